"""The whole way, facts to tables, on a few facts and a tiny model: the real notebooks, the real graph."""
import hashlib
import os
import subprocess
import sys

import pandas as pd
import pytest

from histchrono.core.batch import artefacts
from small import small_project

ENV = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")


def histchrono(project, *words, seed="0", cwd=None):
    env = dict(ENV, HISTCHRONO_HOME=str(project), PYTHONHASHSEED=seed)
    return subprocess.run([sys.executable, "-m", "histchrono.cli", *words], cwd=cwd or project, env=env, capture_output=True, text=True, timeout=600)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    p = small_project(tmp_path_factory.mktemp("small"))
    r = histchrono(p, "run")
    assert r.returncode == 0, r.stdout + r.stderr
    assert f"made {' '.join(sorted(artefacts()))}" in r.stdout.splitlines()[-1] and len(artefacts()) >= 26
    return p


def test_second_run_does_nothing(project):
    before = {p: digest(p) for p in (project / "paper_tables").rglob("*") if p.is_file()}
    r = histchrono(project, "run")
    assert r.returncode == 0 and "nothing was out of date; " in r.stdout
    assert before == {p: digest(p) for p in (project / "paper_tables").rglob("*") if p.is_file()}


def test_table_03_has_every_setting_and_the_papers_models(project):
    t = pd.read_csv(project / "paper_tables/chronoscope/table_03.csv")
    assert (t[(t.status == "real") & (t.metric == "n_chains")].value == 24).all()
    t = t[t.metric != "n_chains"]
    ours = t[t.status == "real"]
    assert set(ours.model) == {"SmolLM2-135M-Instruct (Q4_1 GGUF)"} and set(ours.metric) == {"acc1", "final1", "chain1", "drift"}
    assert set(ours.setting) == {"Gold context", "Self-conditioned", "Questions only", "Explicit"}
    assert ours[["value", "lo", "hi", "n"]].notna().all().all() and (ours.lo <= ours.value).all() and (ours.value <= ours.hi).all()
    paper = t[t.status == "not_run"]
    assert len(paper) == 9 * 3 * 4 and paper.reported.notna().all() and paper.value.isna().all()


def test_every_table_has_four_forms_and_no_trace_of_the_machine(project):
    files = sorted(p for p in (project / "paper_tables").rglob("*") if p.is_file())
    assert [f"{p.parent.name} {p.name}" for p in files] == [f"{paper} table_{n:02d}.{e}" for paper, last in (("chronoscope", 11), ("synthetic_history", 4)) for n in range(1, last + 1) for e in ("csv", "html", "md", "tex")]
    manifests = sorted((project / "runs").rglob("manifest.json"))
    assert len(manifests) >= 8
    for p in files + manifests:
        text = p.read_text(encoding="utf-8")
        for trace in (str(project), str(project.parent), os.path.expanduser("~") + "/", os.uname().nodename + "."):
            assert trace not in text, f"{p.name} holds {trace}"


@pytest.mark.parametrize("seed, workers", [("1", "1"), ("0", "2"), ("1", "2")])
def test_chains_are_the_same_bytes(project, tmp_path, seed, workers):
    out = tmp_path / "chains.parquet"
    r = histchrono(project, "chains", "runs/demo/truth", "--out", str(out), "--workers", workers, "--sample", "24", seed=seed)
    assert r.returncode == 0, r.stderr
    for name in ("chains.parquet", "sample.parquet"):
        assert digest(tmp_path / name) == digest(project / "runs/demo/chains" / name)


def test_dumps_and_statements_are_the_same_bytes(project, tmp_path):
    r = histchrono(project, "write-dumps", "--out", str(tmp_path / "dumps"), seed="1")
    assert r.returncode == 0, r.stderr
    for y in (2022, 2025):
        assert digest(tmp_path / f"dumps/{y}.json.gz") == digest(project / f"runs/demo/dumps/{y}.json.gz")
        r = histchrono(project, "extract", str(tmp_path / f"dumps/{y}.json.gz"), "--snapshot", str(y), "--out", str(tmp_path / f"st/{y}"), "--workers", "2", seed="1")
        assert r.returncode == 0, r.stderr
        for f in ("statements.parquet", "entities.parquet"):
            assert digest(tmp_path / f"st/{y}/{f}") == digest(project / f"runs/demo/statements/{y}/{f}")


