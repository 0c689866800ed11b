"""Metrics end to end: planted models whose every number is known, chains in the authors' released form, a self-conditioned subset, identities."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from histchrono.chronoscope.chainfile import make_chain, read_chains, write_chains
from histchrono.chronoscope.differences import differences
from histchrono.chronoscope.evaluate import evaluate
from histchrono.chronoscope.interop import export_chains, import_chains
from histchrono.chronoscope.metrics import COLUMNS, metrics_of
from histchrono.chronoscope.score import score
from histchrono.core.errors import InputError
from histchrono.models.engines import Completion

N, LENGTH = 12, 4


def turn(i, k):
    return dict(turn_id=str(k), question=f"In {1990 + k}, who led town {i}, number {k}?", answer=f"Gold {i} {k}", answer_qid=f"Q1{i}{k}", answer_kind="entity", accepted=[f"Gold {i} {k}", f"Alias {i} {k}"], property="P6",
                subject_qid=f"Q{i}", subject_label=f"Town {i}", subject_kind="city", year=1990 + k, date="", explicit_time=True, present_answer=f"Now {i}", present_qid=f"Q9{i}", drift_eligible=k % 2 == 0, extra="")


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    rows = [make_chain("temporal_narrative" if i % 2 else "carryover", 2025, "2025-01-01", [turn(i, k) for k in range(1, LENGTH + 1)], 2025, "strict") for i in range(N)]
    path = tmp_path_factory.mktemp("metrics") / "chains.parquet"
    write_chains(rows, path)
    return path


class Simulated:
    "Answers by a rule on (chain, turn, whether the question stands alone)."
    takes, batch_size, machine = "messages", 64, {}

    def __init__(self, rule, name="simulated", k=1):
        self.rule, self.identity, self.k = rule, dict(model=name), k

    def begin(self, system):
        pass

    def complete(self, prompts):
        return [self.say(p) for p in prompts]

    def say(self, p):
        asked = p[-1]["content"]
        i, k = (int(w.strip(",?")) for w in (asked.split("town ")[1].split()[0], asked.split("number ")[1]) ) if "number" in asked else (int(asked.split("Town ")[1].split("?")[0].split()[0].rstrip(",'s")), int("".join(c for c in asked.split("199")[1][:1])))
        text = self.rule(i, k, "number" not in asked)
        texts = text if isinstance(text, tuple) else (text,)
        return Completion(texts[0], candidates=texts if len(texts) > 1 else ())


def scored(chains, rule, out, wanted=("gold", "self", "questions_only", "explicit"), **how):
    evaluate(chains, "simulated", wanted, out, engine=Simulated(rule), progress=False, **how)
    return score(out, n_boot=100)


def value(s, metric, setting="gold", group="all", column="value"):
    return s[(s.metric == metric) & (s.setting == setting) & (s.group == group)][column].item()


def test_always_the_present(chains, tmp_path):
    s = scored(chains, lambda i, k, alone: f"Now {i}", tmp_path)
    for setting in ("gold", "self", "questions_only", "explicit"):
        assert [value(s, m, setting) for m in ("acc1", "final1", "chain1", "chain_average", "drift", "drift_error", "turn1")] == [0, 0, 0, 0, 1, 1, 0]
        assert value(s, "drift_released", setting) == 1  # every turn has a present-day answer, and it is what was said
    assert value(s, "acc1", column="hi") == pytest.approx(1 - 0.025 ** (1 / N))  # none right: Clopper-Pearson on the subjects
    assert not s.metric.str.endswith("_known").any()


def test_always_gold(chains, tmp_path):
    s = scored(chains, lambda i, k, alone: f"Gold {i} {k}", tmp_path)
    assert [value(s, m) for m in ("acc1", "final1", "chain1", "chain_average", "drift", "acc1_accepted", "acc1_folded", "token_f1", "char_f1", "acc1_known", "drift_known")] == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]
    assert value(s, "drift_error", column="n") == 0 and np.isnan(value(s, "drift_error"))


def test_right_until_the_third_turn(chains, tmp_path):
    s = scored(chains, lambda i, k, alone: f"Gold {i} {k}" if k <= 3 else f"Now {i}", tmp_path)
    assert [value(s, m) for m in ("acc1", "final1", "chain1", "drift", "drift_error")] == pytest.approx([2 / 3, 0, 0, 1 / 2, 1])
    assert value(s, "chain_average") == pytest.approx(2 / 3)
    assert [value(s, "acc1", group=str(p)) for p in (1, 2, 3)] == [1, 1, 0] and value(s, "drift", group="3") == 1


def test_knows_but_drifts(chains, tmp_path):
    s = scored(chains, lambda i, k, alone: f"Gold {i} {k}" if alone else f"Now {i}", tmp_path)
    assert [value(s, m) for m in ("acc1", "drift", "acc1_known", "drift_known", "final1_known")] == [0, 1, 0, 1, 0]
    assert value(s, "acc1", "explicit") == 1
    d = differences(tmp_path, "setting", ("acc1", "drift"), n_boot=100).set_index(["a", "b", "metric"])
    assert d.difference["gold", "explicit", "acc1"] == -1 and d.difference["gold", "self", "acc1"] == 0 and d.p["gold", "explicit", "drift"] == pytest.approx(2 / 2**N)


def test_k_candidates(chains, tmp_path):
    s = scored(chains, lambda i, k, alone: (f"Now {i}", f"Gold {i} {k}" if k == 3 else "nobody"), tmp_path, ("gold",))
    assert value(s, "acc1") == 0 and value(s, "acc_k") == pytest.approx(1 / 3)


def test_the_released_form_works_as_well(chains, tmp_path):
    "Our chains, written as the authors write theirs and read back: the same numbers."
    export_chains(chains, tmp_path / "released.jsonl", "released")
    import_chains(tmp_path / "released.jsonl", tmp_path / "back.parquet", progress=None)
    rule = lambda i, k, alone: f"Gold {i} {k}" if (i + k) % 3 else f"Now {i}"
    a, b = (scored(c, rule, tmp_path / n, ("gold", "self", "questions_only")) for c, n in ((chains, "ours"), (tmp_path / "back.parquet", "theirs")))
    keys = ["setting", "scope", "group", "metric"]
    keep = a[~a.scope.isin(["variant"])].set_index(keys).value
    back = b.set_index(keys)
    assert set(keep.index) == set(back.index)
    assert np.allclose(keep, back.value.reindex(keep.index), equal_nan=True) and (a.set_index(keys).n.reindex(keep.index) == back.n.reindex(keep.index)).all()


def test_ways_of_matching_and_scopes(chains, tmp_path):
    s = scored(chains, lambda i, k, alone: f"It was Gold {i} {k}" if k % 2 else f"gold {i} {k}" if i % 3 else "Go", tmp_path, ("gold", "self"))
    modes = {m: score(tmp_path, match=m, n_boot=50) for m in ("exact", "relaxed", "released")}
    assert value(modes["exact"], "acc1") < value(modes["relaxed"], "acc1") < value(modes["released"], "acc1")  # "Go" stands in "Gold 0 2"
    both = score(tmp_path, match="all", n_boot=50)
    assert all(value(both[both.match == m], "acc1") == value(t, "acc1") for m, t in modes.items())
    one = s[(s.setting == "gold") & (s.metric == "acc1")]
    whole = one[one.scope == "all"]
    for scope in ("family", "length", "position"):
        part = one[(one.scope == scope) & ~one.group.str.endswith("+")]
        assert part.n.sum() == whole.n.item() and (part.value * part.n).sum() == pytest.approx((whole.value * whole.n).item())
    there = s.dropna(subset=["lo", "hi"])
    assert ((0 <= there.lo) & (there.lo <= there.value + 1e-12) & (there.value <= there.hi + 1e-12) & (there.hi <= 1)).all()


def test_a_chain_paraphrased_twice_is_no_pair(chains, tmp_path):
    rows = read_chains(chains)[:3]
    again = [dict(rows[0], chain_id=f"p{n}", variant="paraphrase", parent_chain_id=rows[0]["chain_id"], turns=[dict(t, question=f"{n} {t['question']}") for t in rows[0]["turns"]]) for n in range(2)]
    write_chains(rows + again, tmp_path / "c.parquet")
    scored(tmp_path / "c.parquet", lambda i, k, alone: f"Gold {i} {k}", tmp_path / "out", ("gold",))
    with pytest.raises(InputError, match="paraphrased twice"):
        differences(tmp_path / "out", "variant", n_boot=50)


def test_a_part_of_the_chains_under_self(chains, tmp_path):
    s = scored(chains, lambda i, k, alone: f"Gold {i} {k}" if i < 6 else f"Now {i}", tmp_path, self_chains=4)
    assert s[(s.scope == "all") & (s.metric == "acc1")].set_index("setting").chains.to_dict() == dict(gold=N, self=4, questions_only=N, explicit=N)
    d = differences(tmp_path, "setting", ("acc1",), n_boot=100).set_index(["a", "b"])
    assert d.n["gold", "self"] == 4 * 3 and d.left_out["gold", "self"] == (N - 4) * 4
    (tmp_path / "predictions" / "gold.parquet").write_bytes((tmp_path / "predictions" / "self.parquet").read_bytes())
    with pytest.raises(InputError):
        score(tmp_path, n_boot=100)


flags = st.lists(st.tuples(*[st.booleans()] * 8), min_size=2, max_size=6)


@settings(max_examples=80, deadline=None, database=None)
@given(st.lists(flags, min_size=1, max_size=8))
def test_identities(chains):
    rows = []
    for c, turns in enumerate(chains):
        for k, (ok, right, alias, now, has, differs, known, candidate) in enumerate(turns, 1):
            rows.append((f"c{c}", k, k == len(turns), c % 3, ok, right, right or alias, now and not (right and differs), has, has and differs, right, right or candidate, known, float(right), float(right)))
    t = pd.DataFrame(rows, columns=[*COLUMNS, "folded_hit", "k_hit", "known", "token_f1", "char_f1"])
    sums = lambda answered, t=t: {m: (u.num.sum(), u.den.sum()) for m, (f, x) in metrics_of(t).items() for u in [f(x, answered=answered)]}
    a, b = sums(False), sums(True)
    share = lambda s, m: s[m][0] / s[m][1] if m in s and s[m][1] else 0.0
    assert share(a, "chain1") <= share(a, "final1") + 1e-12 and share(a, "chain1") <= share(a, "chain_average") + 1e-12
    assert share(a, "acc1") <= min(share(a, "acc1_accepted"), share(a, "acc_k")) + 1e-12
    assert share(a, "drift") <= share(a, "drift_error") + 1e-12
    assert share(a, "drift") * a["drift"][1] == pytest.approx(share(a, "drift_error") * a["drift_error"][1])  # the same turns drifted
    assert a["drift_error"][1] <= a["drift"][1] <= a["drift_released"][1]
    wrong = a["drift_error"][1] / a["drift"][1] if a["drift"][1] else 0
    assert share(a, "drift") <= wrong + 1e-12
    for m in ("acc1", "final1", "chain1", "acc_k", "acc1_accepted", "token_f1"):
        if b[m][1]:
            assert share(a, m) <= share(b, m) + 1e-12  # leaving failures out never lowers an accuracy
    again = sums(False, t.sample(frac=1, random_state=1).reset_index(drop=True))
    assert all(again[m] == pytest.approx(x) for m, x in a.items())
    parts = [sums(False, t[t.cluster == c]) for c in t.cluster.unique()]
    assert sum(p["acc1"][0] for p in parts) == pytest.approx(a["acc1"][0]) and sum(p["acc1"][1] for p in parts) == a["acc1"][1]
