"""The chains file: the same bytes whatever the order of rows and the number of workers, limits and samples, and what bad input is told. What the chains say is checked in test_families."""
import hashlib
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from histchrono.chronoscope import chains as module
from histchrono.chronoscope.chainfile import CHAINS, FAMILIES, LONG, SINGLE, read_chains, sample_chains, structure
from histchrono.chronoscope.chains import make_chains
from histchrono.chronoscope.dump import ENTITIES, STATEMENTS
from histchrono.chronoscope.intervals import INTERVALS, TIMELESS
from histchrono.chronoscope.truth import build_truth
from histchrono.core.errors import InputError
from histchrono.core.io import Schema, write_parquet
from worlds import ANCHORS, CLASSES, Made, split, write_inputs


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    w = Made(tmp_path_factory.mktemp("world"), 101)
    w.chains = w.folder / "chains.parquet"
    w.counts = make_chains(w.truth, w.dirs, w.chains, 42)
    return w


def shuffled(path, schema, out, seed=1):
    t = pq.read_table(path)
    order = list(range(t.num_rows))
    random.Random(seed).shuffle(order)
    write_parquet(t.take(order), out, schema)


def test_every_family_is_there_and_losses_are_counted(world):
    assert list(world.counts["families"]) == list(FAMILIES)
    lost = world.counts["dropped"]
    assert lost and all(n > 0 for n in lost.values())
    assert any("answer in question" in k for k in lost) and any("split" in k for k in lost), "leaks are planted in the names, and neighbours in other splits"
    table = structure(world.chains)
    assert dict(zip(table.family, table.n_before_merging)) == {f: n["before_merging"] for f, n in world.counts["families"].items()}


def by_hand(folder, people, rows):
    "Chains of a world written by hand: who (kind and name by key), and claims (subject, property, value, start, end)."
    numbers = iter(n for n in range(2000, 3000) if split(f"Q{n}") == "train")
    qid = {k: f"Q{next(numbers)}" for k in people}
    entities = {qid[k]: dict(qid=qid[k], label=name, usable=True, aliases=[], classes=[CLASSES[kind]], country="", gender=None) for k, (kind, name) in people.items()}
    times = lambda t: [t + {10: "/11", 7: "-00/10", 4: "-00-00/9"}[len(t)]] if t else []
    dirs = write_inputs(folder, [dict(subject=qid[a], property=p, value=qid[v], rank="normal", start=times(x), end=times(y), point=[]) for a, p, v, x, y in rows], entities)
    build_truth(dirs, ANCHORS, "strict", folder / "truth")
    make_chains(folder / "truth", dirs, folder / "c.parquet", 42)
    return read_chains(folder / "c.parquet"), qid


def test_two_people_of_one_name_stay_two(tmp_path):
    people = dict(a=("person", "Dae Kim"), b=("person", "Dae Kim"), c=("person", "Ada Voss"), p=("party", "Greens"), x=("firm", "Acme"), y=("firm", "Globex"), z=("firm", "Initech"))
    chains, q = by_hand(tmp_path, people, [(k, "P102", "p", "2001-01-01", "") for k in "abc"] + [(k, "P108", v, "2005-01-01", "") for k, v in zip("abc", "xyz")])
    pairs = {frozenset(t["subject_qid"] for t in c["turns"]) for c in chains if c["family"] == "cross_entity_then"}
    assert pairs == {frozenset((q["a"], q["c"])), frozenset((q["b"], q["c"]))}
    said = {(t["subject_qid"], t["answer_qid"]) for c in chains for t in c["turns"] if t["property"] == "P108"}
    assert said == {(q["a"], q["x"]), (q["b"], q["y"]), (q["c"], q["z"])}


@pytest.mark.parametrize("between, year", [
    ([("a", "2010-03-10"), ("b", "2010-03-10")], "2010"),
    ([("a", "2010-03-10"), ("b", "2010-06-01")], "2010"),  # nobody for a while, within the year
    ([("a", "2011-01-01"), ("b", "2011-01-01")], "2011"),
    ([("a", "2010-03-10"), ("b", "2011-03-01")], None),  # nobody for a while, across the years
    ([("a", "2010"), ("b", "2011")], None),
    ([("a", "2010-12"), ("b", "2011-01")], None),
    ([("a", "2010-12-31"), ("b", "2011-01-01")], None),  # whether the last day of a term counts, nobody knows
    ([("a", "2010-03-10"), ("c", "2010-04"), ("b", "2010-06-01")], None),  # a third may have held it, certainly on no day
])
def test_the_year_of_a_change_is_asked_for_where_it_is_certain(tmp_path, between, year):
    rows = [("f", "P169", "a", "2000-01-01", between[0][1]), ("f", "P169", "b", between[-1][1], "2021-06-01")]
    rows += [("f", "P169", "c", day, "2010-04-20") for _, day in between[1:-1]]
    chains, _ = by_hand(tmp_path, dict(f=("firm", "Acme"), a=("person", "Ada Voss"), b=("person", "Ben Ruiz"), c=("person", "Cora Lindh")), rows)
    points = [c for c in chains if c["family"] == "change_point"]
    assert points and {t["answer"] for c in points for t in c["turns"] if t["answer_kind"] == "year"} == ({year} if year else set())


