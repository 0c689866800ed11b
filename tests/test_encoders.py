"""Encoders: rows 8 to 11 of the image cases on the real architectures with random weights, saved and opened as a reader would; and what is said when something is not there."""
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

timm, torch, open_clip = (pytest.importorskip(m) for m in ("timm", "torch", "open_clip"))
pytest.importorskip("cv2")

from histchrono.core.errors import DownloadError, InputError  # noqa: E402
from histchrono.histvis.encoders import as_input, backbone, dry_dim, encoder_names, one_thread, open_encoder  # noqa: E402
from histchrono.histvis.features import FeatureCache, measure  # noqa: E402
from histchrono.histvis.pictures import pixel_hash  # noqa: E402
from histchrono.histvis.probe import load_probe, save_probe, train_probe  # noqa: E402
from histchrono.histvis.names import PROBE_CLASSES  # noqa: E402
from histchrono.histvis.zeroshot import STRUCTURES, compare_structures, open_zeroshot, zeroshot_probe  # noqa: E402
from histchrono.models.registry import get  # noqa: E402

PICTURE = np.random.default_rng(3).integers(0, 256, (60, 90, 3), dtype=np.uint8)
IMAGENET, HALF = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3)
BACKBONES = {"VGG-16-BN": (4096, IMAGENET), "ResNet-50": (2048, IMAGENET), "Swin-B": (1024, IMAGENET), "BEiT-B": (768, HALF), "MAE-ViT-B": (768, IMAGENET), "DINOv2-ViT-B/14": (768, IMAGENET)}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def saved(timm_id, folder, **kw):
    "A whole model of timm's with random weights, and its file as the hub would have it."
    from safetensors.torch import save_file
    torch.manual_seed(1)
    net = timm.create_model(timm_id, pretrained=False, **kw).eval()
    save_file({k: v.contiguous() for k, v in net.state_dict().items()}, Path(folder) / "model.safetensors")
    return net


@pytest.mark.parametrize("name", BACKBONES)
def test_the_papers_backbones(name):
    "Widths, frozen and in eval mode, the head taken off, the two preprocessings (rows 9, 10, 11)."
    dim, norm = BACKBONES[name]
    with tempfile.TemporaryDirectory() as d:  # not pytest's own, which would keep gigabytes
        net = saved(get(name).id, d, **({"img_size": 224} if name.startswith("DINO") else {}))
        paper = open_encoder(name, weights=d, device="cpu")
        got = paper.features([PICTURE])
        with torch.inference_mode(), one_thread():
            want = lambda x: net.forward_head(net.forward_features(torch.from_numpy(x)), pre_logits=True).numpy()
            expected, normed = want(as_input([PICTURE], 224)), want(as_input([PICTURE], 224, *norm))
        assert (paper.dim, got.shape, paper.preprocess, paper.batch) == (dim, (1, dim), "paper", 1)
        assert np.allclose(got, expected, atol=1e-4 * np.abs(expected).max()), "the file's weights are not what is used"
        if name in ("BEiT-B", "ResNet-50"):
            other = open_encoder(name, weights=d, preprocess="backbone", device="cpu").features([PICTURE])
            assert np.allclose(other, normed, atol=1e-4 * np.abs(normed).max()) and not np.allclose(other, got, atol=1e-4 * np.abs(got).max())
        assert {p.name for p in Path(d).iterdir()} == {"model.safetensors"}


def test_row_8_clip_with_the_wrong_gelu(tmp_path):
    tiny_clip(tmp_path / "quick")
    tiny_clip(tmp_path / "exact", quick_gelu=False)
    with pytest.raises(InputError, match="need the quick one"):
        open_encoder("CLIP-ViT-B/32", weights=tmp_path / "exact")
    with pytest.raises(InputError, match="ViT-B-32-quickgelu"):
        open_zeroshot(tmp_path / "exact" / "open_clip_model.safetensors", architecture="ViT-B-32")
    a, b = open_zeroshot(tmp_path / "quick").encoder.features([PICTURE]), open_zeroshot(tmp_path / "exact", whose="").encoder.features([PICTURE])
    assert not np.allclose(a, b, atol=1e-4), "the two GELUs would give the same features, and the check would check nothing"
    assert open_clip.get_model_config("ViT-B-32-quickgelu")["quick_gelu"] and open_clip.get_pretrained_cfg("ViT-B-32", "openai")["quick_gelu"]


def test_row_9_another_preprocessing_than_the_probes(tmp_path):
    saved("test_vit.r160_in1k", tmp_path)
    paper, own = (open_encoder("timm:test_vit.r160_in1k", weights=tmp_path, preprocess=p, device="cpu") for p in ("paper", "backbone"))
    pics = [np.random.default_rng(i).integers(0, 256, (24, 24, 3), dtype=np.uint8) for i in range(20)]
    y = list(PROBE_CLASSES) * 4
    x = paper.features(pics)
    path = save_probe(train_probe(x, y, x, y, paper, epochs=2), tmp_path / "probe.safetensors")
    assert load_probe(path, paper).preprocess == "paper"
    for bad in (dict(encoder=own), dict(preprocess="backbone"), dict(encoder="texture-colour"), dict(encoder=open_encoder("texture-colour"))):
        with pytest.raises(InputError, match="was trained"):
            load_probe(path, **bad)
    saved("test_vit.r160_in1k", tmp_path, num_classes=10)  # other weights
    from safetensors.torch import load_file, save_file
    w = load_file(tmp_path / "model.safetensors")
    save_file({k: v + 0.01 if v.is_floating_point() else v for k, v in w.items()}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="with weights"):
        load_probe(path, open_encoder("timm:test_vit.r160_in1k", weights=tmp_path, device="cpu"))


