"""Text-to-image engines on tiny pipelines saved as the real ones are: bytes, seeds, arithmetic, refusals, failures."""
from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip('torch')
diffusers = pytest.importorskip('diffusers')
pytest.importorskip('transformers')

sys.path.insert(0, str(Path(__file__).parent))
import tinytti

from histchrono.core.errors import DownloadError, HistError, InputError, SettingsError
from histchrono.core.paths import root
from histchrono.models import images
from histchrono.models.images import open_tti
from histchrono.models.ttisettings import DECLARED, read_tti

THREE = ('SDXL', 'SD3', 'FLUX.1-schnell')
ALL = (*THREE, 'FLUX.1-dev', 'SD1')
CLASS = {'SDXL': 'StableDiffusionXLPipeline', 'SD3': 'StableDiffusion3Pipeline', 'FLUX.1-schnell': 'FluxPipeline', 'FLUX.1-dev': 'FluxPipeline', 'SD1': 'StableDiffusionPipeline'}
GUIDANCE = {'SDXL': 5.0, 'SD3': 7.0, 'FLUX.1-schnell': 0.0, 'FLUX.1-dev': 3.5, 'SD1': 7.5}  # what the models are drawn with where nothing is said
ROWS = [dict(prompt='A person cooking in the 1930s', negative_prompt='', seed=3), dict(prompt='A person dancing in the 17th century', negative_prompt='', seed=2**40 + 5), dict(prompt='A person working in the 1990s', negative_prompt='', seed=11)]
NEGATIVE = [{**ROWS[0], 'negative_prompt': 'black and white image'}, ROWS[1], {**ROWS[2], 'negative_prompt': 'monochrome picture'}]


@pytest.fixture(scope='session')
def tiny(tmp_path_factory) -> dict:
    "Folders of the tiny pipelines."
    torch.set_num_threads(1)
    where = tmp_path_factory.mktemp('tti')
    return {name: tinytti.build(name, where / name) for name in ALL}


@pytest.fixture
def small(tiny):
    "Open a tiny pipeline under the name of the model that it stands for."
    def go(name, folder=None, **how):
        settings = dict(size=tinytti.SIZE, steps=4, **(dict(free_encoders=False) if name in THREE else {}), **(dict(max_sequence_length=48) if name not in ('SDXL', 'SD1') else {})) | how.pop('settings', {})
        return open_tti(name, settings, folder=folder or tiny[name], **how) if name in THREE else open_tti(str(folder or tiny[name]), settings, **how)
    return go


@pytest.fixture(scope='session')
def plain(tiny):
    "The picture of a row by nothing but diffusers' own call: what every engine is held against."
    pipes = {}

    def go(name, row, steps=4, guidance=None, folder=None, **more) -> np.ndarray:
        folder = folder or tiny[name]
        if folder not in pipes:
            pipes[folder] = diffusers.DiffusionPipeline.from_pretrained(folder, use_safetensors=True, **(dict(add_watermarker=False) if name == 'SDXL' else {}))
        pipe = pipes[folder]
        pipe.set_progress_bar_config(disable=True)
        if name not in ('SDXL', 'SD1'):
            more['max_sequence_length'] = 48
        if row['negative_prompt']:
            more['negative_prompt'] = row['negative_prompt']
        image = pipe(row['prompt'], num_inference_steps=steps, guidance_scale=GUIDANCE[name] if guidance is None else guidance, width=tinytti.SIZE, height=tinytti.SIZE,
                     generator=torch.Generator('cpu').manual_seed(row['seed']), **more).images[0]
        return np.asarray(image)
    return go


def same(a, b) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype == np.uint8 and a.tobytes() == b.tobytes()


def pictures(drawn) -> list:
    assert [d.status for d in drawn] == ['ok'] * len(drawn), [d.message for d in drawn]
    return [d.image for d in drawn]


# The same row, the same bytes.
@pytest.mark.parametrize('name', ALL)
def test_rows_are_what_the_plain_call_draws(name, small, plain):
    engine = small(name)
    assert type(next(iter(engine._pipes.values()))).__name__ == CLASS[name] == engine.settings['pipeline']
    assert not any(m.training for m in next(iter(engine._pipes.values())).components.values() if isinstance(m, torch.nn.Module))
    rows = ROWS if name.startswith('FLUX') else NEGATIVE
    together, again = pictures(engine.draw(rows)), pictures(engine.draw(rows[::-1]))[::-1]
    for i, row in enumerate(rows):
        alone = pictures(engine.draw([row]))[0]
        assert same(alone, together[i]) and same(alone, again[i]) and same(alone, plain(name, row)), (name, i)
    assert len({p.tobytes() for p in together}) == len(rows)


