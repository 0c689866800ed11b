"""Scores of a folder: scopes add up, the order of rows changes nothing, chains without items or kinds are scored, exact answers are relaxed ones too."""
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from histchrono.chronoscope.chainfile import FAMILIES, make_chain, write_chains
from histchrono.chronoscope.evaluate import PREDICTIONS, evaluate
from histchrono.chronoscope.score import read_turns, score
from histchrono.core.io import read_parquet, write_parquet
from histchrono.models.engines import Completion

LENGTHS = [2 + i % 9 for i in range(36)]


class Planted:
    "One answer in three is gold, one is gold within a sentence, one is today's; a seventh of the turns has none."
    takes, batch_size, machine, identity = "messages", 64, {}, dict(model="planted")

    def begin(self, system): pass
    def complete(self, prompts): return [self.say(*map(int, re.search(r"(\d+)\.(\d+)", p[-1]["content"]).groups())) for p in prompts]

    def say(self, i, k):
        if (i + 3 * k) % 7 == 0: return Completion(None, finish_reason="length")
        return Completion((f"gold{i}.{k}", f"It was gold{i}.{k}", f"now{i}")[(i * k + k) % 3])


@pytest.fixture
def folder(tmp_path):
    def made(settings=("gold", "explicit"), **fields):
        def turn(i, k):
            one = dict(turn_id=str(k), question=f"q{i}.{k}?", answer=f"gold{i}.{k}", answer_qid="", answer_kind="entity", accepted=[f"gold{i}.{k}"], property="P6", subject_qid=f"Q{i // 2}", subject_label=f"town{i}.{k}",
                       subject_kind="city", year=1998, date="", explicit_time=k == 1, present_answer=f"now{i}", present_qid="", drift_eligible=k % 2 == 0, extra="")
            return {**one, **{name: f(i, k) for name, f in fields.items()}}
        write_chains([make_chain(FAMILIES[i % 4], 2025, "2025-01-01", [turn(i, k) for k in range(1, n + 1)], 2025, "strict") for i, n in enumerate(LENGTHS)], tmp_path / "c.parquet")
        evaluate(tmp_path / "c.parquet", "planted", settings, tmp_path / "out", engine=Planted(), progress=False)
        return tmp_path / "out"
    return made


def test_scopes_add_up(folder):
    s = score(folder(), match="all", n_boot=20)
    per_turn = ("acc1", "acc1_accepted", "acc1_folded", "token_f1", "char_f1", "drift", "drift_error", "drift_released", "acc1_known", "drift_known")
    for (match, setting, metric), rows in s.groupby(["match", "setting", "metric"]):
        whole = rows[rows.scope == "all"].iloc[0]
        for scope in ("family", "length") + ("position",) * (metric in per_turn):
            part = rows[(rows.scope == scope) & ~rows.group.str.endswith("+")]
            assert part.n.sum() == whole.n and (part.value.fillna(0) * part.n).sum() == pytest.approx(0 if np.isnan(whole.value) else whole.value * whole.n), (match, setting, metric, scope)
        for scope, pooled, least in (("length", "8+", 8), ("position", "5+", 5)):
            late = rows[(rows.scope == scope) & rows.group.str.isdigit()]
            late, one = late[late.group.astype(int) >= least], rows[(rows.scope == scope) & (rows.group == pooled)]
            assert late.n.sum() == one.n.sum()
    assert not ((s.answered < s.value - 1e-12) & s.metric.isin(["acc1", "final1", "chain1", "drift"])).any()


def test_exact_answers_are_relaxed_and_released_ones_too(folder):
    exact, relaxed, released = (read_turns(folder(), match=m)[0].correct.to_numpy() for m in ("exact", "relaxed", "released"))
    assert not (exact & ~relaxed).any() and not (exact & ~released).any() and exact.sum() < relaxed.sum()


def test_the_order_of_rows_changes_nothing(folder):
    out = folder()
    s = score(out, match="all", n_boot=40)
    for setting in ("gold", "explicit"):
        f = out / "predictions" / f"{setting}.parquet"
        t = read_parquet(f, PREDICTIONS)
        write_parquet(t.take(pa.array(np.random.default_rng(1).permutation(len(t)))), f, PREDICTIONS)
    again = score(out, match="all", n_boot=40)
    pd.testing.assert_frame_equal(s.drop(columns="answered"), again.drop(columns="answered"), check_exact=True)
    assert again.answered.to_numpy() == pytest.approx(s.answered.to_numpy(), abs=1e-12, nan_ok=True)


def test_chains_without_items_or_kinds(folder):
    none = dict(subject_qid=lambda i, k: "", subject_label=lambda i, k: f"town {i // 2}.{k}", answer_kind=lambda i, k: "", accepted=lambda i, k: [])
    a = score(folder(("gold",), **none), n_boot=20)
    row = a[(a.scope == "all") & (a.metric == "acc1")].iloc[0]
    assert row.subjects == 18 and 0 < row.value < 1 and row.n == sum(LENGTHS) - len(LENGTHS)