CODE = "import sys\nfrom histchrono.chronoscope.chains import make_chains\nif __name__ == '__main__': make_chains(sys.argv[1], sys.argv[2:6], sys.argv[6], 42, workers=int(sys.argv[7]))"


@pytest.mark.parametrize("hashseed, workers", [("0", 1), ("1", 1), ("1", 2)])
def test_same_bytes_over_hash_seeds_and_workers(world, tmp_path, hashseed, workers):
    (tmp_path / "go.py").write_text(CODE)
    env = {**os.environ, "PYTHONHASHSEED": hashseed, "PYTHONPATH": str(Path(module.__file__).parents[2])}
    subprocess.run([sys.executable, tmp_path / "go.py", world.truth, *world.dirs, tmp_path / "c.parquet", str(workers)], check=True, env=env, timeout=120)
    assert digest(tmp_path / "c.parquet") == digest(world.chains)


def test_same_bytes_over_the_order_of_statements(world, tmp_path):
    dirs = write_inputs(tmp_path, world.claims, world.entities, order=lambda rows: random.Random(3).sample(rows, len(rows)))
    assert digest(dirs[0] / "statements.parquet") != digest(world.dirs[0] / "statements.parquet")
    build_truth(dirs, ANCHORS, "strict", tmp_path / "truth")
    make_chains(tmp_path / "truth", dirs, tmp_path / "c.parquet", 42)
    assert digest(tmp_path / "c.parquet") == digest(world.chains)


def test_same_bytes_over_the_order_of_intervals(world, tmp_path):
    for name, schema in (("intervals", INTERVALS), ("timeless", TIMELESS)):
        shuffled(world.truth / f"{name}.parquet", schema, tmp_path / f"{name}.parquet")
        assert digest(tmp_path / f"{name}.parquet") != digest(world.truth / f"{name}.parquet")
    make_chains(tmp_path, world.dirs, tmp_path / "c.parquet", 42)
    assert digest(tmp_path / "c.parquet") == digest(world.chains)


def test_same_bytes_from_a_store_a_snapshot(world, tmp_path):
    for d in world.dirs:
        build_truth([d], [a for a in ANCHORS if a[:4] == d.name], "strict", tmp_path / d.name)
    make_chains([tmp_path / d.name for d in world.dirs], world.dirs, tmp_path / "c.parquet", 42)
    assert digest(tmp_path / "c.parquet") == digest(world.chains)


def test_same_bytes_in_chunks_of_any_size(world, tmp_path, monkeypatch):
    make_chains(world.truth, world.dirs, tmp_path / "limit.parquet", 42, max_per_family=9)
    monkeypatch.setattr(module, "CHUNK", 3)
    make_chains(world.truth, world.dirs, tmp_path / "c.parquet", 42)
    make_chains(world.truth, world.dirs, tmp_path / "l.parquet", 42, max_per_family=9)
    assert digest(tmp_path / "c.parquet") == digest(world.chains)
    assert digest(tmp_path / "l.parquet") == digest(tmp_path / "limit.parquet")


def test_some_families_are_those_of_all(world, tmp_path):
    some = ("scope_switch", "change_point", "bridged_multi_pid")
    make_chains(world.truth, world.dirs, tmp_path / "c.parquet", 42, families=some)
    assert {c["chain_id"]: c for c in read_chains(world.chains) if c["family"] in some} == {c["chain_id"]: c for c in read_chains(tmp_path / "c.parquet")}


def test_another_seed_says_it_otherwise(world, tmp_path):
    make_chains(world.truth, world.dirs, tmp_path / "c.parquet", 43)
    ids = lambda p: {c["chain_id"] for c in read_chains(p)}
    assert len(ids(tmp_path / "c.parquet") & ids(world.chains)) < 0.5 * len(ids(world.chains))


