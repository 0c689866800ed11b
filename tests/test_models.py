"""Each open model of ChronoScope, by its registry name, on a tiny checkpoint of its own architecture: evaluate says what a plain loop says."""
import configparser
import json
import shutil
from functools import cache
from pathlib import Path

import pytest

from histchrono.chronoscope.chainfile import make_chain, write_chains
from histchrono.chronoscope.evaluate import evaluate, system_prompt
from histchrono.chronoscope.matching import completion_status, extract_answer
from histchrono.core.io import read_parquet
from histchrono.core.paths import root
from histchrono.core.settings import load
from histchrono.models.engines import open_engine
from histchrono.models.registry import get, models
from histchrono.models.vllm_engine import ends_of
from tiny import KINDS, edit, save

ROOT = root()
LIMIT, SETTINGS = 6, ('gold', 'self')
DATE = '26 Jul 2024'


def turn(i, k):
    return dict(turn_id=str(k), question=f'{"Who led the town" if k == 1 else "And then,"} number {i * i}{", if one may ask so late" * (i % 3)}, in {1990 + 3 * k}?', answer=f'party {"of the lake " * (i % 2)}{(7 * i + k) % 13}',
                answer_qid='', answer_kind='entity', accepted=[], property='P6', subject_qid=f'Q{i}', subject_label=f'town {i}', subject_kind='city', year=1990 + 3 * k, date='', explicit_time=True,
                present_answer='party 99', present_qid='', drift_eligible=True, extra='')


CHAINS = [make_chain('temporal_narrative', 2025, '2025-01-01', [turn(i, k) for k in range(1, 3 + i % 3)], 2025, 'strict') for i in range(5)]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A project whose settings.ini names a tiny checkpoint for every open model."
    home = tmp_path_factory.mktemp('models')
    (home / 'data').symlink_to(ROOT / 'data')
    write_chains(CHAINS, home / 'chains.parquet')
    for name in KINDS:
        save(name, home / 'weights' / name)
    settings(home)
    return home


def settings(home, **values):
    "The real settings.ini, profile `paper`, with a small budget and other weights."
    ini = configparser.ConfigParser(interpolation=None, delimiters=('=',))
    ini.optionxform = str
    ini.read(ROOT / 'settings.ini', encoding='utf-8')
    ini['paper'].update({'threads': '1', 'batch_size': '8', 'max_new_tokens': str(LIMIT), 'dtype': 'float32', **{k: str(v) for k, v in values.items()}})
    ini['weights'] = {name: str(home / 'weights' / name) for name in KINDS}
    with open(home / 'settings.ini', 'w', encoding='utf-8') as f:
        ini.write(f)


def run(home, name, out, monkeypatch, engine=None, **values):
    "The public call, as profile `paper` makes it; predictions by (setting, chain, turn), counts and manifest."
    monkeypatch.setenv('HISTCHRONO_HOME', str(home))
    settings(home, **values)
    shutil.rmtree(home / out, ignore_errors=True)
    counts = evaluate(home / 'chains.parquet', name, SETTINGS, home / out, engine=engine, profile='paper', progress=False)
    said = {}
    for s in SETTINGS:
        for r in read_parquet(home / out / 'predictions' / f'{s}.parquet').to_pylist():
            said[s, r['chain_id'], r['turn']] = r
    return said, counts, json.loads((home / out / 'manifest.json').read_text())


def flat_messages(setting, chain, k, own):
    "What stands before turn k and its question, as roles and texts."
    flat = [('system', system_prompt())]
    for t, said in zip(chain['turns'][:k], own):
        flat.append(('user', t['question']))
        if shown := (t['answer'] if setting == 'gold' else said):
            flat.append(('assistant', shown))
    return [*flat, ('user', chain['turns'][k]['question'])]


def messages(setting, chain, k, own, folded):
    "What turn k is asked with, written down a second time: roles alternate, the system prompt first or in the first question."
    flat = flat_messages(setting, chain, k, own)
    if folded:
        flat = [('user', flat[0][1]), *flat[1:]]
    out = []
    for role, text in flat:
        if out and out[-1]['role'] == role:
            out[-1]['content'] += '\n\n' + text.strip()
        else:
            out.append(dict(role=role, content=text.strip()))
    return out


