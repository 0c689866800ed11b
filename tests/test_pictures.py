"""Picture files as people have them: each fault has a name and fails its own row; folders of one's own with odd tables."""
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

from histchrono.core.errors import HistError, InputError  # noqa: E402
from histchrono.histvis.collection import find_arm, guess_entry, import_images  # noqa: E402
from histchrono.histvis.generate import collect, generate, missing_note, read_pictures  # noqa: E402
from histchrono.histvis.imageplan import read_plan  # noqa: E402
from histchrono.histvis.pictures import PictureError, bits_apart, colourfulness, contact_sheet, decode, is_black, open_picture, phash, picture_text, pixel_hash, png_bytes, read_picture, write_picture  # noqa: E402
from histchrono.histvis.prompts import activities, choose_activities, periods, prompt_for  # noqa: E402

RGB = np.kron(np.random.default_rng(3).integers(0, 256, (6, 8, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))


def saved(form, img=None, **kw):
    out = io.BytesIO()
    (Image.fromarray(RGB) if img is None else img).save(out, form, **kw)
    return out.getvalue()


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def raw_png(w, h, depth, colour, data, *extra, interlace=0):
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, depth, colour, 0, 0, interlace)) + b"".join(extra) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def turned(n):
    ex = Image.Exif()
    ex[274] = n
    return ex