@pytest.mark.parametrize('name', THREE)
def test_encoders_that_are_let_go_change_nothing(name, small, monkeypatch):
    rows = ROWS if name.startswith('FLUX') else NEGATIVE
    whole, split = small(name), small(name, settings=dict(free_encoders=True))
    asked, cls = [], type(next(iter(whole._pipes.values())))
    own = cls.encode_prompt

    def counted(self, prompt=None, *a, **kw):
        if kw.get('prompt_embeds') is None:
            asked.append(prompt)
        return own(self, prompt, *a, **kw)
    monkeypatch.setattr(cls, 'encode_prompt', counted)
    texts = split.prepare(rows + rows)
    assert not split._pipes and len(asked) == texts == len(set(asked))
    assert all(same(a, b) for a, b in zip(pictures(split.draw(rows)), pictures(whole.draw(rows))))
    assert asked.count(rows[0]['prompt']) == 2  # once by each engine
    assert all(getattr(p, e) is None for p in split._pipes.values() for e in split.plan.family.encoders)
    split.draw(rows)
    assert asked.count(rows[0]['prompt']) == 2


@pytest.mark.parametrize('name', THREE)
def test_several_rows_in_one_call(name, small):
    "As on a GPU: the right rows in the right places; bytes are not promised."
    rows = ROWS if name.startswith('FLUX') else NEGATIVE
    engine = small(name)
    alone, engine.batch = pictures(engine.draw(rows)), 3
    drawn = engine.draw(rows)
    assert [d.facts['denoised_together'] for d in drawn] == ([3, 3, 3] if rows is ROWS else [2, 1, 2])
    assert max(np.abs(a.astype(int) - b).max() for a, b in zip(alone, pictures(drawn))) <= 2


# A change of any of these must be seen.
@pytest.mark.parametrize('name', ALL)
def test_other_steps_and_guidance_are_seen(name, small, plain):
    row, engine = ROWS[0], small(name)
    for change in (dict(num_inference_steps=5), *([dict(guidance_scale=GUIDANCE[name] + 1)] if name != 'FLUX.1-schnell' else [])):
        engine.plan = replace(engine.plan, args=engine.plan.args | change)
        got = pictures(engine.draw([row]))[0]
        assert not same(got, plain(name, row)), change
        assert same(got, plain(name, row, steps=engine.plan.args['num_inference_steps'], guidance=engine.plan.args['guidance_scale']))


@pytest.mark.parametrize('name', THREE)
def test_noise_of_another_dtype_is_seen(name, small, plain, monkeypatch):
    engine, row, own = small(name), ROWS[0], images.draw_noise
    for dtype in (torch.bfloat16, torch.float64):
        def other(shape, seed):
            gen = torch.Generator('cpu').manual_seed(seed)
            return torch.randn((1, *shape), generator=gen, dtype=dtype).float(), gen
        monkeypatch.setattr(images, 'draw_noise', other)
        assert not same(pictures(engine.draw([row]))[0], plain(name, row)), dtype
    monkeypatch.setattr(images, 'draw_noise', own)
    assert same(pictures(engine.draw([row]))[0], plain(name, row))


@pytest.mark.parametrize('name', ('SD3', 'FLUX.1-schnell'))
def test_train_mode_is_seen_and_ended_by_loading(name, small, plain, monkeypatch):
    row, own = ROWS[0], diffusers.DiffusionPipeline.from_pretrained.__func__

    def training(cls, *a, **kw):
        assert kw['use_safetensors'] is True and kw['local_files_only'] is True and kw['trust_remote_code'] is False
        pipe = own(cls, *a, **kw)
        for m in pipe.components.values():
            if isinstance(m, torch.nn.Module):
                m.train()
        return pipe
    monkeypatch.setattr(diffusers.DiffusionPipeline, 'from_pretrained', classmethod(training))
    engine = small(name)
    monkeypatch.undo()
    assert same(pictures(engine.draw([row]))[0], plain(name, row))
    engine._texts.clear()
    next(iter(engine._pipes.values())).text_encoder_2.train(), getattr(next(iter(engine._pipes.values())), 'text_encoder_3', torch.nn.Identity()).train()
    assert not same(pictures(engine.draw([row]))[0], plain(name, row))