def test_pictures_are_the_same_bytes_whole_or_in_shards(project, tmp_path):
    "Drawn by the batch in two shards of an arm; here whole, and in three shards side by side."
    few = ["generate", "--tti", "SDXL", "--engine", "simulator", "--activities", "40", "--images-per-prompt", "1", "--periods", "17th,1910s", "--seed", "42"]
    r = histchrono(project, *few, "--out", str(tmp_path / "whole"))
    assert r.returncode == 0 and "All 80 pictures are there" in r.stdout, r.stderr
    env = dict(ENV, HISTCHRONO_HOME=str(project), PYTHONHASHSEED="7")
    assert histchrono(project, *few, "--out", str(tmp_path / "parts"), "--shard", "1", "--shards", "3").returncode == 0
    rest = [subprocess.Popen([sys.executable, "-m", "histchrono.cli", *few, "--out", str(tmp_path / "parts"), "--shard", k, "--shards", "3"], env=env, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for k in "02"]
    assert [p.wait(300) for p in rest] == [0, 0]
    assert histchrono(project, "collect", str(tmp_path / "parts")).returncode == 0
    files = lambda d: {p.relative_to(d).as_posix(): digest(p) for p in d.rglob("*") if p.is_file() and not p.name.startswith(".")}
    assert files(tmp_path / "whole") == files(tmp_path / "parts")
    drawn = {p.name: digest(p) for p in (project / "runs/demo/images/sdxl").rglob("*.png")}
    mine = {p.name: digest(p) for p in (tmp_path / "whole" / "sdxl").rglob("*.png")}
    assert len(mine) == 80 and mine.items() <= drawn.items()
    r = histchrono(project, "label", str(tmp_path / "whole"))
    assert r.returncode == 0 and "SDXL" in r.stdout, r.stderr
    assert [l.split()[:3] for l in r.stdout.splitlines()[1:]] == [["SDXL", "17th", "40"], ["SDXL", "1910s", "40"]]


@pytest.mark.parametrize("words, code, said", [
    (["extract", "none.json.gz", "--out", "x"], 2, "none.json.gz"),
    (["extract", "cut.json.gz", "--out", "x"], 2, "cut.json.gz"),
    (["truth", "nowhere", "--anchors", "2022-01-01", "--out", "x"], 2, "nowhere"),
    (["truth", "runs/demo/statements/2022", "--anchors", "2022-13-01", "--out", "x"], 2, "2022-13-01"),
    (["truth", "runs/demo/statements/2022", "--anchors", "2023-01-01,2022-01-01", "--out", "x"], 2, "order"),
    (["chains", "nowhere", "--out", "x/chains.parquet"], 2, "nowhere"),
    (["chains", "runs/demo/truth", "--out", "x/chains.parquet", "--families", "carry"], 2, "carryover"),
    (["evaluate", "--chains", "runs/demo/chains/sample.parquet", "--model", "SmolLM3", "--out", "x"], 2, "SmolLM2-135M-Instruct"),
    (["evaluate", "--chains", "runs/demo/chains/sample.parquet", "--model", "SmolLM2-135M-Instruct", "--setting", "golden", "--out", "x"], 2, "gold"),
    (["evaluate", "--chains", "runs/demo/truth/truth.parquet", "--model", "SmolLM2-135M-Instruct", "--out", "x"], 3, "truth.parquet"),
    (["score", "nowhere", "--chains", "runs/demo/chains/sample.parquet"], 2, "nowhere"),
    (["fetch", "SmolLM"], 2, "histchrono models"),
    (["generate", "--tti", "SDXXL", "--out", "x"], 2, "SDXXL"),
    (["generate", "--tti", "SDXL:mitigate", "--out", "x"], 2, "mitigated_appendix_e"),
    (["generate", "--tti", "SDXL", "--engine", "simulators", "--out", "x"], 2, "simulator"),
    (["generate", "--tti", "SDXL", "--engine", "simulator", "--periods", "", "--out", "x"], 2, "period"),
    (["generate", "--tti", "SDXL", "--engine", "simulator", "--periods", "16th", "--out", "x"], 2, "17th"),
    (["generate", "--tti", "SDXL", "--engine", "simulator", "--activities", "none.csv", "--out", "x"], 2, "none.csv"),
    (["draw", "--arm", "SD4"], 2, "SD4"),
    (["collect", "nowhere"], 2, "nowhere"),
    (["label", "nowhere"], 2, "nowhere"),
    (["label", "runs/demo/images", "--probe", "none.safetensors"], 2, "none.safetensors"),
    (["label", "runs/demo/images", "--with", "faces"], 2, "style"),
    (["import-images", "nowhere", "--csv", "none.csv", "--out", "x"], 2, "nowhere"),
    (["run", "--profile", "demos"], 2, "demo"),
    (["run", "table_3"], 2, "table_03"),
])
def test_bad_input_is_one_line_that_names_it(project, words, code, said):
    whole = (project / "runs/demo/dumps/2022.json.gz").read_bytes()
    (project / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    r = histchrono(project, *words)
    assert r.returncode == code, r.stdout + r.stderr
    lines = [l for l in r.stderr.strip().splitlines() if l.startswith("histchrono: ")]
    assert len(lines) == 1 and said in lines[0], r.stderr
    assert "Traceback" not in r.stderr
    assert not list(project.rglob("*.tmp")) and not list((project / "x").rglob("chains.parquet"))
