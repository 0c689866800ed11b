"""Chains from elsewhere and back: nothing is lost, nothing broken becomes data, and the data set opens where it will be used."""
import bz2, gzip, json, os, random, re, subprocess, sys
import pyarrow as pa, pyarrow.parquet as pq, pytest, zstandard
from hypothesis import HealthCheck, given, settings, strategies as st
from histchrono.chronoscope.chainfile import CHAINS, make_chain, read_chains, write_chains
from histchrono.chronoscope.datacard import People, about_living, is_local
from histchrono.chronoscope.dump import ENTITIES
from histchrono.chronoscope.interop import export_chains, import_chains, report_lines
from histchrono.chronoscope.living import LIVING
from histchrono.core.errors import HistError, InputError
from histchrono.core.io import write_parquet
from histchrono.core.provenance import write_manifest

ELEVEN = ('carryover', 'carryover_then', 'scope_switch', 'cross_entity_then', 'multi_turn_chain', 'temporal_narrative', 'interval_reasoning', 'interval_change', 'distinct_count', 'change_point', 'bridged_multi_pid')
slow = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

def a_turn(i=0, **kw):
    "A turn as the released files have it."
    return dict(dict(turn_id=f't-{i}', turn_index=i, question=f'In {2014 + i}, where did Élodie Façon work?', answer='Acme', year=2014 + i, pid='P108', subject_label='Élodie Façon', subject_qid='Q11',
                     value_label='Acme', value_qid='Q21', present_day_answer='Globex', present_day_value_qid='Q22', drift_eligible=True), **kw)

def a_chain(*turns, n=1, **kw):
    return dict(dict(chain_id=f'c-{n}', family='scope_switch', snapshot_year=2022, anchor_date='2022-01-01', truth_type='temporal', difficulty={'hops': 2, 'temporal': True, 'analytic': False},
                     turns=list(turns) or [a_turn(0), a_turn(1)]), **kw)

def without(d, *keys): return {k: v for k, v in d.items() if k not in keys}
def lines(*objects): return ''.join(json.dumps(o) + '\n' for o in objects).encode()
def canon(o): return json.dumps(o)  # types, values and the order of names

def through(tmp, data: bytes, name='in.jsonl'):
    "Import bytes: the report and the rows."
    (tmp / name).write_bytes(data)
    report = import_chains(tmp / name, tmp / 'chains.parquet')
    rows = read_chains(tmp / 'chains.parquet')
    assert report['objects'] == report['chains'] + report['left_out'] and report['chains'] == len(rows) == len({r['chain_id'] for r in rows})
    assert json.loads((tmp / 'report.json').read_text()) == report and (tmp / 'manifest.json').exists()
    return report, rows

def back(tmp):
    export_chains(tmp / 'chains.parquet', tmp / 'back.jsonl')
    return [json.loads(line) for line in (tmp / 'back.jsonl').read_bytes().decode().split('\n')[:-1]]

# ---- nothing is lost

names = st.text(max_size=12)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 3000), st.floats(allow_nan=False, width=32), names, st.sampled_from(['2014', ' 2014.0', '2014-05-01', 'null', 'Yes', '7', 'Q11', 'wd:Q9', 'p39', '\ud800', 'Theresa May']))
anything = st.recursive(scalars, lambda s: st.one_of(st.lists(s, max_size=3), st.dictionaries(names, s, max_size=3)), max_leaves=6)

@st.composite
def odd_chains(draw):
    "A released chain with fields changed, taken away, added and put in another order."
    def bend(o):
        for k in draw(st.lists(st.sampled_from(sorted(o)), max_size=3, unique=True)):
            if k == 'turns': continue
            how = draw(st.sampled_from(('drop', 'null', 'other', 'other')))
            if how == 'drop': del o[k]
            else: o[k] = None if how == 'null' else draw(anything)
        for k in draw(st.lists(st.one_of(names, st.sampled_from(['@raw', '@keys', '@chain', '@order', 'extra', 'accepted', 'split', 'present_day_answer'])), max_size=2)):
            if k not in o: o[k] = draw(anything)
        return {k: o[k] for k in draw(st.permutations(list(o)))} if draw(st.booleans()) else o
    turns = [bend(a_turn(i)) for i in range(draw(st.integers(1, 4)))]
    c = bend(a_chain(*draw(st.permutations(turns)), family=draw(st.sampled_from(('Carryover-Then', 'multi_turn', 'scope_switch', 'distinct count')))))
    return c

@slow
@given(st.lists(odd_chains(), min_size=1, max_size=4))
def test_released_comes_back_as_it_was(tmp_path_factory, chains):
    tmp = tmp_path_factory.mktemp('r')
    try: report, _ = through(tmp, lines(*chains, a_chain()))
    except HistError: raise AssertionError('a good chain was there')
    got, left = [canon(o) for o in back(tmp)], [canon(o) for o in (*chains, a_chain())]
    assert len(got) == report['chains']
    it = iter(left)
    assert all(any(g == o for o in it) for g in got)  # in order, none changed
    again, rows = through(tmp, (tmp / 'back.jsonl').read_bytes())
    assert again['left_out'] == 0 and [canon(o) for o in back(tmp)] == got