@pytest.mark.parametrize('name', THREE)
def test_facts_hold_the_noise_and_no_place(name, small, tiny):
    engine = small(name)
    config = json.loads((tiny[name] / ('unet' if name == 'SDXL' else 'transformer') / 'config.json').read_text())
    channels = config['in_channels'] // (4 if name.startswith('FLUX') else 1)
    noise = torch.randn((1, channels, 8, 8), generator=torch.Generator('cpu').manual_seed(ROWS[1]['seed']))
    want = hashlib.sha256(noise.numpy().tobytes()).hexdigest()
    facts = engine.draw(ROWS)[1].facts
    assert facts['noise_sha256'] == want
    assert small(name, dtype='bfloat16').draw([ROWS[1]])[0].facts['noise_sha256'] == want  # the model's arithmetic does not reach the noise
    assert facts['dtype'] == facts['decode_dtype'] == 'float32' and facts['watermark'] is False and facts['steps'] == 4 and facts['guidance'] == GUIDANCE[name]
    assert facts['scheduler'] and len(facts['scheduler_hash']) == 16 and facts['versions']['diffusers'] == diffusers.__version__ and facts['threads'] >= 1
    assert str(tiny[name].parent) not in json.dumps(facts) + json.dumps(engine.settings)
    assert small(name).settings == engine.settings and json.loads(json.dumps(engine.settings)) == engine.settings


def test_settings_of_a_picture_name_its_weights(small, tiny, tmp_path):
    other = tinytti.build('SDXL', tmp_path / 'other', seed=1)
    a, b = small('SDXL'), small('SDXL', folder=other)
    assert a.settings['revision'] != b.settings['revision'] and a.settings['model'] == b.settings['model'] == 'SDXL'
    assert {k: v for k, v in small('SDXL', settings=dict(batch=7)).settings.items()} == a.settings


@pytest.mark.parametrize('name', ('SDXL', 'SD1'))
def test_schedulers_that_draw_noise_of_their_own(name, tiny, tmp_path, small, plain):
    folder = shutil.copytree(tiny[name], tmp_path / name)
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.save_pretrained(folder)
    engine = small(name, folder=folder)
    drawn = pictures(engine.draw(ROWS))
    assert all(same(d, pictures(engine.draw([r]))[0]) and same(d, plain(name, r, folder=folder)) for r, d in zip(ROWS, drawn))


def test_no_negative_prompt_may_be_zeros_or_the_empty_text(tiny, tmp_path, small, plain):
    folder = shutil.copytree(tiny['SDXL'], tmp_path / 'SDXL')
    relabel(folder, force_zeros_for_empty_prompt=False)
    got = pictures(small('SDXL', folder=folder).draw(ROWS[:1]))[0]
    assert same(got, plain('SDXL', ROWS[0], folder=folder)) and not same(got, plain('SDXL', ROWS[0]))


def test_no_watermark_though_the_package_is_there(small, plain, monkeypatch):
    from diffusers.pipelines.stable_diffusion_xl import pipeline_stable_diffusion_xl as module

    class Marker:
        def apply_watermark(self, image):
            return image * 0
    monkeypatch.setattr(module, 'is_invisible_watermark_available', lambda: True)
    monkeypatch.setattr(module, 'StableDiffusionXLWatermarker', Marker, raising=False)
    assert same(pictures(small('SDXL').draw(ROWS[:1]))[0], plain('SDXL', ROWS[0]))


# Seeds.
def test_generators_are_refused(small):
    engine, one = small('SDXL'), torch.Generator('cpu')
    for seeds in ([one], [one, one], [3, one], ['3'], [3.0], [True], [None], [-1], [2**63]):
        with pytest.raises(InputError, match='seed'):
            engine.draw([{**ROWS[0], 'seed': s} for s in seeds])
    assert same(*[pictures(engine.draw([{**ROWS[0], 'seed': s}]))[0] for s in (5, np.int64(5))])
    with pytest.raises(InputError, match='has no prompt'):
        engine.draw([ROWS[0], {**ROWS[1], 'prompt': ''}])


