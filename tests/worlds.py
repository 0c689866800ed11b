"""Small random worlds, and the answers to questions about them worked out from the statements day by day, by a route that shares no code with the package."""
import hashlib
import random
import re
import unicodedata
from datetime import date, timedelta
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa

from histchrono.chronoscope.dump import ENTITIES, STATEMENTS
from histchrono.chronoscope.truth import build_truth
from histchrono.core.io import write_parquet
from histchrono.core.provenance import write_manifest

SNAPSHOTS = (2022, 2023, 2024, 2025)
ANCHORS = [f"{y}-{md}" for y in SNAPSHOTS for md in ("01-01", "04-01", "07-01", "10-01")]
CLASSES = {"person": "Q5", "country": "Q6256", "city": "Q515", "club": "Q476028", "firm": "Q4830453", "party": "Q7278", "place": "Q56061", "organization": "Q43229", "office": "Q4164871"}
ASKED = {"person": ("P39", "P102", "P108", "P54", "P26"), "club": ("P286", "P488", "P127"), "city": ("P6", "P131", "P17"), "firm": ("P169", "P488", "P127", "P463"), "country": ("P6", "P35"), "party": ("P488",)}
VALUES = {"P39": "office", "P102": "party", "P108": "firm", "P54": "club", "P26": "person", "P286": "person", "P488": "person", "P127": "firm", "P6": "person", "P131": "place", "P17": "country", "P169": "person",
          "P463": "organization", "P35": "person"}
# names that want to leak: months and years in names, a pronoun, numbers, yes and no, two of one name, one that cannot be used
NAMES = {
    "person": ["Ada Voss", "Ben Ruiz", "Cora Lindh", "Dae Kim", "Dae Kim", "Élodie Façon", "Femi James", "Gus March", "Nora April", "Li He", "Theresa May", "Uwe Roth"],
    "country": ["Netherlands", "Norway", "United Kingdom"],
    "city": ["Arden", "Mexico City", "Boras", "Two Rivers"],
    "club": ["Chelsea F.C.", "TSV 1860 Munich", "Rovers", "Schalke 04"],
    "firm": ["Acme", "Starbucks", "Vision 2010", "Initech"],
    "party": ["Labour Party", "No Labels", "Union Party"],
    "place": ["Mexico", "Østfold", "Viken"],
    "organization": ["Star Alliance", "Oneworld"],
    "office": ["Mayor of Arden", "minister", "Prime Minister"],
}
MONTHS = "January February March April May June July August September October November December".split()
TIME = re.compile(r"\b\d{4}s?\b|\b(" + "|".join(MONTHS) + r")\b")


def make_entities(salt: int = 0) -> dict:
    "Entities by QID; the salt moves the numbers, and with them the splits."
    out, n = {}, 1000 + 100 * salt
    for kind, labels in NAMES.items():
        for i, label in enumerate(labels):
            n += 1
            out[f"Q{n}"] = dict(qid=f"Q{n}", kind=kind, label=label, usable=label != "Gus March", aliases=[label.split()[-1]] if kind == "person" else [label.upper()], country="" if kind == "country" or n % 3 == 0 else f"Q{1000 + 100 * salt + len(NAMES['person']) + 1 + n % 2}",
                                gender=[None, "Q6581097", "Q6581072"][i % 3] if kind == "person" else None, classes=[CLASSES[kind]])
    return out


def form(day: date, cut: int = 10) -> str:
    "A time as statements hold it: a day, a month, a year or a decade."
    return {10: f"{day}/11", 7: f"{day:%Y-%m}-00/10", 4: f"{day:%Y}-00-00/9", 3: f"{day.year // 10 * 10}-00-00/8"}[cut]


