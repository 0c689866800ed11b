"""An evaluation that is killed and run again asks nothing twice but the batch in flight, and ends with the same bytes."""
from collections import Counter
from pathlib import Path
import os, random, signal, subprocess, sys, time

import pyarrow.parquet as pq
import pytest

from histchrono.chronoscope.chainfile import make_chain, write_chains
from histchrono.chronoscope.score import score

BATCH = 4
SCRIPT = '''
import os, sys, time, json
from histchrono.chronoscope.evaluate import evaluate
from histchrono.models.chat import Prompt
from histchrono.models.engines import Completion
chains, out, log, pause = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])

class Slow:
    "Answers by the last character codes of the prompt, slowly, and writes down what it is asked before it answers."
    batch_size, identity = %d, dict(model='slow')
    def begin(self, system): pass
    def encode(self, msgs): return Prompt(tuple(map(ord, json.dumps(msgs))))
    def complete(self, prompts):
        with open(log, 'a') as f:
            for p in prompts: f.write(''.join(map(chr, p)) + '\\n')
            f.flush(); os.fsync(f.fileno())
        time.sleep(pause)
        return [Completion(f'answer {sum(p) %% 97}') for p in prompts]

evaluate(chains, 'slow', ('gold', 'self', 'questions_only', 'explicit'), out, engine=Slow(), progress=False)
''' % BATCH


def turn(i, k):
    return dict(turn_id=str(k), question=f'question {i % 9}.{k}?', answer=f'answer {(7 * i + k) % 97}', answer_qid='', answer_kind='entity', accepted=[], property='P6', subject_qid=f'Q{i % 5}',
                subject_label=f'town {i % 9}', subject_kind='city', year=1990 + k, date='', explicit_time=k == 1, present_answer=f'answer {i % 97}', present_qid='', drift_eligible=True, extra='')


@pytest.fixture
def place(tmp_path):
    chains = [make_chain('temporal_narrative', 2025, '2025-01-01', [turn(i, k) for k in range(1, 2 + i % 4 + 1)], 2025, 'strict') for i in range(24)]
    write_chains(chains, tmp_path/'chains.parquet')
    (tmp_path/'run.py').write_text(SCRIPT)
    return tmp_path


