"""Verdicts and overlaps in columns are `is_match`, `token_f1` and `char_f1`, row by row: for every sign of Unicode, every short string of signs that a rule treats, awkward random ones, and answers as models give them."""
import csv
import itertools
import random
import sys
import time
import unicodedata

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from histchrono.chronoscope import judging
from histchrono.chronoscope.judging import judged
from histchrono.chronoscope.matching import MODES, char_f1, is_match, normalise, token_f1, words
from histchrono.chronoscope.overlap import overlaps
from histchrono.chronoscope.verdicts import Words, forms, latin_forms, plain_forms, verdicts
from histchrono.core.paths import root, run_dir

KINDS = ("entity", "yesno", "count", "year", None)
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


def wanted(rows):
    "Every column, one `is_match` at a time."
    out = {f"{m}_{c}": [] for m in MODES for c in ("gold", "present", "accepted")} | {"folded_gold": [], "token_f1": [], "char_f1": []}
    for a, g, p, kind, others in rows:
        a, g, p = a or "", g or "", p or ""
        for m in MODES:
            hit = is_match(a, g, m, kind)
            out[f"{m}_gold"].append(hit)
            out[f"{m}_present"].append(is_match(a, p, m, kind))
            out[f"{m}_accepted"].append(hit or any(is_match(a, x, m, kind) for x in others))
        out["folded_gold"].append(is_match(a, g, "relaxed", kind, folded=True))
        out["token_f1"].append(token_f1(a, g))
        out["char_f1"].append(char_f1(a, g))
    return out


def found(rows, workers=1):
    a, g, p, k, others = (list(c) for c in zip(*rows))
    if workers > 1:
        return judged(a, g, p, k, pa.array(others, pa.list_(pa.string())), workers=workers)
    accepted = [x for xs in others for x in xs], np.cumsum([0, *map(len, others)])
    return verdicts(a, g, p, k, accepted) | overlaps(a, g)


def agree(rows, got):
    want = wanted(rows)
    assert set(got) == set(want)
    for name, column in want.items():
        assert got[name].shape == (len(rows),) and got[name].dtype == (float if name.endswith("f1") else bool), name
        wrong = np.flatnonzero(got[name] != np.array(column))
        assert not len(wrong), (name, rows[wrong[0]], got[name][wrong[0]], column[wrong[0]])


def right_forms(texts):
    "Both fast ways, wherever they say that they may be believed, and the whole of `forms`."
    column = pa.array(texts)
    for way in (plain_forms, latin_forms):
        form, good = way(column)
        for t, f in zip(column.filter(pa.array(good)).to_pylist(), form.filter(pa.array(good)).to_pylist()):
            assert f == normalise.__wrapped__(t), (way.__name__, t)
    return int(good.sum())


# What a fast way says of a string

def test_every_sign_of_unicode():
    "Alone, after and between letters, after a digit, beside dots, doubled, in bold."
    signs = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    for around in ("{}", "Ab{}", "{}b", "ab{}cd", "ab {} cd", "7{}", "ab{}. cd", "x {}. y", "ab.{}", "ab {}{}", "**{}**"):
        assert right_forms([around.format(*[s] * around.count("{}")) for s in signs])


@pytest.mark.parametrize("signs,longest", [("aB1. ,-'", 5), ("a. \u2019*\"", 6), ("aé.(\u2013 ", 6), ("a*\u00a0 .", 7), ("I1,. %", 6)])
def test_every_short_string(signs, longest):
    texts = ["".join(t) for n in range(longest + 1) for t in itertools.product(signs, repeat=n)]
    right_forms(texts)
    form, word = forms(pa.array(texts))
    for t, f, w in zip(texts, form, word):
        assert f == normalise.__wrapped__(t), t
        assert w.split() == words(f) and w == f" {' '.join(words(f))} ", t


