"""The batch on a small project of its own: states, resume after a kill, reruns after an edit, stale artefacts."""
import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

SNAKEFILE = """
import json, shlex, sys
from histchrono.core.batch import artefacts, code_hash
NB = f"{shlex.quote(sys.executable)} -m histchrono.core.execute"
rule data:
    input: "data/{name}.txt"
    output: "runs/demo/{name}.out"
    log: "runs/demo/logs/data_{name}.txt"
    params: code=code_hash("histchrono.core.paths")
    shell: "(grep -q bad {input} && echo 'data/{wildcards.name}.txt is bad: mend it' && exit 3; echo x >> runs/asked.txt; cp {input} {output}) > {log} 2>&1"
rule table:
    input:
        nb="nbs/papers/p/table_{number}.ipynb",
        data=lambda w: "runs/demo/one.out" if w.number == "01" else "runs/demo/two.out",
    output:
        csv="paper_tables/p/table_{number}.csv",
        mark="runs/demo/artefacts/p/table_{number}.done",
    log:
        txt="runs/demo/logs/table_{number}.txt",
        nb="runs/demo/notebooks/table_{number}.ipynb",
    shell:
        "{NB} {input.nb} {log.nb} --params '{{\\"src\\": \\"{input.data}\\", \\"out\\": \\"{output.csv}\\"}}' --promise {output.csv} > {log.txt} 2>&1 && touch {output.mark}"
"""


def notebook(path, *cells, tagged=True):
    nb = new_notebook(cells=[new_code_cell(c) for c in ("src = ''\nout = ''", *cells)])
    nb.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "python3"}
    if tagged:
        nb.cells[0].metadata["tags"] = ["parameters"]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)


COPY = "open(out, 'w').write(open(src).read())"


@pytest.fixture
def project(tmp_path):
    from histchrono.core.paths import root

    p = tmp_path / "project"
    for d in ("data", "workflow", "runs"):
        (p / d).mkdir(parents=True)
    (p / "settings.ini").write_text((root() / "settings.ini").read_text())
    (p / "workflow" / "Snakefile").write_text(SNAKEFILE)
    (p / "data" / "one.txt").write_text("1\n")
    (p / "data" / "two.txt").write_text("2\n")
    for n in ("01", "02"):
        notebook(p / f"nbs/papers/p/table_{n}.ipynb", COPY)
    return p


def histchrono(project, *words, **kw):
    env = dict(os.environ, HISTCHRONO_HOME=str(project))
    return subprocess.run([sys.executable, "-m", "histchrono.cli", *words], cwd=project, env=env, capture_output=True, text=True, timeout=120, **kw)


def last(r):
    return r.stdout.strip().splitlines()[-1]


def asked(project):
    p = project / "runs" / "asked.txt"
    return len(p.read_text().split()) if p.exists() else 0


def test_made_then_nothing_to_do_then_only_what_changed(project):
    r = histchrono(project, "run")
    assert r.returncode == 0 and "made p/table_01 p/table_02" in last(r), r.stdout + r.stderr
    assert "; took: " in last(r) and "data one" in last(r)
    r = histchrono(project, "run")
    assert r.returncode == 0 and "nothing was out of date; 2 up to date" in last(r)
    os.utime(project / "nbs/papers/p/table_01.ipynb")  # touched, not edited
    assert "nothing was out of date" in last(histchrono(project, "run"))
    notebook(project / "nbs/papers/p/table_01.ipynb", COPY, "1 + 1")
    r = histchrono(project, "run", "--list")
    assert "stale    p/table_01" in r.stdout and "current  p/table_02" in r.stdout
    r = histchrono(project, "run")
    assert "made p/table_01; 1 up to date" in last(r)
    (project / "data" / "two.txt").write_text("two\n")
    r = histchrono(project, "run")
    assert "made p/table_02; 1 up to date" in last(r) and asked(project) == 3
    assert (project / "paper_tables/p/table_02.csv").read_text() == "two\n"