# Guidance and negative prompts.
def test_guidance_that_would_be_ignored(small, tiny):
    with pytest.raises(InputError, match='would ignore guidance = 3.5: set guidance = 0'):
        small('FLUX.1-schnell', settings=dict(guidance=3.5))
    with pytest.raises(InputError, match='SDXL takes no true_cfg_scale'):
        small('SDXL', settings=dict(true_cfg_scale=2))
    with pytest.raises(InputError, match='FLUX.1-dev, whose transformer has guidance embeddings'):
        small('FLUX.1-schnell', folder=tiny['FLUX.1-dev'])


def test_negative_prompts_do_something_or_are_refused(small, plain):
    for name, settings, words in (('FLUX.1-schnell', {}, 'true_cfg_scale above 1'), ('SDXL', dict(guidance=1), 'set guidance above 1'), ('SD3', dict(guidance=0.5), 'set guidance above 1'), ('SD1', dict(guidance=1), 'set guidance above 1')):
        engine = small(name, settings=settings)
        for ask in (engine.draw, engine.prepare):
            with pytest.raises(InputError, match=words):
                ask(NEGATIVE)
    flux = small('FLUX.1-schnell', settings=dict(true_cfg_scale=2))
    with_negative, without = pictures(flux.draw([NEGATIVE[0], ROWS[0]]))
    assert same(with_negative, plain('FLUX.1-schnell', NEGATIVE[0], true_cfg_scale=2.0)) and same(without, plain('FLUX.1-schnell', ROWS[0])) and not same(with_negative, without)
    for name in ('SDXL', 'SD3'):
        assert not same(*pictures(small(name).draw([NEGATIVE[0], ROWS[0]])))
        assert same(pictures(small(name, settings=dict(guidance=1)).draw(ROWS[:1]))[0], plain(name, ROWS[0], guidance=1.0))


# What is no picture.
def overflowing(tiny, tmp_path, name: str, part: str, layer: str, factor: float, **config) -> Path:
    "A copy whose `layer` gives numbers that float16 cannot hold and float32 can."
    from safetensors.torch import load_file, save_file
    folder = shutil.copytree(tiny[name], tmp_path / f'{name}_{part}')
    file = folder / part / 'diffusion_pytorch_model.safetensors'
    weights = load_file(file)
    weights[layer] = weights[layer] * factor
    save_file(weights, file)
    path = folder / part / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_a_decoder_that_overflows_is_tried_again_in_32_bits(tiny, small, tmp_path):
    folder = overflowing(tiny, tmp_path, 'SDXL', 'vae', 'decoder.conv_in.weight', 3e4, force_upcast=False)
    engine = small('SDXL', folder=folder, dtype='float16')
    first, second = engine.draw(ROWS), engine.draw(ROWS, attempt=1)
    assert [d.status for d in first] == ['failed:nan'] * 3 and all(d.image is None and 'no numbers' in d.message for d in first)
    assert first[0].facts['decode_dtype'] == 'float16' and second[0].facts['decode_dtype'] == 'float32' and second[0].facts['dtype'] == 'float16'
    assert len({p.tobytes() for p in pictures(second)}) == 3
    assert first[0].facts['noise_sha256'] == second[0].facts['noise_sha256']
    assert next(iter(engine._pipes.values())).vae.dtype == torch.float16  # and put back
    upcast = small('SDXL', folder=overflowing(tiny, tmp_path / 'upcast', 'SDXL', 'vae', 'decoder.conv_in.weight', 3e4, force_upcast=True), dtype='float16').draw(ROWS[:1])[0]
    assert upcast.status == 'ok' and upcast.facts['decode_dtype'] == 'float32'


@pytest.mark.parametrize('free', (False, True))
def test_a_denoiser_that_overflows_is_tried_again_in_32_bits(tiny, small, plain, tmp_path, free):
    folder = overflowing(tiny, tmp_path, 'SDXL', 'unet', 'conv_in.weight', 1e6)
    engine = small('SDXL', folder=folder, dtype='float16', settings=dict(free_encoders=free))
    drawn = [engine.draw(ROWS[:1], attempt=a)[0] for a in range(3)]
    assert [d.status for d in drawn] == ['failed:nan', 'failed:nan', 'ok'] and 'denoiser' in drawn[0].message
    assert drawn[2].facts['dtype'] == 'float32' and same(drawn[2].image, plain('SDXL', ROWS[0], folder=folder))
    assert engine.draw(ROWS[:1])[0].facts['dtype'] == 'float16'  # the next first attempt is as the first


