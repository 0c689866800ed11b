"The simulator: worlds that share nothing, pictures that depend on their row alone, variety, speed, labels that no picture shows."
import ast, hashlib, os, subprocess, sys, time
from pathlib import Path

import numpy as np
import pytest

cv2 = pytest.importorskip('cv2')
from histchrono.core.errors import InputError
from histchrono.histvis import looks, planted, simulate
from histchrono.histvis.looks import WORLDS, look
from histchrono.histvis.names import STYLES
from histchrono.histvis.scene import scene
from histchrono.histvis.render import render
from histchrono.histvis.simulate import OTHERS, Simulator, corpus, item, picture

PACKAGE = Path(simulate.__file__).parent
ARMS = ('FLUX.1', 'SD3', 'SDXL', 'SDXL Mitigated')
PERIODS = ('17th', '18th', '19th', '20th', '21st', '1910s', '1930s', '1950s', '1970s', '1990s')

def rows(n): # of a manifest, every arm, period and many activities
    return [dict(image_id=f'{i:016x}', arm=ARMS[i % 4], period=PERIODS[i * 7 % 10], activity_id=i * 37 % 100 + 1, index=i, seed=10**12 + 977 * i) for i in range(n)]

def digest(d): return hashlib.sha256(d.image.tobytes() + repr(sorted(d.facts['truth'].items())).encode()).hexdigest()

def colourfulness(img): # Hasler and Süsstrunk, signed, on 0–255
    r, g, b = np.moveaxis(img.astype(float), -1, 0)
    rg, yb = r - g, (r + g) / 2 - b
    return np.hypot(rg.std(), yb.std()) + 0.3 * np.hypot(rg.mean(), yb.mean())

def phash(img): # 63 signs of a discrete cosine transform and its constant
    c = cv2.dct(cv2.resize(cv2.cvtColor(img, cv2.COLOR_RGB2GRAY), (32, 32), interpolation=cv2.INTER_AREA).astype(np.float32))[:8, :8].ravel()
    return c > np.median(c[1:])

def test_worlds_share_nothing():
    assert looks.shared() == []
    for s in STYLES:
        a, b = ([look(w, s, np.random.default_rng(k)) for k in range(60)] for w in WORLDS)
        for k in looks.RANGES[s]:
            x, y = ([l[k] for l in ls] for ls in (a, b))
            if isinstance(x[0], float): assert max(x) < min(y) or max(y) < min(x), (s, k)
            else: assert not {repr(v) for v in x} & {repr(v) for v in y}, (s, k)

def test_a_range_that_touches_is_found(monkeypatch):
    monkeypatch.setitem(looks.RANGES['drawing'], 'line', ((0.7, 1.1), (1.1, 1.4)))
    assert looks.shared() == ['drawing line']

def test_a_row_alone_decides_its_picture():
    r = rows(24)
    whole = [digest(d) for d in Simulator(dict(seed=3)).draw(r)]
    pieces = [digest(d) for k in range(0, 24, 5) for d in Simulator(dict(seed=3)).draw(r[k:k + 5])]
    backwards = [digest(d) for d in Simulator(dict(seed=3)).draw(r[::-1], attempt=1)][::-1]
    assert whole == pieces == backwards
    assert len(set(whole)) == 24
    assert digest(Simulator(dict(seed=4)).draw(r[:1])[0]) != whole[0]

def test_one_process_or_four():
    code = "import sys; sys.path.insert(0, 'tests'); from test_simulate import *\nr = rows(16)[int(sys.argv[1])::4]\nfor q, d in zip(r, Simulator(dict(seed=3)).draw(r)): print(q['index'], digest(d))"
    root = Path(__file__).parents[1]
    runs = [subprocess.run([sys.executable, '-c', code, str(k)], cwd=root, env=os.environ | dict(PYTHONHASHSEED=str(k + 1)), capture_output=True, text=True, check=True).stdout for k in range(4)]
    four = dict(line.split() for out in runs for line in out.splitlines())
    assert [four[str(i)] for i in range(16)] == [digest(d) for d in Simulator(dict(seed=3)).draw(rows(16))]