def test_limit(world, tmp_path):
    counts = make_chains(world.truth, world.dirs, tmp_path / "c.parquet", 42, max_per_family=9)
    assert all(n["kept"] == min(9, n["after_merging"]) for n in counts["families"].values())
    over = {f: n["after_merging"] - 9 for f, n in counts["families"].items() if n["after_merging"] > 9}
    assert {k.split(":")[0]: n for k, n in counts["dropped"].items() if "over the limit" in k} == over
    everything = {c["chain_id"]: c for c in read_chains(world.chains)}
    assert all(everything[c["chain_id"]] == c for c in read_chains(tmp_path / "c.parquet"))
    assert make_chains(world.truth, world.dirs, tmp_path / "c.parquet", 42, max_per_family=0)["chains"] == len(everything)


def stratum(c):
    return c["family"], min(c["length"], LONG)


def test_sample_is_stratified_and_hangs_on_no_order(world, tmp_path):
    n = 12 * len(FAMILIES)
    sample = sample_chains(world.chains, n, 1)
    shuffled(world.chains, CHAINS, tmp_path / "c.parquet")
    assert digest(tmp_path / "c.parquet") != digest(world.chains)
    assert sample_chains(tmp_path / "c.parquet", n, 1) == sample
    assert sample_chains(tmp_path / "c.parquet", n, 2) != sample
    said = lambda c: (c["family"], tuple(t["question"] for t in c["turns"]))
    assert len({said(c) for c in sample}) == len(sample) == n
    have, got = Counter(stratum(c) for c in {said(c): c for c in read_chains(world.chains)}.values()), Counter(stratum(c) for c in sample)
    family = lambda counts, f: sum(k for (g, _), k in counts.items() if g == f)
    most = max(family(got, f) for f in FAMILIES)
    for f in FAMILIES:  # equal shares; what a family lacks goes to the others
        assert family(got, f) >= min(most - 1, family(have, f)), f
        lengths = {m: got[f, m] for g, m in have if g == f and m < LONG}
        assert all(k >= min(max(lengths.values()) - 1, have[f, m]) for m, k in lengths.items()), (f, lengths)


def test_sample_quotas_and_strata_have_limits(world):
    few = sample_chains(world.chains, 400, 1, per_stratum=2)
    assert few and max(Counter(map(stratum, few)).values()) == 2
    some = sample_chains(world.chains, 0, 1, quotas=dict(change_point=5, distinct_count=3))
    assert Counter(c["family"] for c in some) == dict(change_point=5, distinct_count=3)
    with pytest.raises(InputError, match="carry"):
        sample_chains(world.chains, 10, 1, quotas=dict(carry=5))


# the command line

def histchrono(monkeypatch, capsys, *words):
    "Run a command in this process: exit code, what was printed, what was said of errors."
    from histchrono.cli import main
    monkeypatch.setattr(sys, "argv", ["histchrono", *map(str, words)])
    code = 0
    try:
        main()
    except SystemExit as e:
        code = e.code or 0
    return code, *capsys.readouterr()


def test_single_turn_and_sample_by_command(world, tmp_path, monkeypatch, capsys):
    code, out, err = histchrono(monkeypatch, capsys, "chains", world.truth, "--out", tmp_path / "s.parquet", "--single-turn", "--sample", 20, *[x for d in world.dirs for x in ("--entities", d)])
    assert code == 0, err
    assert Counter(c["family"] for c in read_chains(tmp_path / "s.parquet")).keys() == set(SINGLE) and all(f in out for f in SINGLE)
    sample = read_chains(tmp_path / "sample.parquet")
    assert len(sample) == 20 and {c["length"] for c in sample} == {1} and (tmp_path / "manifest.json").exists()


def rewrite(path, schema, version):
    "The same table under another version of its schema."
    write_parquet(pq.read_table(path), path, Schema(schema.name, version, schema.fields))


def made_of(folder, world, claims, entities=None, snapshot=None):
    "Truth of other claims, with the folders of entities."
    dirs = write_inputs(folder, claims, entities or world.entities, snapshots=(2025,))
    if snapshot:
        t = pq.read_table(dirs[0] / "statements.parquet")
        write_parquet(t.set_column(0, "snapshot", pa.array([snapshot] * t.num_rows)), dirs[0] / "statements.parquet", STATEMENTS)
        m = dirs[0] / "manifest.json"
        m.write_text(m.read_text().replace('"2025"', f'"{snapshot}"'))
    build_truth(dirs, ANCHORS[-4:], "strict", folder / "truth")
    return [folder / "truth", "--entities", dirs[0]]