@pytest.mark.parametrize('name', ALL)
def test_weights_that_are_no_numbers_give_no_picture(name, small):
    engine = small(name)
    pipe = next(iter(engine._pipes.values()))
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias[0] = float('nan')
    assert [(d.image, d.status) for d in engine.draw(ROWS)] == [(None, 'failed:nan')] * 3
    if name in THREE:  # other pipelines cut infinity down to white before it can be seen
        with torch.no_grad():
            pipe.vae.decoder.conv_out.bias[0] = float('inf')
        assert [(d.image, d.status) for d in engine.draw(ROWS[:1])] == [(None, 'failed:nan')]
    with torch.no_grad():
        pipe.vae.decoder.conv_out.weight.zero_(), pipe.vae.decoder.conv_out.bias.fill_(-9)
    assert [(d.image, d.status) for d in engine.draw(ROWS)] == [(None, 'failed:black')] * 3


@pytest.mark.parametrize('batch', (1, 3))
def test_one_row_s_failure_is_its_own(small, plain, monkeypatch, batch):
    engine = small('SD3')
    engine.batch = batch
    pipe = next(iter(engine._pipes.values()))
    bad, own = engine._encoded(ROWS[1]['prompt'], 'float32')[1], pipe.transformer.forward

    def forward(hidden_states, pooled_projections, **kw):
        if any(torch.equal(p, bad[0]) for p in pooled_projections):
            raise RuntimeError('mat1 and mat2 in /some/where/model.py\nmore')
        return own(hidden_states=hidden_states, pooled_projections=pooled_projections, **kw)
    monkeypatch.setattr(pipe.transformer, 'forward', forward)
    drawn = engine.draw(ROWS)
    assert [d.status for d in drawn] == ['ok', 'failed:error', 'ok'] and drawn[1].message == 'RuntimeError: mat1 and mat2 in …'
    assert same(drawn[2].image, plain('SD3', ROWS[2]))


def test_a_gpu_that_is_too_small(small, monkeypatch):
    for name in ('SDXL', 'SD1'):
        engine = small(name)

        def full(*a, **kw):
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
        monkeypatch.setattr(next(iter(engine._pipes.values())).unet, 'forward', full)
        with pytest.raises(InputError, match='out of GPU memory: set batch to a smaller number, offload = yes'):
            engine.draw(ROWS)
        assert [d.status for d in engine.draw(ROWS, attempt=1)] == ['failed:memory'] * 3


def test_what_a_safety_checker_takes_away(small, monkeypatch):
    engine = small('SD1')
    pipe = next(iter(engine._pipes.values()))
    monkeypatch.setattr(pipe, 'run_safety_checker', lambda image, device, dtype: (image * 0 - 1, [True]))
    assert engine.draw(ROWS[:1])[0].status == 'failed:filtered'


def test_a_prompt_that_is_too_long_says_so(small):
    for name, cut in (('SDXL', 'tokenizer and tokenizer_2'), ('SD3', 'tokenizer and tokenizer_2 and tokenizer_3')):
        long, fits = small(name).draw([{**ROWS[0], 'prompt': 'A person cooking ' * 9}, ROWS[0]])
        assert long.status == fits.status == 'ok' and long.message == f'the end of the prompt was cut off by {cut}' and fits.message == ''


# Any other pipeline, and what is none.
def test_any_other_pipeline(small, plain, tiny):
    engine = small('SD1', settings=dict(guidance=4))
    assert engine.name == 'SD1' and engine.plan.family is None and engine.settings['guidance'] == 4.0
    drawn = engine.draw(NEGATIVE)
    assert all(same(p, plain('SD1', r, guidance=4.0)) for p, r in zip(pictures(drawn), NEGATIVE))
    noise = torch.randn((1, 4, 8, 8), generator=torch.Generator('cpu').manual_seed(3))
    assert drawn[0].facts['noise_sha256'] == hashlib.sha256(noise.numpy().tobytes()).hexdigest() and drawn[0].facts['noise_drawn'] == 'float32 on the CPU'
    low = small('SD1', dtype='bfloat16').draw(ROWS[:1])[0]
    assert low.status == 'ok' and low.facts['noise_sha256'] == drawn[0].facts['noise_sha256'] and low.facts['dtype'] == 'bfloat16'
    assert small('SD1', dtype='bfloat16').draw(ROWS[:1], attempt=1)[0].facts['dtype'] == 'float32'
    with pytest.raises(InputError, match='free_encoders is for'):
        small('SD1', settings=dict(free_encoders=True))
    with pytest.raises(InputError, match='takes no max_sequence_length'):
        small('SD1', settings=dict(max_sequence_length=64))


