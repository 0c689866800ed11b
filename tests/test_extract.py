"""Stage 1 under strain: killed and run again, two at once, odd bytes, huge lines, who may be living."""
import bz2, gzip, io, json, os, signal, subprocess, sys, time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard

from histchrono.chronoscope import spill
from histchrono.chronoscope.dump import IncompleteInput, extract
from histchrono.chronoscope.synthdump import synth_dump, synth_lines
from histchrono.core.errors import DiskError, InputError

FILES = ('statements.parquet', 'entities.parquet', 'living.parquet', 'report.json', 'manifest.json')
BLOCK = 40_000


def read(folder): return {n: (folder/n).read_bytes() for n in FILES}
def names(folder): return sorted(p.name for p in folder.iterdir())
def array(lines): return b'[\n' + b',\n'.join(lines) + b'\n]\n'
def item(n, **k): return json.dumps({'type': 'item', 'id': f'Q{n}', 'labels': {'en': {'value': f'Thing {n}'}}, **k}).encode()
def value(v, kind='wikibase-entityid', **k): return {'mainsnak': {'snaktype': 'value', 'datavalue': {'type': kind, 'value': v}}, 'rank': 'normal', **k}
def ref(n): return value({'id': f'Q{n}'})


@pytest.fixture(scope='module')
def dump(tmp_path_factory):
    p = tmp_path_factory.mktemp('synth')/'d.json.gz'
    synth_dump(600, p)
    return p


@pytest.fixture(scope='module')
def whole(dump, tmp_path_factory):
    "The result of a run that nothing interrupts."
    out = tmp_path_factory.mktemp('whole')/'out'
    extract(dump, out, block_size=BLOCK, group=4)
    return read(out)


# --- killed and run again

SLOW = """
import sys, time
from histchrono.chronoscope import dump, spill
add = spill.Spill.add
def slow(self, done):
    add(self, done); print(self.groups, flush=True); time.sleep(.02)
spill.Spill.add = slow
dump.extract(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]), block_size=%d, group=4)
""" % BLOCK


def start(dump, out, workers=2):
    hears = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts jobs in the background deaf to Ctrl-C
    return subprocess.Popen([sys.executable, '-c', SLOW, str(dump), str(out), str(workers)], stdout=subprocess.PIPE, text=True, preexec_fn=hears)


def kill_after(dump, out, groups, how=signal.SIGKILL, workers=2):
    "Start a run and end it after some groups."
    p = start(dump, out, workers)
    for line in p.stdout:
        if int(line) >= groups: break
    children = [int(x) for x in Path(f'/proc/{p.pid}/task/{p.pid}/children').read_text().split()] if Path('/proc/self/task').exists() else []
    p.send_signal(how)
    p.wait(20)
    for _ in range(200):
        if not any(Path(f'/proc/{c}').exists() for c in children): break
        time.sleep(.05)
    else: raise AssertionError('a worker outlived its parent')


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_and_run_again(dump, whole, tmp_path, how, monkeypatch):
    out = tmp_path/'out'
    kill_after(dump, out, 3, how)
    assert [n[:7] for n in names(out)] == ['.spill-']
    kill_after(dump, out, 6, how, workers=1)  # and once more, with another number of workers
    taken, real = [], spill.Spill.__init__
    monkeypatch.setattr(spill.Spill, '__init__', lambda self, *a: (real(self, *a), taken.append(self.groups))[0])
    extract(dump, out, block_size=BLOCK, group=4, workers=2)
    assert taken[0] >= 6
    assert read(out) == whole and names(out) == sorted(FILES)