def test_row_10_dinov2_is_518_natively():
    small = "vit_small_patch14_dinov2.lvd142m"
    assert timm.get_pretrained_cfg(small).input_size[-1] == timm.get_pretrained_cfg(get("DINOv2-ViT-B/14").id).input_size[-1] == 518
    with tempfile.TemporaryDirectory() as d:
        net = saved(small, d, num_classes=0)
        with pytest.raises(AssertionError), torch.inference_mode():  # the trap itself
            net(torch.zeros(1, 3, 224, 224))
        e = open_encoder(f"timm:{small}", weights=d, device="cpu")  # a file of 518-pixel weights
        x = e.features([PICTURE])
    assert x.shape == (1, 384) and e.size == 224 and np.isfinite(x).all()


def test_row_11_vgg_says_512_and_gives_4096():
    net = backbone("vgg11_bn.tv_in1k")
    assert net.num_features == 512 and dry_dim(net) == 4096


def test_everything_the_registry_calls_an_encoder_opens_or_says_how(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert {"texture-colour", "small-network", *BACKBONES, "CLIP-ViT-B/32"} == set(encoder_names())
    for name in set(encoder_names()) - {"texture-colour"}:
        with pytest.raises((DownloadError, InputError)) as e:
            open_encoder(name)
        assert "\n" not in str(e.value) and ("settings.ini [weights]" in str(e.value) or "train it first" in str(e.value)), str(e.value)


def test_settings_name_local_weights(monkeypatch, tmp_path):
    saved("test_resnet.r160_in1k", tmp_path)
    monkeypatch.setattr("histchrono.histvis.encoders.named_path", lambda name: tmp_path if name == "timm:test_resnet.r160_in1k" else None)
    assert open_encoder("timm:test_resnet.r160_in1k", device="cpu").features([PICTURE]).shape[0] == 1


def test_bad_weights(tmp_path):
    with pytest.raises(InputError, match="is missing"):
        open_encoder("ResNet-50", weights=tmp_path / "gone")
    torch.save({}, tmp_path / "net.pth")
    with pytest.raises(InputError, match="a pickle is never read"):
        open_encoder("ResNet-50", weights=tmp_path / "net.pth")
    with pytest.raises(InputError, match="holds no safetensors"):
        open_encoder("ResNet-50", weights=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(InputError, match="cannot be loaded"):
        open_encoder("ResNet-50", weights=tmp_path)
    saved("test_vit.r160_in1k", tmp_path)  # a whole file, of another model: timm alone would leave the network random and say nothing
    with pytest.raises(InputError, match="cannot be loaded"):
        open_encoder("ResNet-50", weights=tmp_path)
    for bad, words in ((dict(name="ResNet-51"), "is no encoder"), (dict(name="GPT-4o"), "is no encoder"), (dict(name="timm:nothing"), "timm knows no model"),
                       (dict(name="timm:resnet10t.nope"), "timm knows no model 'resnet10t.nope'"), (dict(name=None), "no encoder's name"), (dict(name="ResNet-50", weights=tmp_path, device="tpu9"), "device 'tpu9' is not here"),
                       (dict(name="texture-colour", device="cuda:77"), "device 'cuda:77' is not here"), (dict(name="texture-colour", weights=tmp_path), "has no weights"),
                       (dict(name="ResNet-50", weights=tmp_path, preprocess="imagenet"), "unknown preprocess"), (dict(name="texture-colour", preprocess="backbone"), "use preprocess='paper'")):
        with pytest.raises(InputError, match=words) as e:
            open_encoder(**bad)
        assert "\n" not in str(e.value)


def test_another_vits_weights(tmp_path, caplog):
    "timm resamples patches and position embeddings: what is another model's would load without a word."
    from safetensors.torch import load_file, save_file
    small = "timm:test_vit.r160_in1k"
    saved("test_vit.r160_in1k", tmp_path)
    open_encoder(small, weights=tmp_path, device="cpu")
    assert "Unexpected keys" not in caplog.text
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    patch = "patch_embed.proj.weight"
    for key, value, words in ((patch, torch.zeros(64, 3, 32, 32), patch + r" is \(64, 3, 32, 32\), not \(64, 3, 16, 16\)"), ("blocks.0.mlp.fc1.weight", torch.zeros(8, 64), r"blocks.0.mlp.fc1.weight is \(8, 64\)"),
                              ("norm.weight", torch.zeros(64, 1), "norm.weight"), ("norm.weight", None, "it lacks norm.weight"), ("extra.weight", torch.zeros(1), "extra.weight has no place")):
        save_file({k: v for k, v in {**whole, key: value}.items() if v is not None}, file)
        with pytest.raises(InputError, match=words) as e: open_encoder(small, weights=tmp_path, device="cpu")
        assert "\n" not in str(e.value)


def test_no_number_is_no_feature(tmp_path):
    from safetensors.torch import load_file, save_file
    saved("test_vit.r160_in1k", tmp_path)
    w = load_file(tmp_path / "model.safetensors")
    w["norm.weight"][:] = float("nan")
    save_file(w, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="no numbers"):
        open_encoder("timm:test_vit.r160_in1k", weights=tmp_path, device="cpu").features([PICTURE])
    with pytest.raises(InputError, match="uint8"):
        open_encoder("texture-colour").features([PICTURE.astype(float)])


# --- zero-shot


def tiny_clip(folder, quick_gelu=True):
    from safetensors.torch import save_file
    cfg = dict(embed_dim=16, quick_gelu=quick_gelu, vision_cfg=dict(image_size=32, layers=2, width=64, patch_size=8, head_width=32), text_cfg=dict(context_length=77, vocab_size=49408, width=16, heads=2, layers=1))
    torch.manual_seed(0)
    net = open_clip.CLIP(**cfg)
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in net.state_dict().items()}, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(dict(model_cfg=cfg, preprocess_cfg=dict(mean=[0.48, 0.46, 0.41], std=[0.27, 0.26, 0.28]))))


