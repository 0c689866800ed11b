"""The readings of chains: enough of them, no wrong answer, few with any fault, and the last one read the chains that the seed draws."""
import csv

import pytest

from histchrono.core.paths import root, run_dir

SEED = 53  # of the last reading
READINGS = {"chains_02": (50, 2), "chains_03": (110, 3)}  # how many were read, how many may have a fault


def sheet(name):
    with open(root() / "tests" / "review" / f"{name}.csv", encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


@pytest.mark.parametrize("name", READINGS)
def test_none_wrong_and_few_faults(name):
    (n, faults), rows = READINGS[name], sheet(name)
    assert len({r["chain_id"] for r in rows}) == len(rows) == n
    marks = [[r[c] for c in ("subject", "time", "grammar", "answer_ok")] for r in rows]
    assert all(m in ("ok", "fault") for ms in marks for m in ms)
    assert not [r for r in rows if r["answer_ok"] != "ok"]
    assert sum("fault" in ms for ms in marks) <= faults
    assert all(r["note"] for r, ms in zip(rows, marks) if "fault" in ms)


def test_the_seed_draws_the_chains_that_were_read():
    path = run_dir("demo", "chains", "chains.parquet")
    if not path.exists():
        pytest.skip("the demo's chains are not made here: histchrono run chronoscope/table_02")
    from histchrono.chronoscope.chainfile import FAMILIES, sample_chains

    drawn = {c["chain_id"]: c["family"] for c in sample_chains(path, 110, SEED, {f: 10 for f in FAMILIES})}
    assert sorted(drawn.values()) == sorted(list(FAMILIES) * 10)
    assert set(drawn) == {r["chain_id"] for r in sheet("chains_03")}, "facts, wordings or the seed have changed since the reading: draw anew and have it read"


def test_a_stranger_named_the_styles_of_renders():
    rows = sheet("renders_05")
    from histchrono.histvis.names import STYLES

    assert [r["number"] for r in rows] == [f"{i:02d}" for i in range(60)]
    assert sorted(r["style"] for r in rows) == sorted(list(STYLES) * 10) and {r["answer"] for r in rows} <= set(STYLES)
    assert sum(r["style"] == r["answer"] for r in rows) >= 50


def test_the_seed_draws_the_renders_that_were_read():
    pytest.importorskip("cv2")
    import numpy as np
    from histchrono.core.provenance import rng
    from histchrono.histvis.names import STYLES
    from histchrono.histvis.prompts import periods
    from histchrono.histvis.simulate import picture

    g, times = rng("blind reading of renders", 42), list(periods().period)
    for number, k in enumerate(g.permutation(60)):
        style, activity, period = STYLES[k // 10], int(g.integers(1, 101)), str(g.choice(times))
        facts = picture(style, activity, period, np.random.default_rng(g.integers(0, 2**63)), "shifted")[1]
        read = sheet("renders_05")[number]
        assert [read[c] for c in ("style", "activity_id", "period", "other", "weight")] == [style, str(activity), period, facts["other"], str(facts["weight"])]
