"""Visual style dominance: hand-worked examples, identities, what must not matter, and coverage."""
import re
import numpy as np, pandas as pd, pytest
from hypothesis import given, settings, strategies as st

from histchrono.core.errors import InputError, SettingsError
from histchrono.histvis.names import STYLES
from histchrono.histvis.vsd import KINDS, asterisks, contrasts, counts, intervals, top_two
from histchrono.histvis.vsdcorrect import corrected_shares, matrix_fault, reassignment, with_monochrome
from histchrono.histvis.vsdcover import redraw_coverage
from histchrono.histvis.style import class_of
from histchrono.histvis.stylecharts import SIDE, confusion_map, examples, share_panels, style_intervals
from histchrono.histvis.styletables import (StyleRun, against_planted, change_words, finding_words, held, interval_words, measured_only, printed_cells, run_words, score_words,
    shown_01, shown_02, shown_intervals, star_words, table_01, table_02, table_intervals)

IDENTITY = np.diag([10 ** 7] * 6)
ERRS = np.array([[630, 30, 20, 20, 0, 0], [30, 650, 10, 10, 0, 0], [40, 10, 600, 50, 0, 0], [10, 0, 40, 640, 10, 0], [0, 0, 15, 25, 660, 0], [5, 15, 0, 10, 10, 660]])