def bad_inputs(world, d):
    "Every kind of bad input: words for the command line, exit code, what its one line must name."
    d.mkdir()
    copy = lambda name: shutil.copytree(world.truth, d / name)
    entities = [x for e in world.dirs for x in ("--entities", e)]
    out, whole = ["--out", d / "out" / "chains.parquet"], [world.truth, *entities]
    yield "unknown family", ["chains", *whole, *out, "--families", "carryover,carry_over"], 2, "carryover"
    yield "unknown profile", ["chains", *whole, *out, "--profile", "demos"], 2, "demo"
    yield "two ways at once", ["chains", *whole, *out, "--families", "carryover", "--single-turn"], 2, "--single-turn"
    yield "nowhere", ["chains", d / "nowhere", *entities, *out], 2, "nowhere"
    (d / "empty").mkdir()
    yield "no intervals", ["chains", d / "empty", *entities, *out], 2, "intervals.parquet"
    yield "no entities", ["chains", copy("lonely"), *out], 2, "--entities"
    yield "entities nowhere", ["chains", world.truth, "--entities", d / "nobody", *out], 2, "nobody"
    rewrite(copy("newer") / "intervals.parquet", INTERVALS, 99)
    yield "another version of intervals", ["chains", d / "newer", *entities, *out], 3, "v99"
    other = shutil.copytree(world.dirs[0], d / "2022")
    rewrite(other / "entities.parquet", ENTITIES, 99)
    yield "another version of entities", ["chains", world.truth, "--entities", other, *entities, *out], 3, "v99"
    rewrite(other / "statements.parquet", STATEMENTS, 99)
    yield "another version of statements", ["truth", other, "--anchors", "2022-01-01", "--out", copy("kept")], 3, "v99"
    for name, data in (("cut", (world.truth / "intervals.parquet").read_bytes()[:-200]), ("rubbish", b"no Parquet at all"), ("hollow", b"")):
        (copy(name) / "intervals.parquet").write_bytes(data)
        yield f"{name} intervals", ["chains", d / name, *entities, *out], (2, 3), "intervals.parquet"
    yield "a snapshot that is no year", ["chains", *made_of(d / "w1", world, world.claims, snapshot="latest"), *out], 2, "latest"
    yield "no property that is asked about", ["chains", *made_of(d / "w2", world, [dict(c, property="P106") for c in world.claims]), *out], 2, "no chain can be built"
    yield "nothing sure", ["chains", *made_of(d / "w3", world, [dict(c, end=["somevalue"], point=[]) for c in world.claims if c["start"]]), *out], 2, "no chain can be built"
    yield "no name that can be used", ["chains", *made_of(d / "w4", world, world.claims, {q: dict(e, usable=False) for q, e in world.entities.items()}), *out], 2, "no chain can be built"
    yield "no direct question", ["chains", *made_of(d / "w5", world, [dict(c, property="P106") for c in world.claims]), *out, "--single-turn"], 2, "no chain can be built"
    one = world.claims[-1]["subject"]
    yield "no second subject", ["chains", *made_of(d / "w7", world, [c for c in world.claims if c["subject"] == one]), *out, "--families", "cross_entity_then"], 2, "no chain can be built"
    yield "no statement with a time", ["chains", *made_of(d / "w6", world, [c for c in world.claims if not c["start"] + c["end"] + c["point"]]), *out], 2, "intervals.parquet"
    yield "a folder to write", ["chains", *whole, "--out", d / "out"], 2, "folder"
    yield "below a file", ["chains", *whole, "--out", d / "out" / "chains.parquet" / "x.parquet"], 2, "chains.parquet"


def test_bad_input_is_one_line_and_what_was_finished_stays(world, tmp_path, monkeypatch, capsys):
    out, wrong = tmp_path / "d" / "out", defaultdict(list)
    for what, words, code, said in bad_inputs(world, tmp_path / "d"):
        if not out.exists():  # what an earlier run finished
            out.mkdir()
            shutil.copy(world.chains, out / "chains.parquet")
            (out / "manifest.json").write_text('{"stage": "chains"}')
        try:
            got, _, err = histchrono(monkeypatch, capsys, *words)
        except Exception as e:
            wrong[what].append(f"{type(e).__name__}: {e}")
            continue
        lines = err.strip().splitlines()
        if got not in (code if isinstance(code, tuple) else (code,)) or len(lines) != 1 or not lines[0].startswith("histchrono: ") or said not in lines[0]:
            wrong[what].append(f"{got} {err[-300:]}")
        if sorted(p.name for p in out.iterdir()) != ["chains.parquet", "manifest.json"] or digest(out / "chains.parquet") != digest(world.chains):
            wrong[what].append(f"left {sorted(p.name for p in out.iterdir())}")
            shutil.rmtree(out)
    assert not wrong, "\n".join(f"{k}: {v}" for k, v in wrong.items())
    for n in ("intervals", "timeless", "truth"):
        assert digest(tmp_path / "d" / "kept" / f"{n}.parquet") == digest(world.truth / f"{n}.parquet")


