"""Damaged, odd and merely unusual Wikidata input: the project's own cases, and the larger collection where it is at hand.

A case is a line of a dump and the rows, label and truth that it must give; `tests/data/wikidata_cases.jsonl` holds the lines
(some are no JSON on purpose), `tests/data/wikidata_expected.json` what they must give. Framing cases are whole files, made here.
"""
import bz2, gzip, json, lzma, subprocess, sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard

from histchrono.chronoscope.dump import IncompleteInput, extract, read_block
from histchrono.chronoscope.dumpfile import Block
from histchrono.chronoscope.entity import wanted
from histchrono.chronoscope.truth import build_truth, truth_at
from histchrono.core.errors import InputError

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[1]/'shared'
FOLDERS = {'own': (HERE/'data'/'wikidata_cases.jsonl', HERE/'data'/'wikidata_expected.json'),
           'shared': (SHARED/'cases'/'wikidata'/'cases.jsonl', SHARED/'cases'/'wikidata'/'expected.json')}
FRAMING, TOOLKIT = SHARED/'cases'/'wikidata'/'framing', SHARED/'reference'/'wikidata'/'wikidata_toolkit'


def load(which):
    lines, expected = FOLDERS[which]
    if not expected.exists(): return [], {}
    return lines.read_bytes().split(b'\n'), json.loads(expected.read_text(encoding='utf-8'))


CASES = [(which, name) for which in FOLDERS for name in load(which)[1]]
if not load('shared')[1]: CASES.append(pytest.param('shared', '', marks=pytest.mark.skip(reason=f"{SHARED/'cases'} is not here")))


@pytest.fixture(scope='module')
def worlds(tmp_path_factory):
    """Each collection as one dump of its good lines, extracted once, with truth at every anchor that it names, for both policies."""
    out = {}
    for which in FOLDERS:
        lines, expected = load(which)
        if not expected: continue
        d = tmp_path_factory.mktemp(which)
        keep = [lines[e['line'] - 1].strip().rstrip(b',').strip() for e in expected.values() if e['outcome'] in ('ok', 'property')]
        (d/'dump.json').write_bytes(b'[\n' + b',\n'.join(keep) + b'\n]\n')
        extract(d/'dump.json', d/'in')
        anchors = sorted({a for e in expected.values() for a in (e.get('truth') or {}) if a != 'timeless'})
        out[which] = {'entities': {r['qid']: r for r in pq.read_table(d/'in'/'entities.parquet').to_pylist()}, 'statements': pq.read_table(d/'in'/'statements.parquet').to_pylist()}
        for policy in ('strict', 'paper'):
            build_truth([d/'in'], anchors, policy, d/policy)
            out[which][policy] = {(r['subject'], r['anchor'], r['property']): r for r in pq.read_table(d/policy/'truth.parquet').to_pylist()}
        out[which]['timeless'] = {(r['subject'], r['property']): r for r in pq.read_table(d/'strict'/'timeless.parquet').to_pylist()}
    return out


@pytest.mark.parametrize('which, name', CASES)
def test_line(which, name):
    lines, expected = load(which)
    e = expected[name]
    rows, entities, counts, frame, _ = read_block(wanted(), 0, Block(0, 1, lines[e['line'] - 1] + b'\n'))
    errors = {k: v for k, v in counts.items() if k.startswith('errors')}
    assert bool(errors) == (e['outcome'] == 'error'), errors
    assert entities.num_rows == (e['outcome'] in ('ok', 'property'))
    names = [c for c in rows.column_names if c not in ('claim', 'block', 'pos')]
    assert rows.select(names).to_pylist() == e.get('rows', [])
    if e['outcome'] == 'ok': assert [entities[c][0].as_py() for c in ('label', 'label_lang', 'usable')] == [e['label'], e['label_lang'], e['label_usable']]
    if e['outcome'] == 'property': assert entities['label'][0].as_py() == e['label']
    for k in ('skipped', 'errors', 'aliases', 'classes', 'country', 'gender', 'description'):  # the project's own cases say more
        if k in e: assert e[k] == ({x.split(' ')[1]: n for x, n in counts.items() if n and x.startswith(k)} if k in ('skipped', 'errors') else entities[k][0].as_py()), k