texts = st.text(min_size=1, max_size=20).filter(lambda s: s.strip())
@st.composite
def own_chains(draw):
    "A chain as the project makes them, with every column filled in every way that its type allows."
    maybe = lambda s: st.one_of(st.none(), s)
    turns = [dict(turn_id=str(i + 1), question=draw(texts), answer=draw(texts), answer_qid=draw(st.sampled_from(['', 'Q5', 'Q9000000001'])), answer_kind=draw(st.sampled_from(('entity', 'yesno', 'count', 'year'))),
                  accepted=draw(st.lists(texts, max_size=3)), property=draw(st.sampled_from(('P6', 'P39'))), subject_qid=draw(st.sampled_from(('Q1', 'Q2'))), subject_label=draw(st.text(max_size=8)), subject_kind='country',
                  year=draw(st.integers(-500, 2025)), date=draw(st.sampled_from(('', '2014-05-01', '2010/2014'))), explicit_time=draw(st.booleans()), present_answer=draw(maybe(texts)), present_qid=draw(maybe(st.just('Q8'))),
                  drift_eligible=draw(st.booleans()), extra=draw(st.sampled_from(('', '{"seen":[1,2]}')))) for i in range(draw(st.integers(1, 6)))]
    c = make_chain(draw(st.sampled_from(ELEVEN)), draw(st.integers(2022, 2025)), '2022-04-01', turns, 2025, draw(st.sampled_from(('strict', 'paper'))))
    return {**c, 'anchors': ['2022-04-01', '2022-07-01'][:draw(st.integers(1, 2))], 'variant': draw(st.sampled_from(('template', 'paraphrase'))), 'parent_chain_id': draw(st.sampled_from(('', 'ab12'))), 'source_id': draw(st.sampled_from(('', 'x')))}

@slow
@given(st.lists(own_chains(), min_size=1, max_size=4, unique_by=lambda c: c['chain_id']))
def test_our_chains_come_back_as_the_same_bytes(tmp_path_factory, chains):
    tmp = tmp_path_factory.mktemp('o')
    write_chains(chains, tmp / 'ours.parquet')
    export_chains(tmp / 'ours.parquet', tmp / 'ours.jsonl')
    report = import_chains(tmp / 'ours.jsonl', tmp / 'again.parquet')
    assert (report['left_out'], report['notes']) == (0, {})
    assert (tmp / 'again.parquet').read_bytes() == (tmp / 'ours.parquet').read_bytes()
    first = json.loads((tmp / 'ours.jsonl').read_text(encoding='utf-8').split('\n')[0])
    assert list(first)[:7] == list(a_chain()) and list(first['turns'][0])[:13] == list(a_turn())

def test_many_batches_come_back(tmp_path):
    chains = [a_chain(a_turn(subject_qid=f'Q{i % 5000 + 1}', question=f'In 2014, where did number {i} work?'), n=i) for i in range(20_000)]
    report, rows = through(tmp_path, lines(*chains))
    assert report['chains'] == 20_000 and report['faults'] == {} and [canon(o) for o in back(tmp_path)] == list(map(canon, chains))

def test_an_added_field_of_our_own_form_is_kept(tmp_path):
    import_chains_of = lambda o: through(tmp_path, lines(o))
    write_chains([make_chain('carryover', 2022, '2022-01-01', [dict(turn_id='1', question='Who?', answer='A', answer_qid='Q9', answer_kind='entity', accepted=['A'], property='P6', subject_qid='Q1', subject_label='S', subject_kind='country',
                  year=2022, date='', explicit_time=True, present_answer=None, present_qid=None, drift_eligible=False, extra='')], 2025, 'strict')], tmp_path / 'c.parquet')
    export_chains(tmp_path / 'c.parquet', tmp_path / 'c.jsonl')
    o = json.loads((tmp_path / 'c.jsonl').read_text())
    report, (row,) = import_chains_of({**o, 'remark': 1, 'turns': [{**o['turns'][0], 'rating': 5}]})
    assert json.loads(row['turns'][0]['extra']) == {'rating': 5, '@more': {'remark': 1}} and len(report['notes']) == 1
    assert back(tmp_path)[0]['chain_id'] == o['chain_id']
    report, (row,) = import_chains_of({**o, 'turns': [{**o['turns'][0], 'answer': 'B'}]})
    assert row['chain_id'] != o['chain_id'] and 'numbered anew' in ' '.join(report['notes'])
    with pytest.raises(InputError, match='another schema'): import_chains_of({**o, 'schema': 'histchrono.chains/99'})
    with pytest.raises(InputError, match='accepted'): import_chains_of({**o, 'turns': [{**o['turns'][0], 'accepted': 'A'}]})

# ---- files as they come

FORMS = {'lines': lambda cs: b'\n'.join(json.dumps(c).encode() for c in cs), 'array': lambda cs: json.dumps(cs).encode(), 'array by lines': lambda cs: b'[\n' + b',\n'.join(json.dumps(c).encode() for c in cs) + b'\n]\n',
         'printed array': lambda cs: json.dumps(cs, indent=2, ensure_ascii=False).encode(), 'printed objects': lambda cs: '\n'.join(json.dumps(c, indent=1) for c in cs).encode()}
WRAPS = {'plain': bytes, 'gz': gzip.compress, 'two gz members': lambda b: gzip.compress(b[:100]) + gzip.compress(b[100:]), 'bz2': bz2.compress, 'zst': zstandard.compress}

@pytest.mark.parametrize('wrap', WRAPS)
@pytest.mark.parametrize('form', FORMS)
def test_every_form_and_wrapping(tmp_path, form, wrap):
    chains = [a_chain(n=1), a_chain(a_turn(question='Where did Dae Kim work in 2014?'), n=2), a_chain(a_turn(subject_label='東京'), n=3)]
    report, rows = through(tmp_path, WRAPS[wrap](FORMS[form](chains)), 'file without a telling name')
    assert (report['chains'], report['left_out'], report['complete']) == (3, 0, True) and list(map(canon, back(tmp_path))) == list(map(canon, chains))