def test_threads_of_opencv_do_not_matter():
    r = rows(6)
    one = [digest(d) for d in Simulator().draw(r)]
    cv2.setNumThreads(4)
    assert [digest(d) for d in Simulator().draw(r)] == one

def test_settings_name_what_a_picture_depends_on(tmp_path):
    for name in ('styles', 'objects', 'people'): (tmp_path/f'planted_{name}.csv').write_text(planted.planted_text(name))
    same = Simulator(behaviour=planted.behaviour(tmp_path)).settings
    assert same == Simulator(dict(seed=0, world='shifted')).settings and same['simulated'] is True
    f, old = tmp_path/'planted_styles.csv', planted.planted_text('styles').splitlines()
    a, b = (r.split(',') for r in old[1:3]) # two shares of one cell change places
    a[3], b[3] = b[3], a[3]
    assert a[3] != b[3]
    f.write_text('\n'.join([old[0], ','.join(a), ','.join(b), *old[3:]]) + '\n')
    assert Simulator(behaviour=planted.behaviour(tmp_path)).settings != same
    for other in (dict(seed=1), dict(world='train')): assert Simulator(other).settings != same

def test_truth_is_in_the_facts_and_marked():
    for r, d in zip(rows(8), Simulator(dict(seed=1)).draw(rows(8))):
        t = d.facts['truth']
        assert d.facts['simulated'] is True and d.status == 'ok'
        assert t['style'] in STYLES and t['world'] == 'shifted' and isinstance(t['objects'], list) and {'gender', 'race'} <= set(t['people'][0])
        assert t['other'] in ('',) + OTHERS[t['style']] and 0 <= t['weight'] <= 0.5
        assert d.image.shape == (256, 256, 3) and d.image.dtype == np.uint8

def test_gender_and_race_are_not_drawn(monkeypatch):
    real, r = planted.truth_of, rows(6)
    before = [d.image for d in Simulator().draw(r)]
    monkeypatch.setattr(planted, 'truth_of', lambda *a: (t := real(*a)) | dict(people=[dict(gender='other', race='other') for _ in t['people']]))
    after = Simulator().draw(r)
    assert after[0].facts['truth']['people'][0]['gender'] == 'other'
    assert all(np.array_equal(x, y.image) for x, y in zip(before, after))

def test_a_scene_does_not_depend_on_its_style(monkeypatch):
    seen = []
    monkeypatch.setattr(simulate, 'scene', lambda *a: seen.append(scene(*a)) or seen[-1])
    for s in STYLES: picture(s, 26, '1950s', np.random.default_rng(8))
    assert all(np.array_equal(x.colour, seen[0].colour) for x in seen)

def test_pictures_are_mixed_as_often_as_stated_with_at_most_half():
    facts = [picture('illustration', 40, '1910s', np.random.default_rng(k))[1] for k in range(200)]
    w = np.array([f['weight'] for f in facts if f['other']])
    assert abs(len(w) / 200 - simulate.BLENDED) < 4 * np.sqrt(simulate.BLENDED * (1 - simulate.BLENDED) / 200)
    assert simulate.WEIGHT[0] <= w.min() and 0.42 < w.max() <= simulate.WEIGHT[1] <= 0.5
    assert {f['other'] for f in facts} == {'', *OTHERS['illustration']}

@pytest.mark.parametrize('world', WORLDS)
def test_grey_photographs_are_grey(world):
    for k in range(40): # mixed ones too
        img, facts = picture('monochrome', k * 13 % 100 + 1, PERIODS[k % 10], np.random.default_rng(k), world)
        assert colourfulness(img) < 10, facts

def test_colour_photographs_have_colour():
    c = [colourfulness(picture('photography', k * 13 % 100 + 1, PERIODS[k % 10], np.random.default_rng(k), blended=0)[0]) for k in range(60)]
    assert np.mean(np.array(c) < 10) <= 0.05