@pytest.mark.parametrize('which, name', CASES)
def test_truth(which, name, worlds):
    lines, expected = load(which)
    e, w = expected[name], worlds[which]
    if not e.get('truth'): return
    subject = e['rows'][0]['subject']
    for anchor, properties in e['truth'].items():
        for prop, want in properties.items():
            if anchor == 'timeless':
                assert w['timeless'][subject, prop]['value'] == want['canonical']
                if 'values' in want: assert w['timeless'][subject, prop]['values'] == want['values']
                continue
            got = w['strict'].get((subject, anchor, prop)) or {'certain': [], 'possible': [], 'value': None, 'gold': False}
            assert (got['certain'], got['possible']) == (want['certain'], want['possible']), (anchor, prop)
            assert got['gold'] == (len(want['certain']) == 1 == len(want['possible']))
            for k, column in (('canonical', 'value'), ('tied', 'tied'), ('handover', 'handover'), ('stale_open', 'stale_open')):
                if k in want: assert got[column] == want[k], (anchor, prop, k)
            paper = w['paper'].get((subject, anchor, prop)) or {'possible': [], 'value': None}
            assert paper['possible'] == want.get('paper', want['possible']), (anchor, prop)
            if 'paper_canonical' in want: assert paper['value'] == want['paper_canonical']


@pytest.mark.parametrize('which', FOLDERS)
def test_statements_are_written_as_read(which, worlds):
    if which not in worlds: pytest.skip(f'{FOLDERS[which][1]} is not here')
    expected = load(which)[1]
    want = {json.dumps({**r, 'snapshot': ''}, sort_keys=True) for e in expected.values() if e['outcome'] == 'ok' for r in e['rows']}
    assert {json.dumps(r, sort_keys=True) for r in worlds[which]['statements']} == want


@pytest.mark.parametrize('which', FOLDERS)
def test_the_whole_file_at_once(which, tmp_path):
    """All lines of a collection as one file: what is broken is counted, and nothing behind it is lost."""
    lines, expected = load(which)
    if not expected: pytest.skip(f'{FOLDERS[which][1]} is not here')
    try: report = extract(FOLDERS[which][0], tmp_path/'out')
    except IncompleteInput as e: report = e.report
    good = {e['rows'][0]['subject'] if e['rows'] else name for name, e in expected.items() if e['outcome'] in ('ok', 'property')}
    assert report['entities'] == len(good)
    assert sum(report['errors'].values()) == sum(e['outcome'] == 'error' for e in expected.values())


# --- whole files

def lines_of(n):
    claim = lambda v: {'mainsnak': {'snaktype': 'value', 'property': 'P39', 'datavalue': {'type': 'wikibase-entityid', 'value': {'entity-type': 'item', 'id': f'Q{v}'}}}, 'rank': 'normal', 'type': 'statement'}
    return [json.dumps({'type': 'item', 'id': f'Q{i}', 'labels': {'en': {'language': 'en', 'value': f'Sample {i}'}}, 'claims': {'P39': [claim(700 + i)]}, 'lastrevid': i}).encode() for i in range(1, n + 1)]


def array(lines, end=b'\n'): return b'[' + end + (b',' + end).join(lines) + end + b']' + end


