"""Truth against statements: every row is computed again here, claim by claim and day by day, by a route that shares no code with the package; and drills for memory, disk, order and faults."""
from calendar import monthrange
from datetime import date, timedelta
from pathlib import Path
import json, os, random, resource, subprocess, sys

import pyarrow as pa, pyarrow.parquet as pq, pytest

from histchrono.chronoscope.dump import STATEMENTS
from histchrono.chronoscope.synthtruth import synth_truth
from histchrono.chronoscope.truth import build_truth, truth_at, write_truth
from histchrono.core.errors import DiskError, HistError, InputError, SchemaError
from histchrono.core.io import write_parquet
from histchrono.core.provenance import write_manifest

FILES = ('intervals.parquet', 'timeless.parquet', 'truth.parquet', 'manifest.json')
QUARTERS = [f'{y}-{q}' for y in (2022, 2023, 2024, 2025) for q in ('01-01', '04-01', '07-01', '10-01')]
EVER = float('inf')
SPECIAL = ('novalue', 'somevalue', 'invalid')
PERSONAL = 'P6 P26 P35 P39 P54 P69 P102 P106 P108 P169 P286 P488'.split()


# --- random statements

def random_form(rnd):
    day = date(rnd.choice((rnd.randint(2015, 2026), rnd.randint(2020, 2023), rnd.randint(1880, 2026))), rnd.randint(1, 12), rnd.randint(1, 28)).isoformat()
    return rnd.choice((f'{day}/11', f'{day}/11', f'{day[:7]}-00/10', f'{day[:4]}-00-00/9', f'{day[:4]}-00-00/9', f'{day[:3]}0-00-00/8'))


def random_times(rnd, most, special):
    n = rnd.choice((0, 1, 1, 1, 1, 1, rnd.randint(0, most)))
    return sorted((rnd.choice(SPECIAL) if rnd.random() < special else random_form(rnd) for _ in range(n)), key=lambda f: (f in SPECIAL, f))