def labels(cells, per=2):
    "Labels with given counts a cell, `per` pictures an activity."
    return pd.concat([pd.DataFrame(dict(arm=a, period=p, activity_id=np.arange(sum(k)) // per, style=np.repeat(STYLES, k).astype(object))) for (a, p), k in cells.items()], ignore_index=True)

def one(t, kind, what='vsd', role=None, arm='SD3', period='17th'):
    d = t[(t.kind == kind) & (t.what == what) & (t.arm == arm) & (t.period == period)]
    return (d if role is None else d[d.role == role]).iloc[0]

LIKE = {('SD3', '17th'): [3, 4, 5, 88, 0, 0], ('SD3', '1950s'): [1, 0, 3, 2, 45, 49], ('SDXL', '1970s'): [10, 5, 30, 15, 33, 7]}


def test_score_by_hand():
    t = intervals(labels(LIKE), ERRS, replicates=200)
    v = one(t, 'noise_free')
    assert (v.value, v['style'], v.n, v.activities) == (.88, 'painting', 100, 50)
    assert (one(t, 'paper', 'share', 'second').value, one(t, 'paper', 'share', 'second')['style']) == (.05, 'illustration')
    assert one(t, 'noise_free', 'gap').value == pytest.approx(.83)

def test_paper_interval_has_the_mean_of_its_own_noise():
    "88 paintings keep precision 640/755, and others become paintings as their columns say."
    k, r = np.array(LIKE['SD3', '17th']), reassignment(ERRS)
    t = intervals(labels(LIKE), ERRS, kinds=('paper',), replicates=20000)
    assert r[3, 3] == pytest.approx(640 / 755)
    assert one(t, 'paper', 'share', 'dominant').boot_mean == pytest.approx((k @ r / 100)[3], abs=.001)

def test_score_may_lie_outside_the_papers_own_interval():
    "Labels already hold the predictor's errors; Appendix F adds them once more."
    t = intervals(labels({('SD3', '17th'): [5, 5, 10, 860, 100, 20]}, 10), ERRS)
    v = one(t, 'paper')
    assert v.hi < v.value
    free = one(t, 'noise_free')
    assert free.lo < free.value < free.hi

def test_noise_free_is_the_binomial():
    from scipy.stats import binom
    v = one(intervals(labels({('SD3', '17th'): [0, 0, 0, 70, 30, 0]}), kinds=('noise_free',), replicates=50000), 'noise_free', 'share', 'dominant')
    assert (v.lo, v.hi) == pytest.approx(binom.ppf([.025, .975], 100, .7) / 100, abs=.0101)

def test_identity_matrix_changes_nothing():
    t = intervals(labels(LIKE), IDENTITY)
    key = ['arm', 'period', 'what', 'style']
    by = {k: t[t.kind == k].set_index(key) for k in ('paper', 'noise_free', 'corrected')}
    assert np.allclose(by['corrected'].value, by['noise_free'].value, atol=1e-9)
    assert np.allclose(by['paper'][['lo', 'hi']], by['noise_free'][['lo', 'hi']], atol=.0151) # other random numbers, shares in hundredths
    big = intervals(labels({c: np.multiply(k, 30) for c, k in LIKE.items()}), IDENTITY)
    a, b = (big[(big.kind == k) & (big.role == 'dominant')] for k in ('corrected', 'noise_free'))
    assert np.allclose(a[['lo', 'hi']], b[['lo', 'hi']], atol=.003)

def test_all_of_one_style():
    t = intervals(labels({('SD3', '17th'): [0, 0, 0, 100, 0, 0]}), ERRS)
    v = one(t, 'noise_free')
    assert (v.value, v.lo, v.hi) == (1, 1, 1) and (t.role == 'second').sum() == 0
    assert one(t, 'noise_free', 'gap').lo == 1 and 0 < one(t, 'paper', 'gap').lo < 1 and not asterisks(t).item() and not asterisks(t, 'difference', 'noise_free').item()
    assert one(t, 'corrected').hi == 1 and one(t, 'corrected').lo < 1 # no width is no certainty
    assert one(t, 'clustered').lo == 1

def test_cell_without_pictures_is_missing_and_counted():
    d = pd.concat([labels(LIKE), pd.DataFrame(dict(arm='SDXL', period='1990s', activity_id=range(7), style=''))])
    d.loc[len(d)] = ['SD3', '17th', 3, None]
    cells, k = counts(d)
    c = cells.set_index(['arm', 'period'])
    assert c.loc[('SDXL', '1990s'), ['n', 'missing', 'activities']].tolist() == [0, 7, 0] and c.loc[('SD3', '17th'), 'missing'] == 1 and k.sum() == 300
    t = intervals(d, ERRS, replicates=100)
    empty = t[(t.arm == 'SDXL') & (t.period == '1990s')]
    assert len(empty) == 8 * len(KINDS) and empty[['value', 'lo', 'hi']].isna().all().all() and set(empty.fault) == {'no labelled picture'}
    assert ('SDXL', '1990s') not in asterisks(t)

def test_few_activities():
    t = intervals(labels({('SD3', '17th'): [0, 0, 1, 3, 0, 0]}, per=4), ERRS, replicates=100)
    assert set(t[t.kind == 'clustered'].fault) == {'one activity'} and t[t.kind == 'clustered'].lo.isna().all()

@pytest.mark.parametrize('matrix, words', [(np.diag([9, 0, 9, 9, 9, 9]), 'no labelled picture of engraving'), (np.ones((6, 6), int), 'calls two styles alike')])
def test_matrix_that_cannot_be_inverted(matrix, words):
    t = intervals(labels(LIKE), matrix, replicates=100)
    bad = t[t.kind == 'corrected']
    assert bad.lo.isna().all() and bad.fault.str.contains(words).all() and t[t.kind == 'noise_free'].lo.notna().all()
    with pytest.raises(InputError, match=words): redraw_coverage(pd.DataFrame(dict(arm='SD3', period='17th', style='painting', share=[1.])), 100, matrix)
    with pytest.raises(InputError, match=words): contrasts(labels({('SDXL', '17th'): [1] * 6, ('SDXL Mitigated', '17th'): [1] * 6}), matrix=matrix)

def test_label_that_the_evaluation_never_saw():
    m = np.diag([9, 9, 9, 9, 9, 9]); m[1] = [9, 0, 0, 0, 0, 0] # engravings are never called so
    t = intervals(labels(LIKE), m, kinds=('paper',), replicates=100)
    assert t[(t.arm == 'SD3') & (t.period == '17th')].fault.str.startswith('precision unknown').all()
    assert t[(t.arm == 'SD3') & (t.period == '1950s')].lo[:6].notna().all() # has no such label

def test_monochrome_inherits_photography():
    c = np.diag([90, 90, 90, 90, 80, 0]); c[4, [3, 5]], c[3, 4] = [10, 10], 10
    m = with_monochrome(c)
    assert m[4].tolist() == [0, 0, 0, 10, 90, 0] and m[5].tolist() == [0, 0, 0, 10, 0, 90] and not matrix_fault(c)
    r = reassignment(c)
    assert r[5, 5] == pytest.approx(.9) == r[4, 4] and r[5, 3] == pytest.approx(.1)
    assert np.diag(reassignment(c, 'paper_f1')).tolist() == pytest.approx([.802, .85, .836, .957, .935, .935])
    with pytest.raises(SettingsError, match='did you mean'): reassignment(c, 'paper')

def test_asterisk_rules_differ():
    "Intervals of .338 and .286 overlap although the difference is sure."
    t = intervals(labels({('SD3', '17th'): [100, 100, 176, 286, 338, 0]}, 1), kinds=('noise_free',))
    assert asterisks(t, 'overlap', 'noise_free').item() and not asterisks(t, 'difference', 'noise_free').item()

def test_contrasts_are_paired_by_activity():
    "Each activity looks alike in both arms: the difference varies far less than the shares do."
    a = pd.DataFrame([('SDXL', '17th', i, 'engraving' if i % 2 else 'painting') for i in range(60) for _ in range(5)], columns=['arm', 'period', 'activity_id', 'style'])
    b = a.assign(arm='SDXL Mitigated')
    b.loc[b.activity_id == 1, 'style'] = 'painting'
    d = contrasts(pd.concat([a, b])).set_index(['what', 'style'])
    assert d.loc[('share', 'painting')].value == pytest.approx(5 / 300) and 0 <= d.loc[('share', 'painting')].lo and d.loc[('share', 'painting')].hi < .06
    alone = intervals(pd.concat([a, b]), kinds=('clustered',))
    assert (alone.hi - alone.lo).max() > .2
    assert d.direction.iloc[0] == '↑' and d.style_change.iloc[0] == 'changed' # 150 each: the tie is named engraving; then paintings

def test_contrasts_through_the_matrix_and_bad_arms():
    d = labels({('SDXL', '1910s'): [5, 5, 10, 4, 3, 73], ('SDXL Mitigated', '1910s'): [2, 3, 10, 78, 5, 2], ('SDXL', '17th'): [1, 90, 1, 1, 1, 1]})
    t = contrasts(d, matrix=ERRS)
    assert set(t.period) == {'1910s'} and t[t['style'] == 'monochrome'].hi.item() < -.6
    assert abs(contrasts(d, matrix=IDENTITY)[['value', 'lo', 'hi']] - contrasts(d)[['value', 'lo', 'hi']]).max().max() < 1e-3
    with pytest.raises(InputError, match="no picture of arm 'FLUX.1'"): contrasts(d, 'FLUX.1')
    with pytest.raises(InputError, match='no period in common'): contrasts(d[d.period.eq('17th') | d.arm.eq('SDXL Mitigated')])

@pytest.mark.parametrize('change, error, words', [
    (lambda d: d.assign(style='fresco'), InputError, "'fresco' is none of"), (lambda d: d.drop(columns='activity_id'), InputError, 'lack activity_id'), (lambda d: d[:0], InputError, 'label pictures first')])
def test_bad_labels(change, error, words):
    with pytest.raises(error, match=words): intervals(change(labels(LIKE)), ERRS)

def test_bad_arguments():
    with pytest.raises(InputError, match='6 × 6'): intervals(labels(LIKE), np.eye(5))
    with pytest.raises(SettingsError, match='did you mean noise_free'): intervals(labels(LIKE), ERRS, kinds=('noise_fre',))
    with pytest.raises(InputError, match='confusion matrix'): intervals(labels(LIKE))
    with pytest.raises(SettingsError, match='overlap'): asterisks(intervals(labels(LIKE), kinds=('noise_free',), replicates=50), 'overlaps', 'noise_free')


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.integers(0, 12), min_size=6, max_size=6), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_order_of_rows_and_other_cells_do_not_matter(cells, r):
    d = labels({('SD3', f'{i}th'): k for i, k in enumerate(cells)} | {('SD3', 'z'): [1, 2, 3, 0, 0, 0]})
    t = intervals(d, ERRS, replicates=60)
    mixed = d.sample(frac=1, random_state=r.randrange(1000))
    pd.testing.assert_frame_equal(t, intervals(mixed, ERRS, replicates=60))
    pd.testing.assert_frame_equal(t[t.period == 'z'].reset_index(drop=True), intervals(d[d.period == 'z'], ERRS, replicates=60))

@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=6, max_size=6).filter(any))
def test_what_always_holds(k):
    t = intervals(labels({('SD3', '17th'): k}, 1), ERRS, replicates=200)
    assert ((t.lo <= t.hi) | t.lo.isna()).all() and t[t.what != 'gap'][['lo', 'hi']].stack().between(0, 1).all()
    s = t[(t.kind == 'paper') & (t.what == 'share')]
    assert s.value.sum() == pytest.approx(1) and s.boot_mean.sum() == pytest.approx(1)
    for kind in ('paper', 'noise_free'): # a replicate's largest share is no smaller than any of its shares
        assert one(t, kind).lo >= t[(t.kind == kind) & (t.what == 'share')].lo.max() and one(t, kind).boot_mean >= t[(t.kind == kind) & (t.what == 'share')].boot_mean.max() - 1e-12
    first, second = (x[0] for x in top_two(np.array([k])))
    assert k[first] == max(k) and (second < 0) == (sum(x > 0 for x in k) == 1)

@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(.01, 1), min_size=6, max_size=6), st.integers(0, 10 ** 6))
def test_correction_undoes_the_errors_exactly(w, seed):
    p, gen = np.array(w) / sum(w), np.random.default_rng(seed)
    c = 700 * np.eye(6) + gen.integers(0, 60, (6, 6))
    assert np.allclose(corrected_shares((p @ (c / c.sum(1, keepdims=True)))[None] * 1e6, c), p, atol=1e-9)