def relabel(folder: Path, **changes):
    path = folder / 'model_index.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folders_that_cannot_be_opened(tiny, tmp_path, small):
    def broken(name, spoil, words, **how):
        folder = shutil.copytree(tiny[name], tmp_path / f'{len(list(tmp_path.iterdir()))}')
        spoil(folder)
        with pytest.raises(HistError, match=words) as e:
            small(name, folder=folder, **how)
        assert isinstance(e.value, InputError) and '\n' not in str(e.value)

    def pickled(folder):
        file = folder / 'unet/diffusion_pytorch_model.safetensors'
        file.rename(file.with_name('diffusion_pytorch_model.bin'))
    broken('SDXL', lambda f: (f / 'model_index.json').unlink(), 'holds no model_index.json')
    broken('SDXL', lambda f: (f / 'model_index.json').write_text('{'), 'cannot be read')
    broken('SDXL', lambda f: shutil.rmtree(f / 'tokenizer_2'), 'lacks its part tokenizer_2')
    broken('SD3', lambda f: (f / 'text_encoder_3/model.safetensors').unlink(), 'text_encoder_3 has no weights in safetensors')
    broken('SDXL', pickled, 'a pickle is never read')
    broken('SDXL', lambda f: (f / 'unet/diffusion_pytorch_model.safetensors').write_bytes(b'\0' * 100), 'cannot be loaded as a StableDiffusionXLPipeline')
    broken('SD3', lambda f: (f / 'transformer/config.json').write_text('[]'), 'is no JSON object')
    broken('SD1', lambda f: relabel(f, _class_name='StableDiffusionImg2ImgPipeline'), 'no text-to-image pipeline: it changes a given image')
    broken('SD1', lambda f: relabel(f, _class_name=['pipeline', 'Mine']), 'such code is never run')
    broken('SD1', lambda f: relabel(f, _class_name='Pipeline9'), 'has no Pipeline9')
    for name in ('logging', 'utils', '__version__', '__doc__'):
        broken('SD1', lambda f: relabel(f, _class_name=name), f'no _class_name|has no {name}')
    broken('SDXL', lambda f: (f / 'model_index.json').write_text('[' * 100000), 'cannot be read')
    for cls in ('StableDiffusionXLPipeline', 'FluxPipeline'):
        broken('SD1', lambda f: [shutil.rmtree(p) for p in f.iterdir() if p.is_dir()] + [(f / 'model_index.json').write_text(json.dumps(dict(_class_name=cls)))], 'lacks its part')
    for text in ('x' * 500, 'a/' + 'x' * 500, '/' + 'x' * 300, './' + 'x' * 300):
        with pytest.raises(HistError) as e:
            open_tti(text)
        assert '\n' not in str(e.value)
    broken('SD3', lambda f: None, 'T5 encoder, whose activations leave the range of float16', dtype='float16')
    broken('SDXL', lambda f: None, 'no GPU', device='cuda')
    with pytest.raises(InputError, match='holds a StableDiffusion3Pipeline, and SDXL is a StableDiffusionXLPipeline'):
        small('SDXL', folder=tiny['SD3'])
    with pytest.raises(InputError, match='72x72 pixels cannot be drawn: use multiples of 16'):
        small('SD3', settings=dict(size=72))
    with pytest.raises(SettingsError, match="unknown setting 'guidence'.*did you mean guidance"):
        small('SDXL', settings=dict(guidence=5))
    with pytest.raises(InputError, match='is a single file'):
        small('SDXL', folder=tiny['SDXL'] / 'model_index.json')