def test_corpus_is_even_and_the_same_however_it_is_shared():
    counts = dict(painting=23, drawing=11)
    whole = list(corpus('train', counts, 5, 'a test'))
    ids = [i for i, _, _ in whole]
    assert ids == sorted(set(ids)) and [s for _, s, _ in whole] == ['drawing'] * 11 + ['painting'] * 23
    parts = [x for k in range(3) for x in corpus('train', counts, 5, 'a test', k, 3)]
    assert sorted((i, x.tobytes()) for i, _, x in parts) == [(i, x.tobytes()) for i, _, x in whole]
    assert np.array_equal(item('train', 'painting', 22, 5, 'a test')[2], whole[-1][2])
    for other in (item('shifted', 'painting', 22, 5, 'a test'), item('train', 'painting', 22, 6, 'a test'), item('train', 'painting', 22, 5, 'another')): assert not np.array_equal(other[2], whole[-1][2])

def test_any_hundred_items_show_every_activity(monkeypatch):
    seen = []
    monkeypatch.setattr(simulate, 'picture', lambda s, a, p, *_, **__: (seen.append((a, p)) or np.zeros((1, 1, 3), np.uint8), {}))
    for i in range(1000): item('train', 'drawing', i, 1, 'x')
    assert len(set(seen)) == 1000
    for k in range(0, 1000, 100):
        assert len({a for a, _ in seen[k:k + 100]}) == 100
        assert [sum(p == q for _, p in seen[k:k + 100]) for q in PERIODS] == [10] * 10

def test_pictures_of_one_activity_and_style_differ():
    near = pairs = 0
    for s in STYLES:
        for a in range(4, 100, 8): # 12 activities, 16 pictures each
            h = np.array([phash(picture(s, a, PERIODS[k % 10], np.random.default_rng([a, k]))[0]) for k in range(16)])
            d = (h[:, None] != h[None]).sum(-1)[np.triu_indices(16, 1)]
            near, pairs = near + int((d <= 4).sum()), pairs + len(d)
    assert near / pairs <= 0.01, f'{near} of {pairs} pairs'

def test_forty_pictures_a_second(tmp_path):
    from PIL import Image
    sim, r = Simulator(), rows(120)
    sim.draw(r[:60]) # patterns are worked out once
    best = 1e9
    for k in range(60, 120, 20): # the best of three: other work shares the core
        t = time.process_time()
        for d in sim.draw(r[k:k + 20]): Image.fromarray(d.image).save(tmp_path/'x.png', compress_level=1)
        best = min(best, time.process_time() - t)
    assert 20 / best >= 40, f'{20 / best:.0f} pictures/s'

def test_bad_input():
    g = np.random.default_rng(1)
    with pytest.raises(InputError, match='fresco'): picture('fresco', 1, '17th', g)
    with pytest.raises(InputError, match='moved'): picture('drawing', 1, '17th', g, world='moved')
    with pytest.raises(InputError, match='moved'): Simulator(dict(world='moved'))
    with pytest.raises(InputError, match='sede'): Simulator(dict(sede=1))
    with pytest.raises(InputError, match='cannot make'): render(scene(1, '17th', g), 'painting', look('train', 'drawing', g), g)

def test_only_the_simulator_reads_what_was_planted():
    def imported(path): # whole names
        for n in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(n, ast.Import): yield from (a.name for a in n.names)
            if isinstance(n, ast.ImportFrom): yield from (f'{n.module or ""}.{a.name}' for a in n.names)
    files = sorted(PACKAGE.glob('*.py'))
    uses = {f.stem: {m for m in imported(f) for w in m.split('.') if w in ('planted', 'simulate')} for f in files}
    for name in ('texture', 'smallnet', 'features', 'encoders', 'probe', 'style', 'wikiart', 'zeroshot', 'vsd', 'looks', 'render'): assert not uses.get(name), (name, uses[name])
    assert uses['simulate']