@pytest.mark.parametrize("bits", [("The", "answer", "is", "Answer:", "so", "A", "a.", "J.", "F.", "St.", "Lyon", "1.", "1,234", "-", "(x)", "yes.", "two"),
                                  ("my", "Reply", "response", "OUTPUT", "result", "is", "was", ":", "a:", "Lyon.", "(x)", "\u2013"),
                                  ("a", "b.", "\'\'\'b\'\'\'", "\u2019\u2019\u2019b\u2019\u2019\u2019", "\u2018\u2018b\u2019\u2019", "_b_", "__b__", "s_b", "~~b~~", "*b*", "**b**", "`b`", "[b](c)", "(b)", "#", "\u2026")])
def test_every_short_row_of_words(bits):
    "Labels, articles, initials, abbreviations, numbers, markdown and signs in every order."
    right_forms([" ".join(t) for n in range(1, 5) for t in itertools.product(bits, repeat=n)])


# Random awkward strings

BITS = ["Paris", "paris", "PARIS", "São", "Sa\u0303o", "Tomé", "Tome\u0301", "Đà", "Łódź", "ß", "ẞ", "ſ", "İ", "ı", "ŉ", "ǆ", "ﬁ", "Å", "Ω", "ΣΑΣ", "ς", "東京", "東", "한국", "नई", "दिल्ली", "الرياض", "٣", "½", "²", "Ⅳ", "①", "K",
        "D.C.", "Washington, D.C.", "J. F.", "J.F.", "J. F. K.", "Kennedy", "Ph.D", "St. Louis", "U.S.", "Jr.", "e.g.", "a.b", "O'Hara", "O\u2019Hara", "'60s", "rock 'n' roll", "Baden-Württemberg", "Baden", "new", "York", "new york", "of", "the", "a", "A", "x",
        "*", "**", "***", "_", "__", "~~", "`", "```", "'''", "[", "](", ")", "[a](b)", "![a](b)", "# ", "### ", "> ", "- ", "+ ", "* ", "1. ", "snake_case", "|",
        "Answer", "Answer:", "answer:", "**Answer:**", "The answer is", "the final answer is:", "A:", "Assistant:", "So the answer is", "Result", "Reply :", "response was", ":",
        "Yes", "yes", "NO", "no", "No,", "yesterday", "none", "not", "two", "Two", "twenty-one", "twenty", "one hundred and five", "hundred", "million", "zero", "21", "3", "13", "3rd", "1,234", "1,23", "1234", "3.5", "-5", "−5", "1998", "in 1998.", "1998-99", "007", "+7",
        ".", "..", "…", ",", ";", "!", "?", "-", "–", "—", "‐", "\u2011", "(", "\"", "“", "”", "«", "»", "'", "‘", "´", "ʼ", "′", "/", "&", "%", "$", "€", "@", "\\",
        " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\u3000", "\u2028", "\x0b", "\x1c", "\x85", "\x00", "\x07", "\x7f", "\u200b", "\u200d", "\u200e", "\u202e", "\u2060", "\ufeff", "\u00ad", "\u0301", "\u0327", "\u20dd", "\ufe0f", "🇫🇷", "👩\u200d🚀", "\U0001d400", "\ufffd", "\U000e0041"]
bit = st.sampled_from(BITS)
TEXT = st.one_of(st.lists(bit, max_size=6).map(" ".join), st.lists(bit, max_size=6).map("".join), st.text(max_size=10),
                 st.text(alphabet="aB .,-'1*", max_size=8), st.lists(bit, min_size=1, max_size=2).map("".join).map(lambda s: s * 300))


@st.composite
def row(draw):
    "What is compared has something in common more often than not."
    a, g, p = draw(TEXT), draw(TEXT), draw(TEXT)
    how = draw(st.integers(0, 6))
    a = (a, g, f"It was {g}, {p}", f"**{g}**", unicodedata.normalize("NFD", g).upper(), f"Answer: {g}.", p)[how]
    return draw(st.sampled_from([a, a, a, a, None])), g, draw(st.sampled_from([p, p, "", None])), draw(st.sampled_from(KINDS)), draw(st.lists(st.one_of(TEXT, st.just(g)), max_size=2))


