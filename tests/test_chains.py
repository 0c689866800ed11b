"""Chains against statements: every answer is computed again here, day by day, by a route that shares no code with the package."""
from datetime import date, timedelta
from pathlib import Path
import hashlib, os, random, re, subprocess, sys, unicodedata
import pyarrow as pa, pytest
from hypothesis import given, settings, strategies as st
from histchrono.chronoscope.chainfile import FAMILIES, read_chains, sample_chains, structure
from histchrono.chronoscope.chains import make_chains
from histchrono.chronoscope.dump import ENTITIES, STATEMENTS
from histchrono.chronoscope.templates import explicit_question
from histchrono.chronoscope.truth import build_truth
from histchrono.core.io import write_parquet
from histchrono.core.provenance import write_manifest

SNAPSHOTS = (2022, 2023, 2024, 2025)
ANCHORS = [f'{y}-{md}' for y in SNAPSHOTS for md in ('01-01', '04-01', '07-01', '10-01')]
CLASSES = {'person': 'Q5', 'country': 'Q6256', 'city': 'Q515', 'club': 'Q476028', 'firm': 'Q4830453', 'party': 'Q7278', 'place': 'Q56061', 'organization': 'Q43229', 'office': 'Q4164871'}
ASKED = {'person': ('P39', 'P102', 'P108', 'P54'), 'club': ('P286', 'P488', 'P127'), 'city': ('P6', 'P131', 'P17'), 'firm': ('P169', 'P488', 'P127', 'P463'), 'country': ('P6', 'P35')}
VALUES = {'P39': 'office', 'P102': 'party', 'P108': 'firm', 'P54': 'club', 'P286': 'person', 'P488': 'person', 'P127': 'firm', 'P6': 'person', 'P131': 'place', 'P17': 'country', 'P169': 'person', 'P463': 'organization', 'P35': 'person'}
NAMES = {'person': ['Ada Voss', 'Ben Ruiz', 'Cora Lindh', 'Dae Kim', 'Dae Kim', 'Élodie Façon', 'Femi James', 'Gus March'], 'country': ['Netherlands', 'Norway', 'United Kingdom'], 'city': ['Arden', 'Mexico City', 'Boras'],
         'club': ['Chelsea F.C.', 'TSV 1860 Munich', 'Rovers', 'Schalke 04'], 'firm': ['Acme', 'Starbucks', 'Globex', 'Initech'], 'party': ['Labour Party', 'Greens', 'Union Party'],
         'place': ['Mexico', 'Østfold', 'Viken'], 'organization': ['Star Alliance', 'Oneworld'], 'office': ['Mayor of Arden', 'minister', 'Prime Minister']}

def make_entities():
    rows, n = [], 1000
    for kind, labels in NAMES.items():
        for i, label in enumerate(labels):
            n += 1
            rows.append(dict(qid=f'Q{n}', kind=kind, label=label, usable=label != 'Gus March', aliases=[label.split()[-1]] if kind == 'person' else [label.upper()], country='Q9' if kind not in ('country',) else '',
                             gender=[None, 'Q6581097', 'Q6581072'][i % 3] if kind == 'person' else None))
    return rows