def test_zero_shot_reports_the_best_and_lists_all(tmp_path):
    tiny_clip(tmp_path / "clip")
    zs = open_zeroshot(tmp_path / "clip")
    pics = [np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8) for i in range(25)]
    x = zs.encoder.features(pics)
    truth = zeroshot_probe(zs, list(STRUCTURES)[2]).decide(x)[0]  # labels that make the third structure right
    best, table = compare_structures(zs, x, truth)
    assert best.facts["structure"] == table.structure[table.best].item() and table.accuracy[table.best].item() == 1.0
    assert table.macro_f1.max() == table.macro_f1[table.best].item() and len(table) == len(STRUCTURES) >= 5
    assert {r["structure"] for r in best.facts["tried"]} == set(STRUCTURES)
    again = load_probe(save_probe(best, tmp_path / "p.safetensors"), zs.encoder)
    assert (again.decide(x)[0] == best.decide(x)[0]).all() and again.facts == best.facts
    with pytest.raises(InputError, match="no structure"):
        zeroshot_probe(zs, "a poem about {}")


def test_a_run_with_clip_among_its_encoders(tmp_path, monkeypatch):
    from histchrono.histvis.style import probe_file, train_encoders
    tiny_clip(tmp_path / "clip")
    monkeypatch.setattr("histchrono.histvis.zeroshot.named_path", lambda name: tmp_path / "clip")
    items = [(f"i{i:02d}", PROBE_CLASSES[i % 5], np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8)) for i in range(20)]
    pairs, rows = train_encoders(items, items, tmp_path / "p", ("clip-vit-b/32", "texture-colour"), epochs=1)
    assert [p.encoder for p, _ in pairs] == ["CLIP-ViT-B/32", "texture-colour"] and len(rows) == 40
    clip = load_probe(probe_file(tmp_path / "p", "CLIP-ViT-B/32"), open_encoder("CLIP-ViT-B/32", preprocess="backbone"))
    assert clip.facts["zero_shot"] and len(clip.facts["tried"]) == len(STRUCTURES)
    alone, _ = train_encoders(lambda *a: 1 / 0, items, tmp_path / "q", ["CLIP-ViT-B/32"])  # nothing is trained: no training picture is looked at
    assert (alone[0][0].weight == clip.weight).all()


# --- the cache


def test_cache_under_several_processes_and_damage(tmp_path):
    pics = [np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8) for i in range(60)]
    items = lambda shard, shards: [(f"i{i:02d}", "drawing", p) for i, p in enumerate(pics)][shard::shards]
    e = open_encoder("texture-colour")
    want = measure(items(0, 1), e).x[e.name]
    assert (measure(items, e, tmp_path, workers=3, parts=6).x[e.name] == want).all()
    shards = sorted(tmp_path.rglob("*.parquet"))
    assert len(shards) == 6 and not list(tmp_path.rglob("*.tmp"))
    for i, s in enumerate(shards):  # every shard damaged in another way
        raw = bytearray(s.read_bytes())
        if i % 3 == 0: raw = raw[:len(raw) // 2]
        if i % 3 == 1: raw[len(raw) // 3] ^= 4
        if i % 3 == 2: raw = b"nothing"
        s.write_bytes(raw)
    assert (FeatureCache(tmp_path, e).features([pixel_hash(p) for p in pics], pics.__getitem__) == want).all()
    calls = []
    FeatureCache(tmp_path, e).features([pixel_hash(p) for p in pics], calls.append)
    assert not calls, "what was computed again was not kept"


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written|is a file"):
        FeatureCache(tmp_path / "file", open_encoder("texture-colour"))