@settings(max_examples=600, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(row(), min_size=1, max_size=10))
@example([("a", "a", "a", None, [])] * 2)
@example([("\u0301", "\u0301", "", "entity", [""]), ("e\u0301", "e", "é", "entity", []), ("ß", "ss", "SS", "entity", ["ẞ"])])
@example([("9" * 400, "9" * 401, "9" * 400, "count", []), ("9" * 400, "8" * 400, "", None, [])])
def test_random_rows(rows):
    agree(rows, found(rows))


@settings(max_examples=400, deadline=None, database=None)
@given(st.lists(TEXT, min_size=1, max_size=20))
def test_random_forms(texts):
    right_forms(texts)
    form, word = forms(pa.array(texts))
    assert form == [normalise.__wrapped__(t) for t in texts]
    assert [w.split() for w in word] == [words(f) for f in form]


def bits_crossed():
    "Every bit against every bit, kinds in turn."
    return [(a, g, BITS[(i + 7) % len(BITS)], KINDS[(i + j) % 5], [BITS[(j + 3) % len(BITS)]]) for i, a in enumerate(BITS) for j, g in enumerate(BITS)]


def test_every_pair_of_bits():
    rows = bits_crossed()
    agree(rows, found(rows))


# Processes, orders, kinds of columns

@linux
def test_processes_and_order_change_nothing(monkeypatch):
    rows = bits_crossed()
    random.Random(3).shuffle(rows)
    one = found(rows)
    monkeypatch.setattr(judging, "MANY", 10)
    two = found(rows, workers=2)
    back = found(rows[::-1], workers=3)
    a, g, p, k, others = (list(c) for c in zip(*rows))
    whole = judged(a, g, p, k, pa.array(others), workers=2)
    assert set(whole) == set(one)
    for name, column in one.items():
        for other in (two[name], back[name][::-1], whole[name]):
            assert (other == column).all(), name


def test_columns_of_any_kind():
    rows = [("Lyon", "lyon", "Paris", "entity", []), (None, "x", None, None, ["x"]), ("", "", "", "yesno", []), ("two", "2", "", "count", ["3"]), ("Yes.", "yes", "no", None, [])]
    a, g, p, k, others = (list(c) for c in zip(*rows))
    flat, offsets = [x for xs in others for x in xs], np.cumsum([0, *map(len, others)])
    want = found(rows)
    for column in (pa.array, lambda c: pa.array(c, pa.large_string()), lambda c: pa.chunked_array([c[:2], c[2:]], pa.string()), lambda c: pa.array(c, pa.string()).dictionary_encode(), lambda c: pd.Series(c, dtype="str"), lambda c: np.array(c, object), tuple):
        got = verdicts(*map(column, (a, g, p, k)), (flat, offsets)) | overlaps(column(a), column(g))
        for name in want:
            assert (got[name] == want[name]).all(), name
    few = verdicts(a, g, p, k, (pa.array(flat), pa.array(offsets)), modes=("exact",), folded=False)
    assert set(few) == {"exact_gold", "exact_present", "exact_accepted"} and all((few[n] == want[n]).all() for n in few)
    assert (verdicts(a, g, p, k)["relaxed_accepted"] == want["relaxed_gold"]).all() # no other answers


def test_no_rows_and_one_row():
    assert all(v.shape == (0,) for v in (verdicts([], [], [], []) | overlaps([], [])).values())
    for r in (("", "", "", None, []), (None, "x", "x", "year", [""]), ("Lyon", "Lyon", "Lyon", "entity", ["Lyon"] * 3)):
        agree([r], found([r]))


def test_strings_at_hand_give_the_same():
    rows = bits_crossed()[:3000]
    a, g, p, k, others = (list(c) for c in zip(*rows))
    flat, offsets = [x for xs in others for x in xs], np.cumsum([0, *map(len, others)])
    w = Words(a, g, p, flat)
    agree(rows, verdicts(a, g, p, k, (flat, offsets), w=w) | overlaps(a, g, w=w))