def start(place, out, log, pause):
    return subprocess.Popen([sys.executable, str(place/'run.py'), str(place/'chains.parquet'), str(place/out), str(place/log), str(pause)],
                            env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(place, out, log):
    p = start(place, out, log, 0)
    _, err = p.communicate(timeout=300)
    assert p.returncode == 0, err[-2000:]


def asked(place, log): return (place/log).read_text().splitlines() if (place/log).exists() else []


def results(place, out):
    files = sorted((place/out).glob('predictions/*.parquet')) + [place/out/'manifest.json', place/out/'chains.parquet']
    return {f.name: f.read_bytes() for f in files}


def kill_after(place, out, log, prompts, pause=0.05):
    "Start a run and kill -9 it once it has asked about `prompts` prompts."
    p = start(place, out, log, pause)
    deadline = time.monotonic() + 300
    while len(asked(place, log)) < prompts and p.poll() is None and time.monotonic() < deadline: time.sleep(0.01)
    running = p.poll() is None
    p.send_signal(signal.SIGKILL) if running else None
    p.wait()
    p.stderr.close()
    return running


def test_kill_and_resume(place):
    finish(place, 'whole', 'whole.log')
    everything = asked(place, 'whole.log')
    assert len(everything) == len(set(everything)) > 60
    draw, kills, at = random.Random(2), 0, 0
    for _ in range(10):
        at += draw.randint(1, len(everything) // 9)
        kills += kill_after(place, 'cut', 'cut.log', at)
        assert not (place/'cut'/'manifest.json').exists()
    assert kills >= 8
    finish(place, 'cut', 'cut.log')
    times = Counter(asked(place, 'cut.log'))
    assert set(times) == set(everything)
    assert sum(n - 1 for n in times.values()) <= BATCH * kills  # nothing twice but the batches in flight
    assert results(place, 'cut') == results(place, 'whole')
    a, b = (score(place/o, n_boot=100) for o in ('cut', 'whole'))
    assert a.equals(b)


def test_torn_shard_costs_its_own_prompts(place):
    finish(place, 'whole', 'whole.log')
    before = results(place, 'whole')
    shard = sorted(place.glob('whole/completions/*/*.parquet'))[0]
    lost = pq.read_metadata(shard).num_rows
    shard.write_bytes(shard.read_bytes()[:-20])
    finish(place, 'whole', 'again.log')
    assert len(asked(place, 'again.log')) == lost > 0
    assert results(place, 'whole') == before


def test_hash_seed_does_not_matter(place, monkeypatch):
    for seed in ('0', '1'):
        monkeypatch.setenv('PYTHONHASHSEED', seed)
        finish(place, f'seed{seed}', f'seed{seed}.log')
    assert results(place, 'seed0') == results(place, 'seed1')
    assert asked(place, 'seed0.log') == asked(place, 'seed1.log')


def tiny_checkpoint(folder):
    "Random weights of the Qwen3 architecture in its real format."
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(tokenizer_object=t, eos_token='<|im_end|>', additional_special_tokens=['<|im_start|>'], padding_side='right')
    tok.chat_template = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tok) + 16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
                         eos_token_id=tok.eos_token_id, bos_token_id=None, pad_token_id=None, initializer_range=0.3, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def test_a_paper_model_by_name_whatever_the_batch(place, monkeypatch):
    "Qwen3-4B's row, its path swapped in settings: the same predictions for batches of 1, 2 and 8, and for a second run."
    import json
    from histchrono.chronoscope.chainfile import read_chains
    from histchrono.chronoscope.evaluate import evaluate
    from histchrono.core.paths import root
    home, real = place/'home', root()
    home.mkdir()
    (home/'data').symlink_to(real/'data')
    ini = (real/'settings.ini').read_text().partition('[weights]')[0]
    weights = tiny_checkpoint(place/'tiny')
    write_chains(read_chains(place/'chains.parquet')[:8], place/'few.parquet')
    monkeypatch.setenv('HISTCHRONO_HOME', str(home))
    seen = {}
    for run, size in (('one', 1), ('two', 2), ('eight', 8), ('again', 8)):
        (home/'settings.ini').write_text(ini.replace('batch_size = 32', f'batch_size = {size}').replace('threads = 2', 'threads = 1').replace('max_new_tokens = 24', 'max_new_tokens = 5') + f'\n[weights]\nQwen3-4B = {weights}\n')
        counts = evaluate(place/'few.parquet', 'Qwen3-4B', out=place/run, progress=False)
        assert counts['errors'] == 0 and counts['asked'] == counts['prompts'] > 20
        seen[run] = {f.name: f.read_bytes() for f in sorted((place/run/'predictions').iterdir())}
        assert json.loads((place/run/'manifest.json').read_text())['machine']['architecture'] == 'Qwen3ForCausalLM'
    assert seen['eight'] == seen['again']
    said = {run: {f.stem: pq.read_table(f).drop_columns(['cached_tokens', 'margin', 'notes']).to_pylist() for f in sorted((place/run/'predictions').iterdir())} for run in seen}
    assert said['one'] == said['two'] == said['eight'] # how much came out of a cache depends on the batch, what was said does not
    assert (place/'eight'/'manifest.json').read_bytes() == (place/'again'/'manifest.json').read_bytes()


CONVERSATIONS = '''
import sys, time
from histchrono.chronoscope.evaluate import evaluate
from histchrono.models.engines import Session, TransformersEngine
from histchrono.models.parallel import Forked
chains, out, log, pause, weights = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5]

class Slow(Session):
    "A real session that waits before it answers, and writes down how many prompts it was asked."
    def ask(self, prompts, after=None, more=False):
        with open(log, 'a') as f: f.write(''.join(f'{hash(p) % 10**9}\\n' for p in prompts))
        time.sleep(pause)
        return super().ask(prompts, after, more)

class Engine(TransformersEngine):
    def session(self): return Slow(self)

engine = Engine(weights, 'tiny', threads=1, batch_size=4, max_new_tokens=5, device='cpu')
evaluate(chains, 'tiny', ('gold', 'self', 'questions_only', 'explicit'), out, engine=Forked(engine, 2), progress=False)
'''


def test_kept_caches_and_two_processes(place):
    "A real model in two forked children, killed three times at random: the predictions of an uninterrupted run, to the byte."
    (place/'run.py').write_text(CONVERSATIONS)
    weights = str(tiny_checkpoint(place/'tiny'))

    def run(out, log, pause):
        return subprocess.Popen([sys.executable, str(place/'run.py'), str(place/'chains.parquet'), str(place/out), str(place/log), str(pause), weights],
                                env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), 'PYTHONHASHSEED': '0'}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert run('whole', 'whole.log', 0).wait(300) == 0
    everything, draw, seen = asked(place, 'whole.log'), random.Random(3), 0
    for _ in range(3):
        p, at, deadline = run('cut', 'cut.log', .1), len(asked(place, 'cut.log')) + draw.randint(8, len(everything) // 4), time.monotonic() + 120
        while len(asked(place, 'cut.log')) < at and p.poll() is None and time.monotonic() < deadline: time.sleep(.01)
        assert p.poll() is None
        p.send_signal(signal.SIGKILL)
        p.wait()
        kept = sum(pq.read_metadata(f).num_rows for f in place.glob('cut/completions/*/*.parquet'))
        assert kept >= seen
        seen = kept
    assert seen and not (place/'cut'/'manifest.json').exists()
    assert run('cut', 'cut.log', 0).wait(300) == 0
    assert results(place, 'cut') == results(place, 'whole')
    assert set(asked(place, 'cut.log')) == set(everything)