def test_coverage_of_planted_shares():
    "The corrected interval holds what it says; the paper's does not, and the wrong matrix costs coverage."
    rows = [('SD3', p, s, x) for p, row in {'17th': (.03, .02, .04, .88, .02, .01), '19th': (.19, .55, .1, .1, .04, .02), '20th': (.05, .05, .33, .07, .2, .3), '1990s': (0, 0, .01, .02, .96, .01)}.items() for s, x in zip(STYLES, row)]
    t = redraw_coverage(pd.DataFrame(rows, columns=['arm', 'period', 'style', 'share']), 100, ERRS, redraws=150, replicates=500, wrong=IDENTITY // 10 ** 4)
    c = t.groupby('kind').coverage.mean()
    assert c.corrected > .91 and c.corrected_wrong < c.corrected - .03 and c.paper < .6 # 600 intervals: .95 ± .018 with 95 %
    again = redraw_coverage(pd.DataFrame(rows, columns=['arm', 'period', 'style', 'share']).sample(frac=1, random_state=0), 100, ERRS, redraws=2, replicates=50)
    pd.testing.assert_frame_equal(again, redraw_coverage(pd.DataFrame(rows, columns=['arm', 'period', 'style', 'share']), 100, ERRS, redraws=2, replicates=50))


def a_run(cells, matrix=ERRS, simulated=True):
    "A run with given counts a cell, whose probe errs as a matrix says."
    t, p = np.nonzero(matrix)
    ev = pd.DataFrame(dict(encoder='toy', true=np.repeat(np.array(STYLES)[t], matrix[t, p]), predicted=np.repeat(np.array(STYLES)[p], matrix[t, p])))
    ev = pd.concat([ev.assign(domain=d) for d in ('validation', 'same', 'shifted')], ignore_index=True)
    return StyleRun(labels(cells).assign(status='ok'), ev.assign(probe_class=class_of(ev.predicted)), 'toy', simulated, 42, 200)

def printed_labels(n=100):
    "Labels with the dominant shares of Table 1, the rest spread evenly."
    out = {}
    for r in printed_cells(1).itertuples():
        rest = [(n - round(n * r.vsd) + i) // 5 for i in range(5)]
        out[r.arm, r.period] = [round(n * r.vsd) if s == r.dominant else rest.pop() for s in STYLES]
    return out

def test_printed_numbers_stand_beside_ours():
    run = a_run(printed_labels())
    t, change = run.intervals(), contrasts(run.labels, replicates=200)
    one_, p = table_01(t, change, 'simulated'), pd.read_csv('data/reported/synthetic_history/table_01.csv')
    mine = one_[one_.metric == 'vsd'].set_index(['model', 'period'])
    for r in p.itertuples():
        assert mine.reported[r.model, r.period] == r.vsd and mine.value[r.model, r.period] == pytest.approx(r.vsd)
    moved = one_[one_.metric == 'style_changed'].set_index('period')
    assert len(moved) == 10 and (moved.value == moved.reported).all()
    for number in (3, 4):
        long, p = table_intervals(t, number, 'simulated'), pd.read_csv(f'data/reported/synthetic_history/table_{number:02d}.csv')
        for metric, col in dict(vsd='vsd', vsd_lo='lo', vsd_hi='hi', second_prop='second_prop', second_lo='second_lo', second_hi='second_hi').items():
            said = long[(long.metric == metric) & long.reported.notna()].set_index(['model', 'period']).reported
            assert len(said) == len(p) and all(said[r.model, r.period] == getattr(r, col) for r in p.itertuples())
    assert set(one_.status) == {'simulated'} and 'simulated' in run_words(run, t)
    assert all('10 of 10 periods' in line and '+0.00' in line for line in score_words(one_, t)) and interval_words(t, 3)

def test_table_2_has_every_encoder_that_was_run():
    run = a_run({('SD3', '17th'): [1] * 6})
    ev = pd.concat([run.evaluation, run.evaluation[run.evaluation.domain == 'shifted'].assign(encoder='other')])
    long = table_02(ev, True, replicates=200)
    assert long[long.value.notna()].drop_duplicates(['encoder', 'pictures']).encoder.value_counts().to_dict() == {'toy': 3, 'other': 1}
    assert len(shown_02(long)) == 4 + 7 and long[long.status == 'not_run'].reported.notna().all()
    acc = long[(long.encoder == 'other') & (long.metric == 'accuracy')]
    five = ERRS[:5].copy(); five[4] += ERRS[5, [0, 1, 2, 3, 5, 4]]; five[:, 4] += five[:, 5]
    assert acc.value.item() == pytest.approx(np.trace(five[:, :5]) / ERRS.sum())

def test_own_arms_and_periods():
    "Names that the paper does not know have no reported value, and nothing breaks."
    run = a_run({('mine', 'Bronze Age'): [1, 2, 3, 4, 5, 6], ('SDXL', '17th'): [0, 20, 0, 0, 0, 0]}, simulated=False)
    t = run.intervals()
    long = table_01(t, None, run.status)
    own = long[long.model == 'mine']
    assert own.reported.isna().all() and set(own.period) == {'Bronze Age'} and set(own.status) == {'real'}
    assert shown_01(t).shape[0] == 2 and len(shown_intervals(t, 3)) == 2 and len(measured_only(t)) == 2
    with pytest.raises(InputError, match='Table 4'): table_intervals(t, 4)
    share_panels(run.labels), style_intervals(measured_only(t))

def test_against_planted_by_hand():
    run = a_run({('SD3', '17th'): [3, 4, 5, 88, 0, 0], ('FLUX.1', '1950s'): [1, 0, 3, 2, 45, 49]})
    planted = pd.DataFrame([(a, p, s, x) for a, p, row in (('SD3', '17th', [0, 0, 0, .95, .05, 0]), ('FLUX.1', '1950s', [0, 0, 0, 0, .8, .2]), ('SDXL', '17th', [1, 0, 0, 0, 0, 0])) for s, x in zip(STYLES, row)], columns=['arm', 'period', 'style', 'share'])
    c = against_planted(run.intervals(), planted, run.intervals('same')).set_index('arm')
    assert c.loc['SD3', ['style', 'planted', 'measured', 'labelled']].tolist() == ['painting', .95, .88, 'painting'] and c.corrected_covers['SD3'] and not c.paper_covers['SD3']
    assert c.loc['FLUX.1', ['style', 'planted', 'measured', 'labelled']].tolist() == ['photography', .8, .45, 'monochrome'] and not c.corrected_covers['FLUX.1']
    h = held(c.reset_index()).set_index('interval')
    assert h.held['corrected'] == 1 and (h.cells == 2).all() and h.held["corrected with the wrong domain's matrix"] == 1
    words = finding_words(c.reset_index(), redraw_coverage(planted, 100, ERRS, redraws=2, replicates=50, wrong=ERRS))
    assert any('FLUX.1, 1950s: photography, planted 0.80' in w for w in words)

def test_figures_are_the_same_bytes_each_time(tmp_path):
    from histchrono.core.artifact import save_figure
    from histchrono.histvis.pictures import write_picture
    run, gen = a_run(printed_labels(20)), np.random.default_rng(0)
    pics = []
    for i, (a, p) in enumerate((a, p) for a in ('SDXL', 'SDXL Mitigated') for p in ('17th', '1950s')):
        write_picture(tmp_path/f'{i}.png', gen.integers(0, 255, (256, 256, 3), np.uint8))
        pics.append(dict(image_id=str(i), arm=a, period=p, activity_id=3, index=0, path=f'{i}.png', status='ok', style='painting'))
    pics = pd.DataFrame(pics)
    make = {'shares': lambda: share_panels(run.labels), 'map': lambda: confusion_map({'a': ERRS}), 'examples': lambda: examples(pics.drop(columns='style'), pics, 3, tmp_path, True)}
    for k in ('one', 'two'):
        for name, f in make.items(): save_figure(f(), 'x', name, name == 'examples', tmp_path/k)
        run = StyleRun(run.labels.sample(frac=1, random_state=1), run.evaluation, 'toy', True) # rows in another order
    for p in sorted((tmp_path/'one').iterdir()): assert p.read_bytes() == (tmp_path/'two'/p.name).read_bytes(), p.name

def test_pictures_are_drawn_pixel_for_pixel(tmp_path):
    from PIL import Image
    from histchrono.core.artifact import save_figure
    from histchrono.histvis.pictures import write_picture
    rgb = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
    write_picture(tmp_path/'a.png', rgb)
    one_ = pd.DataFrame([dict(image_id='a', arm='SDXL', period='17th', activity_id=3, index=0, path='a.png', status='ok', style='painting')])
    save_figure(examples(one_.drop(columns='style'), one_, 3, tmp_path, True), 'x', 'grid', True, tmp_path)
    page = np.asarray(Image.open(tmp_path/'grid.png').convert('RGB')).astype(int)
    rows = np.lib.stride_tricks.sliding_window_view(page, (8, 8, 3))[..., 0, :, :, :]
    hit = np.argwhere((rows == rgb[100:108, 100:108]).all((-1, -2, -3)))
    assert len(hit) == 1 # an inner piece stands in the file exactly as in the picture


NAN, NO_ENGRAVING = re.compile(r'\bnan\b'), np.where(np.arange(6)[:, None] == 1, 0, ERRS)

def test_cells_without_an_interval_are_no_misses():
    run = a_run({('SD3', '17th'): [3, 4, 5, 88, 0, 0], ('SDXL', '17th'): [0, 0, 0, 60, 40, 0]})
    gone = run.labels.assign(style=run.labels['style'].where(run.labels.arm == 'SD3', ''))
    t = intervals(gone, ERRS, replicates=200)
    planted = pd.DataFrame([(a, '17th', s, x) for a in ('SD3', 'SDXL') for s, x in (('painting', .9), ('drawing', .1))], columns=['arm', 'period', 'style', 'share'])
    cmp = against_planted(t, planted)
    assert cmp.corrected_covers.isna().tolist() == [False, True] and cmp.corrected_fault.tolist() == ['', 'no labelled picture']
    assert (held(cmp).cells == 1).all() and (held(cmp).without == 1).all()
    words = finding_words(cmp, redraw_coverage(planted, 50, ERRS, redraws=2, replicates=50))
    assert ' of 1 cells that have one' in words[1] and 'in 1 of 2 cells (SDXL: 17th c.): no labelled picture.' in words[-2]
    assert not NAN.search(' '.join(words)) and 'SDXL' not in words[-1]
    fig = style_intervals(cmp)
    assert [ax.get_title(loc='right').split('of')[-1].strip() for ax in fig.axes] == ['1', '0'] and len(fig.axes[1].texts) == 2
    assert measured_only(t).arm.tolist() == ['SD3']
    with pytest.raises(InputError, match='label pictures first'): measured_only(intervals(gone[gone.arm == 'SDXL'], ERRS, replicates=50))
    with pytest.raises(InputError, match='no cell'): style_intervals(cmp[:0])

def test_one_style_only_may_be_in_doubt():
    k = {('SD3', f'{n}'): [0, 0, 0, n, 0, 0] for n in (1, 3, 100)}
    t = intervals(labels(k), ERRS, replicates=2000)
    for rule in ('overlap', 'difference'):
        assert asterisks(t, rule).to_dict() == {('SD3', '1'): True, ('SD3', '3'): True, ('SD3', '100'): False}
        assert asterisks(intervals(labels(k), IDENTITY, replicates=50), rule).to_dict() == {('SD3', '1'): True, ('SD3', '3'): False, ('SD3', '100'): False} # one picture proves nothing
    assert t[(t.what == 'gap') & (t.kind == 'noise_free')].value.tolist() == [1, 1, 1] and one(t, 'paper', 'gap', period='1').lo == -1

def test_unknown_is_not_significant_nor_the_contrary():
    never = ERRS.copy(); never[1], never[:, 1] = [650, 0, 0, 0, 0, 0], 0 # nothing is ever called an engraving
    run = a_run({('SDXL', '17th'): [5, 80, 5, 5, 5, 0], ('SDXL', '18th'): [45, 0, 5, 45, 5, 0], ('SDXL', '19th'): [0] * 5 + [100]}, never)
    t = run.intervals()
    star = asterisks(t)
    assert star.isna().tolist() == [True, False, False] and star.iloc[1] and not star.iloc[2]
    s, long = shown_01(t), table_01(t, None, 'simulated')
    assert s[('SDXL', 'this run')].tolist() == ['0.80? engraving', '0.45* drawing', '1.00 monochrome']
    row = long[(long.metric == 'not_significant') & (long.period == '17th c.')]
    assert row.value.isna().all() and row.n.item() == 100 and row.status.item() == 'simulated'
    assert shown_intervals(t, 3)[("VSD, the paper's interval", 'this run')].iloc[0] == '?'
    assert '1 of 3 cells (SDXL: 17th c.): precision unknown' in star_words(t) and 'never saw' in star_words(t) and 'unknown here in 1 periods' in score_words(long, t)[0]
    assert not NAN.search(' '.join(interval_words(t, 3))) and '2 by the difference' not in interval_words(t, 3)[-1]

def test_style_that_was_never_evaluated():
    "Precision 0 by construction is no precision: no paper's interval anywhere, and all tables still come out."
    run = a_run({('SDXL', '17th'): [5, 80, 5, 5, 5, 0], ('SDXL Mitigated', '17th'): [5, 0, 5, 85, 5, 0]}, NO_ENGRAVING)
    t = run.intervals()
    for kind in ('paper', 'corrected'): assert set(t[t.kind == kind].fault) == {'no labelled picture of engraving'} and t[t.kind == kind].lo.isna().all()
    assert t[t.kind == 'clustered'].lo.notna().all()
    assert table_01(t).query("metric == 'vsd' and n == 100").value.tolist() == [.8, .85] and shown_01(t).iloc[0, 0] == '0.80? engraving'
    for number in (3, 4):
        long = table_intervals(t, number)
        assert long[long.metric == 'score'].value.notna().any() and long[long.metric == 'not_significant'].value.isna().all() and len(shown_intervals(t, number)) == 1
        words = interval_words(t, number)
        assert words == ["No cell has the paper's interval: no labelled picture of engraving."]
    assert 'no labelled picture of engraving' in star_words(t)
    assert intervals(run.labels, run.matrix(), ('paper',), replicates=50, precision='paper_f1', reassign='uniform').lo.notna().all() # needs no evaluation
    with pytest.raises(InputError, match="choose from noise_free$"): asterisks(t[t.kind != 'paper'].query("kind in ('noise_free', 'corrected')"))
    with pytest.raises(InputError, match='no other kind has one either'): asterisks(t[t.kind == 'corrected'])

def test_contrast_needs_activities_of_both_arms():
    a = labels({('SDXL', '17th'): [10, 10, 10, 10, 10, 10]})
    b = a.assign(arm='SDXL Mitigated')
    d = contrasts(pd.concat([a, b[b.activity_id == 3]]), replicates=200)
    assert d.lo.isna().all() and set(d.fault) == {'an arm has fewer than two activities'} and d.value.notna().all()
    assert not NAN.search(' '.join(change_words(d))) and 'fewer than two' in change_words(d)[0]
    d = contrasts(pd.concat([a, b[b.activity_id < 2]]), replicates=200)
    assert d.lo.isna().all() and d.fault.str.contains('of 200 draws of activities have no picture').all()
    d = contrasts(pd.concat([a, b[b.activity_id < 25]]), replicates=200)
    assert d.lo.notna().all() and set(d.fault) == {''}
    with pytest.raises(InputError, match='against itself'): contrasts(pd.concat([a, b]), 'SDXL', 'SDXL')
    with pytest.raises(InputError, match='some are words'): contrasts(pd.concat([a, b.assign(activity_id=b.activity_id.astype(str))]))

@pytest.mark.parametrize('change, words', [
    (lambda m: m / m.sum(1, keepdims=True), 'not shares'), (lambda m: m + .5, 'not shares'), (lambda m: m - 700, '-70 is none'), (lambda m: m * np.nan, 'nan is none'), (lambda m: np.where(np.eye(6), np.inf, m), 'inf is none'),
    (lambda m: m * 1e300, 'is none'), (lambda m: m.astype(str), 'of type'), (lambda m: m.astype(object), 'of type'), (lambda m: m[:5], 'not shape'), (lambda m: m[None], 'not shape'), (lambda m: [[1], [1, 2]], 'equally long'),
    (lambda m: pd.DataFrame(m, list('abcdef'), list('abcdef')), 'not rows a, b'), (lambda m: pd.DataFrame(m, STYLES), 'not rows drawing')])
@pytest.mark.parametrize('use', [lambda m: intervals(labels(LIKE), m, replicates=50), matrix_fault, with_monochrome, reassignment, lambda m: corrected_shares(np.ones((1, 6)), m), lambda m: confusion_map({'a': m})])
def test_what_is_no_confusion_matrix(change, words, use):
    with pytest.raises(InputError, match=words) as e: use(change(ERRS))
    assert '\n' not in str(e.value)

def test_named_matrices_are_taken_by_name():
    m = pd.DataFrame(ERRS, STYLES, STYLES)
    want = intervals(labels(LIKE), ERRS, replicates=50)
    for x in (m, m.iloc[::-1], m.iloc[[3, 1, 0, 2, 5, 4], ::-1], m.reset_index(drop=True).set_axis(range(6), axis=1), ERRS.tolist(), ERRS.astype(float), ERRS.astype(np.uint16)):
        pd.testing.assert_frame_equal(want, intervals(labels(LIKE), x, replicates=50))
    photos = np.diag([200] * 5 + [0]).astype(np.uint8); photos[4, 5] = 100 # 300 photographs recognised: more than a byte holds
    assert with_monochrome(photos)[4, 4] == 300

@pytest.mark.parametrize('kw, words', [(dict(kinds=()), 'no kind of interval'), (dict(replicates=0), '0 replicates'), (dict(replicates=1.5), '1.5 replicates'), (dict(level=95), 'level 95'), (dict(level=-1), 'level -1'), (dict(level=1), 'level 1'), (dict(seed=-1), 'seed -1'), (dict(seed=1.5), 'seed 1.5')])
def test_numbers_that_no_interval_can_be_drawn_with(kw, words):
    with pytest.raises(InputError, match=words): intervals(labels(LIKE), ERRS, **kw)
    if 'kinds' not in kw:
        with pytest.raises(InputError, match=words): contrasts(labels({('SDXL', '17th'): [1] * 6, ('SDXL Mitigated', '17th'): [1] * 6}), **kw)
    with pytest.raises(InputError, match=words): redraw_coverage(PLANTED, 50, ERRS, **kw)

PLANTED = pd.DataFrame([('SD3', '17th', s, x) for s, x in zip(STYLES, (.05, .05, .1, .7, .05, .05))], columns=['arm', 'period', 'style', 'share'])

@pytest.mark.parametrize('planted, n, words', [
    (PLANTED, np.nan, 'not whole'), (PLANTED, 2.7, 'not whole'), (PLANTED, [100], 'give n as a number'), (PLANTED, 'many', 'not whole'), (PLANTED, pd.DataFrame(dict(arm=['SD3'] * 2, period=['17th'] * 2, n=[3, 4])), 'two numbers of pictures'), (PLANTED, pd.DataFrame(dict(arm=['SD3'])), 'lack period, n'),
    (PLANTED, pd.DataFrame(dict(arm=['SDXL'], period=['17th'], n=[4])), 'no picture to draw'), (pd.concat([PLANTED, PLANTED]), 9, 'given twice'), (PLANTED[:0], 9, 'no planted share'), (PLANTED.drop(columns='share'), 9, 'lack share'),
    (PLANTED.assign(share=[.1, np.nan, .1, .7, .05, .05]), 9, 'engraving is no number'), (PLANTED.assign(share='x'), 9, 'is no number'), (PLANTED.assign(arm=None), 9, 'lacks a name'), (PLANTED.assign(share=.1), 9, 'add up to 0.6'), (PLANTED.assign(share=[1.1, -.1, 0, 0, 0, 0]), 9, 'engraving is negative')])
def test_planted_shares_that_nothing_can_be_drawn_from(planted, n, words):
    with pytest.raises(InputError, match=words): redraw_coverage(planted, n, ERRS, redraws=2, replicates=50)

def test_redraws_without_an_interval_are_counted_apart():
    few = np.diag([3, 3, 4, 4, 4, 4]); few[0, 1] = few[1, 0] = 1 # one redraw in twelve tells them not apart
    t = redraw_coverage(PLANTED, 100, few, redraws=60, replicates=60).set_index('kind')
    assert t.without['noise_free'] == 0 < t.without['corrected'] < 60 and t.coverage['corrected'] > .8 and t.width.notna().all()
    with pytest.raises(InputError, match="wrong domain's confusion matrix: the probe calls two styles alike"): redraw_coverage(PLANTED, 100, ERRS, redraws=2, wrong=np.full((6, 6), 5))

def test_names_missing_categorical_or_with_a_dollar_sign(tmp_path):
    d = labels({('ü<$x^$>', '$\\frac$'): [1, 2, 3, 14, 0, 0], ('SDXL', '17th'): [0, 20, 0, 0, 0, 0]})
    with pytest.raises(InputError, match='40 of 40 labels have no arm'): intervals(d.assign(arm=None), ERRS)
    with pytest.raises(InputError, match='20 of 40 labels have no period'): intervals(d.assign(period=d.period.where(d.arm == 'SDXL')), ERRS)
    with pytest.raises(InputError, match='no activity_id'): intervals(d.assign(activity_id=np.nan), ERRS)
    t = intervals(d, ERRS, replicates=50)
    pd.testing.assert_frame_equal(t, intervals(d.astype({c: 'category' for c in d}), ERRS, replicates=50))
    pair = pd.concat([d[d.arm == 'SDXL'], d[d.arm == 'SDXL'].assign(arm='SDXL Mitigated')])
    pd.testing.assert_frame_equal(contrasts(pair, replicates=50), contrasts(pair.astype({c: 'category' for c in pair}), replicates=50))
    for i, fig in enumerate((share_panels(d), style_intervals(measured_only(t)), confusion_map({'a $x^$': ERRS}, 'note $\\frac$'))): fig.savefig(tmp_path/f'{i}.svg')

def test_table_2_with_a_domain_of_ones_own():
    run = a_run({('SD3', '17th'): [1] * 6})
    with pytest.raises(InputError, match="domain 'zz' is none of"): table_02(run.evaluation.assign(domain='zz'), True)