@pytest.mark.parametrize("anchors", [("04-01", "01-01"), ("01-01", "01-01"), (), ("13-01",), ("02-30",), ("spring",)])
def test_anchors_that_are_none(world, tmp_path, anchors):
    with pytest.raises(InputError, match="anchor"):
        make_chains(world.truth, world.dirs, tmp_path / "c.parquet", 42, anchors=anchors)
    assert not list(tmp_path.iterdir())


def test_unknown_names_by_call(world, tmp_path):
    for words, said in ((dict(families=("carry",)), "carryover"), (dict(policy="loose"), "strict")):
        with pytest.raises(InputError, match=said):
            make_chains(world.truth, world.dirs, tmp_path / "c.parquet", 42, **words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size, workers", [(2000, 1), (30000, 1), (30000, 2)])
def test_full_disk(world, tmp_path, size, workers):
    "A run whose files may not grow: one line, exit code 5, nothing half-written, the earlier file whole; with room again it goes on."
    out = tmp_path / "out" / "chains.parquet"
    out.parent.mkdir()
    out.write_bytes(b"an earlier result")
    words = [sys.executable, "-m", "histchrono.cli", "chains", world.truth, "--out", out, "--workers", str(workers), *[x for d in world.dirs for x in ("--entities", d)]]
    r = subprocess.run(words, capture_output=True, text=True, timeout=120, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    lines = r.stderr.strip().splitlines()
    assert r.returncode == 5 and len(lines) == 1 and "no disk space to write" in lines[0] and str(out.parent) in lines[0], r.stderr[-800:]
    assert [p.name for p in out.parent.iterdir()] == ["chains.parquet"] and out.read_bytes() == b"an earlier result"
    r = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0 and digest(out) == digest(world.chains), r.stderr[-800:]


def stage(monkeypatch, capsys, truth, out, *more):
    "Exit code and what is said of a chains command."
    code, _, err = histchrono(monkeypatch, capsys, "chains", str(truth), "--out", str(out), *map(str, more))
    return code, err


def test_other_stages_results_are_not_overwritten(world, tmp_path, monkeypatch, capsys):
    truth, names = tmp_path / "truth", [x for d in world.dirs for x in ("--entities", d)]
    shutil.copytree(world.truth, truth)
    before = {p.name: digest(p) for p in truth.iterdir()}
    for out, said in ((truth / "intervals.parquet", "is an input"), (truth / "chains.parquet", "holds what truth wrote"), (world.dirs[0] / "chains.parquet", "holds what extract wrote")):
        code, err = stage(monkeypatch, capsys, truth, out, *names)
        assert code == 2 and said in err and len(err.splitlines()) == 1, err
    code, err = stage(monkeypatch, capsys, truth, tmp_path / "c" / "sample.parquet", "--sample", 5, *names)
    assert code == 2 and "where the sample goes" in err
    code, err = stage(monkeypatch, capsys, truth, tmp_path / "c" / "chains.parquet", truth, *names)
    assert code == 2 and "both hold snapshot" in err
    assert before == {p.name: digest(p) for p in truth.iterdir()}
    (truth / "manifest.json").unlink()
    code, err = stage(monkeypatch, capsys, truth, tmp_path / "c" / "chains.parquet", *names)
    assert code == 2 and "manifest.json is missing" in err


def test_workers_end_with_the_command(world, tmp_path):
    "A command that is killed leaves no process behind."
    words = [sys.executable, "-m", "histchrono.cli", "chains", world.truth, "--out", tmp_path / "c" / "chains.parquet", "--workers", "2", *[x for d in world.dirs for x in ("--entities", d)]]
    p = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children, until = set(), time.monotonic() + 60
    while p.poll() is None and len(children) < 3 and time.monotonic() < until:
        try:
            children |= set(Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split())
        except OSError:
            break
    p.kill()
    p.wait()
    assert children
    until = time.monotonic() + 20
    while (alive := [c for c in children if Path(f"/proc/{c}").exists() and "Z" not in Path(f"/proc/{c}/stat").read_text().split()[2]]) and time.monotonic() < until:
        time.sleep(0.2)
    assert not alive


def test_anchor_that_a_snapshot_lacks(world, tmp_path):
    with pytest.raises(InputError, match="anchor 02-29 is no day of 2022"):
        make_chains(world.truth, world.dirs, tmp_path / "c.parquet", 42, anchors=("02-29",))
