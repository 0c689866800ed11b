"""A full disk: one line that names the file, an exit code that is not 0, nothing half-written, nothing finished lost."""
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from histchrono.core.errors import InputError
from histchrono.core.io import atomic, write_text
from small import small_project, tiny_model  # noqa: F401


def limited(project, *words, size):
    "Run a command whose files may not grow beyond `size` bytes: to the writer, a disk that is full."
    env = dict(os.environ, HISTCHRONO_HOME=str(project), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return subprocess.run([sys.executable, "-m", "histchrono.cli", *words], cwd=project, env=env, capture_output=True, text=True, timeout=300, preexec_fn=limit)


def free(project, *words):
    return limited(project, *words, size=resource.RLIM_INFINITY)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    p = small_project(tmp_path_factory.mktemp("disk"), chains=12)
    assert free(p, "write-dumps", "--out", "d").returncode == 0
    for y in (2022, 2023, 2024, 2025):
        assert free(p, "extract", f"d/{y}.json.gz", "--snapshot", str(y), "--out", f"statements/{y}").returncode == 0
    assert free(p, "truth", *[f"statements/{y}" for y in (2022, 2023, 2024, 2025)], "--anchors", "2022-01-01,2025-10-01", "--out", "truth").returncode == 0
    r = free(p, "chains", "truth", "--out", "chains/chains.parquet", "--sample", "12")
    assert r.returncode == 0, r.stderr
    return p


@pytest.mark.parametrize("words, out", [
    (["write-dumps", "--out", "x1"], "x1"),
    (["extract", "d/2022.json.gz", "--snapshot", "2022", "--out", "x2"], "x2"),
    (["truth", "statements/2022", "--anchors", "2022-01-01", "--out", "x3"], "x3"),
    (["chains", "truth", "--out", "x4/chains.parquet"], "x4"),
    (["evaluate", "--chains", "chains/sample.parquet", "--model", "SmolLM2-135M-Instruct", "--setting", "gold", "--out", "x5"], "x5"),
])
def test_full_disk(project, words, out):
    r = limited(project, *words, size=2000)
    lines = [l for l in r.stderr.splitlines() if l.startswith("histchrono: ")]
    assert r.returncode == 5 and len(lines) == 1 and "no disk space to write" in lines[0] and out in lines[0], r.stderr[-800:]
    assert "Traceback" not in r.stderr
    left = [p for p in (project / out).rglob("*") if p.is_file()] if (project / out).exists() else []
    assert not [p for p in left if p.name.endswith(".tmp") or p.name == "manifest.json"], left
    r = free(project, *words)  # with room again it goes on
    assert r.returncode == 0, r.stderr
    assert (project / out).exists()


# --- what a killed writer leaves

WRITING = "import sys, time; from histchrono.core.io import atomic\nwith atomic(sys.argv[1]) as tmp: tmp.write_text('half'); print(tmp, flush=True); time.sleep(60)"


def writing(path):
    p = subprocess.Popen([sys.executable, "-c", WRITING, str(path)], stdout=subprocess.PIPE, text=True)
    return p, Path(p.stdout.readline().strip())


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    f = tmp_path / "a[1].json"
    (dead, left), (alive, held) = writing(f), writing(f)
    dead.kill(), dead.wait(20)
    assert left.exists() and held.exists()
    write_text(f, "whole")
    assert f.read_text() == "whole" and held.exists() and not left.exists()
    alive.send_signal(signal.SIGKILL), alive.wait(20)
    write_text(f, "again")
    assert [p.name for p in tmp_path.iterdir()] == ["a[1].json"]
    for p in (dead, alive):
        p.stdout.close()


def test_many_writers_at_once_lose_nothing(tmp_path):
    f = tmp_path / "a.json"
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: write_text(f, str(i) * 1000), [i % 10 for i in range(2000)]))
    assert len(set(f.read_text())) == 1 and len(f.read_text()) == 1000
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_only_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for p, words in ((tmp_path / "pipe", "a device or a pipe"), ("/dev/null", "a device or a pipe"), (tmp_path, "is a folder")):
        with pytest.raises(InputError, match=words):
            write_text(p, "x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/file")
    for text in ("one", "two"):
        with atomic(tmp_path / "link") as tmp:
            tmp.write_text(text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "file").read_text() == text
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["file"]