def test_weights_of_settings_ini(tiny, tmp_path):
    ini = tmp_path / 'settings.ini'
    ini.write_text(f"[tti]\nSDXL = steps=2 guidance=3 size=64 dtype=float16\n\n[weights]\nSDXL = {tiny['SDXL']}\nSD3 = {tmp_path}/gone\n")
    engine = open_tti('sdxl', ini=ini)
    assert engine.name == 'SDXL' and (engine.settings['steps'], engine.settings['guidance'], engine.settings['width'], engine.settings['dtype']) == (2, 3.0, 64, 'float16')
    with pytest.raises(InputError, match='gone is missing: settings.ini'):
        open_tti('SD3', ini=ini)


def test_the_project_s_own_lines():
    import configparser
    ini = configparser.ConfigParser(interpolation=None, default_section='', delimiters=('=',))
    ini.optionxform = str
    ini.read(root() / 'settings.ini', encoding='utf-8')
    declared = read_tti(DECLARED)
    assert {n: (s['steps'], s['guidance']) for n, s in declared.items()} == {'SDXL': (50, 5.0), 'SD3': (28, 7.0), 'FLUX.1-schnell': (4, 0.0)}
    assert declared['FLUX.1-schnell']['max_sequence_length'] == 256 and 'true_cfg_scale' not in declared['FLUX.1-schnell']
    if ini.has_section('tti'):
        lines = read_tti('\n'.join(f"{k} = {' '.join(v.split())}" for k, v in ini['tti'].items()))
        assert {n: (lines[n]['steps'], lines[n]['guidance']) for n in declared} == {n: (s['steps'], s['guidance']) for n, s in declared.items()}


# The hub, played by a server of our own.
COMMIT = 'a' * 40


class Hub(BaseHTTPRequestHandler):
    "Enough of the hub's interface to look a repository up and fetch its files; every other repository does not exist."
    repos: dict = {}  # id → folder
    asked: list = []

    def log_message(self, *a):
        pass

    def _send(self, status: int, body: bytes = b'', **headers):
        self.send_response(status)
        for k, v in dict({'Content-Length': len(body)}, **{k.replace('_', '-'): v for k, v in headers.items()}).items():
            self.send_header(k, str(v))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split('?')[0].strip('/')
        api = path.startswith('api/models/')
        owner, name, *rest = path.removeprefix('api/models/').split('/')
        repo = f'{owner}/{name}'
        if 'gated' in repo:
            return self._send(401, X_Error_Code='GatedRepo', X_Error_Message='Access is restricted')
        if repo not in self.repos:
            return self._send(401, X_Error_Code='RepoNotFound', X_Error_Message='Repository not found')
        folder = self.repos[repo]
        if 'broken' in repo and not path.endswith('model_index.json'):
            return self._send(500)
        if 'v9' in rest:
            return self._send(404, X_Error_Code='RevisionNotFound')
        files = sorted(p for p in folder.rglob('*') if p.is_file())
        oid = lambda p: hashlib.sha1(p.read_bytes()).hexdigest()
        if api:
            entries = [dict(type='file', path=p.relative_to(folder).as_posix(), size=p.stat().st_size, oid=oid(p)) for p in files]
            found = entries if 'tree' in rest else dict(id=repo, sha=COMMIT, siblings=[dict(rfilename=e['path']) for e in entries])
            return self._send(200, json.dumps(found).encode(), Content_Type='application/json')
        file = folder / '/'.join(rest[2:])
        if not file.is_file():
            return self._send(404, X_Error_Code='EntryNotFound', X_Repo_Commit=COMMIT)
        if self.command == 'GET':
            self.asked.append('/'.join(rest[2:]))
        self._send(200, file.read_bytes(), ETag=f'"{oid(file)}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch, tmp_path):
    "A hub with no repository yet."
    from huggingface_hub import constants
    server = ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    at = f'http://127.0.0.1:{server.server_address[1]}'
    for name, value in dict(ENDPOINT=at, HUGGINGFACE_CO_URL_TEMPLATE=at + '/{repo_id}/resolve/{revision}/{filename}', HF_HUB_OFFLINE=False, HF_HUB_CACHE=str(tmp_path / 'cache'), HF_HUB_DISABLE_XET=True).items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(Hub, 'repos', {})
    monkeypatch.setattr(Hub, 'asked', [])
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_pipeline_from_the_hub(hub, tiny, tmp_path, monkeypatch, plain):
    from huggingface_hub import constants
    folder = shutil.copytree(tiny['SDXL'], tmp_path / 'repo')
    for extra in ('sd_xl.safetensors', 'unet/diffusion_pytorch_model.fp16.safetensors', 'unet/diffusion_pytorch_model.bin', 'vae/code.py'):
        (folder / extra).write_bytes(b'not wanted')
    hub.repos['owner/sdxl'] = folder
    engine = open_tti('owner/sdxl', dict(size=64, steps=4))
    assert engine.settings['revision'] == COMMIT and engine.settings['model'] == engine.name == 'owner/sdxl'
    assert not any('not wanted' in (folder / f).read_text(errors='replace') for f in hub.asked) and 'unet/diffusion_pytorch_model.safetensors' in hub.asked
    assert same(pictures(engine.draw(ROWS[:1]))[0], plain('SDXL', ROWS[0]))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    assert open_tti('owner/sdxl', dict(size=64, steps=4)).settings == engine.settings  # from the cache


def test_what_the_hub_refuses(hub, tiny, tmp_path, monkeypatch):
    def refused(name, kind, *words, **settings):
        with pytest.raises(kind) as e:
            open_tti(name, settings)
        assert '\n' not in str(e.value) and all(w in str(e.value) for w in words), str(e.value)
    refused('owner/gated-model', DownloadError, 'is gated', 'accept its terms at https://huggingface.co/owner/gated-model', 'HF_TOKEN', 'hf auth login', 'settings.ini [weights]')
    refused('owner/no-such', DownloadError, 'owner/no-such is not on the hub, or private')
    hub.repos['owner/chat'] = tmp_path
    refused('owner/chat', InputError, 'owner/chat holds no model_index.json')
    hub.repos['owner/model'] = tiny['SDXL']
    refused('owner/model', DownloadError, 'has no revision v9', revision='v9')
    hub.repos['owner/broken'] = tiny['SDXL']
    refused('owner/broken', DownloadError, 'owner/broken came without its part', 'check the network')
    pickles = hub.repos['owner/pickles'] = shutil.copytree(tiny['SD1'], tmp_path / 'pickles')
    (pickles / 'unet/diffusion_pytorch_model.safetensors').rename(pickles / 'unet/diffusion_pytorch_model.bin')
    refused('owner/pickles', InputError, 'unet has no weights in safetensors')
    video = hub.repos['owner/video'] = shutil.copytree(tiny['SD1'], tmp_path / 'video')
    relabel(video, _class_name='WanPipeline')
    refused('owner/video', InputError, 'it makes films')
    from huggingface_hub import constants
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    refused('owner/new', DownloadError, 'owner/new is not in the local cache and the hub cannot be reached', 'settings.ini [weights]')
    refused('owner/gated-new', DownloadError, 'cannot be reached')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', 'http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}')
    monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')
    refused('owner/other', DownloadError, 'owner/other')