def plain_loop(folder, name, dtype='float32', obey=False):
    "One prompt at a time through the library's own generate; `obey` takes the checkpoint's generation_config.json as it is."
    import torch
    import transformers
    kind, args = KINDS[name], get(name).template
    tok = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ends = {tok.convert_tokens_to_ids(t) for t in (*kind.ends, kind.special[0])}
    greedy = transformers.GenerationConfig(do_sample=False, num_beams=1, temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0, max_new_tokens=LIMIT, eos_token_id=sorted(ends), pad_token_id=0)
    if not obey:
        model.generation_config = greedy
    torch.manual_seed(5)
    out, prompts = {}, {}
    for setting in SETTINGS:
        for chain in CHAINS:
            own = []
            for k in range(len(chain['turns'])):
                msgs = messages(setting, chain, k, own, kind.folded)
                if kind.template is None:
                    text = '\n'.join({'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m['role']] + m['content'] for m in msgs) + '\nAssistant:'
                    ids = [tok.bos_token_id, *tok(text, add_special_tokens=False).input_ids]
                else:
                    text = tok.apply_chat_template(msgs, tokenize=False, add_generation_prompt=True, date_string=DATE, **args)
                    ids = tok(text, add_special_tokens=False).input_ids
                with torch.inference_mode():
                    new = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **(dict(max_new_tokens=LIMIT, pad_token_id=0) if obey else dict(generation_config=greedy)))[0, len(ids):].tolist()
                ended = new[-1] in ends
                said = tok.decode(new[:-1] if ended else new, skip_special_tokens=True)
                reason = 'stop' if ended else 'length'
                own.append(extract_answer(said) if completion_status(said, reason) == 'ok' else '')
                out[setting, chain['chain_id'], k + 1] = dict(raw=said, prompt_tokens=len(ids), completion_tokens=len(new), finish_reason=reason)
                prompts[setting, chain['chain_id'], k + 1] = ids, text
    return out, prompts, tok


@cache
def expected(folder, name, dtype='float32'):
    return plain_loop(folder, name, dtype)


def differences(said, plain):
    "Turns in which a run and the plain loop differ in anything that is compared."
    assert said.keys() == plain.keys() and len(plain) == 2 * sum(len(c['turns']) for c in CHAINS)
    return [k for k, p in plain.items() if any(said[k][c] != p[c] for c in p)]


OPEN = [m.name for m in models().values() if m.engines.get('transformers') in ('real weights', 'tiny checkpoint') and m.paper in ('chronoscope', 'project')]


def test_every_open_model_has_a_tiny_checkpoint():
    assert sorted(OPEN) == sorted(KINDS)
    named = 'Qwen2.5-7B-Instruct Qwen3-4B Llama-3.1-8B-Instruct Mistral-7B-Instruct Gemma-7B-it DeepSeek-V3 deepseek-llm-7b-chat Llama-3-8B-Instruct Llama-3-70B-Instruct Phi-3 Phi-4 Nemotron-Mini-4B-Instruct SmolLM2-135M-Instruct Gemma-3-270M'
    assert set(named.split()) <= set(OPEN)


@pytest.mark.parametrize('name', list(KINDS))
def test_as_the_plain_loop(place, monkeypatch, name):
    kind, folder = KINDS[name], place / 'weights' / name
    said, counts, manifest = run(place, name, f'run-{name}', monkeypatch)
    plain, prompts, tok = expected(folder, name)
    assert manifest['machine']['architecture'] == f'{kind.architecture}ForCausalLM'
    assert counts['errors'] == 0
    assert not differences(said, plain)
    assert len({p['raw'] for p in plain.values()}) > 5  # the weights answer prompts differently, so equality says something
    assert {p['finish_reason'] for p in plain.values()} == {'stop', 'length'}
    for key, (ids, text) in prompts.items():
        if kind.begins is not None:
            assert ids.count(tok.bos_token_id) == kind.begins and (not kind.begins or ids[0] == tok.bos_token_id)
        assert text.count(system_prompt()) == 1
        assert ('system_folded' in said[key]['notes']) == kind.folded
        assert ('plain_text' in said[key]['notes']) == (kind.template is None)
    engine, chain = open_engine(name, load('paper')), CHAINS[1]
    for k in range(len(chain['turns'])):  # the very ids
        asked = [dict(role=r, content=c) for r, c in flat_messages('gold', chain, k, [''] * k)]
        assert list(engine.encode(asked).ids) == prompts['gold', chain['chain_id'], k + 1][0]
    assert engine.ends == ends_of(folder, tok) == {tok.convert_tokens_to_ids(t) for t in (*kind.ends, kind.special[0])}
    first, later = (prompts['gold', CHAINS[1]['chain_id'], k][1] for k in (1, 2))
    marks = {'Qwen3-4B': ('<think>\n\n</think>\n\n', 1), 'Llama-3.1-8B-Instruct': (f'Today Date: {DATE}', 1), 'Mistral-7B-Instruct': ('[INST]', 2), 'Gemma-7B-it': ('<start_of_turn>model\n', 2), 'DeepSeek-V3': ('<｜Assistant｜>', 2), 'deepseek-llm-7b-chat': ('Assistant:', 2),
             'Phi-3': ('<|assistant|>\n', 2), 'Phi-4': ('<|im_sep|>', 5), 'Nemotron-Mini-4B-Instruct': ('<extra_id_1>', 4), 'Gemma-3-270M': ('\nUser: ', 2)}
    if name in marks:
        assert later.count(marks[name][0]) == marks[name][1], later
    if name == 'Mistral-7B-Instruct':  # the system prompt goes with the last question
        assert later.index('[/INST]') < later.index(system_prompt()) and first.index(system_prompt()) < first.index('[/INST]')


@pytest.mark.parametrize('name', ['Qwen2.5-7B-Instruct', 'Qwen3-4B', 'Llama-3.1-8B-Instruct', 'Mistral-7B-Instruct', 'Gemma-7B-it', 'Phi-3', 'Gemma-3-270M'])  # DeepSeek-V3's experts have no 64-bit arithmetic in torch
def test_in_64_bits_no_batch_size_changes_a_token(place, monkeypatch, name):
    plain, *_ = expected(place / 'weights' / name, name, 'float64')
    for size in (1, 2, 8):
        said, *_ = run(place, name, f'wide-{name}-{size}', monkeypatch, dtype='float64', batch_size=size)
        assert not differences(said, plain), size


# The same comparison must fail when something is wrong. Each mutant changes one thing; all of them are expected to differ.

def other(home, name, tag):
    "A copy of the project in which one checkpoint may be changed."
    new = home.parent / f'{home.name}-{tag}'
    shutil.rmtree(new, ignore_errors=True)
    (new / 'weights').mkdir(parents=True)
    (new / 'data').symlink_to(ROOT / 'data')
    shutil.copy(home / 'chains.parquet', new)
    for n in KINDS:
        if n != name:
            (new / 'weights' / n).symlink_to(home / 'weights' / n)
    shutil.copytree(home / 'weights' / name, new / 'weights' / name)
    return new, new / 'weights' / name


def expected_to_differ(home, name, monkeypatch, tag, plain, **values):
    said, *_ = run(home, name, f'mutant-{tag}', monkeypatch, **values)
    assert differences(said, plain), f'{tag} was not noticed'


TEMPLATES = {
    'the date of today': ('Llama-3.1-8B-Instruct', lambda t: t.replace('date_string if date_string is defined else ', '')),
    'a second begin token': ('Llama-3-8B-Instruct', lambda t: '{{ bos_token }}' + t),
    'no begin token': ('Gemma-7B-it', lambda t: t.replace('{{ bos_token }}', '', 1)),
    'a generation prompt without its end': ('Qwen2.5-7B-Instruct', lambda t: t.replace('assistant\n{% endif %}', 'assistant{% endif %}')),
    'thinking': ('Qwen3-4B', lambda t: t.replace('not enable_thinking', 'enable_thinking')),
    'the system prompt first': ('Mistral-7B-Instruct', lambda t: t.replace('loop.last and system', 'loop.first and system')),
    'another model\'s template': ('Phi-4', lambda t: KINDS['Qwen2.5-7B-Instruct'].template),
}


@pytest.mark.parametrize('what', list(TEMPLATES))
def test_another_template_is_noticed(place, monkeypatch, what):
    name, change = TEMPLATES[what]
    home, folder = other(place, name, 'template')
    path = folder / 'chat_template.jinja'
    assert change(path.read_text()) != path.read_text()
    path.write_text(change(path.read_text()))
    expected_to_differ(home, name, monkeypatch, what, expected(place / 'weights' / name, name)[0])


def pad_right(prompts, pad, *rest):
    import torch
    n = max(map(len, prompts))
    return torch.tensor([list(p) + [pad] * (n - len(p)) for p in prompts]), torch.tensor([[1] * len(p) + [0] * (n - len(p)) for p in prompts])


def blind(forward, lose):
    def wrapped(self, *args, **kw):
        if lose == 'attention_mask' and kw.get('attention_mask') is not None:
            kw['attention_mask'] = kw['attention_mask'] * 0 + 1
        if lose == 'position_ids':
            kw.pop('position_ids', None)
        return forward(self, *args, **kw)
    return wrapped


PADDING = [(what, name) for what, names in {  # positions are relative: a shift shows only where padding stands behind a kept beginning
    'right padding': ('Qwen2.5-7B-Instruct', 'Mistral-7B-Instruct', 'Phi-3', 'Gemma-3-270M'),
    'attention_mask': ('Llama-3.1-8B-Instruct', 'Mistral-7B-Instruct', 'DeepSeek-V3', 'Gemma-3-270M'),
    'position_ids': ('Llama-3.1-8B-Instruct', 'Qwen2.5-7B-Instruct', 'DeepSeek-V3'),
}.items() for name in names]


@pytest.mark.parametrize('what, name', PADDING)
def test_wrong_padding_is_noticed(place, monkeypatch, what, name):
    import transformers
    if what == 'right padding':
        from histchrono.models import decoding
        monkeypatch.setattr(decoding, 'pad_left', pad_right)
    else:
        cls = getattr(transformers, f'{KINDS[name].architecture}ForCausalLM')
        monkeypatch.setattr(cls, 'forward', blind(cls.forward, what))
    expected_to_differ(place, name, monkeypatch, f'{what} {name}', expected(place / 'weights' / name, name)[0])


@pytest.mark.parametrize('name', ['Llama-3.1-8B-Instruct', 'Qwen3-4B', 'Phi-3'])
def test_generation_settings_of_a_checkpoint(place, monkeypatch, name):
    "Sampling that a checkpoint declares has no effect; whoever obeyed it would be noticed; its end tokens do count."
    home, folder = other(place, name, 'generation')
    plain = expected(place / 'weights' / name, name)[0]
    path = folder / 'generation_config.json'
    edit(path, do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.1)
    said, *_ = run(home, name, 'sampling', monkeypatch)
    assert not differences(said, plain)
    assert differences(plain_loop(folder, name, obey=True)[0], plain)
    edit(path, drop=('do_sample', 'temperature', 'top_k'), repetition_penalty=1.1)
    assert differences(plain_loop(folder, name, obey=True)[0], plain)
    tok = expected(place / 'weights' / name, name)[2]
    edit(path, drop=('repetition_penalty',), eos_token_id=tok.convert_tokens_to_ids(KINDS[name].special[0]))  # the others are dropped
    expected_to_differ(home, name, monkeypatch, 'a dropped end token', plain)
    edit(path, eos_token_id=sorted(set(tok('o e a n t r', add_special_tokens=False).input_ids)))
    expected_to_differ(home, name, monkeypatch, 'another end token', plain)


def test_no_template_but_the_tokenizers(place, monkeypatch):
    "A tokenizer whose template is gone is asked in plain text, and that is noticed."
    name = 'Nemotron-Mini-4B-Instruct'
    home, folder = other(place, name, 'plain')
    (folder / 'chat_template.jinja').unlink()
    expected_to_differ(home, name, monkeypatch, 'no template', expected(place / 'weights' / name, name)[0])


# vLLM, on a stand-in that is played by transformers: there is no GPU here, and the registry says that vLLM was never run.

@pytest.fixture
def standin(monkeypatch, tmp_path):
    import sys
    monkeypatch.syspath_prepend(str(Path(__file__).parent / 'standins'))
    monkeypatch.delitem(sys.modules, 'vllm', raising=False)
    monkeypatch.setenv('STANDIN_LOG', str(tmp_path / 'log'))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
    yield tmp_path / 'log'
    sys.modules.pop('vllm', None)


@pytest.mark.parametrize('name', ['Qwen3-4B', 'Llama-3.1-8B-Instruct', 'Gemma-7B-it'])
def test_vllm_on_a_standin_says_what_the_plain_loop_says(place, monkeypatch, standin, name):
    said, counts, manifest = run(place, name, f'vllm-{name}', monkeypatch, engine='vllm')
    assert not differences(said, expected(place / 'weights' / name, name)[0])
    assert manifest['machine']['architecture'] == f'{KINDS[name].architecture}ForCausalLM'
    identity = json.loads(next((place / f'vllm-{name}').glob('completions/*/identity.json')).read_text())
    assert identity['engine'] == 'vllm' and str(place) not in json.dumps([identity, manifest])
    assert len(standin.read_text().splitlines()) == counts['asked']
    assert get(name).engines['vllm'] == 'stand-in'


def test_a_result_that_vllm_leaves_out_is_asked_again(place, monkeypatch, standin):
    monkeypatch.setenv('STANDIN_DROP', '1')
    name, out = 'Llama-3-8B-Instruct', place / 'vllm-drop'
    said, counts, _ = run(place, name, out.name, monkeypatch, engine='vllm')
    assert counts['errors'] == 1 and sum(r['finish_reason'] == 'missing' for r in said.values()) == 1
    monkeypatch.delenv('STANDIN_DROP')
    again = evaluate(place / 'chains.parquet', name, SETTINGS, out, profile='paper', progress=False, engine='vllm')
    assert again['errors'] == 0 and 1 <= again['asked'] < counts['asked'] / 2
    rows = {(s, r['chain_id'], r['turn']): r for s in SETTINGS for r in read_parquet(out / 'predictions' / f'{s}.parquet').to_pylist()}
    assert not differences(rows, expected(place / 'weights' / name, name)[0])


def test_a_vllm_copy_on_each_gpu(place, monkeypatch, standin):
    "A conversation stays on its copy; a copy that dies fails its own prompts; one that cannot start is one line."
    from histchrono.core.errors import InputError
    monkeypatch.setenv('HISTCHRONO_HOME', str(place))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '2,3')
    settings(place)
    name = 'Llama-3-8B-Instruct'
    ask = [(c['chain_id'], k, [dict(role=r, content=t) for r, t in flat_messages('gold', c, k, [''] * k)]) for c in CHAINS for k in range(len(c['turns']))]
    plain = expected(place / 'weights' / name, name)[0]
    ask += [(f'alone {i}', 0, [dict(role='user', content=f'Who was it in {i}?')]) for i in range(4)]
    answers = lambda e: dict(e.stream({f'{c} {k}': e.encode(m).ids for c, k, m in ask}))
    die = place / 'die'
    monkeypatch.setenv('STANDIN_DIE', str(die))
    engine = open_engine(name, load('paper'), 'vllm')
    said = answers(engine)
    assert all(c.status == 'ok' for c in said.values()) and all(said[f'{c} {k}'].text == plain['gold', c, k + 1]['raw'] for c, k, _ in ask if ('gold', c, k + 1) in plain)
    lines = [line.split() for line in standin.read_text().splitlines()]
    where = {tuple(map(int, ids)): (gpu, pid) for gpu, pid, _, *ids in lines}
    homes = {c: {where[engine.encode(m).ids] for d, _, m in ask if d == c} for c, _, _ in ask}
    assert {len(h) for h in homes.values()} == {1} and {g for h in homes.values() for g, _ in h} == {'2', '3'}
    assert engine.usage()['requests'] == len(ask) and engine.usage()['cached_tokens'] == sum(int(line[2]) for line in lines) > 0
    die.write_text('3')
    half = answers(engine)
    engine.close()
    lost = {f'{c} {k}' for c, k, _ in ask if next(iter(homes[c]))[0] == '3'}
    assert {key for key, c in half.items() if c.status == 'error'} == lost and {half[key].finish_reason for key in lost} == {'replica_lost'}
    assert lost and all(half[key].text == said[key].text for key in half.keys() - lost)
    monkeypatch.setenv('STANDIN_BROKEN', '1')
    for gpus in ('2,3', '2'):
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', gpus)
        with pytest.raises(InputError, match='vLLM cannot start Llama-3-8B-Instruct .RuntimeError: no kernel image is available.'):
            answers(open_engine(name, load('paper'), 'vllm'))  # its processes end with it