def random_statements(rnd, n, snapshot=''):
    rows = []
    for _ in range(n):
        s, v, p = f'Q{rnd.randint(1, 60)}', f'Q{rnd.randint(1, 9)}', rnd.choice(('P6', 'P39', 'P127'))
        point = random_times(rnd, 3, .05) if rnd.random() < .15 else []
        start, end = ([], []) if point and rnd.random() < .6 else (random_times(rnd, 3, .08), random_times(rnd, 3, .1))
        rows.append(dict(snapshot=snapshot, subject=s, property=p, value=v, rank=rnd.choice(('normal',) * 6 + ('preferred', 'deprecated')), start=start, end=end, point=point,
                         replaces=[], replaced_by=[], ordinal=[], of=[]))
    for r in rnd.sample(rows, n//6):  # hand over: a new value takes up where an old one left off
        if r['end'] and r['end'][0] not in SPECIAL: rows.append({**r, 'value': f'Q{rnd.randint(1, 9)}', 'start': r['end'][:1], 'end': [], 'point': []})
    return rows


def write_extract(folder, rows, snapshot='', complete=True):
    write_parquet(pa.Table.from_pylist(rows, schema=STATEMENTS.fields), folder/'statements.parquet', STATEMENTS)
    write_manifest(folder, 'extract', settings=dict(snapshot=snapshot), extra=dict(complete=complete))
    return folder


# --- the other route

def span(form):
    """First and last day of a form."""
    text, p = form.split('/')
    y, m, d = map(int, text.split('-'))
    if p == '11': return date(y, m, d), date(y, m, d)
    if p == '10': return date(y, m, 1), date(y, m, monthrange(y, m)[1])
    if p == '9': return date(y, 1, 1), date(y, 12, 31)
    return date(y, 1, 1), date(y + 9, 12, 31)


def number(form): return tuple(d.toordinal() for d in span(form))


def spells_of(start, end):
    """(first, last) day of start, whether known, (first, last) day of end, whether it is one that can be certain, whether it is dated."""
    plain = not any(f in SPECIAL for f in start + end)
    if plain and len(start) + len(end) >= 3 and abs(len(start) - len(end)) <= 1:
        s, e = sorted(map(number, start)), sorted(map(number, end))
        if len(s) > len(e): e.append(None)
        if len(e) > len(s): s.insert(0, None)
        fits = all(a is None or b is None or a[0] <= b[1] for a, b in zip(s, e)) and all(e[i][1] <= s[i + 1][0] for i in range(len(s) - 1))
        if fits: return [((*(a or (-EVER, EVER)), a is not None), (*(b or (EVER, EVER)), True, b is not None)) for a, b in zip(s, e)]
    days, ends = [number(f) for f in start if f not in SPECIAL], [number(f) for f in end if f not in SPECIAL]
    known = bool(start) and len(days) == len(start)
    s = (min(a for a, _ in days), max(b for _, b in days), True) if known else (-EVER, EVER, False)
    if 'invalid' in end or 'somevalue' in end: e = (-EVER, EVER, False, False)
    elif not ends: e = (EVER, EVER, True, False)
    else: e = (min(a for a, _ in ends), EVER if 'novalue' in end else max(b for _, b in ends), True, True)
    if (len(start) > 1 or len(end) > 1) and days and max(a for a, _ in days) > e[1]: e = (min(e[0], s[0]), EVER, False, False)
    return [(s, e)]


def seen_at(row, day):
    """What a statement says of a day: a list of dicts, one a spell or point that may hold."""
    d, out = day.toordinal(), []
    base = dict(value=int(row['value'][1:]), preferred=row['rank'] == 'preferred', ends=False, begins=False, old=False)
    if not row['start'] and not row['end']:
        for f in row['point']:
            if f in SPECIAL or f.endswith('/8'): continue
            a, b = span(f)
            if a >= date(day.year, 1, 1) and b <= date(day.year, 12, 31): out.append({**base, 'sure': True, 'begun': number(f)})
        return out
    for s, e in spells_of(row['start'], row['end']):
        if not s[0] <= d <= e[1]: continue
        out.append({**base, 'sure': s[2] and s[1] <= d < e[0] and e[2], 'begun': s[:2], 'ends': e[3] and e[0] <= d <= e[1], 'begins': s[2] and d <= s[1],
                    'old': row['property'] in PERSONAL and e[1] == EVER and s[2] and s[1] < d - 36524})
    return out


def seen_by_paper(row, day):
    """The same for the paper's rule: the year of the earliest point, or earliest start to latest end."""
    d, out = day.toordinal(), []
    starts, ends = [number(f) for f in row['start'] if f not in SPECIAL], [number(f) for f in row['end'] if f not in SPECIAL]
    points = sorted(span(f) for f in row['point'] if f not in SPECIAL and not f.endswith('/8'))
    whole = min((a for a, _ in starts), default=-EVER) <= d <= max((b for _, b in ends), default=EVER) and (row['start'] or row['end'])
    if not (whole or (points and points[0][0].year == day.year)): return []
    begun = min((a for a, _ in starts), default=-EVER) if row['start'] or row['end'] else None
    spans = [(begun,)] if begun is not None else [(a.toordinal(),) for a, _ in sorted(set(points))]
    return [dict(value=int(row['value'][1:]), preferred=row['rank'] == 'preferred', begun=b) for b in spans]


def answer(rows, day, policy):
    """The truth of a subject and property on a day, or None."""
    if policy == 'paper':
        on = [x for r in rows for x in seen_by_paper(r, day)]
        if not on: return None
        best = min(on, key=lambda x: (not x['preferred'], -x['begun'][0], x['value']))
        return dict(value=best['value'], possible=sorted({x['value'] for x in on}), gold=True)
    on = [x for r in rows for x in seen_at(r, day)]
    if not on: return None
    best = min(on, key=lambda x: (not x['preferred'], not x['sure'], -x['begun'][0], -x['begun'][1], x['value']))
    values = {v: [x for x in on if x['value'] == v] for v in {x['value'] for x in on}}
    of = lambda v, key: any(x[key] for x in values[v])
    certain = sorted(v for v in values if of(v, 'sure'))
    tied = [v for v in values if of(v, 'preferred') == best['preferred'] and of(v, 'sure') == best['sure'] and (v == best['value'] or not all(x['old'] for x in values[v]))]
    ending, beginning = {v for v in values if of(v, 'ends')}, {v for v in values if of(v, 'begins')}
    return dict(value=best['value'], certain=certain, possible=sorted(values), gold=len(certain) == 1 == len(values), tied=len(tied), handover=bool(ending and beginning and len(ending | beginning) > 1))


@pytest.mark.parametrize('policy', ('strict', 'paper'))
@pytest.mark.parametrize('seed', range(4))
def test_truth_again(seed, policy, tmp_path):
    rnd = random.Random(seed)
    rows = random_statements(rnd, 900)
    days = sorted({date(2019, 1, 1) + timedelta(rnd.randint(0, 2500)) for _ in range(12)} | {span(f)[0] for r in rnd.sample(rows, 8) for f in r['start'][:1] if f not in SPECIAL and f > '1900'})
    counts = build_truth(write_extract(tmp_path/'in', rows), [d.isoformat() for d in days], policy, tmp_path/'out')
    series = {}
    for r in rows:
        if r['rank'] != 'deprecated' and r['subject'] != r['value']: series.setdefault((r['subject'], r['property']), []).append(r)
    want = {(d.isoformat(), *k): a for k, rs in series.items() for d in days if (a := answer(rs, d, policy))}
    got = {}
    for r in pq.read_table(tmp_path/'out'/'truth.parquet').to_pylist():
        a = dict(value=int(r['value'][1:]), certain=[int(v[1:]) for v in r['certain']], possible=[int(v[1:]) for v in r['possible']], **{k: r[k] for k in ('gold', 'tied', 'handover')})
        got[r['anchor'], r['subject'], r['property']] = a if policy == 'strict' else {k: a[k] for k in ('value', 'possible', 'gold')}
    assert got.keys() == want.keys()
    for k in want: assert got[k] == want[k], (k, series[k[1:]])
    assert counts['truth'] == len(want) and counts['gold'] == sum(a['gold'] for a in want.values())
    if policy == 'strict': assert counts['tied'] == sum(a['tied'] > 1 for a in want.values()) and counts['handover'] == sum(a['handover'] for a in want.values()) > 0
    # nothing is lost on the way
    assert counts['temporal_claims'] == sum(bool(r['start'] or r['end'] or r['point']) for rs in series.values() for r in rs)
    assert truth_at(pq.read_table(tmp_path/'out'/'intervals.parquet'), [d.isoformat() for d in days], policy).equals(pq.read_table(tmp_path/'out'/'truth.parquet').replace_schema_metadata(None))


# --- the same bytes

@pytest.fixture(scope='module')
def world(tmp_path_factory):
    """A synthetic world of 30,000 statements, two snapshots."""
    d = tmp_path_factory.mktemp('synthetic')
    synth_truth(30_000, d, snapshots=(2024, 2025))
    return d


def extracts(world): return [world/'statements'/'2024', world/'statements'/'2025']


def same(a, b): return [n for n in FILES if (a/n).read_bytes() != (b/n).read_bytes()]


def test_limits_and_threads_change_no_byte(world, tmp_path):
    anchors = json.loads((world/'manifest.json').read_text())['settings']['anchors']
    for i, kw in enumerate((dict(threads=1), dict(memory_limit='60MB', threads=1), dict(memory_limit='100MB', threads=2))):
        build_truth(extracts(world), anchors, 'strict', tmp_path/str(i), **kw)
        assert not same(tmp_path/str(i), world), kw
        assert sorted(p.name for p in (tmp_path/str(i)).iterdir()) == sorted(FILES)


def test_order_of_rows_changes_no_byte(world, tmp_path):
    for d in extracts(world):
        t = pq.read_table(d/'statements.parquet')
        rows = list(range(t.num_rows))
        random.Random(5).shuffle(rows)
        write_parquet(t.take(rows), tmp_path/d.name/'statements.parquet', STATEMENTS)
        (tmp_path/d.name/'manifest.json').write_bytes((d/'manifest.json').read_bytes())
    build_truth([tmp_path/d.name for d in extracts(world)], json.loads((world/'manifest.json').read_text())['settings']['anchors'], 'strict', tmp_path/'out')
    assert same(tmp_path/'out', world) == ['manifest.json']  # it holds the hashes of the inputs


def test_hash_seed_changes_no_byte(tmp_path):
    for seed in ('0', '77'):
        code = f"from histchrono.chronoscope.synthtruth import synth_truth; synth_truth(3000, {str(tmp_path/seed)!r})"
        subprocess.run([sys.executable, '-c', code], check=True, env={**os.environ, 'PYTHONHASHSEED': seed}, timeout=120)
    for f in sorted(p.relative_to(tmp_path/'0') for p in (tmp_path/'0').rglob('*') if p.is_file()): assert (tmp_path/'0'/f).read_bytes() == (tmp_path/'77'/f).read_bytes(), f


# --- drills

def test_too_little_memory_is_one_line(world, tmp_path):
    with pytest.raises(HistError, match='is too little') as e: build_truth(extracts(world), QUARTERS, 'strict', tmp_path/'out', memory_limit='1MB')
    assert '\n' not in str(e.value) and not (tmp_path/'out').exists()


@pytest.mark.parametrize('share', (.02, .3, .7, .95))
def test_full_disk_keeps_what_was_there(world, tmp_path, share):
    """Files may not grow beyond a share of the largest: whatever breaks, the older results stay and the message names a result."""
    build_truth(extracts(world)[:1], QUARTERS[:2], 'strict', tmp_path/'out')
    before = {f.name: f.read_bytes() for f in (tmp_path/'out').iterdir()}
    size = int(share*max((world/n).stat().st_size for n in FILES))
    code = f"from histchrono.chronoscope.truth import build_truth; build_truth({[str(d) for d in extracts(world)]!r}, {QUARTERS!r}, 'strict', {str(tmp_path/'out')!r})"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120, preexec_fn=limit)
    assert r.returncode and 'DiskError: no disk space to write' in r.stderr.splitlines()[-1] and '.work.' not in r.stderr.splitlines()[-1], r.stderr[-500:]
    assert {f.name: f.read_bytes() for f in (tmp_path/'out').iterdir()} == before