@pytest.mark.parametrize('change', ['input', 'same size and date', 'properties', 'blocks'])
def test_another_input_or_setting_begins_again(dump, tmp_path, change):
    copy, out, settings = tmp_path/'d.json', tmp_path/'out', {}
    copy.write_bytes(gzip.decompress(dump.read_bytes()))
    kill_after(copy, out, 3)
    if change == 'input': synth_dump(500, copy, 8)
    if change == 'same size and date':
        was = copy.stat()
        with open(copy, 'r+b') as f:
            data = f.read().replace(b'"P39"', b'"P35"', 5)
            f.seek(0)
            f.write(data)
        os.utime(copy, ns=(was.st_atime_ns, was.st_mtime_ns))
    if change == 'properties': settings = dict(properties='P39')
    extract(copy, out, workers=2, group=4, block_size=BLOCK + (change == 'blocks'), **settings)
    assert names(out) == sorted(FILES)
    extract(copy, tmp_path/'new', **settings)
    assert read(out) == read(tmp_path/'new')


def test_a_damaged_group_is_read_again(dump, whole, tmp_path):
    out = tmp_path/'out'
    kill_after(dump, out, 4)
    next(out.glob('.spill-*/000001.row')).write_bytes(b'short')
    extract(dump, out, block_size=BLOCK, group=4)
    assert read(out) == whole


def test_two_at_once(dump, whole, tmp_path):
    out = tmp_path/'out'
    p = start(dump, out)
    p.stdout.readline()
    with pytest.raises(InputError, match=rf'another extract \(process {p.pid}\) is writing to .*out: wait'): extract(dump, out)
    extract(dump, tmp_path/'other')
    p.kill(); p.wait(20)
    for _ in range(100):  # workers still hold nothing, but the system may take a moment
        try: extract(dump, out, block_size=BLOCK, group=4)
        except InputError: time.sleep(.05)
        else: break
    assert read(out) == whole


def test_what_dead_runs_left_goes(dump, tmp_path):
    out = tmp_path/'out'
    out.mkdir()
    (out/'.spill-0123456789abcdef').mkdir(); (out/'.spill-0123456789abcdef'/'000000.row').write_bytes(b'x')
    (out/'.statements.parquet.abcd1234.tmp').write_bytes(b'x'); (out/'notes.txt').write_text('mine')
    extract(dump, out)
    assert names(out) == sorted([*FILES, 'notes.txt'])


def test_a_broken_input_leaves_its_rows_and_no_spill(dump, tmp_path):
    (tmp_path/'cut.gz').write_bytes(dump.read_bytes()[:-1000])
    for workers in (1, 2):
        with pytest.raises(IncompleteInput): extract(tmp_path/'cut.gz', tmp_path/str(workers), workers=workers, block_size=BLOCK*workers)
        assert names(tmp_path/str(workers)) == sorted(FILES)
    assert read(tmp_path/'1') == read(tmp_path/'2')


# --- forms, and what comes through a pipe

def test_forms_give_the_same(tmp_path):
    for suffix in ('.json', '.json.gz', '.json.bz2', '.json.zst'): synth_dump(150, tmp_path/f'd{suffix}')
    plain = (tmp_path/'d.json').read_bytes()
    (tmp_path/'streams').write_bytes(b''.join(bz2.compress(plain[i:i + 400_000]) for i in range(0, len(plain), 400_000)))
    (tmp_path/'members.bz2').write_bytes(b''.join(gzip.compress(plain[i:i + 400_000]) for i in range(0, len(plain), 400_000)))  # the name is wrong
    got = []
    for p in sorted(tmp_path.iterdir()):
        for workers in (1, 2):
            extract(p, tmp_path/'out'/f'{p.name}{workers}', workers=workers, block_size=100_000)
            got.append([(tmp_path/'out'/f'{p.name}{workers}'/n).read_bytes() for n in FILES[:3]])
    assert len(got) == 12 and all(g == got[0] for g in got)