def random_claims(rnd: random.Random, entities: dict) -> list:
    "Claims of every precision: one after another, some overlapping; points, unknown ends, ranks, two spells in one claim, self-loops; and countries without a time."
    by, claims = {}, []
    for e in entities.values():
        by.setdefault(e["kind"], []).append(e["qid"])
    for e in entities.values():
        home = {"person": "P27", "club": "P17", "firm": "P17", "party": "P17"}.get(e["kind"])
        if home and rnd.random() < 0.7:
            claims.append(dict(subject=e["qid"], property=home, value=rnd.choice(by["country"]), rank="normal", start=[], end=[], point=[]))
    cut = lambda: rnd.choice((10,) * 14 + (7, 7, 4, 4, 4, 3))
    for e in entities.values():
        for prop in ASKED.get(e["kind"], ()):
            day = date(rnd.randint(1985, 2014), rnd.choice((1, rnd.randint(1, 12))), rnd.choice((1, rnd.randint(1, 28))))
            for _ in range(rnd.randint(1, 7)):
                end = day + timedelta(rnd.randint(200, 2600))
                value, odd = rnd.choice([v for v in by[VALUES[prop]] if v != e["qid"]]), rnd.random()
                c = dict(subject=e["qid"], property=prop, value=value, rank="normal", start=[form(day, cut())], end=[form(end, cut())], point=[])
                last = end > date(2025, 10, 1)
                if last:
                    c["end"] = rnd.choice(([], [], ["novalue"], ["somevalue"]))
                elif odd < 0.03:
                    c["start"] = ["somevalue"]
                elif odd < 0.06:
                    c["end"] = ["somevalue"]
                elif odd < 0.09:
                    c.update(start=[], end=[], point=[form(day, rnd.choice((10, 7, 4)))])
                elif odd < 0.13:
                    again = end + timedelta(rnd.randint(400, 900))
                    c.update(start=[form(day), form(again)], end=[form(end), form(again + timedelta(500))])
                elif odd < 0.17:
                    c["rank"] = rnd.choice(("preferred", "deprecated"))
                elif odd < 0.19:
                    c["value"] = e["qid"]
                elif odd < 0.21:
                    c["start"] = []
                claims.append(c)
                day = end if rnd.random() < 0.8 else end + timedelta(rnd.randint(-150, 150))
                if last:
                    break
    return claims


def known_by(claims: list, year: int) -> list:
    "What is known of the claims at the end of a year."
    early = lambda forms: [f for f in forms if f in ("somevalue", "novalue") or span(f)[0] <= date(year, 12, 31)]
    return [dict(c, start=early(c["start"]), end=early(c["end"]), point=early(c["point"]), snapshot=str(year)) for c in claims if early(c["start"] + c["point"]) or not c["start"] + c["point"]]