PHOTO = Image.fromarray(RGB)
PNG, JPG = saved("PNG"), saved("JPEG")
DEEP = np.random.default_rng(1).integers(0, 1 << 16, (8, 8), dtype=np.uint16)
FAULTS = {
    # cut or damaged
    "half.png": (PNG[:len(PNG) // 2], "truncated"), "half.jpg": (JPG[:len(JPG) // 2], "truncated"), "most.jpg": (JPG[:-3], "truncated"), "no_end.jpg": (JPG[:-2], "truncated"), "no_end.png": (PNG[:-12], "truncated"),
    "one_byte.png": (PNG[:-1], "truncated"), "head.png": (PNG[:20], "truncated"), "signature.png": (PNG[:8], "truncated"), "half.gif": (saved("GIF")[:200], None), "half_interlaced.png": (raw_png(8, 8, 8, 2, bytes(150), interlace=1), None), "sound.png": (b"RIFF\x24\0\0\0WAVEfmt " + bytes(20), "format"), "half_riff.webp": (b"RIFF", None), "half.bmp": (saved("BMP")[:400], "truncated"), "half.webp": (saved("WEBP", lossless=True)[:60], None),
    "progressive.jpg": (saved("JPEG", progressive=True)[:-60], "truncated"), "thumb.jpg": (saved("JPEG", exif=turned(1))[:-2], "truncated"), "flipped.png": (PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:], "damaged"), "half.tif": (saved("TIFF")[:300], None),
    "ihdr.png": (PNG[:29] + b"\0\0\0\0" + PNG[33:], "damaged"), "short_data.png": (raw_png(8, 8, 8, 2, bytes(50)), None), "zeros.jpg": (bytes(500), "format"), "zeros_behind.jpg": (JPG[:len(JPG) // 2] + bytes(400), "truncated"),
    # no pictures
    "text.png": (b"a text, saved under a wrong name\n", "format"), "page.jpg": (b"<!doctype html><html><body>404</body></html>", "format"), "archive.png": (b"PK\3\4" + bytes(40), "format"), "empty.png": (b"", "empty"), "drawing.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "format"),
    "script.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "format"), "photo.heic": (b"\0\0\0\x18ftypheic" + bytes(40), "format"), "pointer.png": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "format"),
    # other numbers and colours
    "ink.jpg": (saved("JPEG", PHOTO.convert("CMYK")), "cmyk"), "ink.tif": (saved("TIFF", PHOTO.convert("CMYK")), "cmyk"), "lab.tif": (saved("TIFF", PHOTO.convert("LAB")), "colourspace"), "grey16.png": (saved("PNG", Image.fromarray(DEEP)), "16bit"),
    "rgb16.png": (raw_png(4, 4, 16, 2, (b"\0" + bytes(range(24))) * 4), "16bit"), "rgba16.png": (raw_png(4, 4, 16, 6, (b"\0" + bytes(range(32))) * 4), "16bit"), "grey_alpha16.png": (raw_png(4, 4, 16, 4, (b"\0" + bytes(range(16))) * 4), "16bit"),
    "grey16.tif": (saved("TIFF", Image.fromarray(DEEP)), "16bit"), "float.tif": (saved("TIFF", Image.fromarray(DEEP.astype(np.float32))), "16bit"), "int.tif": (saved("TIFF", Image.fromarray(DEEP.astype(np.int32))), "16bit"), "deep.ppm": (b"P6 2 2 65535\n" + bytes(24), "16bit"),
    "alpha.png": (saved("PNG", PHOTO.convert("RGBA")), "alpha"), "grey_alpha.png": (saved("PNG", PHOTO.convert("LA")), "alpha"), "alpha.webp": (saved("WEBP", Image.fromarray(np.dstack([RGB, RGB[..., 0]])), lossless=True), "alpha"), "key.png": (saved("PNG", transparency=(1, 2, 3)), "alpha"),
    "palette.png": (saved("PNG", PHOTO.quantize(9), transparency=0), "alpha"), "palette.gif": (saved("GIF", PHOTO.quantize(9), transparency=3), "alpha"), "grey_key.png": (saved("PNG", PHOTO.convert("L"), transparency=9), "alpha"), "alpha.tif": (saved("TIFF", PHOTO.convert("RGBA")), "alpha"),
    # turned, moving, huge
    **{f"turned{n}.jpg": (saved("JPEG", exif=turned(n)), "rotated") for n in range(2, 9)}, "turned.png": (saved("PNG", exif=turned(8)), "rotated"), "turned.webp": (saved("WEBP", lossless=True, exif=turned(3)), "rotated"),
    "moving.gif": (saved("GIF", save_all=True, append_images=[PHOTO.rotate(180)]), "animated"), "moving.png": (saved("PNG", save_all=True, append_images=[PHOTO.rotate(180)]), "animated"), "moving.webp": (saved("WEBP", save_all=True, append_images=[PHOTO.rotate(180)]), "animated"),
    "two.mpo": (saved("MPO", save_all=True, append_images=[PHOTO.rotate(180)]), "animated"), "pages.tif": (saved("TIFF", save_all=True, append_images=[PHOTO.rotate(180)]), "animated"), "bomb.png": (raw_png(100000, 100000, 8, 2, bytes(99)), "huge"), "wide.png": (raw_png(1 << 30, 1, 1, 0, bytes(9)), "huge"), "large.png": (raw_png(9000, 9000, 8, 0, bytes(9)), "huge"), "none.png": (raw_png(0, 5, 8, 2, b""), None),
    "text_bomb.png": (raw_png(2, 2, 8, 2, (b"\0" + bytes(6)) * 2, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24)))), None),
}
FINE = {
    "rgb.png": PNG, "named_wrong.png": JPG, "grey.png": saved("PNG", PHOTO.convert("L")), "bits.png": saved("PNG", PHOTO.convert("1")), "few.png": saved("PNG", PHOTO.quantize(5)), "palette.gif": saved("GIF", PHOTO.quantize(7)), "grey.jpg": saved("JPEG", PHOTO.convert("L")),
    "upright.jpg": saved("JPEG", exif=turned(1)), "zero.jpg": saved("JPEG", exif=turned(0)), "progressive.jpg": saved("JPEG", progressive=True), "behind.jpg": JPG + b"more", "behind.png": PNG + b"more", "a.webp": saved("WEBP"), "a.bmp": saved("BMP"), "a.tif": saved("TIFF"),
    "night.png": saved("PNG", Image.fromarray(np.concatenate([RGB, RGB * 0]))), "interlaced.png": raw_png(8, 8, 8, 2, bytes(207), interlace=1), "black.png": saved("PNG", Image.new("L", (9, 7))), "noted.png": saved("PNG", dpi=(72, 72)), "two_bits.png": raw_png(8, 2, 2, 0, b"\0\x1b\x1b" * 2), "pixel.png": raw_png(1, 1, 8, 2, bytes([0, 9, 8, 7])), "a.ppm": saved("PPM"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(tmp_path, name):
    "images.md 20: truncated, CMYK, 16-bit, alpha, EXIF rotation, a text named .png …: each fails with its path."
    data, why = FAULTS[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(PictureError) as e:
        read_picture(tmp_path / name)
    assert str(e.value).startswith(f"{tmp_path / name}: ") and "\n" not in str(e.value) and len(str(e.value)) < len(str(tmp_path)) + 300
    assert why is None and e.value.why in ("truncated", "damaged") or e.value.why == why, str(e.value)
    assert isinstance(e.value, InputError)


@pytest.mark.parametrize("name", FINE)
def test_what_loses_nothing_is_read(tmp_path, name):
    (tmp_path / name).write_bytes(FINE[name])
    p = open_picture(tmp_path / name)
    assert p.rgb.dtype == np.uint8 and p.rgb.ndim == 3 and p.rgb.flags.c_contiguous and not p.notes
    assert (p.rgb == np.asarray(Image.open(tmp_path / name).convert("RGB"))).all()


def test_converting_says_what_it_did(tmp_path):
    for name, (data, why) in FAULTS.items():
        (tmp_path / name).write_bytes(data)
        if why in ("cmyk", "colourspace", "alpha", "16bit", "rotated", "animated") and name not in ("float.tif", "int.tif"):
            p = open_picture(tmp_path / name, convert=True)
            assert p.notes and p.rgb.dtype == np.uint8 and p.rgb.shape[2] == 3, name
        else:
            with pytest.raises(PictureError):
                open_picture(tmp_path / name, convert=True)
    for n in range(2, 9):  # as any viewer turns it
        want = np.asarray({2: PHOTO.transpose(0), 3: PHOTO.rotate(180), 4: PHOTO.transpose(1), 5: PHOTO.transpose(5), 6: PHOTO.transpose(4), 7: PHOTO.transpose(6), 8: PHOTO.transpose(2)}[n])
        (tmp_path / "t.png").write_bytes(saved("PNG", exif=turned(n)))
        assert (open_picture(tmp_path / "t.png", convert=True).rgb == want).all(), n


def test_places_that_are_no_files(tmp_path):
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("nowhere")
    (tmp_path / "loop.png").symlink_to("loop.png")
    for name, why in (("folder.png", "folder"), ("pipe.png", "device"), ("link.png", "missing"), ("loop.png", "unreadable"), ("x" * 300, "unreadable"), ("a\0b", "missing"), ("folder.png/x.png", "missing")):
        with pytest.raises(PictureError) as e:
            read_picture(tmp_path / name)
        assert e.value.why == why


def test_whatever_is_done_to_a_file_it_is_read_or_refused():
    rnd = random.Random(7)
    for data in [*FINE.values(), *(d for d, _ in FAULTS.values() if d)]:
        for _ in range(12):
            b = bytearray(data)
            for _ in range(rnd.randint(1, 5)):
                b[rnd.randrange(len(b))] = rnd.randrange(256)
            try:
                decode(bytes(b[:rnd.randint(1, len(b))] if rnd.random() < 0.4 else b), "x.png", convert=rnd.random() < 0.5)
            except PictureError:
                pass


def test_a_changed_png_is_never_read_as_another_picture():
    "Every single damaged byte of a PNG is noticed: its checksums are looked at."
    rnd = random.Random(1)
    for i in rnd.sample(range(8, len(PNG)), 60):
        with pytest.raises(PictureError):
            decode(PNG[:i] + bytes([PNG[i] ^ (1 << rnd.randrange(8))]) + PNG[i + 1:])


# --- measures

def test_colourfulness():
    "Hasler and Süsstrunk on signed differences: any grey 0, flat red 85.53, flat blue 76.5, half red half green 293.25."
    flat = lambda *c: np.full((10, 6, 3), c, np.uint8)
    for v in range(0, 256, 15):
        assert colourfulness(flat(v, v, v)) == 0.0
    assert colourfulness(np.repeat(np.random.default_rng(0).integers(0, 256, (50, 40, 1), dtype=np.uint8), 3, 2)) == 0.0
    for img, want in ((flat(255, 0, 0), 85.53), (flat(0, 255, 0), 85.53), (flat(0, 0, 255), 76.5), (np.concatenate([flat(255, 0, 0), flat(0, 255, 0)]), 293.25)):
        assert abs(colourfulness(img) - want) < 0.01
    big = np.tile(RGB, (40, 40, 1))  # no overflow, and nothing depends on the size
    assert abs(colourfulness(big) - colourfulness(RGB)) < 1e-9
    for bad in (RGB[..., 0], RGB / 255, RGB.astype(np.int16), None):
        with pytest.raises(InputError):
            colourfulness(bad)


def test_black_and_hashes():
    assert is_black(np.zeros((4, 4, 3), np.uint8)) and not is_black(RGB)
    assert pixel_hash(RGB) != pixel_hash(RGB.reshape(RGB.shape[1], RGB.shape[0], 3))
    assert pixel_hash(decode(saved("PNG")).rgb) == pixel_hash(decode(saved("BMP")).rgb) == pixel_hash(RGB)
    gen = np.random.default_rng(2)
    many = [phash(np.asarray(Image.fromarray(gen.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize((128, 128), 3))) for _ in range(40)]
    apart = [bits_apart(a, b) for i, a in enumerate(many) for b in many[:i]]
    assert min(apart) > 8 and abs(np.mean(apart) - 32) < 3
    assert bits_apart(phash(RGB), phash(np.asarray(PHOTO.resize((64 * 3, 48 * 3), 0)))) <= 2


def test_png_bytes_are_the_same_in_every_process(tmp_path):
    code = "import numpy as np, sys, hashlib; sys.path.insert(0, sys.argv[1]); from test_pictures import *; print(hashlib.sha256(png_bytes(RGB, dict(b='1', a='ä'))).hexdigest(), pixel_hash(contact_sheet([(RGB, 'a long caption for a small picture'), (None, 'failed:nan')], 'A title')))"
    one, two = (subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], env=dict(os.environ, PYTHONHASHSEED=str(i)), capture_output=True, text=True, check=True).stdout for i in range(2))
    assert one == two and len(one.split()) == 2
    write_picture(tmp_path / "a.png", RGB, {"prompt": "A person cooking in the 17th century", "note": "漢字"})
    assert picture_text(tmp_path / "a.png") == {"prompt": "A person cooking in the 17th century", "note": "漢字"}


# --- folders of one's own

LINES = ["path,activity,period,model"]


def folder(base, names=("a.png", "b.png", "c.jpg")):
    base.mkdir()
    for i, n in enumerate(names):
        (base / n).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.roll(RGB, i * 8, 1)).save(base / n)
    return base


def bring(d, out, **kw):
    said = []
    return import_images(d, out, progress=False, say=said.append, **kw), said


def test_a_folder_with_every_fault(tmp_path):
    "images.md 20: broken pictures fail their row with its path; the run goes on and says what is missing."
    d = folder(tmp_path / "d")
    for name, (data, _) in FAULTS.items():
        (d / name).write_bytes(data)
    (d / "folder.png").mkdir()
    names = ["a.png", "b.png", "c.jpg", *FAULTS, "folder.png", "gone.png"]
    (d / "list.csv").write_text("\n".join(LINES + [f"{n},cooking,17th,sdxl" for n in names]))
    n, said = bring(d, tmp_path / "set")
    assert (n["rows"], n["ok"], n["unplaced"], sum(n["failed"].values())) == (len(names), 3, 0, len(names) - 3)
    pics = read_pictures(tmp_path / "set").assign(name=lambda x: x.path.str.replace("../d/", ""))
    for p in pics[pics.status != "ok"].itertuples():
        assert p.name in p.message and p.status.startswith("failed:") and (FAULTS.get(p.name, (0, None))[1] or p.status[7:]) == p.status[7:]
    assert pics[pics.status != "ok"].colourfulness.isna().all() and any("in no denominator" in s for s in said)
    n, _ = bring(d, tmp_path / "set", convert=True)
    assert n["ok"] > 30 and sum(n["converted"].values()) >= n["ok"] - 3
    assert all(open_picture(tmp_path / "set" / p).rgb.shape[2] == 3 for p in read_pictures(tmp_path / "set").query("status == 'ok'").path)
    assert sorted(p.name for p in d.iterdir()) == sorted({*names, "list.csv"} - {"gone.png"})  # nothing is written beside the pictures


@pytest.mark.parametrize("table", [
    b"\xef\xbb\xbfpath,activity,period,model\r\na.png,cooking,17th,SDXL\r\n", b"Path;Activity;Period;Model\na.png;cooking;17th century;sdxl\n", "path\tactivity\tperiod\tmodel\n./a.png\tA person cooking\t17th c.\tStable Diffusion XL\n".encode("utf-16"),
    b'"File Name","Time Period","Model","Prompt"\n"a.png","","SDXL","A person cooking in the 17th century."\n', b"\n\npath,activity,period,model,index,junk\n\na.png,COOKING,the 17th Century,sd-xl,0,\n,,,,,\n", b"filename|action|century|generator\na.png|cooking|17TH|sdxl\n",
    b"path,activity,period,model,variant\na.png,Cooking.,seventeenth century,stabilityai/stable-diffusion-xl-base-1.0,neutral", b"path,activity,period,model\na.png, cooking ,17th_century,sdxl\n"])
def test_tables_as_spreadsheets_write_them(tmp_path, table):
    d = folder(tmp_path / "d", ["a.png"])
    (d / "t.csv").write_bytes(table)
    n, _ = bring(d, tmp_path / "s")
    (row,), _ = read_plan(tmp_path / "s")
    assert n["ok"] == 1 and (row["arm"], row["period"], row["activity_id"], row["activity"], row["index"], row["seed"]) == ("SDXL", "17th", 26, "cooking", 0, -1)


@pytest.mark.parametrize("table, words", [
    (b"", "is empty"), (b"path,activity,period\na.png,cooking,17th\n", "no column model"), (b"a.png,cooking,17th,SDXL\n", "no column|no line"), (b"path,activity,period,model\n", "no line under its head"), (b"path,path,activity,period,model\na,b,c,d,e\n", "a column twice"),
    (b"path,activity,period,model\na.png,cooking, or not,17th,SDXL\n", "put quotes"), (PNG, "no text|no column"), (b"path,activity,period,model\na.png,,17th,SDXL\n,cooking,17th,SDXL\n", "could be used")])
def test_tables_that_cannot_be_used(tmp_path, table, words):
    d = folder(tmp_path / "d", ["a.png"])
    (d / "t.csv").write_bytes(table)
    with pytest.raises(HistError, match=words):
        bring(d, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_lines_that_belong_nowhere_are_listed(tmp_path):
    "An empty period, a model without a name, a path outside: the run goes on and says so, with the line."
    d = folder(tmp_path / "d")
    bad = ["a.png,cooking,,sdxl", "a.png,,17th,sdxl", "a.png,cooking,17th,", ",cooking,17th,sdxl", "../x.png,cooking,17th,sdxl", "/etc/hostname,cooking,17th,sdxl", "b.png,cooking,17th,sdxl", "c.jpg,cooking,17th,sdxl:x"]
    (d / "list.csv").write_text("\n".join(["path,activity,period,model", "b.png,cooking,17th,sdxl", *bad]))
    n, said = bring(d, tmp_path / "s")
    assert (n["rows"], n["ok"], n["unplaced"]) == (1, 1, 8)
    listed = json.loads((tmp_path / "s" / "manifest.json").read_text())["imported"]["unplaced"]
    assert [x[0] for x in listed] == [str(i) for i in range(3, 11)] and "no period for a.png" in listed[0][1] and "outside" in listed[4][1] and "line 2" in listed[6][1]
    assert sum(s.startswith("left out: line") for s in said) == 5 and any("8 lines" in s for s in said)


def test_own_words_are_kept_and_known_ones_found(tmp_path):
    d = folder(tmp_path / "d", [f"{i}.png" for i in range(9)])
    rows = ["0.png,flying a kite,Bronze Age,My own/model", "1.png,Flying a Kite,the bronze age,My own/model", "2.png,cooking,the 1950s,FLUX.1 [schnell]", "3.png,cooking,1950,flux", "4.png,cooking,1950's,SDXL (mitigated)", "5.png,zähmen,Zukunft,SD3", "6.png,cooking,1943,SD3 medium", "7.png,cooking,21st cent.,sd3", "8.png,cooking,2040s,sd3"]
    (d / "list.csv").write_text("\n".join(LINES + rows), encoding="utf-8")
    n, _ = bring(d, tmp_path / "s")
    got = [(r["arm"], r["period"], r["activity"], r["index"]) for r in read_plan(tmp_path / "s")[0]]
    assert n["ok"] == 9 and got == [("FLUX.1", "1950s", "cooking", 0), ("FLUX.1", "1950s", "cooking", 1), ("SD3", "21st", "cooking", 0), ("SD3", "1943", "cooking", 0), ("SD3", "2040s", "cooking", 0), ("SD3", "zukunft", "zähmen", 0),
                                    ("SDXL Mitigated", "1950s", "cooking", 0), ("My own/model", "bronze age", "flying a kite", 0), ("My own/model", "bronze age", "flying a kite", 1)]
    assert {r["activity_id"] for r in read_plan(tmp_path / "s")[0]} == {26, 101, 102}
    with pytest.raises(InputError, match="imported pictures"):
        generate(tmp_path / "s", None)


def test_the_order_of_lines_and_processes_change_nothing(tmp_path):
    d = folder(tmp_path / "d", [f"x/{i}.png" for i in range(12)])
    lines = [f"x/{i}.png,{a},{p},sdxl" for i, (a, p) in enumerate([("cooking", "17th"), ("own one", "1910s"), ("another", "Stone Age")] * 4)]
    made = []
    for k, workers in ((0, 1), (1, 2), (2, 1)):
        random.Random(k).shuffle(lines)
        (tmp_path / f"{k}.csv").write_text("\n".join(LINES + lines))
        import_images(d, tmp_path / f"s{k}", csv=tmp_path / f"{k}.csv", workers=workers, progress=False)
        made.append({p.relative_to(tmp_path / f"s{k}").as_posix(): p.read_bytes() for p in (tmp_path / f"s{k}").rglob("*") if p.is_file() and ".locks" not in p.parts and p.name != "manifest.json"})  # which names the table's hash
    assert made[0] == made[1] == made[2] and len(made[0]) == 12 + 3 + 2


def test_what_is_changed_later_is_noticed(tmp_path):
    d = folder(tmp_path / "d")
    (d / "list.csv").write_text("\n".join(LINES + [f"{n},cooking,17th,sdxl" for n in ("a.png", "b.png", "c.jpg")]))
    bring(d, tmp_path / "s")
    Image.fromarray(RGB[::-1]).save(d / "a.png")
    (d / "b.png").unlink()
    n = collect(tmp_path / "s")
    assert (n["ok"], n["edited"], n["missing"]) == (1, 1, 1) and "1 of 3" in missing_note(read_pictures(tmp_path / "s"))
    n, _ = bring(d, tmp_path / "s")
    assert (n["ok"], n["edited"], n["failed"]) == (2, 0, {"missing": 1})
    (d / "list.csv").write_text("\n".join(LINES + ["c.jpg,farming,18th,sdxl"]))
    assert bring(d, tmp_path / "s")[0]["rows"] == 1 and len(list((tmp_path / "s").glob("sdxl/*/*.json"))) == 1  # records of lines that are gone go too
    (d / "list.csv").write_text("\n".join(LINES + ["b.png,farming,18th,sdxl"]))
    with pytest.raises(InputError, match="no picture of"):
        bring(d, tmp_path / "s")
    assert "No picture at all: SDXL 18th." in missing_note(read_pictures(tmp_path / "s"))


def test_a_set_may_lie_in_its_own_folder(tmp_path):
    d = folder(tmp_path / "d")
    (d / "list.csv").write_text("\n".join(LINES + ["a.png,cooking,17th,sdxl"]))
    for _ in range(2):
        assert bring(d, d, csv=d / "list.csv")[0]["ok"] == 1
    assert read_pictures(d).path.tolist() == ["a.png"] and (read_picture(d / "a.png") == RGB).all()


def test_a_full_disk_while_importing(tmp_path):
    d = folder(tmp_path / "d")
    (d / "list.csv").write_text("\n".join(LINES + [f"{n},cooking,17th,sdxl" for n in ("a.png", "b.png", "c.jpg")]))
    code = "import sys, resource; from histchrono.histvis.collection import *\nresource.setrlimit(resource.RLIMIT_FSIZE, (300,)*2)\nfrom histchrono.core.errors import HistError\ntry: import_images(sys.argv[1], sys.argv[2], progress=False)\nexcept HistError as e: print(e, file=sys.stderr); sys.exit(e.exit_code)"
    r = subprocess.run([sys.executable, "-c", code, str(d), str(tmp_path / "s")], capture_output=True, text=True)
    assert r.returncode == 5 and len(r.stderr.strip().splitlines()) == 1 and "no disk space to write" in r.stderr
    assert bring(d, tmp_path / "s")[0]["ok"] == 3


def test_a_guessed_layout_says_that_it_is_one(tmp_path):
    d = folder(tmp_path / "d", ["SDXL/17th century/A person cooking in the 17th century_0.png", "SDXL/17th century/A person cooking in the 17th century_1.png", "flux.1_schnell/1910s/dancing_with_another_3.jpg", "sdxl_mitigated/21st/own thing 2.png", "what/is/this.png"])
    n, said = bring(d, tmp_path / "s", layout="histvis")
    assert "GUESS" in said[0] and "4 of 5" in said[0] and (n["ok"], n["unplaced"]) == (4, 1)
    assert [(r["arm"], r["period"], r["activity"], r["index"]) for r in read_plan(tmp_path / "s")[0]] == [("FLUX.1", "1910s", "dancing with another", 3), ("SDXL", "17th", "cooking", 0), ("SDXL", "17th", "cooking", 1), ("SDXL Mitigated", "21st", "own thing", 2)]
    with pytest.warns(UserWarning, match="GUESS"):
        import_images(d, tmp_path / "t", layout="histvis", progress=False)
    with pytest.raises(HistError, match="layout"):
        bring(d, tmp_path / "u", layout="kaggle")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="holds no picture"):
        bring(tmp_path / "none", tmp_path / "u", layout="histvis")


@pytest.mark.parametrize("path, want", [("stable-diffusion-3/1990s/003_working_with_others.png", ("stable diffusion 3", "1990s", "working with others", "003")), ("HistVis_FLUX/19th_century/Music/teaching music to another/img_07.png", ("FLUX", "19th century", "teaching music to another", "07")),
                                        ("a/b/c.png", ("", "", "", "")), ("sd3_1930s_exercising_2.jpg", ("sd3", "1930s", "exercising", "2"))])
def test_guesses(path, want):
    assert tuple(guess_entry(path)[k] for k in ("model", "period", "activity", "index")) == want


# --- lists and prompts

def test_lists_of_ones_own(tmp_path):
    (tmp_path / "a.csv").write_text("activity,category\nflying a kite,Play\nmending a net,Work\n")
    (tmp_path / "p.csv").write_text("period,words\nbronze,Bronze Age\n1880s,\n")
    acts, pers = activities(tmp_path / "a.csv"), periods(tmp_path / "p.csv")
    from histchrono.histvis.imageplan import plan_images
    n = plan_images(tmp_path / "d", "SDXL", lambda arm: {}, acts, pers, 2)
    assert n["rows"] == 8 and [r["prompt"] for r in read_plan(tmp_path / "d")[0]][::2] == ["A person flying a kite in the Bronze Age", "A person mending a net in the Bronze Age", "A person flying a kite in the 1880s", "A person mending a net in the 1880s"]
    for text, words in (("activity\n", "no activity"), ("x\ny\n", "no column"), ("activity\na [b]\n", "cannot stand"), ("activity,activity_id\na,99999\n", "no number")):
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(InputError, match=words):
            activities(tmp_path / "a.csv")


def test_samples_of_activities():
    for n in (1, 7, 20, 33, 50, 100):
        some = choose_activities(n)
        assert len(some) == n and some.category.nunique() == min(n, 20) and some.activity_id.is_monotonic_increasing
        assert set(some.activity_id) <= set(choose_activities(min(100, n + 1)).activity_id)
    quoted = activities().query("provenance == 'quoted'")
    assert set(quoted.activity_id) <= set(choose_activities(50).activity_id)


def test_mitigation_prompts():
    "design §5: Appendix E drops 'a person' and negates 'black and white image'; Figures 9–10 keep it and negate 'monochrome picture'."
    assert prompt_for("laughing with a friend", "1930s", "mitigated_appendix_e") == ("A photorealistic image of laughing with a friend in the 1930s", "black and white image")
    assert prompt_for("laughing with a friend", "1930s", "mitigated_figures_9_10") == ("A photorealistic image of a person laughing with a friend in the 1930s", "monochrome picture")
    assert prompt_for("laughing with a friend", "1930s") == ("A person laughing with a friend in the 1930s", "")


@pytest.mark.parametrize("model, variant, label", [("sdxl", "", "SDXL"), ("SDXL_mitigated", "", "SDXL Mitigated"), ("SDXL", "mitigated_figures_9_10", "SDXL Mitigated (Figures 9–10)"), ("flux.1-schnell", "", "FLUX.1"), ("Stable Diffusion 3 Medium", "neutral", "SD3"), ("SD3.5", "", "SD3.5"), ("FLUX.1-dev", "", "FLUX.1-dev")])
def test_model_names(model, variant, label):
    assert find_arm(model, variant).label == label


def test_broken_pictures_of_a_run_can_be_copied_elsewhere(tmp_path):
    "A run's folder may be moved as a whole: paths are relative."
    from test_generate import plan, run
    d = plan(tmp_path / "d")
    run(d), collect(d)
    shutil.move(d, tmp_path / "elsewhere")
    assert collect(tmp_path / "elsewhere")["ok"] == 36 and run(tmp_path / "elsewhere")["drawn"] == 0


# --- what people's disks and tables do

def lined(d, *rows, head="path,activity,period,model"):
    (d / "list.csv").write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    return d


def many(tmp_path, n=48):
    d = folder(tmp_path / "d", [f"{i}.png" for i in range(n)])
    return lined(d, *(f"{i}.png,cooking,17th,sdxl" for i in range(n)))


SLOW = "import sys, time, os\nfrom histchrono.histvis import collection as c\nwas = c._measure\ndef slow(job):\n    time.sleep(.3)\n    return was(job)\nc._measure = slow\nprint(os.getpid(), flush=True)\nc.import_images(sys.argv[1], sys.argv[2], workers=2, progress=False)"


def children(pid):
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_killed_import_leaves_no_lock(tmp_path):
    "Children end with their parent, and hold no lock of their own meanwhile."
    d = many(tmp_path)
    p = subprocess.Popen([sys.executable, "-c", SLOW, str(d), str(tmp_path / "s")], stdout=subprocess.PIPE)
    try:
        for _ in range(300):
            if len(kids := children(p.pid)) == 2 and list((tmp_path / "s").rglob("*.json")): break
            time.sleep(0.1)
        held = [[os.readlink(f) for f in Path(f"/proc/{k}/fd").iterdir()] for k in kids]
        assert len(kids) == 2 and not any("/.locks/" in f for fs in held for f in fs)
        assert any("/.locks/" in os.readlink(f) for f in Path(f"/proc/{p.pid}/fd").iterdir())  # the parent does
    finally:
        p.kill()
        p.wait()
    for _ in range(100):
        if not any(Path(f"/proc/{k}/cmdline").exists() and Path(f"/proc/{k}/cmdline").read_bytes() for k in kids): break
        time.sleep(0.05)
    else: pytest.fail("a child outlived its parent")
    assert bring(d, tmp_path / "s", workers=2)[0]["ok"] == 48


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_killed_child_is_one_line(tmp_path, monkeypatch):
    from histchrono.histvis import collection
    d, me, was = many(tmp_path), os.getpid(), collection._measure
    monkeypatch.setattr(collection, "_measure", lambda job: os.kill(os.getpid(), 9) if job[0].endswith("/30.png") and os.getpid() != me else was(job))
    with pytest.raises(HistError, match="reading pictures ended.*use fewer workers"):
        bring(d, tmp_path / "s", workers=2)
    monkeypatch.undo()
    assert bring(d, tmp_path / "s", workers=2)[0]["ok"] == 48


def test_folders_behind_links(tmp_path):
    "The set's path and the pictures' may go through links, up and down."
    d = lined(folder(tmp_path / "d", ["a.png", "sub/b.png"]), "a.png,cooking,17th,sdxl", "sub/b.png,cooking,18th,sdxl")
    (tmp_path / "real/deep/er").mkdir(parents=True)
    (tmp_path / "lnk").symlink_to("real/deep/er")
    (tmp_path / "real/pics").symlink_to(d)
    (d / "there").symlink_to(d / "sub")
    for i, (pics, out) in enumerate([(d, tmp_path / "lnk/set"), (tmp_path / "real/pics", tmp_path / "s1"), (tmp_path / "lnk/../../pics", tmp_path / "lnk/../s2")]):
        assert bring(pics, out)[0]["ok"] == 2 and collect(out.resolve())["ok"] == 2
    lined(d, "there/b.png,cooking,18th,sdxl")
    assert bring(d, tmp_path / "lnk/set3")[0]["ok"] == 1


def test_paths_that_cannot_be_looked_for(tmp_path, monkeypatch):
    d = lined(folder(tmp_path / "d", ["a.png", "shut/b.png"]), "a.png,cooking,17th,sdxl", "x" * 300 + ".png,cooking,17th,sdxl", "shut/b.png,cooking,17th,sdxl")
    was, walk = Path.stat, os.scandir

    def stat(self, **kw):
        if "shut" in self.parts: raise PermissionError(13, "Permission denied", str(self))
        return was(self, **kw)
    monkeypatch.setattr(Path, "stat", stat)  # as for anybody but root
    n, said = bring(d, tmp_path / "s")
    assert (n["rows"], n["ok"], n["unplaced"]) == (1, 1, 2) and any("line 3" in s and "File name too long" in s for s in said) and any("line 4" in s and "shut/b.png cannot be looked for (Permission denied)" in s for s in said)
    monkeypatch.undo()

    def scandir(path="."):
        if str(path).endswith("shut"): raise PermissionError(13, "Permission denied", str(path))
        return walk(path)
    g = folder(tmp_path / "g", ["sdxl/17th/cooking/1.png", "sdxl/shut/cooking_18th_2.png"])
    monkeypatch.setattr(os, "scandir", scandir)
    n, said = bring(g, tmp_path / "t", layout="histvis")
    assert (n["ok"], n["unplaced"]) == (1, 1) and any("sdxl/shut: this folder cannot be read (Permission denied)" in s for s in said)


def test_names_that_are_no_text(tmp_path):
    d = folder(tmp_path / "d", ["sdxl/17th/cooking/1.png"])
    odd = os.fsencode(d / "sdxl/17th/cooking") + b"/\xff2.png"
    try: shutil.copy(d / "sdxl/17th/cooking/1.png", odd)
    except OSError: pytest.skip("this disk takes UTF-8 names only")
    n, said = bring(d, tmp_path / "s", layout="histvis")
    assert (n["ok"], n["unplaced"]) == (1, 1) and any("cooking/\\xff2.png: its name is no UTF-8" in s for s in said)
    with pytest.raises(InputError, match=r"o\\xff: the name of this folder is no UTF-8"):
        bring(d, tmp_path / os.fsdecode(b"o\xff"), layout="histvis")


def test_quotes_and_newlines(tmp_path):
    d = lined(folder(tmp_path / "d"), 'a.png,"flying\n a kite","Bronze\nAge",SDXL', "b.png,flying a kite,Bronze Age,SDXL")
    bring(d, tmp_path / "s")
    assert {(r["activity"], r["period"]) for r in read_plan(tmp_path / "s")[0]} == {("flying a kite", "bronze age")}
    assert read_plan(tmp_path / "s")[1]["periods"] == [["bronze age", "Bronze Age", "Bronze Age"]]
    for rows, line in ((("a.png,cooking,17th,SDXL", '"b.png,cooking,17th,SDXL', "c.jpg,cooking,17th,SDXL"), 3), (('a.png,"cooking,17th,SDXL', 'b.png,"cooking",17th,SDXL'), 2)):
        with pytest.raises(InputError, match=f"line {line}: a quote is opened"):
            bring(lined(d, *rows), tmp_path / "t")
    with pytest.raises(InputError, match="nothing but separators"):
        bring(lined(d, head=",,,"), tmp_path / "t")


def test_models_that_would_share_a_folder(tmp_path):
    d = folder(tmp_path / "d")
    with pytest.raises(InputError, match="would share the folder my_model"):
        bring(lined(d, "a.png,cooking,17th,my model", "b.png,cooking,17th,my-model"), tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert bring(lined(d, "a.png,cooking,17th,my model", "b.png,cooking,17th,my model"), tmp_path / "s")[0]["ok"] == 2


def test_backslashes_in_names(tmp_path):
    d = lined(folder(tmp_path / "d", ["a\\b.png", "a/b.png", "c/d.png"]), "a\\b.png,cooking,17th,sdxl", "a/b.png,cooking,17th,sdxl", "c\\d.png,cooking,17th,sdxl")
    assert bring(d, tmp_path / "s")[0]["ok"] == 3
    rows = read_plan(tmp_path / "s")[0]
    assert len({r["image_id"] for r in rows}) == 3
    lined(d, "c/d.png,cooking,17th,sdxl")
    bring(d, tmp_path / "t")
    assert read_plan(tmp_path / "t")[0][0]["image_id"] in {r["image_id"] for r in rows}  # however its path is written


def test_each_thing_that_is_converted_is_noted(tmp_path):
    deep, clear = "from 16 to 8 bits", "transparency laid on white"
    for name in ("rgba16.png", "grey_alpha16.png"):
        assert decode(FAULTS[name][0], name, True).notes == (deep, clear)
    grey = lambda key: raw_png(2, 1, 16, 0, b"\0" + struct.pack(">HH", 500, 0x4000), chunk(b"tRNS", struct.pack(">H", key)))
    p = decode(grey(500), "x", True)
    assert p.notes == (deep, clear) and p.rgb[0, :, 0].tolist() == [255, 0x40]
    key = raw_png(1, 1, 16, 2, bytes(7), chunk(b"tRNS", bytes(6)))
    for data in (FAULTS["float.tif"][0], FAULTS["int.tif"][0], b"P5 2 2 65535\n" + bytes(8), b"Pf\n2 2\n-1.0\n" + bytes(16), key):
        for convert in (False, True):
            with pytest.raises(PictureError) as e: decode(data, "x", convert)
            assert e.value.why == "16bit" and "convert" not in str(e.value).replace("converted", "")


def test_converted_pictures_go_with_converting(tmp_path):
    d = folder(tmp_path / "d")
    (d / "ink.jpg").write_bytes(FAULTS["ink.jpg"][0])
    lined(d, "a.png,cooking,17th,sdxl", "ink.jpg,cooking,17th,sdxl")
    assert bring(d, tmp_path / "s", convert=True)[0]["ok"] == 2 and len(list((tmp_path / "s/sdxl").rglob("*.png"))) == 1
    assert bring(d, tmp_path / "s")[0]["failed"] == {"cmyk": 1} and not list((tmp_path / "s/sdxl").rglob("*.png"))


def test_an_import_without_a_picture_is_an_error(tmp_path):
    d = lined(folder(tmp_path / "d"), "gone.png,cooking,17th,sdxl")
    with pytest.raises(InputError, match="no picture of .* can be used"):
        bring(d, tmp_path / "s")
    assert read_pictures(tmp_path / "s").status.tolist() == ["failed:missing"]  # which is written all the same