def span(text):
    "First and last day that a written date may mean."
    p = [int(x) for x in text.split('-')]
    if len(p) == 3: return date(*p), date(*p)
    if len(p) == 2: return date(p[0], p[1], 1), date(p[0] + p[1]//12, p[1] % 12 + 1, 1) - timedelta(1)
    return date(p[0], 1, 1), date(p[0], 12, 31)

def random_facts(rnd, entities):
    "Facts of every precision: (subject, property, value, start, end, known until), end '' open, '?' somevalue."
    by, facts = {}, []
    for e in entities: by.setdefault(e['kind'], []).append(e['qid'])
    for e in entities:
        for prop in ASKED.get(e['kind'], ()):
            day = date(rnd.randint(1990, 2014), rnd.randint(1, 12), rnd.randint(1, 28))
            for _ in range(rnd.randint(1, 6)):
                end = day + timedelta(rnd.randint(200, 2600))
                value = rnd.choice([v for v in by[VALUES[prop]] if v != e['qid']])
                cut = rnd.choice((10, 10, 10, 10, 7, 4))
                last = end > date(2025, 10, 1)
                facts.append((e['qid'], prop, value, day.isoformat()[:cut], rnd.choice(('', '', '?')) if last else end.isoformat()[:cut]))
                day = end if rnd.random() < 0.8 else end + timedelta(rnd.randint(-150, 150))
                if last: break
    return facts

def seen_in(facts, year):
    "What is known of the facts at the end of a year."
    out = []
    for s, p, v, a, b in facts:
        if span(a)[0] > date(year, 12, 31): continue
        out.append((s, p, v, a, '' if b not in ('', '?') and span(b)[0] > date(year, 12, 31) else b))
    return out

def about(facts):
    "Facts by subject and property, with the days their dates may mean."
    out = {}
    for s, p, v, a, b in facts:
        if v != s: out.setdefault((s, p), []).append((v, *span(a), *(span(b) if b not in ('', '?') else (date.min, date.max) if b else (date.max, date.max))))
    return out

def values_at(known, subject, prop, day):
    "Certain and possible values on a day, straight from the statements."
    rows = known.get((subject, prop), [])
    maybe = {v for v, a0, a1, b0, b1 in rows if a0 <= day <= b1}
    return {v for v, a0, a1, b0, b1 in rows if a1 <= day < b0}, maybe

def gold_at(facts, subject, prop, day):
    sure, maybe = values_at(facts, subject, prop, day)
    return next(iter(sure)) if len(sure) == 1 and maybe == sure else None

def gold_of(facts, turn):
    "The answer of a turn: on its day, or on every day of its year."
    if turn['date']: return gold_at(facts, turn['subject_qid'], turn['property'], date.fromisoformat(turn['date']))
    days = [date(turn['year'], 1, 1) + timedelta(i) for i in range((date(turn['year'] + 1, 1, 1) - date(turn['year'], 1, 1)).days)]
    found = {gold_at(facts, turn['subject_qid'], turn['property'], d) for d in days}
    return found.pop() if len(found) == 1 else None

FORM = {10: '/11', 7: '-00/10', 4: '-00-00/9'}

def write_inputs(folder, facts, entities):
    "Statements and entities as extract writes them, one folder a snapshot."
    dirs = []
    for year in SNAPSHOTS:
        d = Path(folder)/str(year)
        form = lambda t: ['somevalue'] if t == '?' else [t + FORM[len(t)]] if t else []
        rows = [dict(snapshot=str(year), subject=s, property=p, value=v, rank='normal', start=form(a), end=form(b), point=[], replaces=[], replaced_by=[], ordinal=[], of=[]) for s, p, v, a, b in seen_in(facts, year)]
        write_parquet(pa.Table.from_pylist(rows, schema=STATEMENTS.fields), d/'statements.parquet', STATEMENTS)
        ents = [dict(qid=e['qid'], label=e['label'], label_lang='en', usable=e['usable'], aliases=e['aliases'], description='', classes=[CLASSES[e['kind']]], country=e['country'], gender=e['gender']) for e in entities]
        write_parquet(pa.Table.from_pylist(ents, schema=ENTITIES.fields), d/'entities.parquet', ENTITIES)
        write_manifest(d, 'extract', settings=dict(snapshot=str(year)), extra=dict(complete=True))
        dirs.append(d)
    build_truth(dirs, ANCHORS, 'strict', Path(folder)/'truth')
    return Path(folder)/'truth', dirs

def plain(text): return re.findall(r'[^\W_]+', re.sub(r'(?<=[A-Za-z])\.(?=[A-Za-z]|\W|$)', '', unicodedata.normalize('NFKC', text).casefold()))
def holds(text, part): return f" {' '.join(plain(part))} " in f" {' '.join(plain(text))} "

def check(chains, facts, entities):
    "Everything that must hold of every chain."
    ent = {e['qid']: e for e in entities}
    known, memory = {y: about(seen_in(facts, y)) for y in SNAPSHOTS}, {}
    for c in chains:
        assert c['anchors'] == sorted(set(c['anchors'])) and c['anchor'] == c['anchors'][0] and c['length'] == len(c['turns'])
        assert all(a[:4] == str(c['snapshot_year']) for a in c['anchors'])
        for t in c['turns']:
            key = (c['snapshot_year'], t['subject_qid'], t['property'], t['year'], t['date'])
            if key not in memory: memory[key] = gold_of(known[c['snapshot_year']], t)
            answer = memory[key]
            assert answer == t['answer_qid'], (c['chain_id'], t, answer)
            assert t['answer'] == ent[answer]['label'] and ent[answer]['usable'] and ent[t['subject_qid']]['usable']
            assert set(t['accepted']) <= {ent[answer]['label'], *ent[answer]['aliases']} and t['answer'] in t['accepted']
            now = gold_at(known[2025], t['subject_qid'], t['property'], date(2025, 10, 1))
            now = now if now and ent[now]['usable'] else None
            assert t['present_qid'] == now and t['present_answer'] == (ent[now]['label'] if now else None)
            assert t['drift_eligible'] == (now is not None and now != answer and ' '.join(plain(t['present_answer'])) not in {' '.join(plain(a)) for a in t['accepted']})
            if not t['date']: assert t['year'] < 2025 and t['year'] <= c['snapshot_year']
            else: assert t['date'] in c['anchors'] and t['year'] == int(t['date'][:4])
            assert not any(holds(t['question'], a) for a in t['accepted']), t['question']
            assert bool(re.search(r'\b\d{4}\b', t['question'])) == t['explicit_time'], t['question']
            assert t['question'].endswith('?') and t['question'][0].isupper() and '{' not in t['question']
            alone = explicit_question(t)
            assert t['subject_label'] in alone.replace('the ', 'The ').replace('The ', '') or t['subject_label'] in alone
            assert str(t['year']) in alone
        check_family(c)

def check_family(c):
    "What makes a family."
    ts, f = c['turns'], c['family']
    subjects, props, years = [t['subject_qid'] for t in ts], [t['property'] for t in ts], [t['year'] for t in ts]
    pointing = lambda t: bool(re.search(r'\b(then|at the time|at that time)\b', t['question'], re.I))
    assert ts[0]['explicit_time'] and ts[0]['subject_label'].removeprefix('The ') in ts[0]['question']
    if f in ('carryover', 'carryover_then', 'multi_turn_chain'):
        assert len(set(subjects)) == 1 and len(set(props)) == len(props) and len({(t['year'], t['date']) for t in ts}) == 1 and not any(t['explicit_time'] for t in ts[1:])
    if f == 'carryover': assert len(ts) == 2 and not pointing(ts[1])
    if f == 'carryover_then': assert len(ts) == 2 and pointing(ts[1])
    if f == 'multi_turn_chain': assert 3 <= len(ts) <= 6
    if f == 'scope_switch': assert len(ts) == 2 and len(set(subjects)) == len(set(props)) == 1 and years[0] != years[1] and ts[0]['answer_qid'] != ts[1]['answer_qid'] and ts[1]['date'] == '' and abs(years[1] - int(c['anchor'][:4])) <= 25
    if f == 'cross_entity_then':
        assert len(ts) == 2 and len(set(props)) == 1 and subjects[0] != subjects[1] and ts[0]['subject_label'] != ts[1]['subject_label'] and ts[0]['subject_kind'] == ts[1]['subject_kind']
        assert pointing(ts[1]) and not ts[1]['explicit_time']
    if f == 'temporal_narrative':
        assert 3 <= len(ts) <= 11 and years == sorted(set(years)) and len(set(subjects)) == len(set(props)) == 1 and len({t['answer_qid'] for t in ts}) > 1 and not any(t['date'] for t in ts)

def build(folder, seed):
    entities = make_entities()
    facts = random_facts(random.Random(seed), entities)
    truth, dirs = write_inputs(folder, facts, entities)
    return truth, dirs, facts, entities

@pytest.fixture(scope='module')
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp('world')
    truth, dirs, facts, entities = build(folder, 5)
    counts = make_chains(truth, dirs, folder/'chains.parquet', 42)
    return folder, truth, dirs, facts, entities, counts

def test_every_family_is_there(world):
    folder, *_, counts = world
    assert list(counts['families']) == sorted(FAMILIES)
    assert counts['dropped'], 'the leaks planted in the names must have been found'
    table = structure(read_chains(folder/'chains.parquet'))
    assert dict(zip(table.family, table.n_before_merging)) == {f: n['before_merging'] for f, n in counts['families'].items()}
    multi = [c['length'] for c in read_chains(folder/'chains.parquet') if c['family'] == 'multi_turn_chain']
    assert sum(n == 3 for n in multi) >= 0.6*len(multi)

@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_answers_from_the_statements(tmp_path_factory, seed):
    folder = tmp_path_factory.mktemp('random')
    truth, dirs, facts, entities = build(folder, seed)
    make_chains(truth, dirs, folder/'chains.parquet', seed)
    check(read_chains(folder/'chains.parquet'), facts, entities)

def test_two_people_of_one_name(world):
    folder, _, _, _, entities, _ = world
    chains = read_chains(folder/'chains.parquet')
    kims = {e['qid'] for e in entities if e['label'] == 'Dae Kim'}
    assert len(kims) == 2 and len({c['chain_id'] for c in chains}) == len(chains)
    assert not any({t['subject_qid'] for t in c['turns']} == kims for c in chains)

CODE = "import sys; from histchrono.chronoscope.chains import make_chains\nif __name__ == '__main__': make_chains(sys.argv[1], sys.argv[2:6], sys.argv[6], 42, workers=int(sys.argv[7]))"

@pytest.mark.parametrize('hashseed, workers', [('0', 1), ('1', 1), ('1', 2)])
def test_same_bytes(world, tmp_path, hashseed, workers):
    folder, truth, dirs, *_ = world
    (tmp_path/'go.py').write_text(CODE)
    root = Path(__file__).resolve().parents[1]
    env = {**os.environ, 'PYTHONHASHSEED': hashseed, 'PYTHONPATH': str(root)}
    subprocess.run([sys.executable, tmp_path/'go.py', truth, *dirs, tmp_path/'c.parquet', str(workers)], check=True, env=env)
    digest = lambda p: hashlib.sha256(Path(p).read_bytes()).hexdigest()
    assert digest(tmp_path/'c.parquet') == digest(folder/'chains.parquet')

def test_limit_and_sample(world, tmp_path):
    folder, truth, dirs, *_ = world
    counts = make_chains(truth, dirs, tmp_path/'c.parquet', 42, max_per_family=9)
    assert all(n['kept'] == min(9, n['after_merging']) for n in counts['families'].values())
    everything = read_chains(folder/'chains.parquet')
    assert {c['chain_id'] for c in read_chains(tmp_path/'c.parquet')} <= {c['chain_id'] for c in everything}
    sample = sample_chains(folder/'chains.parquet', 60, 1)
    assert len(sample) == 60 and {c['family'] for c in sample} == set(FAMILIES)
    texts = [(c['family'], tuple(t['question'] for t in c['turns'])) for c in sample]
    assert len(set(texts)) == len(texts)

def test_paper_policy(world, tmp_path):
    folder, truth, dirs, facts, entities, _ = world
    counts = make_chains(truth, dirs, tmp_path/'p.parquet', 42, policy='paper')
    chains = read_chains(tmp_path/'p.parquet')
    assert counts['chains'] > len(read_chains(folder/'chains.parquet')), 'the paper has an answer where the sound reading has none'
    known = {y: seen_in(facts, y) for y in SNAPSHOTS}
    for c in chains:
        assert c['truth_type'] == 'paper'
        for t in c['turns']:
            day = date.fromisoformat(t['date'] or f"{t['year']}{c['anchor'][4:]}")
            on = [f for f in known[c['snapshot_year']] if f[:2] == (t['subject_qid'], t['property']) and f[2] != f[0] and span(f[3])[0] <= day and (f[4] in ('', '?') or day <= span(f[4])[1])]
            best = min(on, key=lambda f: (-span(f[3])[0].toordinal(), int(f[2][1:])))
            assert t['answer_qid'] == best[2]

def test_alone_gives_nothing_away(world):
    folder, *_ = world
    for c in read_chains(folder/'chains.parquet'):
        for t in c['turns']: assert not any(holds(explicit_question(t), a) for a in t['accepted'])