def test_a_failed_input_makes_its_artefact_stale_and_leaves_the_rest(project):
    histchrono(project, "run")
    (project / "data" / "two.txt").write_text("bad\n")
    notebook(project / "nbs/papers/p/table_01.ipynb", COPY, "2 + 2")
    r = histchrono(project, "run")
    assert r.returncode == 1
    assert "failed: data two: data/two.txt is bad: mend it" in last(r)
    assert "stale, an input failed and the files there are of an earlier run: p/table_02" in last(r)
    assert last(r).startswith("NOT COMPLETE") and "made p/table_01" in last(r)
    assert (project / "paper_tables/p/table_02.csv").read_text() == "2\n"
    (project / "data" / "two.txt").write_text("good\n")
    r = histchrono(project, "run")
    assert r.returncode == 0 and "made p/table_02; 1 up to date" in last(r)


@pytest.mark.parametrize("cells, tagged, why", [
    (["1 / 0"], True, "ZeroDivisionError"),
    (["import os; os.kill(os.getpid(), 9)", COPY], True, "failed: table 02"),
    (["import sys; sys.exit(0)", COPY], True, "failed: table 02"),
    (["open(out + '.tmp', 'w').write('x')"], True, "did not write"),
    ([COPY], False, "has no cell tagged `parameters`"),
])
def test_a_notebook_that_fails_leaves_no_artefact_and_says_why(project, cells, tagged, why):
    notebook(project / "nbs/papers/p/table_02.ipynb", *cells, tagged=tagged)
    r = histchrono(project, "run")
    assert r.returncode == 1 and why in r.stdout, r.stdout
    assert "Traceback" not in r.stdout + r.stderr
    assert not (project / "paper_tables/p/table_02.csv").exists()
    assert (project / "paper_tables/p/table_01.csv").exists()
    assert "made p/table_01" in last(r) and "failed: table 02" in last(r)


def test_a_killed_batch_is_picked_up(project):
    notebook(project / "nbs/papers/p/table_01.ipynb", "import os, time, pathlib\nif not pathlib.Path('runs/quick').exists(): pathlib.Path('runs/began').write_text(str(os.getpid())); time.sleep(60)", COPY)
    env = dict(os.environ, HISTCHRONO_HOME=str(project))
    p = subprocess.Popen([sys.executable, "-m", "histchrono.cli", "run", "table_01"], cwd=project, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    for _ in range(300):
        if (project / "runs/began").exists() and (project / "runs/began").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the notebook did not begin")
    assert "another batch is running here" in histchrono(project, "run").stderr
    os.kill(p.pid, signal.SIGKILL)
    p.wait()
    kernel = int((project / "runs/began").read_text())
    for _ in range(100):  # the job sees that its batch is gone, and its kernel goes with it
        try:
            os.kill(kernel, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("a kernel outlived its batch")
    (project / "runs/quick").write_text("x")
    r = histchrono(project, "run")
    assert r.returncode == 0 and "made p/table_01 p/table_02" in last(r), r.stdout + r.stderr
    assert asked(project) == 2  # `data one` was done before the kill and is not done again


def test_an_edited_module_reruns_what_uses_it(project, tmp_path):
    from pathlib import Path
    import shutil

    import histchrono

    copy = tmp_path / "lib"
    shutil.copytree(Path(histchrono.__file__).parent, copy / "histchrono", ignore=shutil.ignore_patterns("__pycache__"))
    env = dict(os.environ, HISTCHRONO_HOME=str(project), PYTHONPATH=str(copy))

    def run():
        return subprocess.run([sys.executable, "-m", "histchrono.cli", "run"], cwd=project, env=env, capture_output=True, text=True, timeout=120).stdout

    assert "made p/table_01 p/table_02" in run()
    assert "nothing was out of date" in run()
    errors = copy / "histchrono/core/errors.py"  # imported by paths, which the rule `data` names
    errors.write_text(errors.read_text() + "\n# edited\n")
    out = run()
    assert "data one" in out and "data two" in out, out
    io = copy / "histchrono/core/io.py"  # not used by `data`
    io.write_text(io.read_text() + "\n# edited\n")
    assert "nothing was out of date" in run()