def test_two_runs_at_once(world, tmp_path):
    """Two processes that write into one folder leave one whole result."""
    code = f"from histchrono.chronoscope.truth import build_truth; build_truth({[str(d) for d in extracts(world)]!r}, {QUARTERS!r}, 'strict', {str(tmp_path/'out')!r}, memory_limit='100MB')"
    runs = [subprocess.Popen([sys.executable, '-c', code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for r in runs: assert r.wait(120) == 0, r.stderr.read()
    for r in runs: r.stderr.close()
    build_truth(extracts(world), QUARTERS, 'strict', tmp_path/'alone')
    assert not same(tmp_path/'out', tmp_path/'alone') and len(list((tmp_path/'out').iterdir())) == len(FILES)


GOOD = [dict(snapshot='', subject='Q1', property='P6', value='Q2', rank='normal', start=['2019-00-00/9'], end=[], point=[], replaces=[], replaced_by=[], ordinal=[], of=[])]


@pytest.mark.parametrize('what, error, words', [
    ('no manifest', InputError, 'manifest.json is missing'), ('{"stage": "extract"}', InputError, 'is not what extract writes'), ('{}', InputError, 'is damaged'), ('[]', InputError, 'is damaged'), ('{"settings":', InputError, 'is damaged'),
    ('\ud800'.encode('utf-8', 'surrogatepass'), InputError, 'is damaged'), ('no statements', InputError, 'statements.parquet is missing'), ('text', InputError, 'damaged or no Parquet'), ('other schema', SchemaError, 'expected statements v1'),
    ('older schema', SchemaError, 'statements v0, expected statements v1'), ('no column', SchemaError, 'column rank is missing'), ('other type', SchemaError, 'column point is of type'),
    ('subject', InputError, "'Berlin'"), ('property', InputError, "'P0'"), ('value', InputError, "'L7'"), ('rank', InputError, "'best'"), ('null', InputError, 'None'), ('snapshot', InputError, "'2024'"), ('form', InputError, "has the time '2019'"), ('month', InputError, "has the time '2019-13-00/10'"), ('no form', InputError, 'has the time None')])
def test_faults(what, error, words, tmp_path):
    d = write_extract(tmp_path/'in', GOOD)
    table, meta = pa.Table.from_pylist(GOOD, schema=STATEMENTS.fields), STATEMENTS.arrow.metadata
    put = lambda t, m=meta: pq.write_table(t.replace_schema_metadata(m), d/'statements.parquet')
    edit = lambda **kw: put(pa.Table.from_pylist([{**GOOD[0], **kw}], schema=STATEMENTS.fields))
    if what == 'no manifest': (d/'manifest.json').unlink()
    elif what == 'no statements': (d/'statements.parquet').unlink()
    elif what == 'text': (d/'statements.parquet').write_text('not Parquet')
    elif what == 'other schema': put(table, None)
    elif what == 'older schema': put(table, {'histchrono.schema': 'statements', 'histchrono.version': '0'})
    elif what == 'no column': put(table.drop_columns('rank'))
    elif what == 'other type': put(table.set_column(7, 'point', pa.array([['x']], pa.list_(pa.binary()))))
    elif what in ('subject', 'property', 'value', 'rank', 'snapshot'): edit(**{what: words.strip("'")})
    elif what == 'null': edit(subject=None)
    elif what in ('form', 'month', 'no form'): edit(start=['2019'] if what == 'form' else ['2019-13-00/10'] if what == 'month' else [None])
    else: (d/'manifest.json').write_bytes(what if isinstance(what, bytes) else what.encode())
    build_truth(write_extract(tmp_path/'fine', GOOD), '2022-01-01', 'strict', tmp_path/'out')
    before = {f.name: f.read_bytes() for f in (tmp_path/'out').iterdir()}
    with pytest.raises(error, match=words) as e: build_truth([d], '2022-01-01', 'strict', tmp_path/'out')
    assert '\n' not in str(e.value) and 'in/' in str(e.value)
    assert {f.name: f.read_bytes() for f in (tmp_path/'out').iterdir()} == before


@pytest.mark.parametrize('anchors, words', [('', 'is no date'), ([], 'no anchor dates'), ('2022-01-01,2021-01-01', 'does not come after'), ('2022-01-01,2022-01-01', 'does not come after'), ('2022', 'is no date'),
                                            ('2022-02-30', 'is no date'), ([20220101], 'is no date'), ([None], 'is no date'), (2022, 'no anchor dates')])
def test_anchors(anchors, words, tmp_path):
    with pytest.raises(InputError, match=words): build_truth(write_extract(tmp_path/'in', GOOD), anchors, 'strict', tmp_path/'out')
    build_truth(tmp_path/'in', '2022-01-01', 'strict', tmp_path/'out')
    with pytest.raises(InputError, match=words): write_truth(tmp_path/'out'/'intervals.parquet', anchors, 'strict', tmp_path/'out'/'t.parquet')


def test_incomplete_and_empty_are_said(tmp_path):
    d = write_extract(tmp_path/'in', GOOD, complete=False)
    rows = build_truth([d], '2022-01-01', 'strict', tmp_path/'out')
    assert rows['warnings'] == json.loads((tmp_path/'out'/'manifest.json').read_text())['warnings'] and 'was not complete' in rows['warnings'][0]
    timeless = write_extract(tmp_path/'timeless', [{**GOOD[0], 'start': []}])
    rows = build_truth([timeless], '2022-01-01', 'strict', tmp_path/'out')
    assert rows['truth'] == 0 and rows['timeless'] == 1 and 'no statement has a time' in rows['warnings'][0]
    for rows in ([], [{**GOOD[0], 'rank': 'deprecated'}], [{**GOOD[0], 'value': 'Q1'}]):
        with pytest.raises(InputError, match='no statement that can be used'): build_truth([write_extract(tmp_path/'none', rows)], '2022-01-01', 'strict', tmp_path/'out')


@pytest.mark.parametrize('limit', ('junk', '1KB', '', '80%'))
def test_memory_limits_are_checked_first(limit, tmp_path):
    with pytest.raises(InputError, match='memory limit') as e: build_truth(write_extract(tmp_path/'in', GOOD), '2022-01-01', 'strict', tmp_path/'out', memory_limit=limit)
    assert limit in str(e.value) and '\n' not in str(e.value) and not (tmp_path/'out').exists()
    with pytest.raises(InputError, match='memory limit'): synth_truth(10, tmp_path/'out', memory_limit=limit)
    assert not (tmp_path/'out').exists()


@pytest.mark.parametrize('n, seed, words', [(10, -1, 'seed -1'), (0, 7, 'at least 1'), (10**15, 7, 'at most')])
def test_synthetic_truth_refuses(n, seed, words, tmp_path):
    with pytest.raises(InputError, match=words): synth_truth(n, tmp_path/'out', seed)
    assert not (tmp_path/'out').exists()


# --- names of folders, and damaged bytes

ODD_NAMES = ('snapshot=2031', 'subject=Q9', 'b1', 'b[1]', 'st*r', 'star', 'q?x', '{a,b}', "it's", '[!a]')


def test_names_of_folders_mean_nothing(tmp_path):
    """Each folder has a statement of its own; whatever the folder's name, that one is read."""
    for i, n in enumerate(ODD_NAMES): write_extract(tmp_path/'in'/n, [{**GOOD[0], 'value': f'Q{100 + i}', 'snapshot': str(i)}], snapshot=str(i))
    for i, n in enumerate(ODD_NAMES):
        build_truth(tmp_path/'in'/n, '2022-01-01', 'strict', tmp_path/n)
        rows = pq.ParquetFile(tmp_path/n/'truth.parquet').read().to_pylist()
        assert [(r['snapshot'], r['subject'], r['possible']) for r in rows] == [(str(i), 'Q1', [f'Q{100 + i}'])], n
        assert truth_at(tmp_path/n/'intervals.parquet', '2022-01-01').to_pylist() == rows
    build_truth([tmp_path/'in'/n for n in ODD_NAMES], '2022-01-01', 'strict', tmp_path/'all')
    assert sorted(pq.read_table(tmp_path/'all'/'truth.parquet')['value'].to_pylist()) == [f'Q{100 + i}' for i in range(len(ODD_NAMES))]


def test_damaged_bytes_name_the_file(world, tmp_path):
    """Bytes are damaged wherever: the file is named, or nobody can tell that it is damaged."""
    rnd, named = random.Random(3), 0
    for which, file in (('statements', extracts(world)[1]/'statements.parquet'), ('intervals', world/'intervals.parquet')):
        d = tmp_path/which
        d.mkdir()
        whole, copy = file.read_bytes(), d/f'{which}.parquet'
        if which == 'statements': (d/'manifest.json').write_bytes((extracts(world)[1]/'manifest.json').read_bytes())
        for at in (rnd.randrange(4, len(whole) - 60) for _ in range(12)):
            copy.write_bytes(whole[:at] + rnd.randbytes(50) + whole[at + 50:])
            try: build_truth([extracts(world)[0], d], '2024-01-01', 'strict', tmp_path/'out') if which == 'statements' else truth_at(copy, '2024-01-01')
            except HistError as e:
                named += 1
                assert str(copy) in str(e) and '\n' not in str(e)
    assert named > 12


@pytest.mark.parametrize('value', ('Berlin', '', None))
def test_intervals_that_are_none_name_the_file(value, tmp_path):
    from histchrono.chronoscope.intervals import INTERVALS
    build_truth(write_extract(tmp_path/'in', GOOD), '2022-01-01', 'strict', tmp_path/'out')
    f = tmp_path/'out'/'intervals.parquet'
    rows = pq.read_table(f).to_pylist()
    write_parquet(pa.Table.from_pylist([{**rows[0], 'value': value}], schema=INTERVALS.fields), f, INTERVALS)
    with pytest.raises(InputError, match='out/intervals.parquet') as e: truth_at(f, '2022-01-01')
    assert '\n' not in str(e.value)


def test_a_failure_at_the_end_keeps_what_was_there(tmp_path, monkeypatch):
    from histchrono.chronoscope import truth
    d = write_extract(tmp_path/'in', GOOD)
    build_truth(d, '2022-01-01', 'strict', tmp_path/'out')
    before = {f.name: f.read_bytes() for f in (tmp_path/'out').iterdir()}
    def fail(*a, **k): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(truth, 'write_manifest', fail)
    with pytest.raises(DiskError): build_truth(d, '2023-01-01', 'strict', tmp_path/'out')
    assert {f.name: f.read_bytes() for f in (tmp_path/'out').iterdir()} == before