L = lines_of(6)
HUGE = json.dumps({'type': 'item', 'id': 'Q9', 'labels': {'en': {'value': 'Long'}}, 'descriptions': {'xx': {'value': 'x' * (9 << 20)}}}).encode()
HALVES = array(L[:3])[:-3] + b',\n', b',\n'.join(L[3:]) + b'\n]\n'
WHOLE = {  # name: (bytes, entities)
    'array': (array(L), 6), 'lines': (b'\n'.join(L) + b'\n', 6), 'no_final_newline': (b'\n'.join(L), 6), 'crlf': (array(L, b'\r\n'), 6), 'bom': (b'\xef\xbb\xbf' + array(L), 6),
    'glued': (b'[' + b',\n'.join(L) + b']', 6), 'glued_comma_space': (b'[ ' + b' , \r\n'.join(L) + b' ]\n\n', 6), 'comma_first': (b'[\n' + b'\n,'.join(L) + b'\n]', 6), 'one_line': (b'[' + b','.join(L) + b']', 6),
    'blank_lines': (b'\n\n' + array(L).replace(b',\n', b',\n\n \n'), 6), 'empty_array': (b'[\n]\n', 0), 'empty_array_one_line': (b'[]', 0), 'two_arrays': (array(L[:2]) + array(L[2:]), 6), 'huge': (array([L[0], HUGE, L[1]]), 3),
    'gzip': (gzip.compress(array(L)), 6), 'gzip_members': (b''.join(map(gzip.compress, HALVES)), 6), 'gzip_padded': (gzip.compress(array(L)) + bytes(1024), 6),
    'bzip2': (bz2.compress(array(L)), 6), 'bzip2_streams': (b''.join(map(bz2.compress, HALVES)), 6), 'zstd': (zstandard.compress(array(L)), 6), 'zstd_frames': (b''.join(map(zstandard.compress, HALVES)), 6),
    'zstd_skippable': (b'\x50\x2a\x4d\x18\x04\x00\x00\x00abcd' + zstandard.compress(array(L)), 6), 'xz': (lzma.compress(array(L)), 6), 'gzip_bom': (gzip.compress(b'\xef\xbb\xbf' + array(L)), 6), 'gzip_huge': (gzip.compress(array([HUGE, L[0]])), 2),
}
BROKEN = {  # name: (bytes, entities or None, words of the message)
    'empty': (b'', 0, 'is empty'), 'only_blanks': (b'\n\n', 0, 'is empty'), 'gzip_of_nothing': (gzip.compress(b''), 0, 'is empty'), 'no_bracket': (b'[\n' + b',\n'.join(L) + b'\n', 6, 'no closing bracket'),
    'cut_line': (array(L)[:-60], 5, 'no closing bracket'), 'cut_line_no_brackets': (b'\n'.join(L)[:-20], 5, 'ends in a line'), 'second_array_cut': (array(L[:2]) + array(L[2:])[:-3], 6, 'no closing bracket'),
    'gzip_cut': (gzip.compress(array(L))[:-9], None, 'cut before its end'), 'gzip_trailer_cut': (gzip.compress(array(L))[:-4], 6, 'cut before its end'), 'bzip2_cut': (bz2.compress(array(L))[:-30], None, 'cut before its end'),
    'zstd_cut': (zstandard.compress(array(L))[:-5], None, 'cut before its end'), 'second_member_cut': (gzip.compress(HALVES[0]) + gzip.compress(HALVES[1])[:-12], None, 'cut before its end'),
    'gzip_garbage_behind': (gzip.compress(array(L)) + b'HTTP/1.1 200 OK', 6, 'broken gzip'), 'zip': (b'PK\x03\x04 not a dump', 0, 'not framed as a dump'), 'csv': (b'item,label\nQ1,Sample\n', 0, 'not framed as a dump'),
    'web_answer': (b'{"entities":{"Q1":' + L[0] + b'}}', 0, 'not framed as a dump'), 'pretty': (json.dumps([json.loads(x) for x in L], indent=1).encode(), 0, 'not framed as a dump'), 'utf16': (array(L).decode().encode('utf-16'), 0, 'not framed as a dump'),
}


@pytest.mark.parametrize('name', WHOLE)
def test_whole_file(name, tmp_path):
    data, n = WHOLE[name]
    (tmp_path/'any.name').write_bytes(data)
    report = extract(tmp_path/'any.name', tmp_path/'out')
    assert (report['entities'], report['complete'], report['errors']) == (n, True, {})
    assert pq.read_table(tmp_path/'out'/'entities.parquet').num_rows == n