def test_standard_input_with_workers(dump, whole, tmp_path):
    code = f"from histchrono.chronoscope.dump import extract; extract('-', {str(tmp_path/'out')!r}, workers=2, progress=True)"
    got = subprocess.run([sys.executable, '-c', code], input=dump.read_bytes(), capture_output=True, timeout=120)
    assert got.returncode == 0 and got.stderr == b'', got.stderr  # no bar in a log
    for n in FILES[:3]: assert (tmp_path/'out'/n).read_bytes() == whole[n]
    assert names(tmp_path/'out') == sorted(FILES)


def test_a_named_pipe(dump, whole, tmp_path):
    os.mkfifo(tmp_path/'pipe')
    p = subprocess.Popen(['cp', str(dump), str(tmp_path/'pipe')])
    extract(tmp_path/'pipe', tmp_path/'out', workers=2)
    p.wait(20)
    for n in FILES[:3]: assert (tmp_path/'out'/n).read_bytes() == whole[n]


def test_progress_on_a_terminal(dump, tmp_path):
    import pty
    ours, theirs = pty.openpty()
    code = f"from histchrono.chronoscope.dump import extract; extract({str(dump)!r}, {str(tmp_path/'out')!r}, progress=True, block_size=100_000)"
    p = subprocess.Popen([sys.executable, '-c', code], stderr=theirs)
    assert p.wait(60) == 0
    os.close(theirs)
    shown = ''
    try:
        while piece := os.read(ours, 1 << 16): shown += piece.decode()
    except OSError: pass  # all is read
    os.close(ours)
    assert 'extract' in shown and 'B/s' in shown and 'entities' in shown and '/s' in shown


# --- odd bytes

ODD = {  # name: (line, entities, statements, errors)
    'deep': (b'{"type":"item","id":"Q1","x":' + b'['*100_000 + b']'*100_000 + b'}', 0, 0, 'invalid_json'),
    'deep_objects': (b'{"type":"item","id":"Q1","claims":{"P39":' + b'{"a":'*100_000 + b'1' + b'}'*100_000 + b'}}', 0, 0, 'invalid_json'),
    'deep_unclosed': (b'[' * 200_000, 0, 0, 'invalid_json'),
    'deep_label': (b'{"type":"item","id":"Q1","labels":' + b'['*5000 + b']'*5000 + b'}', 0, 0, 'invalid_json'),
    'some_depth': (b'{"type":"item","id":"Q1","x":' + b'['*300 + b']'*300 + b'}', 1, 0, ''),
    'big_float': (b'{"type":"item","id":"Q1","x":1e999,"lastrevid":1e999}', 1, 0, ''),
    'big_int': (b'{"type":"item","id":"Q1","lastrevid":' + b'9'*400 + b'}', 1, 0, ''),
    'huge_int': (b'{"type":"item","id":"Q1","labels":{"en":{"value":' + b'9'*10_000 + b'}},"lastrevid":' + b'9'*10_000 + b'}', 1, 0, ''),
    'minus_zero': (b'{"type":"item","id":"Q1","lastrevid":-0.0}', 1, 0, ''),
    'huge_numeric_id': (b'{"type":"item","id":"Q1","claims":{"P39":[{"mainsnak":{"snaktype":"value","datavalue":{"type":"wikibase-entityid","value":{"numeric-id":' + b'7'*5000 + b'}}}}]}}', 1, 0, ''),
    'nul': (b'{"type":"item","id":"Q1","labels":{"en":{"value":"a\0b"}}}', 0, 0, 'invalid_json'),
    'only_nuls': (bytes(500), 0, 0, 'invalid_json'),
    'nul_escape': (rb'{"type":"item","id":"Q1","labels":{"en":{"value":"a\u0000b"}}}', 1, 0, ''),
    'surrogate': (rb'{"type":"item","id":"Q1","labels":{"xx":{"value":"\ud83d"}},"claims":{"P39":[' + json.dumps(ref(2)).encode() + b']}}', 1, 1, ''),
    'surrogate_low_first': (rb'{"type":"item","id":"Q1","labels":{"en":{"value":"\ude00\ud83d x"}}}', 1, 0, ''),
    'latin1': (b'{"type":"item","id":"Q1","labels":{"en":{"value":"S\xe3o"}}}', 0, 0, 'invalid_utf8'),
    'rank': (item(1, claims={'P39': [{**ref(2), 'rank': 'best'}, ref(3), {**ref(3), 'rank': None}, {**ref(3), 'rank': []}]}), 1, 2, ''),
    'revision_text': (item(1, lastrevid='77'), 1, 0, ''),
    'lists_for_maps': (item(1, labels=[], descriptions=[], aliases=[], claims=[], sitelinks=[]), 1, 0, ''),
    'claims_text': (item(1, claims='none'), 1, 0, ''),
    'claims_null': (item(1, claims=None, labels=None, aliases=None), 1, 0, ''),
    'claim_null': (item(1, claims={'P39': [None, 7, 'x', [], ref(2)]}), 1, 1, ''),
    'property_null': (item(1, claims={'P39': None, 'P69': {}, 'P31': [ref(5)]}), 1, 1, ''),
    'qualifiers_list': (item(1, claims={'P39': [{**ref(2), 'qualifiers': []}, {**ref(2), 'qualifiers': None}, {**ref(3), 'qualifiers': {'P580': []}}]}), 1, 3, ''),
    'references_odd': (item(1, claims={'P39': [{**ref(2), 'references': 7}]}), 1, 1, ''),
    'number': (b'42', 0, 0, 'not_an_object'), 'text': (b'"x"', 0, 0, 'not_an_object'), 'null': (b'null', 0, 0, 'not_an_object'),
    'life_odd': (item(1, claims={'P31': [ref(5)], 'P569': 'x', 'P570': [7]}), 1, 1, ''),
    'two_on_a_line': (item(1, claims={'P39': [ref(2)]}) + b', ' + item(4), 2, 1, ''),
}


