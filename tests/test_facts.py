"""The facts in data/wikidata: form, offices held by one at a time, QIDs that a reference file shows, and what the reference says differently."""
import csv
import re
from collections import Counter, defaultdict

import pytest

from histchrono.chronoscope.facts import SOLE, bounds, load_facts, summary
from histchrono.core.paths import data_dir

KNOWN = "facts_differences.tsv"  # differences that were looked at, each with the reason why ours stands


@pytest.fixture(scope="module")
def facts():
    return load_facts(data_dir("wikidata"))  # form, intervals and sole offices are checked on reading


@pytest.fixture(scope="module")
def reference(shared):
    folder = shared / "reference" / "wikidata"

    def tsv(name):
        with open(folder / name, encoding="utf-8", newline="") as f:
            return list(csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE))

    def comma(name):
        with open(folder / name, encoding="utf-8", newline="") as f:
            return list(csv.DictReader(f))

    return dict(
        labels=tsv("labels_en.tsv"), pat=tsv("pat_singlehop_joined.tsv"), p39=tsv("p39_joined.tsv"), w12k=tsv("wikidata12k_joined.tsv"),
        leaders={y: comma(f"world_leaders_{y}.csv") for y in (2021, 2022)},
    )


def test_size_and_share(facts):
    s = summary(facts)
    assert s["facts"] >= 1000 and s["subjects"] >= 150
    assert 2 * s["subjects with reference QID"] >= s["subjects"]
    assert 2 * s["values with reference QID"] >= s["values"]
    for p in "P6 P35 P39 P54 P69 P102 P108 P127 P131 P17 P169 P286 P463 P488".split():
        assert s.get(p), f"no fact of {p}"


def test_coverage(facts):
    by = defaultdict(set)
    for f in facts.facts:
        by[f.property, facts.entities[f.subject].cls].add(f.subject)
    heads = by["P6", "country"] | by["P35", "country"]
    assert len(heads) >= 40
    firms = {s for p in ("P169", "P488") for c in ("business", "airline", "newspaper") for s in by[p, c]}
    assert len(firms) >= 25
    teams = {s for c in ("association football club", "national association football team", "basketball team") for s in by["P286", c]}
    assert len(teams) >= 25
    changed = Counter((f.subject, f.property) for f in facts.facts if f.property in ("P17", "P131"))
    assert sum(n > 1 for n in changed.values()) >= 25


def test_every_subject_has_its_timeless_facts(facts):
    for f in facts.facts:
        e = facts.entities[f.subject]
        assert e.cls, f"{e.name} has no class"
        assert bool(e.pronoun) == (e.cls == "human"), f"{e.name}: a pronoun belongs to people, and to each of them"
        assert e.country or e.cls in ("country", "international organization", "organization", "political party", "research institute", "business", "airline", "newspaper", "human", "university"), f"{e.name} has no country"


def test_one_holder_at_a_time_day_by_day(facts):
    "The rule of the loader, checked another way: on no day do two people surely hold one office."
    offices = defaultdict(list)
    for f in facts.facts:
        if f.property in SOLE and f.start != "?" and f.end != "?":
            offices[f.subject, f.property].append(f)
    for key, fs in offices.items():
        sure = sorted((bounds(f.start)[1].toordinal(), bounds(f.end or f.held_until_known)[0].toordinal(), f.value) for f in fs)
        for a, b in zip(sure, sure[1:]):
            assert a[1] <= b[0] or a[2] == b[2] or a[1] <= a[0] or b[1] <= b[0], f"{key}: {a[2]} and {b[2]}"


def label_index(ref):
    shown = defaultdict(lambda: defaultdict(set))

    def add(name, qid, label):
        if qid and label:
            shown[name][qid].add(label.replace("\xa0", " ").strip().casefold())

    for r in ref["labels"]:
        add("labels_en.tsv", r["qid"], r["label"])
    for y, rows in ref["leaders"].items():
        for r in rows:
            for a, b in (("countryid", "country"), ("position", "positionLabel"), ("officeholder", "officeholderLabel")):
                add(f"world_leaders_{y}.csv", r[a], r[b])
    for r in ref["pat"]:
        add("pat_singlehop_joined.tsv", r["subject"], r["subject_label"])
        for s in ("Dec2021", "Dec2023", "March2024"):
            for q, l in zip(r[f"{s}_qids"].split("|"), r[f"{s}_labels"].split("|")):
                add("pat_singlehop_joined.tsv", q, l)
    for r in ref["p39"]:
        add("p39_joined.tsv", r["subject"], r["subject_label"])
        add("p39_joined.tsv", r["value"], r["value_label"])
    return shown