@pytest.mark.parametrize('name', BROKEN)
def test_broken_file(name, tmp_path):
    data, n, words = BROKEN[name]
    (tmp_path/'any.name').write_bytes(data)
    with pytest.raises(InputError, match=words) as e: extract(tmp_path/'any.name', tmp_path/'out')
    assert 'any.name' in str(e.value) and '\n' not in str(e.value)
    report = json.loads((tmp_path/'out'/'report.json').read_text())
    assert not report['complete']
    if n is not None: assert report['entities'] == n == pq.read_table(tmp_path/'out'/'entities.parquet').num_rows
    assert json.loads((tmp_path/'out'/'manifest.json').read_text())['complete'] is False


def test_several_files_are_complete_when_all_are(tmp_path):
    (tmp_path/'a.json').write_bytes(array(L[:3])); (tmp_path/'b.gz').write_bytes(gzip.compress(array(L[2:])))
    assert extract([tmp_path/'a.json', tmp_path/'b.gz'], tmp_path/'out')['skipped'] == {'duplicate_entities': 1, 'duplicate_statements': 1}
    (tmp_path/'c.json').write_bytes(array(L)[:-2])
    with pytest.raises(InputError, match='c.json has no closing bracket') as e: extract([tmp_path/'a.json', tmp_path/'c.json'], tmp_path/'out')
    assert [i['complete'] for i in e.value.report['inputs']] == [True, False]


def test_a_broken_line_in_the_middle_is_counted(tmp_path):
    (tmp_path/'a.json').write_bytes(array([L[0], L[1][:50], L[2]]))
    report = extract(tmp_path/'a.json', tmp_path/'out')
    assert (report['entities'], report['complete'], report['errors'], report['examples']) == (2, True, {'invalid_json': 1}, ['a.json line 3: invalid_json'])


def test_standard_input(tmp_path):
    code = f"from histchrono.chronoscope.dump import extract; print(extract('-', {str(tmp_path/'out')!r})['entities'])"
    got = subprocess.run([sys.executable, '-c', code], input=zstandard.compress(array(L)), capture_output=True, timeout=120)
    assert got.stdout.split() == [b'6'], got.stderr


def test_workers_and_order_change_no_byte(tmp_path):
    files = []
    for i in range(3):
        files.append(tmp_path/f'{i}.json')
        files[-1].write_bytes(array(lines_of(40)[i::3]))
    names = ('statements.parquet', 'entities.parquet', 'report.json', 'manifest.json')
    extract(files, tmp_path/'one', block_size=2000)
    extract(files, tmp_path/'two', block_size=500, workers=2)
    for n in names: assert (tmp_path/'one'/n).read_bytes() == (tmp_path/'two'/n).read_bytes(), n
    extract(files[::-1], tmp_path/'three')
    for n in names[:2]: assert (tmp_path/'one'/n).read_bytes() == (tmp_path/'three'/n).read_bytes(), n


def test_truth_is_the_same_for_any_threads(tmp_path, worlds):
    (tmp_path/'a.json').write_bytes(FOLDERS['own'][0].read_bytes() + b'\n' + L[0])
    try: extract(tmp_path/'a.json', tmp_path/'in')
    except IncompleteInput: pass
    for t in (1, 2): build_truth([tmp_path/'in'], '2020-01-01,2022-01-01', 'strict', tmp_path/str(t), threads=t)
    for n in ('intervals.parquet', 'timeless.parquet', 'truth.parquet', 'manifest.json'): assert (tmp_path/'1'/n).read_bytes() == (tmp_path/'2'/n).read_bytes(), n
    assert truth_at(tmp_path/'1'/'intervals.parquet', '2020-01-01,2022-01-01').equals(pq.read_table(tmp_path/'1'/'truth.parquet').replace_schema_metadata(None))