@pytest.mark.parametrize('name', ODD)
def test_an_odd_line_costs_no_more_than_itself(name, tmp_path):
    line, entities, statements, error = ODD[name]
    last = item(9, claims={'P39': [ref(8)]})
    for end in (b'\n', b'\r\n'):
        p = tmp_path/'any'
        p.write_bytes(b'\xef\xbb\xbf[' + end + line + b',' + end + last + end + b']' + end)
        for workers in (1, 2):
            r = extract(p, tmp_path/'out', workers=workers, block_size=100 if workers == 1 else 1 << 20)
            assert (r['entities'], r['statements'], r['errors']) == (entities + 1, statements + 1, {error: 1} if error else {}), r
            assert pq.read_table(tmp_path/'out'/'entities.parquet')['qid'].to_pylist()[-1] == 'Q9'


def test_depth_does_not_depend_on_the_caller(tmp_path):
    p = tmp_path/'a.json'
    for depth in (880, 920, 960, 975, 990, 1010):
        p.write_bytes(b'{"type":"item","id":"Q1","x":' + b'['*depth + b']'*depth + b'}\n' + item(2))
        def nested(n, w): return nested(n - 1, w) if n else extract(p, tmp_path/'out', workers=w)['errors']
        assert nested(0, 1) == nested(150, 1) == nested(0, 2)