def test_reference_qids_are_shown_by_the_file_that_is_named(facts, reference):
    shown = label_index(reference)
    rows = {"p39_joined.tsv": {(r["subject"], r["property"], r["value"], (r["start"] or "")[:4]) for r in reference["p39"]},
            "wikidata12k_joined.tsv": {(r["subject"], r["property"], r["value"], r["start_year"]) for r in reference["w12k"]}}
    qid = {n: e.qid for n, e in facts.entities.items()}
    ours = {(qid[f.subject], f.property, qid[f.value], f.start[:4]) for f in facts.facts}
    dated = {name: Counter(q for row in have & ours for q in (row[0], row[2])) for name, have in rows.items()}
    bad = []
    for e in facts.entities.values():
        if e.local:
            continue
        name, by_dates = re.fullmatch(r"reference:([\w.]+)(#dates)?", e.source).groups()
        if by_dates:
            if not dated[name][e.qid]:
                bad.append(f"{e.name} {e.qid}: no statement of ours has the dates of one in {name}")
        elif not shown[name][e.qid] & {e.label.casefold(), *(a.casefold() for a in e.aliases)}:
            bad.append(f"{e.name} {e.qid}: {name} calls it {sorted(shown[name][e.qid])}")
    assert not bad, "\n".join(bad)


def holds(f, day):
    return f.start != "?" and f.start <= day[: len(f.start)] and (not f.end or f.end == "?" or day[: len(f.end)] <= f.end)


def differences(facts, ref):
    "Where the reference shows the same subject and property, and says something else: (file, subject, property, when, ours, theirs)."
    qid, out = {n: e.qid for n, e in facts.entities.items()}, []
    labels = {n: {e.label.casefold(), *(a.casefold() for a in e.aliases)} for n, e in facts.entities.items()}
    by = defaultdict(list)
    for f in facts.facts:
        by[qid[f.subject], f.property].append(f)
    for r in ref["pat"]:
        mine = by.get((r["subject"], r["property"]), []) if r["kind"] == "current" else []
        for s, day in (("Dec2021", "2021-12-29"), ("Dec2023", "2023-12-15"), ("March2024", "2024-03-15")) if mine else ():
            here = [f for f in mine if holds(f, day)]
            theirs = [x for x in r[f"{s}_labels"].split("|") if x]
            same = {qid[f.value] for f in here} & set(r[f"{s}_qids"].split("|")) or any(t.casefold() in labels[f.value] for t in theirs for f in here)
            if here and theirs and not same:
                out.append(("pat_singlehop_joined.tsv", here[0].subject, r["property"], day, " / ".join(sorted(f.value for f in here)), " / ".join(sorted(theirs))))
    for year, rows in ref["leaders"].items():
        known = defaultdict(set)
        for r in rows:
            known[r["countryid"], r["officeholder"]].add(r["start_year"])
        for (country, holder), starts in sorted(known.items()):
            mine = [f for p in ("P6", "P35") for f in by.get((country, p), []) if qid[f.value] == holder and f.start != "?"]
            if mine and not {f.start[:4] for f in mine} & starts:
                out.append((f"world_leaders_{year}.csv", mine[0].subject, mine[0].property, "start", f"{mine[0].value} {' '.join(sorted({f.start[:4] for f in mine}))}", " ".join(sorted(starts))))
    return sorted(set(out))


def test_differences_from_the_reference_are_known(facts, reference, pytestconfig):
    "The reference is not always right (vandalism, late edits, several ranks); what differs was looked at, and a new difference is an error."
    path = pytestconfig.rootpath / "tests" / "data" / KNOWN
    with open(path, encoding="utf-8", newline="") as f:
        known = {tuple(r[:6]): r[6] for r in csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE) if r and r[0] != "file"}
    found = differences(facts, reference)
    new = [d for d in found if d not in known]
    assert not new, "differences from the reference that nobody looked at:\n" + "\n".join("\t".join(d) for d in new)
    assert all(w.strip() for w in known.values()), "each known difference needs its reason"
    gone = [k for k in known if k not in found]
    assert not gone, "no longer a difference, take it out:\n" + "\n".join("\t".join(k) for k in gone)