def span(form_: str) -> tuple:
    "First and last day that a written time may mean."
    text, p = form_.split("/")
    y, m, d = map(int, text.split("-"))
    if p == "11":
        return date(y, m, d), date(y, m, d)
    if p == "10":
        return date(y, m, 1), date(y + m // 12, m % 12 + 1, 1) - timedelta(1)
    return (date(y, 1, 1), date(y, 12, 31)) if p == "9" else (date(y // 10 * 10, 1, 1), date(y // 10 * 10 + 9, 12, 31))


FIRST, LAST = date(1700, 1, 1).toordinal(), date(2030, 12, 31).toordinal()  # days that questions can be about


def days(a: date, b: date) -> int:
    "A set of days, both ends included: a whole number with a bit for each day."
    a, b = max(a.toordinal(), FIRST) - FIRST, min(b.toordinal(), LAST) - FIRST
    return (1 << b + 1) - (1 << a) if a <= b else 0


@lru_cache(maxsize=None)
def years(a: int, b: int) -> int:
    return days(date(a, 1, 1), date(b, 12, 31))


def all_of(sets) -> int:
    "Days that are in one of the sets."
    out = 0
    for s in sets:
        out |= s
    return out


class Series:
    "One subject and property: on which days a value is possible, on which it is certain."

    def __init__(self, claims: list):
        self.possible, self.certain, self.claims, self._sole = {}, {}, claims, {}
        for c in claims:
            self._add(c)

    def _add(self, c: dict):
        for f in c["point"] if not c["start"] and not c["end"] else ():
            y = span(f)[0].year
            for kind in (self.possible, self.certain):
                kind[c["value"]] = kind.get(c["value"], 0) | years(y, y)
        for start, end in zip_longest(sorted(c["start"]), sorted(c["end"])) if c["start"] or c["end"] else ():
            s, e = (None if x in (None, "somevalue", "novalue") else span(x) for x in (start, end))
            may = days(s[0] if s else date.min, e[1] if e else date.max)
            sure = days(s[1], e[0] - timedelta(1) if e else date.max) if s and end != "somevalue" else 0
            self.possible[c["value"]] = self.possible.get(c["value"], 0) | may
            self.certain[c["value"]] = self.certain.get(c["value"], 0) | sure

    def sole(self, value: str) -> int:
        "Days on which the value is certain and no other is possible."
        if value not in self._sole:
            self._sole[value] = self.certain.get(value, 0) & ~all_of(d for v, d in self.possible.items() if v != value)
        return self._sole[value]

    def walk(self, sets, a: date, b: date):
        "Day by day: the day, and in which of some sets of days it is."
        low = a.toordinal() - FIRST
        cut = [x >> low & (1 << (b - a).days + 1) - 1 for x in sets]
        for n in range((b - a).days + 1):
            yield a + timedelta(n), [x >> n & 1 for x in cut]

    def answer(self, window: int):
        "The value that is certain, alone, on every day of a window."
        return next((v for v in self.certain if window & ~self.sole(v) == 0), None)

    def spells(self):
        "The paper's reading: rank, first and last day and value of each claim at its widest, a point for its year."
        for c in self.claims:
            dates = [[span(f) for f in c[k] if f not in ("somevalue", "novalue")] for k in ("start", "end", "point")]
            since = min((a for a, _ in dates[0]), default=date.min)
            if c["start"] or c["end"]:
                yield c["rank"] != "preferred", since, since, max((b for _, b in dates[1]), default=date.max), c["value"]
            else:
                yield from ((c["rank"] != "preferred", a, date(a.year, 1, 1), date(a.year, 12, 31), c["value"]) for a, _ in dates[2])

    def canonical(self, day: date) -> tuple:
        "The paper's canonical value of a day (preferred, latest start, lowest number), and every value that holds on it."
        on = [(normal, -since.toordinal(), int(v[1:]), v) for normal, since, a, b, v in self.spells() if a <= day <= b]
        return (min(on)[3] if on else None), {x[3] for x in on}

    def widest(self) -> dict:
        "The paper's days of each value."
        out = {}
        for _, _, a, b, v in self.spells():
            out[v] = out.get(v, 0) | days(a, b)
        return out


class Facts:
    "Statements of all snapshots, as series."

    def __init__(self, rows):
        self.rows, self.timeless, self.cache = {}, {}, {}
        for r in rows:
            if r["rank"] != "deprecated" and r["subject"] != r["value"]:
                timed = r["start"] or r["end"] or r["point"]
                (self.rows if timed else self.timeless).setdefault((int(r["snapshot"]), r["subject"], r["property"]), []).append(r)

    def series(self, snapshot: int, subject: str, prop: str) -> Series:
        key = snapshot, subject, prop
        if key not in self.cache:
            self.cache[key] = Series(self.rows.get(key, ()))
        return self.cache[key]


def write_inputs(folder: Path, claims: list, entities: dict, order=lambda rows: rows, snapshots=SNAPSHOTS) -> list:
    "Statements and entities as extract writes them, one folder a snapshot."
    dirs = []
    for year in snapshots:
        d = folder / str(year)
        rows = [dict(c, replaces=[], replaced_by=[], ordinal=[], of=[]) for c in known_by(claims, year)]
        write_parquet(pa.Table.from_pylist(order(rows), schema=STATEMENTS.fields), d / "statements.parquet", STATEMENTS)
        ents = [{k: v for k, v in dict(e, label_lang="en", description="").items() if k != "kind"} for e in entities.values()]
        write_parquet(pa.Table.from_pylist(order(ents), schema=ENTITIES.fields), d / "entities.parquet", ENTITIES)
        write_manifest(d, "extract", settings=dict(snapshot=str(year)), extra=dict(complete=True))
        dirs.append(d)
    return dirs


class Made:
    "A world in files: truth, folders of statements, and the facts as the checks look at them."

    def __init__(self, folder, seed: int):
        self.folder, self.entities = Path(folder), make_entities(seed % 7)
        self.claims = random_claims(random.Random(seed), self.entities)
        self.dirs, self.truth = write_inputs(self.folder, self.claims, self.entities), self.folder / "truth"
        build_truth(self.dirs, ANCHORS, "strict", self.truth)
        self.facts = Facts(r for y in SNAPSHOTS for r in known_by(self.claims, y))


@lru_cache(maxsize=1 << 14)
def plain(text: str) -> list:
    "Words as they are compared: no case, no dots inside abbreviations, no punctuation."
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[A-Za-z])\.(?=[A-Za-z]|\W|$)", "", unicodedata.normalize("NFKC", text).casefold()))


def holds(text: str, part: str) -> bool:
    "Whether a text holds another as whole words."
    return f" {' '.join(plain(part))} " in f" {' '.join(plain(text))} "


def names(e: dict) -> set:
    "The names of an entity, as they are compared."
    return {" ".join(plain(n)) for n in (e["label"], *e["aliases"])}


def split(qid: str) -> str:
    "Train, dev and test, 80/10/10 by MD5."
    return (*("train",) * 8, "dev", "test")[int(hashlib.md5(qid.encode()).hexdigest()[:8], 16) % 10]