def test_the_highest_revision_wins_over_files(tmp_path):
    file = lambda name, *lines: (tmp_path/name).write_bytes(array(lines)) and tmp_path/name
    a = file('a', item(1, lastrevid=5, claims={'P39': [ref(50)]}), item(2, lastrevid='12', claims={'P39': [ref(51), ref(52)]}), item(3))
    b = file('b', item(2, lastrevid=9, claims={'P39': [ref(60)]}), item(1, lastrevid='100', claims={'P39': [ref(61)]}), item(1, lastrevid=7))
    for order in ([a, b], [b, a]):
        r = extract(order, tmp_path/'out')
        assert r['skipped'] == {'duplicate_entities': 3, 'duplicate_statements': 2} and r['entities'] == 3
        assert pq.read_table(tmp_path/'out'/'statements.parquet')['value'].to_pylist() == ['Q61', 'Q51', 'Q52']
    r = extract([a, a], tmp_path/'out')
    assert r['skipped'] == {'duplicate_entities': 3, 'duplicate_statements': 3}


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='no /proc here')
def test_a_line_of_200_megabytes(tmp_path):
    p = tmp_path/'huge.json.gz'
    link = b'"%06dwiki":{"site":"enwiki","title":"' + b'x'*900 + b'"},'
    with gzip.open(p, 'wb', compresslevel=1) as f:
        f.write(b'[\n' + item(1, claims={'P39': [ref(2)]}) + b',\n{"type":"item","id":"Q2","sitelinks":{')
        for i in range(210_000): f.write(link % i)
        f.write(b'"z":{}},"claims":{"P39":[' + json.dumps(ref(3)).encode() + b']}},\n' + item(3) + b'\n]\n')
    # VmHWM begins anew with the program; ru_maxrss is inherited from the process that started it
    code = f"""from histchrono.chronoscope.dump import extract; r = extract({str(p)!r}, {str(tmp_path/'out')!r}, workers=2)
print(r['entities'], r['statements'], next(int(l.split()[1])//1024 for l in open('/proc/self/status') if l.startswith('VmHWM')))"""
    got = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=300)
    entities, statements, peak = map(int, got.stdout.split())
    assert (entities, statements) == (3, 2) and peak < 700, got


def test_a_whole_array_on_one_line(tmp_path):
    lines = list(synth_lines(200))
    (tmp_path/'one').write_bytes(b'[' + b','.join(lines) + b']'); (tmp_path/'many').write_bytes(array(lines))
    extract(tmp_path/'one', tmp_path/'a', block_size=BLOCK); extract(tmp_path/'many', tmp_path/'b')
    for n in FILES[:3]: assert (tmp_path/'a'/n).read_bytes() == (tmp_path/'b'/n).read_bytes()


# --- who may be living

def test_living(tmp_path):
    at = lambda t, p=11: value({'time': t + 'T00:00:00Z', 'precision': p, 'calendarmodel': 'http://www.wikidata.org/entity/Q1985727'}, 'time')
    some = {'mainsnak': {'snaktype': 'somevalue'}, 'rank': 'normal'}
    none = {'mainsnak': {'snaktype': 'novalue'}, 'rank': 'normal'}
    human, town = [ref(5)], [ref(515)]
    people = {1: (human, [at('+1980-02-03')], [], True), 2: (human, [at('+1980-02-03')], [at('+2020-00-00', 9)], False), 3: (human, [at('+1910-00-00', 9)], [], False), 4: (human, [at('+1911-01-01')], [], True),
              5: (human, [], [], True), 6: (human, [], [some], False), 7: (human, [], [none], True), 8: (town, [], [], False), 9: (human, [at('+1900-00-00', 8)], [], True),
              10: ([{**ref(5), 'rank': 'deprecated'}], [], [], False), 11: (human, [at('+1890-00-00', 9), at('+1990-00-00', 9)], [], True), 12: (human, [at('+1890-00-00', 9)], [none], False)}
    lines = [item(n, claims={k: v for k, v in zip(('P31', 'P569', 'P570'), x) if v}) for n, x in people.items()]
    lines += [item(20, lastrevid=1, claims={'P31': human}), item(20, lastrevid=2, claims={'P31': human, 'P570': [some]})]  # died between two revisions
    (tmp_path/'a.json').write_bytes(array(lines))
    r = extract(tmp_path/'a.json', tmp_path/'out', properties='P39')
    t = pq.read_table(tmp_path/'out'/'living.parquet')
    want = [f'Q{n}' for n, x in people.items() if x[3]]
    assert t['qid'].to_pylist() == want and t.column_names == ['qid'] and t.schema.metadata[b'histchrono.schema'] == b'living'
    assert r['may_be_living'] == len(want) == json.loads((tmp_path/'out'/'manifest.json').read_text())['rows']['may_be_living']
    stored = b''.join((tmp_path/'out'/n).read_bytes() for n in FILES) + repr(pq.read_table(tmp_path/'out'/'statements.parquet').to_pylist()).encode()
    assert b'1980' not in stored and 'P569' not in pq.read_table(tmp_path/'out'/'statements.parquet')['property'].to_pylist()


