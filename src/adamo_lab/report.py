"""One page that says what the runs say: tables, verdicts and figures, from records alone.

Needs no torch and no network, neither to make nor to read: everything is inside ``index.html``.
The figures are also written to ``figures/``, as SVG.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import claims, figures, tables
from .disk import write_atomically
from .errors import LabError
from .figures import Drawing
from .grids import grids
from .groups import YOURS, Group, by_study, show
from .records import FAILED, Record, load_all
from .studies import STUDIES, Claim
from .tables import Table
from .tasks import unit
from .verdicts import FAILS, HOLDS, OPEN, RULE, Verdict, after_correction

ENVIRONMENT = {  # a key of the records: how it reads
    "device": "hardware",
    "threads": "threads",
    "adamo_optim": "adamo-optim",
    "torch": "PyTorch",
    "python": "Python",
    "commit": "commit",
    "date": "date",
}


@dataclass(frozen=True)
class Judged:
    """A claim, what became of it, and why, in words."""

    verdict: Verdict
    why: str
    short: str  # the same for the overview
    where: str  # which group, if a study has several
    anchor: str
    means: Sequence[tuple[str, str, int]]  # row, mean ± sd, number of runs

    @property
    def claim(self) -> Claim:
        return self.verdict.claim

    @property
    def outcome(self) -> str:
        return self.verdict.outcome

    @property
    def kind(self) -> str:
        return {HOLDS: "holds", FAILS: "fails", OPEN: "open"}[self.outcome]


@dataclass(frozen=True)
class Part:
    """A group as the page shows it."""

    group: Group
    title: str
    table: Table
    every_setting: Table | None
    judged: list[Judged]
    figures: list[Drawing]
    layers: list[Drawing]

    @property
    def hypers(self) -> list[tuple[str, str]]:
        return [(x.label, settings(x.hyper)) for x in tables.best_lines(self.group)]


@dataclass(frozen=True)
class Section:
    """A study, or runs that belong to none."""

    anchor: str
    title: str
    about: str
    parts: list[Part]
    brief: list[Judged] = field(default_factory=list)


@dataclass(frozen=True)
class Cover:
    """What a page is about."""

    title: str = "AdamO, measured"
    lead: str = (
        "This page sets our runs beside the numbers the paper printed, and says of each "
        "claim whether it holds."
    )
    stories: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Runs outside of studies, by task: a title, and what to look for."""


OWN_STORY = ("Your model", "A model of your own, trained with the optimizers side by side.")


def write_report(results: Path, out: Path, cover: Cover | None = None) -> Path:
    """Make ``out/index.html`` from every record below ``results``."""
    cover = cover or Cover()
    if not results.is_dir():
        raise LabError(f"there is no folder {results}; run a study first: adamo-lab study fig1")
    records, problems = load_all(results)
    if not records:
        odd = f" ({'; '.join(problems)})" if problems else ""
        raise LabError(f"no records below {results}{odd}; run a study first: adamo-lab study fig1")
    made = sections(by_study(sorted(records, key=lambda r: r.id)), cover)
    for drawing in (d for section in made for p in section.parts for d in (*p.figures, *p.layers)):
        write_atomically(out / "figures" / f"{drawing.name}.svg", drawing.svg)
    problems = [said.replace(str(results), "").lstrip("/") for said in problems]
    write_atomically(out / "index.html", render(cover, made, records, problems).encode())
    return out / "index.html"


# --- from groups to sections


def sections(files: Mapping[str, list[Group]], cover: Cover) -> list[Section]:
    """Your models, the studies, the stories of a cover, and whatever else there is."""
    seen: set[str] = set()  # runs shown layer by layer
    others = [g for name, mine in files.items() if name not in STUDIES for g in mine]
    told = {YOURS: OWN_STORY, **cover.stories}
    made = [
        (f"story-{task}", title, about, [g for g in others if g.task == task], [])
        for task, (title, about) in told.items()
    ]
    for name, study in STUDIES.items():
        mine = files.get(name, [])
        made.append((name, study.title, study.about, mine, in_brief(mine)))
    rest = [g for g in others if g.task not in told]
    made.append(("other", "Other runs", "Runs and sweeps that belong to no study.", rest, []))
    return [
        Section(anchor, title, about, [part(g, seen) for g in groups], brief)
        for anchor, title, about, groups, brief in made
        if groups
    ]


