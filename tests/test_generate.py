"""Pictures can be made, lost, resumed and traced row by row: kills, pieces, processes, edited files, black pictures, full disks."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")

from histchrono.core.errors import DiskError, HistError, InputError  # noqa: E402
from histchrono.histvis.generate import collect, generate, missing_note, read_pictures, read_record, standing  # noqa: E402
from histchrono.histvis.imageplan import hold, picture_path, plan_images, plan_rows, read_plan  # noqa: E402
from histchrono.histvis.names import parse_arms  # noqa: E402
from histchrono.histvis.pictures import picture_text, read_picture, write_picture  # noqa: E402
from histchrono.histvis.prompts import choose_activities, choose_periods, periods  # noqa: E402
from histchrono.models.images import Drawn  # noqa: E402

ARMS = "FLUX.1-schnell SDXL SDXL:mitigated_appendix_e"


class Toy:
    "Draws blocks of colour from a row's seed; `how` says what goes wrong with a row."
    name = "toy"

    def __init__(self, how=lambda row, attempt: "ok", batch=3, side=32, pause=0.0, loud=False):
        self.how, self.batch, self.side, self.pause, self.loud, self.asked = how, batch, side, pause, loud, []
        self.settings = dict(kind="toy", side=side)

    def draw(self, rows, attempt=0):
        self.asked.append(([r["row"] for r in rows], attempt))
        time.sleep(self.pause)
        if self.loud:
            print("drawing", flush=True)
        return [self.one(r, self.how(r, attempt)) for r in rows]

    def one(self, row, how):
        g = np.random.default_rng(row["seed"])
        rgb = np.kron(g.integers(0, 256, (8, 8, 3), dtype=np.uint8), np.ones((self.side // 8, self.side // 8, 1), np.uint8))
        if how == "raise":
            raise RuntimeError("it broke")
        odd = dict(black=rgb * 0, none=None, floats=rgb / 255, nan=np.full(rgb.shape, np.nan), grey=rgb[..., 0], nothing=rgb[:0], text="a picture", facts=rgb)
        if how.startswith("failed"):
            return Drawn(None, how, "said so")
        return Drawn(odd.get(how, rgb), facts=dict(x=object()) if how == "facts" else dict(blocks=np.int64(64)))


def plan(folder, n=2, arms=ARMS, engine=None, acts=3, pers="17th 1990s", **kw):
    plan_images(folder, arms, engine or Toy(), choose_activities(acts), choose_periods(pers), n, **kw)
    return folder


def run(folder, engine=None, **kw):
    return generate(folder, engine or Toy(), progress=False, **kw)


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file() and ".locks" not in p.parts}


SCRIPT = """
import signal, sys; sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background deaf to Ctrl-C
from test_generate import *
if len(sys.argv) > 6: import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[6]),) * 2)
try: print(generate(sys.argv[2], Toy(pause=float(sys.argv[5]), loud=True), shard=int(sys.argv[3]), shards=int(sys.argv[4]), progress=False))
except HistError as e: print(f'{type(e).__name__}: {e}', file=sys.stderr); sys.exit(e.exit_code)
"""


def process(folder, shard=0, shards=1, pause=0.0, *limit, env=()):
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(folder), str(shard), str(shards), str(pause), *map(str, limit)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=dict(os.environ, OMP_NUM_THREADS="1", **dict(env)))


def ended(p, code=0):
    out, err = p.communicate(timeout=120)
    assert p.returncode == code, err[-800:]
    return out, err


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The same plan, drawn in one go."
    d = plan(tmp_path_factory.mktemp("whole") / "d")
    assert run(d)["drawn"] == 36
    collect(d)
    return files(d)


# --- the same pictures, however they are made

def test_four_processes_at_once_make_the_bytes_of_one(whole, tmp_path):
    "images.md 7: a shard is the manifest row modulo the number of shards; hash seeds do not matter."
    d = plan(tmp_path / "d")
    for p in [process(d, i, 4, env={"PYTHONHASHSEED": str(i)}) for i in range(4)]:
        ended(p)
    collect(d)
    assert files(d) == whole


def test_killed_at_any_time_and_resumed(whole, tmp_path):
    "kill -9 leaves nothing that looks finished; what was finished is not drawn again."
    d, rnd, drawn = plan(tmp_path / "d"), random.Random(5), []
    for _ in range(4):
        p = process(d, 0, 1, 0.2)
        for _ in range(rnd.randint(1, 2)):
            p.stdout.readline()
        time.sleep(rnd.uniform(0, 0.06))
        p.send_signal(signal.SIGKILL)
        p.communicate()
        there = [standing(d, r)[0] for r in read_plan(d)[0]]
        assert set(there) <= {"ok", "missing"}
        drawn.append(there.count("ok"))
    assert drawn == sorted(drawn) and 0 < drawn[-1] < 36, drawn
    engine = Toy()
    assert run(d, engine)["drawn"] == 36 - drawn[-1] == sum(len(r) for r, _ in engine.asked)
    collect(d)
    assert files(d) == whole  # no temporary file is left either


def test_killed_between_the_picture_and_its_record(whole, tmp_path):
    d = plan(tmp_path / "d")
    run(d)
    lost = [r for r in read_plan(d)[0] if r["row"] % 5 == 0]
    for r in lost:
        (d / picture_path(r, "json")).unlink()
    assert collect(d)["missing"] == len(lost)
    assert run(d)["drawn"] == len(lost)
    collect(d)
    assert files(d) == whole


def test_ctrl_c(tmp_path):
    "Ctrl-C ends a run at once, holds nothing, and the next run goes on."
    d = plan(tmp_path / "d")
    p = process(d, 0, 1, 0.1)
    p.stdout.readline()
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=30)
    assert p.returncode != 0 and "KeyboardInterrupt" in err
    assert [q.name for q in (d / ".locks").iterdir()] == ["all"] and not [f for f in files(d) if f.endswith(".tmp")]
    n = run(d)
    assert n["drawn"] + n["kept"] == 36


@pytest.mark.parametrize("how", range(4))
def test_pieces(whole, tmp_path, how):
    "Arms apart, shards of changing numbers, batches of any size, a plan that grew: the same bytes."
    rnd, d = random.Random(how), tmp_path / "d"
    if how == 3:  # a smaller plan first, in another order
        plan(d, n=1, arms="SDXL FLUX.1-schnell", acts=2, pers="1990s")
        run(d)
        assert plan_images(d, ARMS, Toy(), choose_activities(3), choose_periods("17th 1990s"), 2)["kept"] == 4
    plan(d)
    for _ in range(3):
        shards = rnd.randint(1, 7)
        run(d, Toy(batch=rnd.randint(1, 9)), arm=rnd.choice([None, "SDXL", "SDXL Mitigated", "FLUX.1-schnell"]), shard=rnd.randrange(shards), shards=shards)
    run(d, Toy(batch=64))
    collect(d)
    assert files(d) == whole


def test_a_row_alone_is_the_row_in_a_batch(tmp_path):
    "images.md 1: a manifest row made alone equals the same row in a batch."
    a, b = plan(tmp_path / "a"), plan(tmp_path / "b")
    run(a, Toy(batch=36))
    for i in (17, 3, 30):
        assert run(b, Toy(batch=1), shard=i, shards=36)["drawn"] == 1
        row = read_plan(b)[0][i]
        assert (a / picture_path(row)).read_bytes() == (b / picture_path(row)).read_bytes()


@pytest.mark.parametrize("seed", [np.random.default_rng(1), [1, 2], 1.0, "1", -1, True, None, 1 << 63, np.random.SeedSequence(1)])
def test_seeds_are_whole_numbers(tmp_path, seed):
    "images.md 1: the API takes ints; a generator is refused, so it cannot be listed twice."
    with pytest.raises(InputError, match="a seed is a whole number"):
        plan(tmp_path / "d", seed=seed)
    assert not (tmp_path / "d").exists()


def test_rows_and_seeds_do_not_depend_on_what_else_is_planned():
    rnd, acts = random.Random(0), choose_activities()
    key = lambda r: (r["arm"], r["activity"], r["period"], r["index"])
    full = {key(r): r for r in plan_rows(parse_arms(ARMS), Toy(), acts, periods(), 3, 7)}
    assert len({r["image_id"] for r in full.values()}) == len(full) == 9000
    assert len({r["seed"] for r in full.values() if r["arm"] != "SDXL Mitigated"}) == 6000
    for _ in range(5):
        some = plan_rows(parse_arms(rnd.sample(ARMS.split(), 2)), Toy(), acts.sample(rnd.randint(1, 9), random_state=rnd.randrange(99)), periods().sample(3, random_state=rnd.randrange(99)), rnd.randint(1, 3), 7)
        for r in some:
            assert {k: v for k, v in r.items() if k != "row"} == {k: v for k, v in full[key(r)].items() if k != "row"}
    for (arm, *rest), r in full.items():
        if arm == "SDXL":
            assert r["seed"] == full["SDXL Mitigated", *rest]["seed"] and r["image_id"] != full["SDXL Mitigated", *rest]["image_id"]


# --- what a run holds

def test_two_runs_into_one_shard(tmp_path):
    d = plan(tmp_path / "d")
    p = process(d, 0, 2, 0.3)
    p.stdout.readline()
    for kw in (dict(shard=0, shards=2), {}, dict(shard=2, shards=4), dict(arm="SDXL")):
        with pytest.raises(InputError, match="another run draws"):
            run(d, **kw)
    with pytest.raises(InputError, match="another run draws"):
        collect(d)
    with pytest.raises(InputError, match="another run draws"):
        plan(d, n=3)
    assert run(d, shard=1, shards=2)["drawn"] == 18
    p.kill(), p.communicate()
    assert run(d, shard=0, shards=2)["rows"] == 18  # a killed run holds nothing


def test_another_plan_keeps_what_is_unchanged(tmp_path):
    d = plan(tmp_path / "d")
    run(d), collect(d)
    before = files(d)
    new = lambda arm: Toy(side=64 if arm.label == "SDXL" else 32)
    assert plan_images(d, ARMS, new, choose_activities(3), choose_periods("17th 1990s"), 2) == dict(rows=36, kept=24, new=12, gone=12)
    assert not (d / "pictures.parquet").exists()
    with pytest.raises(InputError, match="settings are not those"):
        run(d)
    asked = Toy(side=64)
    n = generate(d, {"SDXL": asked, "FLUX.1": Toy(), "SDXL Mitigated": Toy()}, progress=False)
    assert (n["drawn"], n["kept"]) == (12, 24) and all(r["arm"] == "SDXL" for i, _ in asked.asked for r in [read_plan(d)[0][j] for j in i])
    assert collect(d)["strays"] == 12  # of the plan before
    plan(d)  # and back: nothing has to be drawn
    assert run(d)["drawn"] == 0
    collect(d)
    assert {k: v for k, v in files(d).items() if k in before and k != "manifest.json"} == {k: v for k, v in before.items() if k != "manifest.json"}


@pytest.mark.parametrize("kw, words", [(dict(pers=[]), "no period"), (dict(n=0), "0 images a prompt"), (dict(n=-1), "images a prompt"), (dict(n=40000), "images a prompt"), (dict(arms=""), "no arm"), (dict(pers="18h"), "did you mean"), (dict(acts=0), "choose from"),
                                       (dict(arms="SDXL SDXL"), "share the folder"), (dict(arms="SDXL:mitigation"), "did you mean"), (dict(engine=object()), "is no engine")])
def test_plans_that_make_no_sense(tmp_path, kw, words):
    with pytest.raises(HistError, match=words):
        plan(tmp_path / "d", **kw)
    assert not (tmp_path / "d").exists()


def test_a_plan_that_was_changed_is_not_drawn(tmp_path):
    d, e = plan(tmp_path / "d"), plan(tmp_path / "e", n=1)
    shutil.copy(e / "manifest.parquet", d / "manifest.parquet")
    with pytest.raises(InputError, match="plan the images again"):
        run(d)
    (d / "manifest.parquet").write_bytes((d / "manifest.parquet").read_bytes()[:99])
    with pytest.raises(InputError, match="damaged"):
        run(d)
    assert plan(d) and run(d)["drawn"] == 36


# --- what was changed on the disk

def damage(d, rows):
    "Do something to the first rows' files; the statuses that follow."
    at = lambda i, e="png": d / picture_path(rows[i], e)
    x = read_picture(at(0)).copy()
    x[0, 0, 0] ^= 1
    write_picture(at(0), x)  # one grey level of one pixel
    at(1).unlink()
    for e in ("png", "json"):  # two pairs swapped
        at(2, e).rename(d / "t"), at(3, e).rename(at(2, e)), (d / "t").rename(at(3, e))
    at(4).rename(d / "t"), at(5).rename(at(4)), (d / "t").rename(at(5))  # two pictures swapped
    at(6).write_bytes(at(6).read_bytes()[:-20])
    at(7, "json").write_bytes(at(7, "json").read_bytes()[:100])
    r = json.loads(at(8, "json").read_text())
    at(8, "json").write_text(json.dumps({**r, "phash": "0" * 16}))  # still JSON, no longer what was written
    at(9).unlink(), at(9).mkdir()
    at(10).write_bytes(b"")
    at(11).rename(at(11).with_name("moved.png"))
    shutil.copy(at(13), at(12)), shutil.copy(at(13, "json"), at(12, "json"))  # one put over another
    return ["edited", "missing", "edited", "edited", "edited", "edited", "edited", "edited", "edited", "missing", "edited", "missing", "edited"]


def test_every_change_on_the_disk_is_noticed_and_mended(whole, tmp_path):
    "images.md 7: resume checks each row's settings hash and file hash."
    d = plan(tmp_path / "d")
    run(d)
    rows = read_plan(d)[0]
    want = damage(d, rows)
    lines = []
    n = collect(d, say=lines.append)
    pics = read_pictures(d)
    assert pics.status.tolist() == want + ["ok"] * 23 and (n["edited"], n["missing"], n["ok"]) == (10, 3, 23)
    assert "lies at" in pics.message[11] and "moved.png" in pics.message[11] and "23 of 36" in lines[-1]
    assert (pics.sha256[:13] == "").all() and pics.colourfulness[:13].isna().all()
    (d / picture_path(rows[9])).rmdir()
    (d / picture_path(rows[11])).with_name("moved.png").unlink()
    said = []
    n = run(d, say=said.append)
    assert n["drawn"] == 13 and "drawn again" in said[0]
    collect(d)
    assert files(d) == whole


# --- pictures that are none

def test_black_nan_and_broken_rows(tmp_path):
    "images.md 3: a black picture is failed, no PNG is kept, it is retried, and it is in no denominator."
    ways = ["black", "nan", "none", "floats", "grey", "nothing", "text", "facts", "raise", "failed:nan", "failed:filtered"]
    sick = lambda row, attempt: ways[row["row"]] if row["row"] < len(ways) else "ok"
    d, engine = plan(tmp_path / "d"), Toy(sick)
    n = run(d, engine)
    assert (n["drawn"], n["failed"]) == (36 - len(ways), len(ways))
    rows = read_plan(d)[0]
    got = [standing(d, r)[0] for r in rows[:len(ways)]]
    assert got == ["failed:black", "failed:nan", "failed:none", "failed:format", "failed:format", "failed:format", "failed:format", "failed:error", "failed:error", "failed:nan", "failed:filtered"]
    for r in rows[:len(ways)]:
        assert not (d / picture_path(r)).exists()
        rec = read_record(d / picture_path(r, "json"))
        assert rec["attempts"] == 3 and rec["message"] and "sha256" not in rec
    assert sorted(a for i, a in engine.asked if 7 in i) == [0, 0, 1, 2]  # in a batch where another row raised, then three times by itself
    collect(d)
    pics = read_pictures(d)
    ok = pics[pics.status == "ok"]
    assert len(ok) == 25 and ok.colourfulness.notna().all() and (ok.colourfulness > 0).all()
    assert pics[pics.status != "ok"].colourfulness.isna().all()
    assert "11 failed" in missing_note(pics) and "no denominator" in missing_note(pics)
    well = Toy()
    assert run(d, well)["drawn"] == len(ways) and {j for i, _ in well.asked for j in i} == set(range(len(ways)))


def test_failed_rows_then_drawn_leave_the_bytes_of_a_clean_run(whole, tmp_path):
    d = plan(tmp_path / "d")
    run(d, Toy(lambda row, a: ["black", "raise", "ok"][row["row"] % 3]))
    run(d)
    collect(d)
    assert files(d) == whole


def test_a_failure_that_passes(whole, tmp_path):
    "A second attempt gives the row's own picture; the record says how many it took."
    d = plan(tmp_path / "d")
    n = run(d, Toy(lambda row, attempt: "failed:nan" if attempt < row["row"] % 3 else "ok"))
    assert (n["drawn"], n["failed"]) == (36, 0)
    assert [read_record(d / picture_path(r, "json"))["attempts"] for r in read_plan(d)[0][:6]] == [1, 2, 3, 1, 2, 3]
    assert {k: v for k, v in files(d).items() if k.endswith("png")} == {k: v for k, v in whole.items() if k.endswith("png") and "sheets" not in k}


def test_an_earlier_picture_of_a_failed_row_goes(tmp_path):
    "A row whose file was edited and that cannot be drawn now must not keep the edited file."
    d = plan(tmp_path / "d")
    run(d)
    row = read_plan(d)[0][0]
    write_picture(d / picture_path(row), np.full((8, 8, 3), 7, np.uint8))
    run(d, Toy(lambda r, a: "black"))
    assert standing(d, row)[0] == "failed:black" and not (d / picture_path(row)).exists()


def test_no_picture_at_all_is_missing_not_a_value(tmp_path):
    "images.md 19: a cell without a usable picture is missing, with its count."
    d = plan(tmp_path / "d")
    run(d, Toy(lambda r, a: "black" if r["period"] == "17th" and r["arm"] == "SDXL" else "ok"))
    n = collect(d)
    assert n["failed"] == {"black": 6} and "No picture at all: SDXL 17th." in missing_note(read_pictures(d))
    assert (d / "sheets" / "sdxl_17th.png").exists()


def test_wrong_numbers_of_pictures_are_isolated(tmp_path):
    class Short(Toy):
        def draw(self, rows, attempt=0):
            return super().draw(rows, attempt)[:2] if len(rows) > 2 else super().draw(rows, attempt)

    d = plan(tmp_path / "d")
    assert run(d, Short(batch=5))["drawn"] == 36


def test_what_is_wrong_with_the_set_up_ends_the_run(tmp_path):
    class Gated(Toy):
        def draw(self, rows, attempt=0):
            if rows[0]["row"] >= 6:
                raise InputError("FLUX.1-schnell ignores a negative prompt: leave it out")
            return super().draw(rows, attempt)

    d = plan(tmp_path / "d")
    with pytest.raises(InputError, match="ignores a negative prompt"):
        run(d, Gated())
    assert [standing(d, r)[0] for r in read_plan(d)[0]].count("ok") == 6
    with pytest.raises(InputError, match="is no engine"):
        run(d, object())
    with pytest.raises(InputError, match="no engine for"):
        run(d, {"SD3": Toy()})


def test_engines_are_opened_only_where_something_is_missing(tmp_path):
    d, opened = plan(tmp_path / "d"), []

    def engines(arm):
        opened.append(arm.label)
        return Toy()

    run(d, engines, arm="SDXL")
    run(d, engines)
    run(d, engines)
    assert opened == ["SDXL", "FLUX.1", "SDXL Mitigated"]


def test_prompts_are_prepared_once(tmp_path):
    class Prepared(Toy):
        def prepare(self, rows):
            self.known = {r["prompt"] for r in rows}

        def draw(self, rows, attempt=0):
            assert {r["prompt"] for r in rows} <= self.known
            return super().draw(rows, attempt)

    d = plan(tmp_path / "d")
    run(d, shard=0, shards=2)
    assert run(d, lambda arm: Prepared())["drawn"] == 18


# --- a full disk

def test_full_disk(whole, tmp_path):
    "One line that names the file, nothing half-written, nothing finished lost; with room again it goes on."
    d = plan(tmp_path / "d")
    sizes = sorted(len(v) for k, v in whole.items() if k.count("/") == 2)
    out, err = ended(process(d, 0, 1, 0.0, sizes[len(sizes) // 2]), DiskError.exit_code)
    assert len(err.strip().splitlines()) == 1 and "no disk space to write" in err and str(d) in err, err
    left = files(d)
    assert not [f for f in left if f.endswith(".tmp")]
    there = [standing(d, r)[0] for r in read_plan(d)[0]]
    assert set(there) <= {"ok", "missing"}
    engine = Toy()
    assert run(d, engine)["kept"] == there.count("ok")
    collect(d)
    assert files(d) == whole


def test_a_disk_that_fills_while_the_engine_works(tmp_path):
    class Full(Toy):
        def draw(self, rows, attempt=0):
            raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match="no disk space"):
        run(plan(tmp_path / "d"), Full())


def test_full_disk_while_collecting_or_planning(tmp_path, monkeypatch):
    d = plan(tmp_path / "d")
    run(d)
    from histchrono.core import io
    real = io.os.replace

    def replace(a, b):
        if Path(b).name in ("pictures.parquet", "manifest.parquet"):
            raise OSError(28, "No space left on device")
        real(a, b)

    monkeypatch.setattr(io.os, "replace", replace)
    for act in (lambda: collect(d), lambda: plan(tmp_path / "e")):
        with pytest.raises(DiskError, match="no disk space to write"):
            act()
    monkeypatch.undo()
    assert collect(d)["ok"] == 36 and plan(tmp_path / "e") and not [f for f in files(tmp_path / "e") if f.endswith(".tmp")]


# --- what can be read of it

def test_a_picture_says_where_it_comes_from(tmp_path):
    d = plan(tmp_path / "d")
    run(d), collect(d)
    pics = read_pictures(d)
    for row, p in zip(read_plan(d)[0], pics.itertuples()):
        text, rec = picture_text(d / p.path), read_record(d / p.path.replace(".png", ".json"))
        assert text["image_id"] == row["image_id"] == rec["image_id"] == p.image_id and int(text["seed"]) == row["seed"] == rec["seed"]
        assert text["prompt"] == row["prompt"] and text["settings_hash"] == row["settings_hash"] and rec["sha256"] == p.sha256 and rec["engine"] == "toy" and rec["facts"] == {"blocks": 64}
    said = json.loads((d / "manifest.json").read_text())
    assert said["rows"] == dict(manifest=36, pictures=36, ok=36) and said["counts"]["ok"] == 36 and said["settings"]["arms"]["SDXL"]["engine"] == Toy().settings
    assert not any(str(tmp_path).encode() in v for v in files(d).values())  # no path of this machine


def test_the_live_line(tmp_path, monkeypatch, capsys):
    d = plan(tmp_path / "d")
    monkeypatch.setenv("HISTCHRONO_PROGRESS", str(tmp_path / "live"))
    (tmp_path / "live").mkdir()
    generate(d, Toy(pause=0.15), arm="SDXL")
    (live,) = (tmp_path / "live").glob("*.txt")
    assert live.name == "images_SDXL.txt" and "image/s" in live.read_text() and "12/12" in live.read_text()
    monkeypatch.delenv("HISTCHRONO_PROGRESS")
    generate(d, Toy())
    assert "image/s" in capsys.readouterr().err


def test_the_simulator_through_the_same_call(tmp_path):
    pytest.importorskip("cv2")
    from histchrono.core.settings import load
    from histchrono.histvis.study import engine_of
    draws = lambda arm: engine_of(load("demo"), arm)
    a, b = (plan(tmp_path / x, n=1, acts=2, pers="1910s", engine=draws) for x in "ab")
    run(a, draws)
    for i in range(3):
        run(b, draws, shard=2 - i, shards=3)
    assert collect(a)["ok"] == collect(b)["ok"] == 6 and files(a) == files(b)


def test_an_arm_is_held_by_its_own_name(tmp_path):
    d = plan(tmp_path / "d")
    with hold(d, "sdxl", 0, 1):
        assert run(d, arm="SDXL:mitigated_appendix_e")["drawn"] == 12
        with pytest.raises(InputError, match="another run draws"):
            run(d, arm="SDXL")


# --- odd things on the disk, odd engines, odd arguments

class Said:
    "What an engine gives that is no `Drawn`."

    def __init__(self, **kw):
        self.__dict__.update(kw)


@pytest.mark.parametrize("text", ["[" * 200000, '{"seal":"x","status":"\\ud800"}', "[]", '{"seal":1', None])
def test_a_damaged_record_is_edited_and_drawn_again(whole, tmp_path, text):
    d = plan(tmp_path / "d")
    run(d)
    row = read_plan(d)[0][0]
    side = d / picture_path(row, "json")
    side.unlink()
    if text is None:
        os.mkfifo(side)  # nothing waits at it
    else:
        side.write_text(text)
    assert standing(d, row)[0] == "edited" and collect(d)["edited"] == 1
    if text is None:
        assert run(d)["why"] == {"failed:place": 1}
        side.unlink()
    assert run(d)["drawn"] == 1
    collect(d)
    assert files(d) == whole


@pytest.mark.parametrize("what", ["folder", "link", "pipe", "socket"])
def test_an_odd_thing_beside_lost_pictures(tmp_path, what):
    d = plan(tmp_path / "d")
    run(d)
    row = read_plan(d)[0][0]
    (d / picture_path(row)).rename((d / picture_path(row)).with_name("moved.png"))
    odd = (d / picture_path(row)).with_name("zz.png")
    for p in (odd, odd.with_name("zz.json"), d / "sheets" / "zz.png"):
        p.parent.mkdir(exist_ok=True)
        dict(folder=p.mkdir, link=lambda: p.symlink_to("nowhere"), pipe=lambda: os.mkfifo(p), socket=lambda: os.mknod(p, 0o140644))[what]()
    assert collect(d)["missing"] == 1 and "moved.png" in read_pictures(d).message[0]
    assert (d / "sheets" / "zz.png").is_dir() == (what == "folder") and run(d)["drawn"] == 1


@pytest.mark.parametrize("end", ["png", "json"])
@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
@pytest.mark.parametrize("drawn", [False, True])
def test_a_place_that_is_taken_fails_its_row_alone(whole, tmp_path, end, what, drawn):
    d, said = plan(tmp_path / "d"), []
    if drawn:
        run(d)
    row = read_plan(d)[0][0]
    p = d / picture_path(row, end)
    p.parent.mkdir(parents=True, exist_ok=True)
    p.unlink(missing_ok=True)
    dict(folder=p.mkdir, pipe=lambda: os.mkfifo(p), link=lambda: p.symlink_to("nowhere"))[what]()
    n = run(d, say=said.append)
    assert n["why"] == {"failed:place": 1} and n["kept"] + n["drawn"] == 35 and any(picture_path(row, end) in s for s in said), said
    assert collect(d)["ok"] == 35
    pics = read_pictures(d)
    assert pics.message[0] and pics.status[0] == ("failed:place" if end == "png" else "edited")
    p.rmdir() if what == "folder" else p.unlink()
    assert run(d)["drawn"] == 1
    collect(d)
    assert files(d) == whole


def test_a_folder_that_cannot_be_read(whole, tmp_path, monkeypatch):
    d, real, said = plan(tmp_path / "d"), os.stat, []
    run(d)
    shut = str(d / "sdxl" / "17th")

    def stat(path, *a, **kw):
        if isinstance(path, (str, Path)) and str(path).startswith(shut + "/"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *a, **kw)

    monkeypatch.setattr(os, "stat", stat)
    assert collect(d, sheets=False)["missing"] == 6
    assert all("Permission denied" in m for m in read_pictures(d).query("status == 'missing'").message)
    n = run(d, say=said.append)
    assert n["why"] == {"failed:place": 6} and n["kept"] == 30 and "Permission denied" in said[0]
    monkeypatch.undo()
    assert run(d)["kept"] == 36
    collect(d)
    assert files(d) == whole


def test_a_contact_sheet_whose_place_is_taken(tmp_path):
    d, said = plan(tmp_path / "d"), []
    run(d)
    (d / "sheets" / "sdxl_17th.png").mkdir(parents=True)
    assert collect(d, say=said.append)["ok"] == 36 and "sdxl_17th.png is a folder" in said[0] and (d / "sheets" / "sdxl_1990s.png").is_file()


def odd_answers():
    me = {}
    me["me"] = me
    ok = np.full((8, 8, 3), 9, np.uint8)
    mute = type("Mute", (Exception,), {"__str__": lambda s: 1 / 0})
    return dict(huge=(Drawn(np.full((9000, 9000, 3), 9, np.uint8)), "huge"), surrogate=(ValueError("\udcff"), "error"), mute=(mute(), "error"), nothing=(None, "none"), bare=(Said(image=None, status="failed:x"), "x"),
                cyclic=(Drawn(ok, facts=me), "error"), nan=(Drawn(ok, facts=dict(x=[float("nan")])), "error"), npnan=(Drawn(ok, facts=dict(x=np.float32("inf"))), "error"), list=(Drawn(ok, facts=[1]), "error"),
                text=(Drawn(ok, facts=dict(x="\udcff")), "error"), deep=(Drawn(ok, facts=dict(x=eval("[" * 60 + "]" * 60))), "error"), plain=(Said(image=ok), None), empty=(Drawn(ok, facts=None), None), message=(Drawn(ok, message="\udcff"), None))


@pytest.mark.parametrize("name", odd_answers())
def test_one_pictures_fault_is_its_own(tmp_path, name):
    got, why = odd_answers()[name]

    class Odd(Toy):
        def draw(self, rows, attempt=0):
            if isinstance(got, Exception) and rows[0]["row"] == 0:
                raise got
            return [got if r["row"] == 0 else self.one(r, "ok") for r in rows]

    d = plan(tmp_path / "d", n=1, arms="SDXL")
    assert run(d, Odd())["why"] == ({f"failed:{why}": 1} if why else {})
    text = (d / picture_path(read_plan(d)[0][0], "json")).read_text()
    json.loads(text, parse_constant=lambda s: pytest.fail(f"{s} is no JSON"))
    assert collect(d)["ok"] == (5 if why else 6)


@pytest.mark.parametrize("change, words", [(dict(batch="x"), "the batch of toy is 'x'"), (dict(batch=None), "the batch of toy"), (dict(name=None), "needs a `name`"), (dict(name=3), "needs a `name`"), (dict(name="a\nb"), "needs a `name`"),
                                           (dict(prepare=lambda rows: 1 / 0), "toy cannot prepare its rows .ZeroDivisionError"), (dict(prepare=lambda rows: [][0]), "toy cannot prepare")])
def test_engines_that_are_none(tmp_path, change, words):
    d, e = plan(tmp_path / "d"), Toy()
    e.__dict__.update(change)
    with pytest.raises(InputError, match=words) as x:
        run(d, e)
    assert "\n" not in str(x.value)
    with pytest.raises(InputError, match="is no engine"):
        run(d, Toy)


@pytest.mark.parametrize("kw", [dict(shard=1.5, shards=2), dict(shard="a"), dict(shard=None), dict(shards=2.0), dict(shard=True, shards=2), dict(arm=3)])
def test_shards_and_arms_that_are_none(tmp_path, kw):
    with pytest.raises(InputError):
        run(plan(tmp_path / "d"), **kw)


def test_own_texts_with_line_ends(tmp_path):
    from histchrono.histvis.generate import _shown
    for table, column in ((periods()[:1], "period"), (periods()[:1], "label"), (periods()[:1], "words"), (choose_activities(1), "activity"), (choose_activities(1), "category")):
        for text in ("a\nb", "a\x07b", "a\u2028b", "a\x85b", None, float("nan"), 3):
            t = {"activities": choose_activities(1), "periods": periods()[:1]} | {"activities" if "activity" in table else "periods": table.assign(**{column: [text]})}
            with pytest.raises(InputError, match="no line of text"):
                plan_images(tmp_path / "d", "SDXL", Toy(), t["activities"], t["periods"], 1)
    assert _shown("a\n b\x07\x85c") == "a b c" and not (tmp_path / "d").exists()


def test_sheets_of_arms_with_like_names(tmp_path):
    from histchrono.histvis.collection import import_images
    pics = tmp_path / "pics"
    lines = ["path,activity,period,model"]
    for i, (model, period) in enumerate([("my model", "17th"), ("a", "b_c"), ("a b", "c"), ("SDXL", "17th")]):
        write_picture(pics / f"{i}.png", np.full((16, 16, 3), 20 + i, np.uint8))
        lines.append(f"{i}.png,cooking,{period},{model}")
    (pics / "t.csv").write_text("\n".join(lines))
    assert import_images(pics, tmp_path / "out", progress=False)["ok"] == 4
    names = [p.name for p in (tmp_path / "out" / "sheets").iterdir()]
    assert len(names) == 4 and "my_model_17th.png" in names and "sdxl_17th.png" in names
    assert {(t["arm"], t["period"]) for t in map(picture_text, (tmp_path / "out" / "sheets").iterdir())} == set(map(tuple, read_pictures(tmp_path / "out")[["arm", "period"]].values))


def test_a_manifest_without_settings(tmp_path):
    d = plan(tmp_path / "d")
    said = json.loads((d / "manifest.json").read_text())
    del said["settings"]
    (d / "manifest.json").write_text(json.dumps(said))
    for act in (run, collect):
        with pytest.raises(InputError, match="does not say the plan's settings"):
            act(d)
    assert plan(d) and run(d)["drawn"] == 36