# --- a worker that dies

def test_a_dead_worker_is_one_line_and_loses_nothing(dump, whole, tmp_path):
    out = tmp_path/'out'
    p = subprocess.Popen([sys.executable, '-c', SLOW, str(dump), str(out), '2'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in p.stdout:
        if int(line) >= 3: break
    os.kill(int(Path(f'/proc/{p.pid}/task/{p.pid}/children').read_text().split()[0]), signal.SIGKILL)
    err = p.communicate(timeout=60)[1]
    assert p.returncode and 'a worker process died' in err.splitlines()[-1] and '--workers' in err.splitlines()[-1]
    assert [n[:7] for n in names(out)] == ['.spill-']
    extract(dump, out, block_size=BLOCK, group=4)
    assert read(out) == whole


# --- a kind that is named like a reason

@pytest.mark.parametrize('kind', ['claim_novalue', 'blank_line', 'duplicate_entities', 'x' * 5000, 'Lexeme', 'a b'])
def test_a_kind_that_is_named_like_a_reason(kind, tmp_path):
    (tmp_path/'a.json').write_bytes(array([json.dumps({'type': kind, 'id': 'Q1'}).encode(), item(2)]))
    assert extract(tmp_path/'a.json', tmp_path/'out')['skipped'] == {'other_entity': 1}


# --- a run that fails leaves what was finished, and settings are checked before anything

LIMITED = """
import resource, sys
from histchrono.chronoscope import dump, sorting
sorting._FEW = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),)*2)
dump.extract(sys.argv[1], sys.argv[2], snapshot='later', block_size=%d, group=2)
""" % BLOCK


@pytest.mark.parametrize('few', (0, 10**6))
@pytest.mark.parametrize('share', (.01, .3, .7, .95))
def test_full_disk_keeps_what_was_there(dump, whole, tmp_path, share, few):
    "Files may not grow beyond a share of the largest result."
    out, size = tmp_path/'out', int(share*max(map(len, whole.values())))
    extract(dump, out)
    r = subprocess.run([sys.executable, '-c', LIMITED, str(dump), str(out), str(few), str(size)], capture_output=True, text=True, timeout=120)
    last = r.stderr.splitlines()[-1]
    assert r.returncode and f'DiskError: no disk space to write {out}' in last and '.spill' not in last, r.stderr[-800:]
    assert read(out) == whole and [n for n in names(out) if not n.startswith('.spill-')] == sorted(FILES)
    assert not [p for p in out.rglob('*') if p.name.endswith('.tmp') or p.name in ('results', 'duckdb')]
    extract(dump, out, block_size=BLOCK, group=2)
    assert read(out) == whole and names(out) == sorted(FILES)


def test_a_failure_while_writing_keeps_what_was_there(dump, whole, tmp_path, monkeypatch):
    from histchrono.chronoscope import dump as module
    for stage in ('put_in_order', 'write_json', '_write_manifest'):
        extract(dump, tmp_path/'out')
        def fail(*a, **k): raise RuntimeError(stage)
        with monkeypatch.context() as m:
            m.setattr(module, stage, fail)
            with pytest.raises(RuntimeError, match=stage): extract(dump, tmp_path/'out', snapshot='later')
        assert read(tmp_path/'out') == whole


@pytest.mark.parametrize('settings, words', [(dict(memory_limit='junk'), "memory limit 'junk' cannot be read"), (dict(memory_limit=''), "memory limit '' cannot be read"), (dict(memory_limit='1KB'), 'memory limit 1KB is too little'),
    (dict(workers=100_000), '100000 workers on'), (dict(workers=0), '0 workers'), (dict(properties='P99999999999999999999'), "'P99999999999999999999' is no property"), (dict(properties=['P39', 'P99999999999']), "'P99999999999' is no property")])
def test_settings_are_checked_first(dump, whole, tmp_path, settings, words):
    extract(dump, tmp_path/'out')
    for d in ('out', 'new'):
        with pytest.raises(InputError, match=words) as e: extract(dump, tmp_path/d, **settings)
        assert '\n' not in str(e.value)
    assert read(tmp_path/'out') == whole and not (tmp_path/'new').exists()


def test_little_memory_is_enough_or_named(dump, whole, tmp_path, monkeypatch):
    from histchrono.chronoscope import sorting
    monkeypatch.setattr(sorting, '_FEW', 0)
    try: extract(dump, tmp_path/'out', memory_limit='16MB', workers=2)
    except InputError as e: assert 'memory limit 16MB is too little' in str(e) and '\n' not in str(e)
    extract(dump, tmp_path/'out', memory_limit='200MB', workers=2)
    assert read(tmp_path/'out') == whole


def test_the_largest_property_goes_through(tmp_path):
    from histchrono.chronoscope.truth import build_truth
    (tmp_path/'a.json').write_bytes(array([item(1, claims={'P999999999': [ref(2)]})]))
    extract(tmp_path/'a.json', tmp_path/'in', properties='P999999999')
    assert build_truth(tmp_path/'in', '2022-01-01', 'strict', tmp_path/'out')['timeless'] == 1


def test_nothing_came(tmp_path):
    code = f"from histchrono.chronoscope.dump import extract; extract('-', {str(tmp_path/'out')!r})"
    got = subprocess.run([sys.executable, '-c', code], input=b'', capture_output=True, timeout=120)
    assert b'- is empty: nothing came on standard input' in got.stderr and b'download' not in got.stderr
    os.mkfifo(tmp_path/'pipe')
    p = subprocess.Popen(['cp', '/dev/null', str(tmp_path/'pipe')])
    with pytest.raises(IncompleteInput, match='pipe is empty: nothing came through the pipe'): extract(tmp_path/'pipe', tmp_path/'out')
    p.wait(20)


def test_joiners_that_spell(tmp_path):
    names_ = {1: 'می\u200cخواهم', 2: 'क्\u200dष', 3: '\U0001f468\u200d\U0001f469 Ada'}
    (tmp_path/'a.json').write_bytes(array([item(n, labels={'en': {'value': f'\u200e\u200d{t}\u200c\u202c'}}) for n, t in names_.items()]))
    extract(tmp_path/'a.json', tmp_path/'out')
    assert pq.read_table(tmp_path/'out'/'entities.parquet')['label'].to_pylist() == list(names_.values())


# --- synthetic dumps

@pytest.mark.parametrize('n, name, seed, words', [(3, 'd.json', -1, 'seed -1'), (0, 'd.json', 7, 'at least 1'), (10**15, 'd.json.gz', 7, 'at most'), (3, 'file/d.json', 7, 'cannot be written'), (3, 'd.json/x.json', 7, 'cannot be written')])
def test_synthetic_dumps_refuse(tmp_path, n, name, seed, words):
    (tmp_path/'file').write_text('x'); (tmp_path/'d.json').write_text('old')
    with pytest.raises(InputError, match=words): synth_dump(n, tmp_path/name, seed)
    assert (tmp_path/'d.json').read_text() == 'old' and names(tmp_path) == ['d.json', 'file']


def test_a_synthetic_dump_beside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synth_dump(3, 'd.json')
    assert names(tmp_path) == ['d.json']
