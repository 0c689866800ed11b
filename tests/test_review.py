"""The reading of chains: enough of them, no wrong answer, at most two with any fault, and they are the chains that the seed draws."""
import csv

import pytest

from histchrono.core.paths import root, run_dir


def sheet():
    with open(root() / "tests" / "review" / "chains_02.csv", encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def test_fifty_read_none_wrong():
    rows = sheet()
    assert len({r["chain_id"] for r in rows}) == len(rows) == 50
    marks = [[r[c] for c in ("subject", "time", "grammar", "answer_ok")] for r in rows]
    assert all(m in ("ok", "fault") for ms in marks for m in ms)
    assert not [r for r in rows if r["answer_ok"] != "ok"]
    assert sum("fault" in ms for ms in marks) <= 2
    assert all(r["note"] for r, ms in zip(rows, marks) if "fault" in ms)


def test_the_seed_draws_the_chains_that_were_read():
    path = run_dir("demo", "chains", "chains.parquet")
    if not path.exists():
        pytest.skip("the demo's chains are not made here: histchrono run table_02")
    from histchrono.chronoscope.chainfile import sample_chains

    drawn = {c["chain_id"] for c in sample_chains(path, 50, 31)}
    assert drawn == {r["chain_id"] for r in sheet()}, "facts, wordings or the seed have changed since the reading: draw anew and have it read"
