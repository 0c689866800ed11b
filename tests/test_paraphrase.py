"""Paraphrased chains: every family, at the demo's size too; planted damage is found; nothing hangs on order or hash seeds; an engine's failures are counted and its answers outlive a kill."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from histchrono.chronoscope.chainfile import FAMILIES, SINGLE, chain_id, read_chains, write_chains
from histchrono.chronoscope.chains import make_chains
from histchrono.chronoscope.paraphrase import SHARD, ask_all, by_rules, clean, paraphrase_chains, write_paraphrases
from histchrono.chronoscope.rephrase import other_wordings
from histchrono.chronoscope.sameness import faults
from histchrono.core.errors import InputError
from histchrono.core.paths import run_dir
from histchrono.models.engines import Completion
from worlds import MONTHS, Made, holds

POINTING = re.compile(r"\b(then|at that (?:same )?(?:time|point)|at the time)\b", re.I)
WHO = dict(he=1, him=1, his=1, she=2, her=2, they=3, them=3, their=3)
SAME = [k for k in ("source_id", "family", "snapshot_year", "anchor", "anchors", "present_snapshot", "truth_type", "difficulty", "length", "split")]


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    "All families of a random world whose names want to be mistaken for months, years, yes and no."
    w = Made(tmp_path_factory.mktemp("world"), 101)
    make_chains(w.truth, w.dirs, w.folder / "chains.parquet", 42, FAMILIES + SINGLE)
    return read_chains(w.folder / "chains.parquet")


@pytest.fixture(scope="module")
def demo():
    path = run_dir("demo", "chains", "chains.parquet")
    if not path.exists():
        pytest.skip("the demo's chains are not made: histchrono run chronoscope/table_02")
    return path


def same_meaning(old: dict, new: dict):
    "What a reader can check without the package's own checks."
    assert {k: old[k] for k in SAME} == {k: new[k] for k in SAME}
    assert (new["variant"], new["parent_chain_id"]) == ("paraphrase", old["chain_id"])
    assert new["chain_id"] == chain_id(new["family"], new["snapshot_year"], new["turns"]) != old["chain_id"]
    for a, b in zip(old["turns"], new["turns"], strict=True):
        assert {**a, "question": ""} == {**b, "question": ""}
        p, q = a["question"], b["question"]
        assert p != q and q.endswith("?") and q[0].isupper()
        assert holds(p, a["subject_label"]) == holds(q, a["subject_label"])
        value = json.loads(a["extra"])["value_label"] if a["answer_kind"] == "yesno" else ""
        assert not value or holds(q, value)
        bare = lambda s: s.replace(value or a["subject_label"], "X").replace(a["subject_label"], "X")
        assert sorted(re.findall(r"\b\d{4}\b", bare(p))) == sorted(re.findall(r"\b\d{4}\b", bare(q)))
        assert [m for m in MONTHS if m in bare(p).split()] == [m for m in MONTHS if m in bare(q).split()]
        people = lambda s: {WHO[w] for w in re.findall(r"\w+", re.sub("(on|among) their (staff|members)", "", bare(s).lower())) if w in WHO}
        assert people(p) == people(q)
        if not a["explicit_time"]:
            assert bool(POINTING.search(bare(p))) == bool(POINTING.search(bare(q)))
        if a["answer_kind"] == "count":
            assert "different" in q
        assert not any(holds(q, x) and not holds(p, x) for x in a["accepted"])


def test_every_family_and_question(chains):
    got, report = paraphrase_chains(chains, len(chains))
    by = {c["chain_id"]: c for c in chains}
    assert {c["family"] for c in got} == {*FAMILIES, *SINGLE}
    assert report["kept"] == len(got) >= 0.99 * len(chains) and set(report["dropped"]) <= {"same_as_another"}
    assert report["kept"] + sum(report["dropped"].values()) == len(chains)
    for c in got:
        same_meaning(by[c["parent_chain_id"]], c)


def test_demo(demo, tmp_path):
    t = time.process_time()
    report = write_paraphrases(demo, tmp_path / "p.parquet", 10_000, seed=42)
    assert time.process_time() - t < 60
    got, by = read_chains(tmp_path / "p.parquet"), {c["chain_id"]: c for c in read_chains(demo)}
    assert report == json.loads((tmp_path / "p.json").read_text()) and report["kept"] == len(got) == 10_000
    assert sum(report["dropped"].values()) <= 0.01 * 10_000
    sizes = Counter(c["family"] for c in by.values())
    level = max(f["kept"] for f in report["families"].values())
    assert all(f["kept"] >= min(sizes[k], level) - 1 - sum(f["dropped"].values()) for k, f in report["families"].items())
    for c in got:
        same_meaning(by[c["parent_chain_id"]], c)
    again = write_paraphrases(demo, tmp_path / "q.parquet", 10_000, seed=42)
    assert again == report and (tmp_path / "p.parquet").read_bytes() == (tmp_path / "q.parquet").read_bytes()


def test_two_variants_a_form(chains):
    for c in chains[:: max(1, len(chains) // 100)]:
        for i, t in enumerate(c["turns"]):
            assert len({q for q in other_wordings(t, i > 0, 0) if not faults(t, q)}) >= 2, t["question"]


# ---- planted damage ----

def good_pairs(chains):
    return [(t, q) for c in chains[::7] for t, q in zip(c["turns"], by_rules(c, 3)[0] or ())]


@pytest.mark.parametrize("damage, why", [("entity", {"entity_lost", "reference_changed"}), ("year", {"year_lost"}), ("added", {"year_added", "answer_leaked"}), ("now", {"time_added"}), ("not", {"polarity_changed"}),
                                         ("answer", {"answer_leaked"}), ("named", {"entity_added"}), ("kind", {"kind_changed"}), ("then", {"pointer_lost"}), ("mark", {"not_a_question"}), ("pronoun", {"reference_changed"})])
def test_planted_damage(chains, damage, why):
    n = 0
    for t, q in good_pairs(chains):
        assert not faults(t, q)
        label, bad = t["subject_label"], q
        if damage == "entity" and label in q and not holds("it", label):
            bad = q.replace(label, "Zzyx")
        elif damage == "year" and not re.search(r"\d", label + t["extra"]) and (m := re.search(r"\d{4}", q)):
            bad = q.replace(m[0], str(int(m[0]) + 1)) if str(int(m[0]) + 1) not in q else q
        elif damage == "added" and not re.search(r"\b\d{4}\b", q):
            bad = q[:-1] + " in 1905?"
        elif damage == "now":
            bad = q[:-1] + " today?"
        elif damage == "not" and t["answer_kind"] == "yesno":
            bad = re.sub(r"\b(was|were|did)\b( \S+| the \S+)", r"\1\2 not", q, count=1, flags=re.I)
        elif damage == "answer" and not any(holds(q, a) for a in t["accepted"]):
            bad = q[:-1] + f", {t['accepted'][0]}?"
        elif damage == "named" and not holds(q, label):
            bad = f"As for {label}, {q}"
        elif damage == "kind" and t["answer_kind"] == "yesno":
            bad = re.sub(r"\b(was|were|did)\b", "when did", q, count=1, flags=re.I)
        elif damage == "then" and not t["explicit_time"] and POINTING.search(q.replace(label, "X")):
            bad = re.sub(r",? ?(\b(?:back|at that same|at that|at the) )?\b(then|time|point)\b,?", "", q)
        elif damage == "mark":
            bad = q[:-1] + "."
        elif damage == "pronoun" and not holds(q, label) and re.search(r"\b(he|him|his)\b", q):
            bad = re.sub(r"\b(?:his|him)\b", "her", re.sub(r"\bhe\b", "she", q))
        if bad != q:
            n += 1
            assert set(faults(t, bad)) & why, (damage, q, bad, faults(t, bad))
    assert n >= 5, damage


@given(st.text(max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_text_is_judged(text):
    t = dict(question="In 2005, who was the head coach of Chelsea F.C.?", subject_label="Chelsea F.C.", answer_kind="entity", accepted=["José Mourinho"], extra="", explicit_time=True, date="")
    assert faults(t, text)
    assert isinstance(clean(text), str) and "\n" not in clean(text)


def test_hand_made_damage():
    t = dict(question="Did she serve as Prime Minister of Norway throughout the period from the start of 1998 to the end of 2005?", subject_label="Gro Harlem Brundtland", answer_kind="yesno", accepted=["no"], explicit_time=True, date="1998/2005",
             extra=json.dumps(dict(value_label="Prime Minister of Norway")))
    ok = "From the beginning of 1998 until the end of 2005, was she serving as Prime Minister of Norway the whole time?"
    assert faults(t, ok) == []
    cases = {"From the beginning of 1998 until the end of 2005, was she ever serving as Prime Minister of Norway?": "window_changed", ok.replace("1998", "1997"): "year_lost", ok.replace("Norway", "Sweden"): "entity_lost", ok.replace("she", "he"): "reference_changed",
             ok.replace("she", "Gro Harlem Brundtland"): "entity_added", ok.replace("was she", "wasn't she"): "polarity_changed", ok.replace("was she", "who was"): "reference_changed", ok[:-1] + ", no?": "answer_leaked", "": "empty", t["question"].upper(): "unchanged",
             ok + " " + ok: "not_a_question"}
    assert {q: faults(t, q)[0] for q in cases} == cases
    t = t | dict(question="How many different clubs did he play for between the start of 1998 and the end of 2005?", subject_label="Luís Figo", answer_kind="count", accepted=["3", "three"], extra="")
    assert faults(t, "From the beginning of 1998 until the end of 2005, for how many different clubs did he play?") == []
    assert faults(t, "From the beginning of 1998 until the end of 2005, for how many clubs did he play?") == ["kind_changed"]
    assert faults(t, "Which three different clubs did he play for between the start of 1998 and the end of 2005?")[0] == "answer_leaked"
    t = t | dict(question="Between 1998 and 2005, in which year did he change clubs?", answer_kind="year", accepted=["2000"])
    assert faults(t, "When between 1998 and 2005 did he go to another club?") == []
    assert faults(t, "Between 1998 and 2005, did he change clubs in 2000?")[0] == "answer_leaked"
    assert faults(t, "Between 1998 and 2005, how did he change clubs?") == ["kind_changed"]
    t = t | dict(question="Who is its owner?", subject_label="Eurosport", answer_kind="entity", accepted=["X"], explicit_time=False, date="")
    assert faults(t | dict(question="Who was its owner?"), "Who is its proprietor?") == ["tense_changed"]


# ---- order, seeds, bad input ----

def test_order_and_seed(chains, tmp_path):
    got = paraphrase_chains(chains, 60, seed=7)
    mixed = random.Random(1).sample(chains, len(chains))
    assert paraphrase_chains(mixed, 60, seed=7) == got
    assert paraphrase_chains(mixed + mixed[:50], 60, seed=7) == got
    assert [c["chain_id"] for c in paraphrase_chains(chains, 60, seed=8)[0]] != [c["chain_id"] for c in got[0]]
    counts = Counter(c["family"] for c in got[0])
    assert set(counts.values()) <= {4, 5} and len(counts) == 13 # 60 over 13 families
    write_chains(mixed, tmp_path / "in.parquet")
    script = "import sys; from histchrono.chronoscope.paraphrase import write_paraphrases as w; w(sys.argv[1], sys.argv[2], 60, 7)"
    for i in "01":
        subprocess.run([sys.executable, "-c", script, tmp_path / "in.parquet", tmp_path / f"{i}.parquet"], check=True, env={**os.environ, "PYTHONHASHSEED": i})
    assert (tmp_path / "0.parquet").read_bytes() == (tmp_path / "1.parquet").read_bytes() and (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    assert read_chains(tmp_path / "0.parquet") == got[0]


def test_lengths_are_even(chains):
    got, report = paraphrase_chains(chains, 60, seed=7)
    have = Counter((c["family"], c["length"]) for c in chains)
    for f, r in report["families"].items():
        spread = [r["lengths"].get(str(n), 0) for (g, n), k in have.items() if g == f and k >= 5]
        assert max(spread) - min(spread) <= 1


def test_bad_input(chains, tmp_path):
    with pytest.raises(InputError, match="at least 1"):
        paraphrase_chains(chains, 0)
    with pytest.raises(InputError, match="'rules' or an engine"):
        paraphrase_chains(chains, 3, by="gpt")
    with pytest.raises(InputError, match="no chain"):
        paraphrase_chains([], 3)
    with pytest.raises(InputError, match="judge"):
        paraphrase_chains(chains, 3, judge=True)
    with pytest.raises(InputError, match="missing"):
        write_paraphrases(tmp_path / "none.parquet", tmp_path / "out.parquet", 3)
    write_chains([], tmp_path / "empty.parquet")
    with pytest.raises(InputError, match="holds no chain"):
        write_paraphrases(tmp_path / "empty.parquet", tmp_path / "out.parquet", 3)
    write_chains(chains[:5], tmp_path / "few.parquet")
    for out, why in (("few.parquet", "name another file"), ("out.json", "must end in .parquet")):
        with pytest.raises(InputError, match=why):
            write_paraphrases(tmp_path / "few.parquet", tmp_path / out, 3)
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match="damaged"):
        write_paraphrases(tmp_path / "bad.parquet", tmp_path / "out.parquet", 3)
    assert not (tmp_path / "out.parquet").exists()
    report = write_paraphrases(tmp_path / "few.parquet", tmp_path / "out.parquet", 300)
    assert report["asked"] == 300 and report["kept"] == 5 == len(read_chains(tmp_path / "out.parquet"))
    again, report = paraphrase_chains(read_chains(tmp_path / "out.parquet") + chains[5:6], 10)
    assert report["candidates"] == 1 == len(again)  # a paraphrase is not paraphrased again


def test_unknown_wordings_are_counted(chains):
    odd = [{**c, "chain_id": f"x{i}", "turns": [{**t, "question": f"Name it, please ({i})."} for t in c["turns"]]} for i, c in enumerate(chains[:6])]
    got, report = paraphrase_chains(odd + chains[:4], 100)
    assert report["dropped"] == {"no_rule": 6} and len(got) == 4


# ---- engines ----

class Scripted:
    "Rewrites by the rules, so that what it says is good; fails where it is told to."
    identity, batch_size, takes = dict(model="scripted"), 4, "messages"

    def __init__(self, chains, bad=lambda q: None, stop_after=None):
        self.new = {}
        for c in chains:
            for t, q in zip(c["turns"], by_rules(c, 5)[0] or ()):
                self.new.setdefault(t["question"], q)
        self.bad, self.asked, self.stop_after = bad, [], stop_after

    def answer(self, messages):
        assert [m["role"] for m in messages] == ["user"] and "Preserve all entities" in messages[0]["content"]
        q = re.search(r"Original question: (.*)", messages[0]["content"])[1]
        self.asked.append(q)
        if self.stop_after is not None and len(self.asked) > self.stop_after:
            raise KeyboardInterrupt
        return self.bad(q) or Completion(f'Rewritten question: "{self.new[q]}"')


class Streaming(Scripted):
    def stream(self, prompts):
        items = list(prompts.items())
        random.Random(0).shuffle(items)
        for k, m in items:
            c = self.answer(m)
            if c.finish_reason == "lost":
                continue
            yield k, c
            yield k, Completion("Who came twice?")  # a second answer is never a shift
            yield "unknown", Completion("Who is nobody?")


class Batched(Scripted):
    takes = "ids"

    def encode(self, messages):
        return type("Prompt", (), dict(ids=tuple(messages[0]["content"].encode()), notes=()))

    def complete(self, prompts):
        assert len(prompts) <= self.batch_size
        return [self.answer([dict(role="user", content=bytes(p).decode())]) for p in prompts]


class Planned(Scripted):
    takes, encode = "ids", Batched.encode

    def session(self):
        return type("Session", (), dict(ask=lambda _, prompts: Batched.complete(self, prompts)))()


@pytest.mark.parametrize("kind", [Streaming, Batched, Planned])
def test_engine(chains, kind):
    some = chains[:: max(1, len(chains) // 60)]
    engine = kind(some)
    got, report = paraphrase_chains(some, len(some), by=engine)
    by = {c["chain_id"]: c for c in some}
    for c in got:
        same_meaning(by[c["parent_chain_id"]], c)
    questions = {t["question"] for c in some for t in c["turns"]}
    assert sorted(engine.asked) == sorted(questions)  # each once
    assert report["questions"] == len(questions) and report["failures"] == {} and report["engine"] == dict(model="scripted")
    assert len(got) >= 0.9 * len(some)


def test_engine_failures_are_counted(chains, tmp_path):
    some = chains[:: max(1, len(chains) // 80)]
    kinds = [Completion(None, finish_reason="http_500", status="error"), Completion(None, finish_reason="timeout", status="error"), Completion("Who was", finish_reason="length"), Completion("  \n "), Completion("lost", finish_reason="lost"), Completion("I cannot help with that.")]
    which = lambda q: zlib.crc32(q.encode()) % 40
    bad = lambda q: kinds[which(q)] if which(q) < len(kinds) else None
    got, report = paraphrase_chains(some, len(some), by=Streaming(some, bad), folder=tmp_path)
    assert report["kept"] + sum(report["dropped"].values()) == len(some)
    assert set(report["failures"]) <= {"http_500", "timeout", "length", "missing"} and report["dropped"]["engine_error"] > 0
    assert not any(t["question"].startswith(("I cannot", "Who was?")) for c in got for t in c["turns"])
    engine = Streaming(some)
    paraphrase_chains(some, len(some), by=engine, folder=tmp_path)
    assert engine.asked and all(which(q) in (0, 1, 4) for q in engine.asked)  # failures are asked again, answers are not
    other = Streaming(some)
    other.identity = dict(model="another")
    paraphrase_chains(some, len(some), by=other, folder=tmp_path)
    assert len(other.asked) > len(engine.asked)  # another model's answers are not this one's


def test_interrupted_run_goes_on(chains, tmp_path):
    some = chains[:60]
    write_chains(some, tmp_path / "in.parquet")
    whole = write_paraphrases(tmp_path / "in.parquet", tmp_path / "whole.parquet", 40, by=Streaming(some))
    first = Streaming(some, stop_after=17)
    with pytest.raises(KeyboardInterrupt):
        write_paraphrases(tmp_path / "in.parquet", tmp_path / "out.parquet", 40, by=first)
    assert not (tmp_path / "out.parquet").exists()
    second = Streaming(some)
    assert write_paraphrases(tmp_path / "in.parquet", tmp_path / "out.parquet", 40, by=second) == whole
    assert not set(first.asked[:17]) & set(second.asked)
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_killed_run_goes_on(tmp_path):
    script = f"""
import sys, time
from histchrono.chronoscope.paraphrase import ask_all
from histchrono.models.engines import Completion
class E:
    identity, takes = dict(model='slow'), 'messages'
    def stream(self, prompts):
        for i, k in enumerate(prompts):
            if i == {2 * SHARD + 50}: print('here', flush=True); time.sleep(60)
            yield k, Completion(k)
ask_all(E(), {{str(i): [dict(role='user', content=str(i))] for i in range({3 * SHARD})}}, sys.argv[1])
"""
    p = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "asked")], stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "here\n"
    os.kill(p.pid, signal.SIGKILL)
    p.wait()

    class Rest:
        identity, takes, asked = dict(model="slow"), "messages", 0

        def stream(self, prompts):
            for k in prompts:
                self.asked += 1
                yield k, Completion(k)

    e, prompts = Rest(), {str(i): [dict(role="user", content=str(i))] for i in range(3 * SHARD)}
    said = ask_all(e, prompts, tmp_path / "asked")
    assert e.asked == SHARD and {k: v[0] for k, v in said.items()} == {k: k for k in prompts}
    assert ask_all(e, prompts, tmp_path / "asked") == said and e.asked == SHARD