# From the plan to the files.
@pytest.mark.parametrize('name', THREE)
def test_a_plan_is_the_same_files_whole_in_shards_and_resumed(name, small, tmp_path):
    "PNG, record and table of each row, byte for byte: drawn in one go, in two shards with a batch of another size, and again after two files were lost."
    from histchrono.histvis.generate import collect, generate
    from histchrono.histvis.imageplan import plan_images
    from histchrono.histvis.prompts import choose_activities, choose_periods
    files = lambda d: {p.relative_to(d).as_posix(): p.read_bytes() for p in d.rglob('*') if p.is_file() and not p.name.startswith('.')}
    engine, arms = small(name), [name] if name.startswith('FLUX') else [name, f'{name}:mitigated_appendix_e']
    made = {}
    for how, shards in (('whole', 1), ('shards', 2), ('lost', 1)):
        d = tmp_path / how
        plan_images(d, arms, engine, choose_activities(2), choose_periods(['17th', '1950s']), 1, seed=42)
        for k in range(shards):
            assert generate(d, engine, shard=k, shards=shards, progress=False)['failed'] == 0
        if how == 'lost':
            gone = sorted(d.glob('*/*/*.png'))[:2]
            for p in gone: p.unlink()
            assert generate(d, engine, progress=False)['drawn'] == 2
        assert collect(d)['ok'] == 4 * len(arms)
        made[how] = files(d)
    assert made['whole'] == made['shards'] == made['lost'] and sum(f.endswith('.png') and not f.startswith('sheets') for f in made['whole']) == 4 * len(arms)