def part(group: Group, seen: set[str]) -> Part:
    maps = grids(group)
    whole = tables.table(group)
    many = len(group.lines) > tables.MOST_LINES
    best = tables.best_table(group, {one.line.name: one.finding for one in maps})
    shown = (best, whole) if many else (whole, None)
    drawn = figures.draw(group, maps, seen)
    return Part(group, title_of(group), *shown, judged_claims(group), *drawn)


def in_brief(groups: Iterable[Group]) -> list[Judged]:
    """Every claim with its verdict from full runs on real data."""
    return [judged for g in groups if g.full for judged in judged_claims(g)]


def title_of(group: Group) -> str:
    kinds = ["shortened"] if group.scale < 1 else ["lengthened"] if group.scale > 1 else []
    kinds += ["made-up data"] if group.synthetic else []
    length = f"{group.epochs} {unit(group.task)}{'s' if group.epochs != 1 else ''}"
    first = [] if group.study or group.task == YOURS else [group.task]
    return capitalized(", ".join(filter(None, [*first, group.label, length, *kinds])))


def judged_claims(group: Group) -> list[Judged]:
    return [
        Judged(
            verdict,
            *(claims.numbers(verdict, group), claims.numbers(verdict, group, brief=True)),
            *(group.label, f"at-{group.name}", claims.means(verdict.claim, group)),
        )
        for verdict in claims.verdicts(group)
    ]


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- the page


def render(
    cover: Cover, sections: list[Section], records: list[Record], problems: list[str]
) -> str:
    environment = Environment(
        loader=PackageLoader("adamo_lab", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"data_uri": data_uri, "capitalized": capitalized}
    brief = [(section, judged) for section in sections for judged in section.brief]
    finished = [*{r.id: r for r in records if r.status != FAILED}.values()]
    css, script = asset("report.css"), asset("report.js")
    return environment.get_template("report.html.j2").render(
        cover=cover,
        sections=sections,
        brief=brief,
        counts=Counter(judged.outcome for _, judged in brief),
        outcomes=(HOLDS, FAILS, OPEN),
        rule=RULE,
        corrected=after_correction(judged.verdict for _, judged in brief),
        finished=finished,
        failed=[(r, without_paths(r.error)) for r in records if r.status == FAILED],
        problems=[without_paths(problem) for problem in problems],
        warned=warnings_of(finished),
        environment=environment_of(finished),
        hours=duration(sum(r.environment.get("seconds") or 0 for r in finished)),
        dates=span(r.environment.get("date") for r in finished),
        css=Markup(css),
        script=Markup(script),
        css_digest=csp_digest(css),
        script_digest=csp_digest(script),
    )


def asset(name: str) -> str:
    return (files("adamo_lab") / "templates" / name).read_text(encoding="utf-8")


def csp_digest(text: str) -> str:
    """The page's policy runs this script and no other, whatever a record may hold."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data_uri(drawing: Drawing) -> str:
    """Percent signs where they must be: shorter than base64."""
    return "data:image/svg+xml," + quote(drawing.svg, safe=" !$&'()*+,-./:;=?@[]^_`{|}~")


def settings(hyper: Any) -> str:
    return ", ".join(f"{key} {show(value)}" for key, value in hyper.items())


def environment_of(records: Sequence[Record]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Each thing a result depends on: the values that occur, and in how many runs."""
    told = {
        name: Counter(str(r.environment[key]) for r in records if key in r.environment)
        for key, name in ENVIRONMENT.items()
    }
    return [(name, sorted(values.items())) for name, values in told.items() if values]


def warnings_of(records: Sequence[Record]) -> list[tuple[str, int, list[str], list[str]]]:
    """Each warning once, in how many runs, with which optimizers and at which commits."""
    seen: dict[str, list[Record]] = {}
    for r in records:
        for said in {*(r.environment.get("warnings") or ())}:
            seen.setdefault(without_paths(str(said)), []).append(r)

    def every(runs: list[Record]) -> tuple[list[str], list[str]]:
        names = {r.config.optimizer for r in runs}
        return sorted(names), sorted({str(r.environment.get("commit")) for r in runs})

    return [(said, len(runs), *every(runs)) for said, runs in sorted(seen.items())]


def without_paths(text: str) -> str:
    """The name of a file, not where it lies on somebody's machine."""
    path = r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+ -]*[\w@+-]){2,}"
    return re.sub(path, lambda m: "…/" + re.split(r"[/\\]", m[0])[-1], text)


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def span(dates: Iterable[str | None]) -> str:
    found = sorted({str(date) for date in dates if date})
    return "" if not found else found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