def test_two_snapshots(tmp_path):
    for year in ('2024', '2025'):
        (tmp_path/'a.json').write_bytes(array(L))
        extract(tmp_path/'a.json', tmp_path/year, snapshot=year)
    build_truth([tmp_path/'2024', tmp_path/'2025'], '2024-01-01', 'strict', tmp_path/'out')
    assert pq.read_table(tmp_path/'out'/'timeless.parquet')['snapshot'].to_pylist() == ['2024'] * 6 + ['2025'] * 6
    with pytest.raises(InputError, match='are both snapshot'): build_truth([tmp_path/'2024', tmp_path/'2024'], '2024-01-01', 'strict', tmp_path/'out')


# --- files of others, where they are at hand

FRAMING_EXPECTED = json.loads((SHARED/'cases'/'wikidata'/'expected_framing.json').read_text()) if FRAMING.is_dir() else {}


@pytest.mark.parametrize('name', FRAMING_EXPECTED or [pytest.param('', marks=pytest.mark.skip(reason=f'{FRAMING} is not here'))])
def test_shared_framing(name, tmp_path):
    want = FRAMING_EXPECTED[name]
    try: report = extract(FRAMING/name, tmp_path/'out')
    except IncompleteInput as e: report = e.report
    assert report['complete'] == (not want.get('error', False))
    if want['entities'] is not None: assert report['entities'] == want['entities']


@pytest.mark.skipif(not TOOLKIT.is_dir(), reason=f'{TOOLKIT} is not here')
@pytest.mark.parametrize('name, complete, entities, errors', [('mock-dump-for-testing.json', True, 3, 0), ('mock-dump-for-long-testing.json', True, 101, 0), ('mock-dump-with-bugs.json', True, 101, 0),
                                                              ('wbgetentities-Douglas-Adams.json', False, 0, 1), ('wbgetentities-Q32063953.json', False, 0, 1)])
def test_toolkit_files(name, complete, entities, errors, tmp_path):
    try: report = extract(TOOLKIT/name, tmp_path/'out')
    except IncompleteInput as e: report = e.report
    assert report['complete'] == complete
    assert (report['entities'], sum(report['errors'].values())) == (entities, errors)


# --- damage at random

ODD = [None, True, 0, -1, 10**30, 1.5, '', 'x', [], [1], {}, {'a': 1}, [None], {'value': None}, 'Q1', 'P31', '\ud800', '+2020-01-01T00:00:00Z']


def damage(rng, obj):
    """Put something odd in one to three places of a JSON value."""
    for _ in range(int(rng.integers(1, 4))):
        here = obj
        while isinstance(here, (dict, list)) and here:
            key = list(here)[int(rng.integers(len(here)))] if isinstance(here, dict) else int(rng.integers(len(here)))
            if rng.random() < .3 or not isinstance(here[key], (dict, list)) or not here[key]:
                here[key] = json.loads(json.dumps(ODD[int(rng.integers(len(ODD)))]))
                break
            here = here[key]
    return obj


def test_damage_is_counted_and_never_escapes():
    from histchrono.chronoscope.intervals import spells
    from histchrono.core.provenance import rng as generator
    rng, good = generator('damage', 1), []
    for line in load('own')[0]:
        try: good.append(json.loads(line.strip().strip(b',')))
        except ValueError: pass
    good = [json.dumps(o) for o in good if isinstance(o, dict)]
    for _ in range(1500):
        line = json.dumps(damage(rng, json.loads(good[int(rng.integers(len(good)))]))).encode()
        if rng.random() < .1: line = line[:int(rng.integers(len(line)))]
        rows, entities, counts, frame, _ = read_block(wanted(), 0, Block(0, 1, line + b'\n'))
        assert counts['claims'] == rows.num_rows + sum(n for k, n in counts.items() if k.startswith('skipped claim_'))
        assert entities.num_rows + sum(n for k, n in counts.items() if k.startswith(('errors', 'skipped')) and not k.startswith('skipped claim_')) == 1
        for r in rows.to_pylist(): spells(r['start'], r['end'], r['point'])