@pytest.mark.parametrize('data', [b'\xef\xbb\xbf' + lines(a_chain()), lines(a_chain()).replace(b'\n', b'\r\n'), b'\n\n  \n' + lines(a_chain()) + b'\n\n', lines(a_chain()).rstrip(), b'\xef\xbb\xbf[\r\n' + lines(a_chain()).rstrip() + b'\r\n]'],
                         ids=['byte order mark', 'CR LF', 'blank lines', 'no last line end', 'array with all of it'])
def test_harmless_oddities_leave_no_trace(tmp_path, data):
    report, rows = through(tmp_path, data)
    assert (report['chains'], report['left_out'], report['complete'], report['notes']) == (1, 0, True, {}) and back(tmp_path) == [a_chain()]

def test_cut_and_broken_files_keep_what_was_read(tmp_path):
    whole = lines(a_chain(n=1), a_chain(a_turn(), n=2))
    report, rows = through(tmp_path, whole[:-40])
    assert (report['chains'], report['complete'], report['faults']) == (1, False, {'cut off': {'n': 1, 'lines': [2]}})
    rnd = random.Random(1)
    packed = gzip.compress(lines(*(a_chain(a_turn(question=f'In 2014, where did {rnd.random()} work?'), n=i) for i in range(3000))))
    report, rows = through(tmp_path, packed[:len(packed) // 2])
    assert 0 < report['chains'] < 3000 and not report['complete'] and 'gzip' in report['problem']
    report, rows = through(tmp_path, json.dumps([a_chain(n=1), a_chain(a_turn(), n=2)], indent=1).encode()[:-60])
    assert report['chains'] == 1 and not report['complete']

@pytest.mark.parametrize('data', [b'', b'\n\n', b'[]', b'42\n"x"\n', b'PAR1\x00\x01', gzip.compress(b''), json.dumps(a_chain()).encode('utf-16'), lines(a_chain(turns=[]))], ids=['empty', 'blank', 'empty array', 'no objects', 'binary', 'empty gzip', 'UTF-16', 'no turns'])
def test_nothing_usable_is_an_error_and_leaves_no_file(tmp_path, data):
    with pytest.raises(InputError) as e: through(tmp_path, data)
    assert '\n' not in str(e.value) and not (tmp_path / 'chains.parquet').exists() and not (tmp_path / 'manifest.json').exists()
    with pytest.raises(InputError, match='missing'): import_chains(tmp_path / 'absent', tmp_path / 'c.parquet')
    with pytest.raises(InputError, match='folder'): import_chains(tmp_path, tmp_path / 'c.parquet')

FAULTS = {
    'no JSON': b'{"chain_id": x}', 'no object': b'[1, 2]', 'not UTF-8': b'{"chain_id": "\xff"}', 'a name twice in one object': b'{"family": "a", "family": "b"}', 'nested too deeply': b'[' * 100_000,
    'no turns': a_chain(turns=[]), 'no family': a_chain(family=None), 'a turn that is no object': a_chain(turns=['x']), 'a turn without a question': a_chain(a_turn(question=' ')), 'a turn without an answer': a_chain(a_turn(answer=None)),
    'answer that cannot be read': a_chain(a_turn(answer=['A', 'B'])), 'year that cannot be read': a_chain(a_turn(year='MMXIV')), 'snapshot_year that cannot be read': a_chain(snapshot_year=2022.5), 'anchor_date that cannot be read': a_chain(anchor_date='2022-02-31'),
    'neither snapshot_year nor anchor_date': without(a_chain(), 'snapshot_year', 'anchor_date'), 'drift_eligible that cannot be read': a_chain(a_turn(drift_eligible='perhaps')), 'present_day_answer of a chain that cannot be read': a_chain(present_day_answer=[1]),
}
@pytest.mark.parametrize('reason', FAULTS)
def test_each_fault_is_counted_with_its_line(tmp_path, reason):
    bad = FAULTS[reason]
    bad = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    report, rows = through(tmp_path, lines(a_chain()) + b'\n' + bad + b'\n' + bad + b'\n' + lines(a_chain(a_turn(), n=2)))
    assert report['faults'] == {reason: {'n': 2, 'lines': [3, 4]}} and report['chains'] == 2 and len(back(tmp_path)) == 2

def test_only_a_few_lines_are_shown(tmp_path):
    report, _ = through(tmp_path, b'x\n' * 50 + lines(a_chain()))
    assert report['faults'] == {'no JSON': {'n': 50, 'lines': [1, 2, 3, 4, 5]}}
    assert report_lines(report) == ['1 chains with 2 turns, 50 of 51 objects left out', 'left out: no JSON: 50 (lines 1, 2, 3, 4, 5 …)']

def test_broken_spots_of_an_array(tmp_path):
    good = [json.dumps(a_chain(a_turn(question=f'In 2014, who {i}?'), n=i)) for i in range(4)]
    report, rows = through(tmp_path, ('[\n' + ',\n'.join([good[0], '{"a": }', good[1], '7', good[2][:50], good[3]]) + '\n]').encode())
    assert [r['source_id'] for r in rows] == ['c-0', 'c-1', 'c-3'] and report['left_out'] == 3 and report['faults']['no object']['lines'] == [5]

# ---- what is read from a turn

def one(tmp, *turns, **kw):
    report, (row,) = through(tmp, lines(a_chain(*turns, **kw)))
    assert back(tmp) == [a_chain(*turns, **kw)]
    return row, list(report['notes'])

def test_order_and_numbering_of_turns(tmp_path):
    for index in ([0, 1, 2], [1, 2, 3], ['1', '2', '3'], [0.0, 1.0, 2.0]):
        row, notes = one(tmp_path, *(a_turn(i, turn_index=index[i]) for i in (2, 0, 1)))
        assert [t['turn_id'] for t in row['turns']] == ['t-0', 't-1', 't-2'] and notes == ['turns out of order: put in the order of turn_index']
    row, notes = one(tmp_path, *(without(a_turn(i), 'turn_index') for i in (1, 0)))
    assert [t['turn_id'] for t in row['turns']] == ['t-1', 't-0'] and not notes
    row, notes = one(tmp_path, a_turn(0, turn_index=1), a_turn(1, turn_index=1))
    assert 'orders nothing' in notes[0]
    assert 'a gap' in one(tmp_path, a_turn(0, turn_index=0), a_turn(1, turn_index=2))[1][0]
    row, notes = one(tmp_path, a_turn(0, turn_id='x'), a_turn(1, turn_id='x'))
    assert [t['turn_id'] for t in row['turns']] == ['1', '2'] and 'a turn_id twice' in notes[0]

def test_years(tmp_path):
    ask = lambda q, y: a_turn(question=q, year=y)
    row, notes = one(tmp_path, ask('In 1998, who?', None), ask('And then?', None), ask('And in 2004?', '2004'), ask('And then?', 2004.0), ask('On 3 May 2007?', '2007-05-03'))
    assert [t['year'] for t in row['turns']] == [1998, 1998, 2004, 2004, 2007] and [t['explicit_time'] for t in row['turns']] == [True, False, True, False, True]
    assert row['turns'][4]['date'] == '2007-05-03' and 'without a year' in notes[0]
    row, _ = one(tmp_path, ask('And then?', None), a_turn(subject_label='TSV 1860 Munich', question='Who coached TSV 1860 Munich at the time?', year=2001), ask('Who ruled in 854?', 854), a_turn(answer='Theresa May', value_label='Theresa May', question='Who came after Theresa May then?'))
    assert [t['explicit_time'] for t in row['turns']] == [False, False, True, False] and row['turns'][0]['year'] == 2022

def test_kinds_of_answers_and_numbers(tmp_path):
    row, notes = one(tmp_path, a_turn(answer='Yes', question='Was it so in 2014?'), a_turn(1, answer=3, question='How many clubs?'), a_turn(2, answer='2014', question='In which year did it change?'), a_turn(3, answer=True, question='Really?'),
                     a_turn(4, subject_qid='http://www.wikidata.org/entity/Q11', value_qid='q21', pid='wdt:P108'), a_turn(5, subject_qid=None), family='Distinct-Count')
    assert [t['answer_kind'] for t in row['turns']] == ['yesno', 'count', 'year', 'yesno', 'entity', 'entity'] and [t['answer'] for t in row['turns']][:4] == ['Yes', '3', '2014', 'Yes']
    assert row['turns'][4]['answer_qid'] == 'Q21' and row['turns'][4]['property'] == 'P108' and row['family'] == 'distinct_count' and any('QID of its subject' in n for n in notes)
    assert [t['drift_eligible'] for t in row['turns']] == [False] * 4 + [True] * 2 and any('drift_eligible' in n for n in notes)

def test_present_day_answers(tmp_path):
    bare = lambda i, **kw: without(a_turn(i, **kw), 'present_day_answer', 'present_day_value_qid', 'drift_eligible')
    got = lambda row: [(t['present_answer'], t['drift_eligible']) for t in row['turns']]
    row, _ = one(tmp_path, bare(0), bare(1, pid='P39', answer='mayor'), bare(2, answer='Globex'), present_day_answer='Globex')
    assert got(row) == [('Globex', True), (None, False), ('Globex', False)]
    row, _ = one(tmp_path, bare(0), bare(1, pid='P39', answer='mayor'), present_day_answer={'P108': 'Globex', 'P39': 'mayor'}, present_day_value_qid={'P108': 'Q22'})
    assert got(row) == [('Globex', True), ('mayor', False)] and row['turns'][0]['present_qid'] == 'Q22'
    row, notes = one(tmp_path, bare(0), bare(1, subject_qid='Q12'), present_day_answer='Globex')  # two people of one name
    assert got(row) == [(None, False), ('Globex', True)] and 'two subjects' in notes[0]
    assert 'no turn asks about' in one(tmp_path, bare(0), present_day_answer={'P999': 'x'})[1][0]
    row, _ = one(tmp_path, a_turn(0, drift_eligible=False), a_turn(1, drift_eligible=None), a_turn(2, present_day_answer=None), present_day_answer='Other')
    assert got(row) == [('Globex', False), ('Globex', True), (None, False)]

def test_the_same_conversation_and_the_same_id_twice(tmp_path):
    other = a_chain(a_turn(subject_qid='Q12'), n=1)  # another person of the same name, under an id that is taken
    chains = [a_chain(), a_chain(anchor_date='2022-04-01', n=2), other, a_chain(), a_chain(family='Scope-Switch', n=3)]
    report, rows = through(tmp_path, lines(*chains))
    assert report['chains'] == 5 and back(tmp_path) == chains and len({r['turns'][0]['subject_qid'] for r in rows}) == 2
    assert {n: d['lines'] for n, d in report['notes'].items()} == {'a chain_id that came before': [3, 4], 'a conversation that came before: kept under an id of its own': [2, 4, 5]}

def test_lone_surrogates_and_unknown_families(tmp_path):
    row, notes = one(tmp_path, a_turn(subject_label='a\ud800b', question='Was a\ud800b there in 2014?', note='\udfff'), family='multihop_2')
    assert row['turns'][0]['subject_label'] == 'a\ufffdb' and row['family'] == 'multihop_2' and len(notes) == 2

def test_unknown_fields_stand_in_extra(tmp_path):
    row, _ = one(tmp_path, a_turn(rating=5, tags=['a', {'b': None}]), a_turn(1), release='v2')
    first = json.loads(row['turns'][0]['extra'])
    assert (first['rating'], first['tags'], first['@chain']['release']) == (5, ['a', {'b': None}], 'v2') and row['turns'][1]['extra'] == ''

def test_the_bytes_hang_on_the_input_alone(tmp_path):
    names = ['May 1', 'May 2', '1 May', 'X 1999', 'Y 1999']
    (tmp_path / 'in.jsonl').write_bytes(lines(*(a_chain(*(a_turn(i, subject_label=n, question=f'And {n} {m}?') for i, n in enumerate(names)), n=m) for m in range(20))))
    run = 'import sys; from histchrono.chronoscope.interop import *; import_chains(sys.argv[1], sys.argv[2]); export_chains(sys.argv[2], sys.argv[3], "hf")'
    for seed in '12': subprocess.run([sys.executable, '-c', run, tmp_path / 'in.jsonl', tmp_path / seed / 'c.parquet', tmp_path / seed / 'hf'], check=True, env={**os.environ, 'PYTHONHASHSEED': seed})
    files = [sorted((p.relative_to(tmp_path / s).as_posix(), p.read_bytes()) for p in (tmp_path / s).rglob('*') if p.is_file()) for s in '12']
    assert files[0] == files[1]

def test_formats_and_missing_files(tmp_path):
    write_chains([], tmp_path / 'none.parquet')
    for f, word in (('inspect', 'not there yet'), ('lm-eval', 'choose released or hf'), ('csv', 'unknown')):
        with pytest.raises(InputError, match=word): export_chains(tmp_path / 'none.parquet', tmp_path / 'x', f)
    with pytest.raises(InputError, match='missing'): export_chains(tmp_path / 'absent.parquet', tmp_path / 'x')
    with pytest.raises(HistError): export_chains(__file__, tmp_path / 'x')
    with pytest.raises(InputError, match='no chain'): export_chains(tmp_path / 'none.parquet', tmp_path / 'x', 'hf')
    with pytest.raises(InputError, match='is the input itself'): export_chains(tmp_path / 'none.parquet', tmp_path / 'none.parquet')
    assert not (tmp_path / 'x').exists()

# ---- the data set

def ours(n=300):
    rnd, out = random.Random(5), []
    for i in range(n):
        q, a = (f'Q{x if x % 4 else 9_000_000_000 + x}' for x in rnd.sample(range(1, 120), 2))
        turn = lambda k, **kw: dict(dict(turn_id=str(k + 1), question=f'In 2014, who was number {i} of {q}?' if not k else f'And the next, {k}?', answer=f'Name {a}', answer_qid=a, answer_kind='entity', accepted=[f'Name {a}', 'A.'], property=rnd.choice(('P6', 'P102')),
                                         subject_qid=q, subject_label=f'Thing {q}', subject_kind='city', year=2014, date='', explicit_time=not k, present_answer=None, present_qid=None, drift_eligible=False, extra=''), **kw)
        out.append(make_chain(ELEVEN[i % 11], 2022 + i % 4, '2022-01-01', [turn(k) for k in range(2 + i % 3)], 2025, 'strict'))
    return out

def extracted(folder, people: dict):
    "What extract leaves: everybody's names, and who may be living."
    rows = [dict(qid=q, label=n, label_lang='en', usable=True, aliases=[], description='', classes=['Q5'], country=None, gender=None) for q, n in people.items()]
    write_parquet(pa.Table.from_pylist([r | {f.name: None for f in ENTITIES.fields if f.name not in r} for r in rows], schema=ENTITIES.fields), folder / 'entities.parquet', ENTITIES)
    write_parquet(pa.table({'qid': pa.array(sorted(people), pa.string())}), folder / 'living.parquet', LIVING)
    return folder

def test_the_folder_opens_with_datasets(tmp_path):
    pytest.importorskip('datasets', reason='the datasets library is not installed: pip install datasets (dev extra)')
    chains = ours()
    write_chains(chains, tmp_path / 'c.parquet')
    done = export_chains(tmp_path / 'c.parquet', tmp_path / 'hf', 'hf')
    write_chains([c for c in chains if c['split'] == 'train'][:3], tmp_path / 'few.parquet')
    assert export_chains(tmp_path / 'few.parquet', tmp_path / 'few', 'hf')['splits'] == {'train': 3}
    code = 'import datasets, json, sys; assert datasets.load_dataset("few").num_rows == {"train": 3}; d = datasets.load_dataset(sys.argv[1]); print(json.dumps({"rows": {s: d[s].to_list() for s in d}, "features": sorted(d["train"].features)}))'
    env = {**os.environ, 'HF_HOME': str(tmp_path / 'home'), 'HF_HUB_OFFLINE': '1', 'HF_DATASETS_OFFLINE': '1'}
    r = subprocess.run([sys.executable, '-c', code, tmp_path / 'hf'], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert r.returncode == 0, r.stderr
    assert not re.search('warn|ignoring|malformed', r.stderr, re.I), r.stderr
    got = json.loads(r.stdout.splitlines()[-1])
    assert set(got['rows']) == {'train', 'validation', 'test'} and {s: len(x) for s, x in got['rows'].items()} == done['splits'] and got['features'] == sorted(CHAINS.fields.names)
    key = lambda c: c['chain_id']
    assert sorted(sum(got['rows'].values(), []), key=key) == sorted(chains, key=key)
    assert all(r['split'] == {'validation': 'dev'}.get(s, s) for s, x in got['rows'].items() for r in x)

def test_the_card_counts_what_is_there(tmp_path):
    yaml = pytest.importorskip('yaml')
    chains = ours()
    write_chains(chains, tmp_path / 'c.parquet')
    done = export_chains(tmp_path / 'c.parquet', tmp_path / 'hf', 'hf')
    page = (tmp_path / 'hf' / 'README.md').read_text()
    head = yaml.safe_load(page.split('---\n')[1])
    assert head['license'] == 'cc0-1.0' and head['language'] == ['en'] and head['size_categories'] == ['n<1K'] and [f['split'] for f in head['configs'][0]['data_files']] == list(done['splits']) and 'dataset_info' not in head
    for s, n in done['splits'].items(): assert f'| {s} | {n} |' in page
    turns = [t for c in chains for t in c['turns']]
    local = lambda q: int(q[1:]) >= 9_000_000_000
    assert f"Subjects with such a number: {sum(local(t['subject_qid']) for t in turns):,} of {len(turns):,}" in page and f"at least one: {sum(any(local(q) for t in c['turns'] for q in (t['subject_qid'], t['answer_qid'])) for c in chains):,} of 300" in page
    for f in ELEVEN: assert f"| {f} | {sum(c['family'] == f for c in chains)} | {sum(c['length'] for c in chains if c['family'] == f)} |" in page
    for word in ('valid-time reconstruction', 'P102', 'profile', '--living keep', 'CC0', f"{sum(t['property'] == 'P102' for t in turns)} of the turns", *CHAINS.fields.names): assert word in page, word
    assert not re.search(r'\b20\d\d-\d\d-\d\d\b|/tmp|/work', page.replace('2022-01-01', ''))

def test_living_people_are_left_out(tmp_path):
    chains = ours()
    about = make_chain('interval_reasoning', 2022, '2022-01-01', [{**chains[0]['turns'][0], 'property': 'P35', 'question': "Was Ada Voss-Lind in office all through 2010 to 2014?", 'answer': 'Yes', 'answer_qid': '', 'answer_kind': 'yesno', 'accepted': ['Yes'], 'subject_qid': 'Q5000'}], 2025, 'strict')
    among = make_chain('carryover', 2022, '2022-01-01', [{**chains[0]['turns'][0], 'property': 'P6', 'question': 'Who?', 'answer_qid': 'Q5001', 'accepted': ['Name', 'Lula'], 'subject_qid': 'Q5000'}], 2025, 'strict')
    write_chains([*chains, about, among], tmp_path / 'c.parquet')
    with pytest.raises(InputError, match='--entities'): export_chains(tmp_path / 'c.parquet', tmp_path / 'hf', 'hf', living='drop')
    with pytest.raises(InputError, match='run extract again'): export_chains(tmp_path / 'c.parquet', tmp_path / 'hf', 'hf', living='drop', entities=[tmp_path])
    people = {f'Q{i}': f'Person {i}' for i in range(1, 20)} | {'Q7001': 'Ada Voss-Lind', 'Q7002': 'Lula'}
    done = export_chains(tmp_path / 'c.parquet', tmp_path / 'hf', 'hf', living='drop', entities=[extracted(tmp_path / 'e', people)])
    kept = [c for p in (tmp_path / 'hf' / 'data').glob('*.parquet') for c in pq.read_table(p).to_pylist()]
    expected = [c for c in chains if not any(q in people for t in c['turns'] for q in (t['subject_qid'], t['answer_qid']))]
    assert sorted(c['chain_id'] for c in kept) == sorted(c['chain_id'] for c in expected) and 0 < len(kept) < 300
    assert sum(done['dropped'].values()) == 302 - len(kept) and done['chains'] == len(kept)
    page = (tmp_path / 'hf' / 'README.md').read_text()
    assert f'{302 - len(kept)} chains that ask about or answer with' in page and f"| interval_reasoning | {done['dropped']['interval_reasoning']} |" in page
    everybody = {q: q for c in [*chains, about, among] for t in c['turns'] for q in (t['subject_qid'], t['answer_qid'])}
    with pytest.raises(InputError, match='nothing is left'): export_chains(tmp_path / 'c.parquet', tmp_path / 'hf2', 'hf', living='drop', entities=[extracted(tmp_path / 'all', everybody)])

def test_a_second_export_leaves_no_old_files(tmp_path, monkeypatch):
    import histchrono.chronoscope.datacard as card
    write_chains(ours(), tmp_path / 'c.parquet')
    monkeypatch.setattr(card, 'SHARD', 50)
    done = export_chains(tmp_path / 'c.parquet', tmp_path / 'hf', 'hf')
    assert len(list((tmp_path / 'hf' / 'data').glob('train-*-of-*.parquet'))) == -(-done['splits']['train'] // 50) > 1
    monkeypatch.setattr(card, 'SHARD', 500_000)
    assert export_chains(tmp_path / 'c.parquet', tmp_path / 'hf', 'hf') == done
    assert sorted(p.name for p in (tmp_path / 'hf' / 'data').iterdir()) == ['test-00000-of-00001.parquet', 'train-00000-of-00001.parquet', 'validation-00000-of-00001.parquet']

def test_flags_of_a_part_of_a_batch():
    "Arrow arrays that are a view of others must count from their own beginning."
    t = pa.Table.from_pylist(ours(40), schema=CHAINS.fields).combine_chunks().to_batches()[0]
    qids = pa.array([f'Q{i}' for i in range(1, 30)])
    p = People(set(qids.to_pylist()), {f'name q{i}' for i in range(50, 60)}, {f'Q{i}' for i in range(70)}, set())
    both = lambda x: list(zip(*map(list, about_living(x, p))))
    whole = both(t)
    assert both(t.slice(0, 13)) + both(t.slice(13)) == whole and {h for h, _ in whole} == {0, 1} and {u for _, u in whole} == {False, True}
    assert is_local(pa.array(['Q1', 'Q9000000000']).slice(1)).tolist() == [True]

# ---- nothing that is there is lost

def folder_bytes(d): return {p.relative_to(d).as_posix(): p.read_bytes() for p in sorted(d.rglob('*')) if p.is_file()}

def test_living_people_without_numbers_are_found_by_name(tmp_path):
    "Chains from elsewhere, without the numbers of subjects and properties."
    bare = lambda n, **kw: a_chain(*(without(a_turn(i, **kw), 'subject_qid', 'pid') for i in range(2)), n=n)
    chains = [bare(1), bare(2, subject_label='ELODIE  Facon', question='And then?'), bare(3, subject_label='Rex Alt', question='And of Rex?'), bare(4, subject_label='Nobody Known', question='And of them?'),
              bare(5, subject_label='Rex Alt', question='And?', value_qid=None, value_label='Mia', answer='Mia'), bare(6, subject_label='Rex Alt', question='What then?', value_qid='Q7'),
              bare(7, subject_label='Rex Alt', question='Was it so?', answer='Yes', value_qid='Q7'), bare(8, subject_label='Rex Alt', question='And where?', present_day_value_qid=None, present_day_answer='Mia')]
    through(tmp_path, lines(*chains))
    extracted(tmp_path / 'e', {'Q7': 'Élodie Façon', 'Q8': 'Mia', 'Q9': 'Rex Alt', 'Q21': 'Acme', 'Q22': 'Globex'})
    write_parquet(pa.table({'qid': ['Q7', 'Q8']}), tmp_path / 'e' / 'living.parquet', LIVING)
    done = export_chains(tmp_path / 'chains.parquet', tmp_path / 'hf', 'hf', 'drop', [tmp_path / 'e'])
    kept = sorted(c['source_id'] for p in (tmp_path / 'hf' / 'data').glob('*.parquet') for c in pq.read_table(p).to_pylist())
    assert kept == ['c-3', 'c-4'] and done['dropped_by'] == {'qid': 2, 'name': 4} and done['unsettled'] == 1 and sum(done['dropped'].values()) == 6
    page = (tmp_path / 'hf' / 'README.md').read_text()
    for words in ('6 chains that ask about', '2 by a number, 4 by a name alone', 'Not settled: 1 of the chains', 'A namesake', 'labels and aliases'): assert words in page, words
    assert 'unsettled' not in export_chains(tmp_path / 'chains.parquet', tmp_path / 'all', 'hf') and 'Not settled' not in (tmp_path / 'all' / 'README.md').read_text()

def test_a_name_counts_only_where_no_number_says_who_it_is(tmp_path):
    "A dead namesake with a number of their own stays."
    people = {'Q7': 'Ada Voss', 'Q11': 'Ada Voss', 'Q21': 'Acme', 'Q22': 'Globex'}
    extracted(tmp_path / 'e', people)
    write_parquet(pa.table({'qid': ['Q7']}), tmp_path / 'e' / 'living.parquet', LIVING)
    turn = lambda **kw: a_turn(**dict(dict(subject_label='Ada Voss', question='In 2014, where did Ada Voss work?'), **kw))
    through(tmp_path, lines(a_chain(turn(), n=1), a_chain(turn(subject_qid='Q99'), n=2), a_chain(turn(subject_qid='Q98', subject_label='Who', question='Where?'), n=3)))
    done = export_chains(tmp_path / 'chains.parquet', tmp_path / 'hf', 'hf', 'drop', [tmp_path / 'e'])
    assert (done['chains'], done['dropped_by'], done['unsettled']) == (2, {'qid': 0, 'name': 1}, 1)

@pytest.mark.parametrize('useless', [b'', b'x\n', None], ids=['empty', 'no JSON', 'missing'])
def test_a_useless_import_leaves_an_earlier_one_alone(tmp_path, useless):
    through(tmp_path, lines(a_chain()))
    if useless is not None: (tmp_path / 'bad').write_bytes(useless)
    before = folder_bytes(tmp_path)
    with pytest.raises(InputError): import_chains(tmp_path / 'bad', tmp_path / 'chains.parquet')
    assert folder_bytes(tmp_path) == before and not list(tmp_path.glob('.*'))

def test_an_import_writes_over_nothing_but_an_import(tmp_path):
    (tmp_path / 'in.jsonl').write_bytes(lines(a_chain()))
    (tmp_path / 'link.jsonl').symlink_to('in.jsonl')
    (tmp_path / 'st').mkdir(), (tmp_path / 'st' / 'report.json').write_bytes(lines(a_chain()))
    write_manifest(tmp_path / 'st', 'extract')
    (tmp_path / 'free').mkdir(), (tmp_path / 'free' / 'report.json').write_bytes(lines(a_chain()))
    before = folder_bytes(tmp_path)
    for source, out, word in (('in.jsonl', 'in.jsonl', 'is the input itself'), ('in.jsonl', 'link.jsonl', 'is the input itself'), ('in.jsonl', 'st', 'is a folder'), ('in.jsonl', 'st/c.parquet', 'holds what extract wrote'),
                              ('in.jsonl', 'manifest.json', 'own record'), ('free/report.json', 'free/c.parquet', 'would be overwritten')):
        with pytest.raises(InputError, match=word) as e: import_chains(tmp_path / source, tmp_path / out)
        assert '.tmp' not in str(e.value) and '\n' not in str(e.value) and folder_bytes(tmp_path) == before

@pytest.mark.parametrize('format', ['released', 'hf'])
def test_an_export_writes_over_nothing_else(tmp_path, format):
    through(tmp_path / 'c', lines(a_chain())) if (tmp_path / 'c').mkdir() is None else None
    (tmp_path / 'st').mkdir(), write_manifest(tmp_path / 'st', 'extract')
    export_chains(tmp_path / 'c' / 'chains.parquet', tmp_path / 'hf', 'hf')
    before = folder_bytes(tmp_path)
    piece = next((tmp_path / 'hf' / 'data').iterdir())
    cases = [('c/chains.parquet', 'c/manifest.json'), ('c/chains.parquet', 'c/chains.parquet'), ('c', 'x'), ('c/chains.parquet', 'st/c.jsonl' if format == 'released' else 'st'), ('c/chains.parquet', 'c'),
             (piece.relative_to(tmp_path).as_posix(), 'hf')] + [('c/chains.parquet', 'x.parquet')] * (format == 'released')
    for source, out in cases:
        with pytest.raises(InputError) as e: export_chains(tmp_path / source, tmp_path / out, format)
        assert '.tmp' not in str(e.value) and 'damaged' not in str(e.value) and folder_bytes(tmp_path) == before, (source, out)

FULL = """
import resource, sys
from histchrono.chronoscope.interop import *
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try: (import_chains if sys.argv[1] == 'in' else export_chains)(sys.argv[2], sys.argv[3], **({'format': sys.argv[1]} if sys.argv[1] != 'in' else {}))
except Exception as e: print(type(e).__name__, e)
"""
@pytest.mark.parametrize('how', ['in', 'released', 'hf'])
def test_a_full_disk_leaves_what_was_there(tmp_path, how):
    chains, (a, b) = ours(), (tmp_path / 'few', tmp_path / 'many')
    for d, cs in ((a, chains[:3]), (b, chains)):
        write_chains(cs, d / 'c.parquet')
        export_chains(d / 'c.parquet', d / 'c.jsonl')
    source, out = {'in': ('c.jsonl', tmp_path / 'o' / 'c.parquet'), 'released': ('c.parquet', tmp_path / 'o' / 'c.jsonl'), 'hf': ('c.parquet', tmp_path / 'o')}[how]
    import_chains(a / source, out) if how == 'in' else export_chains(a / source, out, how)
    before = folder_bytes(tmp_path)
    r = subprocess.run([sys.executable, '-c', FULL, how, b / source, out], capture_output=True, text=True)
    assert r.stdout.startswith('DiskError') and '.work' not in r.stdout and '.tmp' not in r.stdout, r.stdout + r.stderr
    assert folder_bytes(tmp_path) == before and not [p for p in (tmp_path / 'o').rglob('.*')]

def test_a_failure_while_moving_puts_the_old_set_back(tmp_path, monkeypatch):
    import histchrono.chronoscope.datacard as card
    write_chains(ours(), tmp_path / 'c.parquet')
    write_chains(ours()[:200], tmp_path / 'd.parquet')
    export_chains(tmp_path / 'c.parquet', tmp_path / 'hf', 'hf')
    before, move, n = folder_bytes(tmp_path), os.replace, []
    class Broken:
        replace = staticmethod(lambda a, b: (_ for _ in ()).throw(OSError(5, 'broken')) if n.append(b) or len(n) == 6 else move(a, b))
    monkeypatch.setattr(card, 'os', Broken)
    with pytest.raises(OSError): export_chains(tmp_path / 'd.parquet', tmp_path / 'hf', 'hf')
    assert folder_bytes(tmp_path) == before

@pytest.mark.parametrize('indent', [0, 1, 4, None])
def test_the_cut_piece_of_an_array_counts_once(tmp_path, indent):
    data = json.dumps([a_chain(*(a_turn(k, question=f'In 2014, who {i}?') for k in range(5)), n=i) for i in range(30)], indent=indent).encode()
    last = data.rindex(b'"c-29"')
    for cut in (last + 3, last + 500, len(data) - 60, len(data) - 3):
        report, rows = through(tmp_path, data[:cut])
        assert (report['objects'], report['chains'], report['complete'], {r: d['n'] for r, d in report['faults'].items()}) == (30, 29, False, {'cut off': 1}), (cut, report['faults'])
        assert report_lines(report)[0].endswith('1 of 30 objects left out')
    report, rows = through(tmp_path, data.rstrip(b']\n'))
    assert (report['chains'], report['left_out'], report['complete']) == (30, 0, False) and 'no end' in report_lines(report)[-1]

def test_turns_of_a_broken_chain_are_not_taken_for_chains(tmp_path):
    data = json.dumps([a_chain(*(a_turn(k, question=f'In 2014, who {i}?') for k in range(5)), n=i) for i in range(4)], indent=2)
    report, rows = through(tmp_path, data.replace('"c-1",', 'c-1,', 1).encode())
    assert [r['source_id'] for r in rows] == ['c-0', 'c-2', 'c-3'] and {r: d['n'] for r, d in report['faults'].items()} == {'no JSON': 1}

def test_groups_of_rows_come_back_as_the_same_bytes(tmp_path):
    rnd, chains = random.Random(2), ours(3000)
    for c in chains:
        for t in c['turns']: t['question'] = ' '.join(str(rnd.random()) for _ in range(8))
    chains = [make_chain(c['family'], c['snapshot_year'], c['anchor'], c['turns'], 2025, 'strict') for c in chains]
    t = pa.Table.from_pylist(chains, schema=CHAINS.fields)
    write_parquet((t.slice(i, 1000) for i in range(0, 3000, 1000)), tmp_path / 'c.parquet', CHAINS)
    export_chains(tmp_path / 'c.parquet', tmp_path / 'c.jsonl.zst')
    import_chains(tmp_path / 'c.jsonl.zst', tmp_path / 'again.parquet', group=1000)
    assert pq.read_metadata(tmp_path / 'again.parquet').num_row_groups == 3 and (tmp_path / 'again.parquet').read_bytes() == (tmp_path / 'c.parquet').read_bytes()
    from histchrono.chronoscope import chains as stage, interop
    assert interop.GROUP == stage._ROWS