def test_very_long_answers():
    long = ["word " * 20_000 + "Lyon", "Lyon. " * 20_000, "x" * 100_000, "é" * 50_000 + " Lyon", "- Lyon\n" * 20_000, "1" * 5_000, "(" * 50_000 + "Lyon" + ")" * 50_000]
    rows = [(a, g, "Paris", k, ["LYON"]) for a in long for g, k in (("Lyon", "entity"), (a, "entity"), ("1", "count"), ("yes", "yesno"))]
    begun = time.perf_counter()
    got = found(rows)
    assert time.perf_counter() - begun < 60
    agree(rows, got)


# Answers as models give them

def said(r, gold, other, i):
    "One answer of the kinds that models give."
    ways = (gold, other, f"{gold}.", f"It was {gold}.", f"The answer is {gold}", f"**Answer:** {other}", f"**{gold}**", f"*{gold}* (since {1900 + i % 120})", f"{other}, not {gold}", f"“{gold}”", f"{gold} – {other}", f"1. {gold}", f"- {other}", f"# {gold}",
            f"{gold}\n{other}", f"I think that {other} held it from {1900 + i % 100} until {1930 + i % 90}, when {gold} came", unicodedata.normalize("NFD", gold), gold.upper(), gold.lower().replace("-", "\u2011"), gold.split()[0], gold[: len(gold) // 2 + 1], f"`{gold}`", f"A: {gold}",
            f"Yes, {gold}", f"No. {other} was", f"{i % 13} of them", ("three", "Twenty-one", "one hundred and five")[i % 3], "", None, "I don't know", f"{gold}'s", f"{gold}-{other}", f"[{gold}](https://x.org/{i})", f"<b>{gold}</b>", unicodedata.normalize("NFKD", gold).encode("ascii", "ignore").decode())
    return r.choice(ways)


def compared(labels, n, seed):
    r = random.Random(seed)
    rows = []
    for i in range(n):
        kind = r.choice(("entity",) * 6 + KINDS)
        gold = {"yesno": r.choice(("yes", "no")), "count": str(r.randrange(14)), "year": str(1900 + r.randrange(120))}.get(kind) or r.choice(labels)
        other = r.choice(labels)
        rows.append((said(r, gold, other, i), gold, r.choice((other, other, "")), kind, r.sample(labels, r.randrange(3))))
    return rows


def test_answers_about_every_label_of_the_cases():
    "The labels of the project's own excerpt of Wikidata, in all the ways that models say them."
    labels = set()
    for path in sorted((root() / "data" / "wikidata").glob("*.tsv")):
        with path.open(encoding="utf-8") as f:
            labels |= {c.strip() for line in csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE) for c in line if c.strip()}
    labels = sorted(labels)
    assert len(labels) > 200
    rows = compared(labels, 60_000, 11)
    agree(rows, found(rows, workers=2))


def test_chains_and_answers_of_the_demo():
    "Every gold, present-day and accepted answer of the demo's chains, and every answer that a model gave, where the demo was run."
    chains, files = run_dir("demo") / "chains" / "sample.parquet", sorted((run_dir("demo") / "predictions").glob("*/predictions/*.parquet"))
    if not chains.is_file() or not files:
        pytest.skip("the demo's chains or predictions are not there: run `make demo` first")
    turns = [t for c in pq.read_table(chains).to_pylist() for t in c["turns"]]
    labels = sorted({x for t in turns for x in (t["answer"], t["present_answer"], *(t["accepted"] or ())) if x})
    asked = [(t["answer"], t["present_answer"], t["answer_kind"], list(t["accepted"] or ())) for t in turns]
    rows = compared(labels, 20_000, 12) + [(a, *q) for q in asked for a in q[:2]]
    texts = sorted({x for f in files for c in ("answer", "raw") for x in pq.read_table(f, columns=[c])[c].to_pylist() if x})
    assert texts
    rows += [(x, *q) for x, q in zip(texts, itertools.cycle(asked))] + [(x, *asked[i * 7 % len(asked)]) for i, x in enumerate(texts)]
    agree(rows, found(rows, workers=2))
