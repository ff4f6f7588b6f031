"""One page that says what the runs say: tables, verdicts and figures, from records alone.

Needs no torch and no network, neither to make nor to read: everything is inside ``index.html``.
The figures are also written to ``figures/`` (PNG and SVG), the tables to ``tables/`` (Markdown).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import claims, figures, tables
from .errors import LabError
from .figures import Drawing
from .grids import grid_table, grids
from .groups import YOURS, Group, by_study, expected_options, label_of, show
from .records import FAILED, Record, load_all, write_atomically
from .studies import STUDIES, Claim, Study
from .tables import Table
from .verdicts import FAILS, HOLDS, OPEN, RULE, Verdict

NOTE = "NOTE.txt"  # in a study's folder of records
ONLY_PARTIAL = "only shortened or made-up runs so far"
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

    claim: Claim
    outcome: str
    why: str
    short: str  # the same for the overview
    where: str = ""  # which group, if a study has several
    anchor: str = ""
    means: Sequence[tuple[str, str, int]] = ()  # optimizer, mean ± sd, number of runs

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
        return [(x.label, settings(x.hyper)) for x in self.group.lines]


@dataclass(frozen=True)
class Section:
    """A study, or the runs that belong to none."""

    anchor: str
    title: str
    about: str
    parts: list[Part]
    brief: list[Judged] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # what has no full run on real data yet
    command: str = ""
    note: str = ""  # what whoever keeps the records wants to be read with them


@dataclass(frozen=True)
class Cover:
    """What a page is about."""

    title: str = "AdamO, measured"
    lead: str = (
        "This page sets our runs beside the numbers the paper printed, and says of each "
        "claim whether it holds."
    )
    whole: bool = True  # also what has no runs yet, and all claims in an overview
    stories: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Runs outside of studies, by task: a title, and what to look for."""


OWN_COVER = Cover(
    title="AdamO on your model",
    lead="The same start, the same batches and the same budget for every optimizer.",
    whole=False,
)


def write_report(results: Path, out: Path, cover: Cover | None = None) -> Path:
    """Make ``out/index.html`` from every record below ``results``."""
    cover = cover or Cover()
    if not results.is_dir():
        raise LabError(f"there is no folder {results}; run a study first: adamo-lab study fig1")
    found, problems = load_all(results)
    if not found:
        damaged = f" ({len(problems)} damaged)" if problems else ""
        raise LabError(
            f"no records below {results}{damaged}; run a study first: adamo-lab study fig1"
        )
    records = sorted(found.values(), key=lambda r: r.id)
    grouped, others = by_study(records)
    seen: set[str] = set()  # runs shown layer by layer
    sections = [study_section(STUDIES[name], groups, seen) for name, groups in grouped.items()]
    yours = [g for g in others if g.task == YOURS]
    rest = [g for g in others if g.task != YOURS]
    if yours:
        about = "A model of your own, trained with the optimizers side by side."
        sections.insert(0, Section(YOURS, "Your model", about, [part(g, seen) for g in yours]))
    for task, (title, about) in cover.stories.items():
        told = [part(g, seen) for g in rest if g.task == task]
        sections.append(Section(f"story-{task}", title, about, told))
    rest = [g for g in rest if g.task not in cover.stories]
    if rest:
        about = "Runs and sweeps that belong to no study."
        sections.append(Section("other", "Other runs", about, [part(g, seen) for g in rest]))
    if not cover.whole:
        sections = [section for section in sections if section.parts]
    for made in (p for section in sections for p in section.parts):
        write_part(made, out)
    sections = [replace(section, note=note(results / section.anchor)) for section in sections]
    problems = [said.replace(str(results), "").lstrip("/") for said in problems]
    page = render(cover, sections, records, problems)
    write_atomically(out / "index.html", page.encode())
    return out / "index.html"


# --- from groups to sections


def note(folder: Path) -> str:
    path = folder / NOTE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def study_section(study: Study, groups: list[Group], seen: set[str]) -> Section:
    parts = [part(g, seen) for g in groups]
    brief, absent = in_brief(study, groups)
    return Section(study.name, study.title, study.about, parts, brief, absent, study.example)


def in_brief(study: Study, groups: list[Group]) -> tuple[list[Judged], list[str]]:
    """Every claim with its verdict from full runs on real data, and which groups have none."""
    brief: list[Judged] = []
    absent: list[str] = []
    for options in expected_options(study):
        mine = [g for g in groups if g.usual and options.items() <= g.options.items()]
        full = next((g for g in mine if g.full), None)
        if full:
            brief += judged_claims(full)
        else:
            label = label_of(options)
            absent.append(label)
            why = ONLY_PARTIAL if mine else "no runs yet"
            brief += [Judged(claim, OPEN, why, why, label, study.name) for claim in study.claims]
    unusual = [g for g in groups if g.full and not g.usual]
    brief += [judged for g in unusual for judged in judged_claims(g)]
    return brief, absent


def part(group: Group, seen: set[str]) -> Part:
    maps = grids(group)
    whole = tables.table(group)
    drawn, layers = figures.draw(group, maps, seen)
    return Part(
        group=group,
        title=title_of(group),
        table=grid_table(group, maps) if maps else whole,
        every_setting=whole if maps else None,
        judged=judged_claims(group) if group.study else [],
        figures=drawn,
        layers=layers,
    )


def title_of(group: Group) -> str:
    kinds = ["shortened"] if group.scale < 1 else ["lengthened"] if group.scale > 1 else []
    kinds += ["made-up data"] if group.synthetic else []
    length = f"{group.epochs} epoch{'s' if group.epochs != 1 else ''}"
    first = [] if group.study or group.task == YOURS else [group.task]
    return capitalized(", ".join(filter(None, [*first, group.label, length, *kinds])))


def judged_claims(group: Group) -> list[Judged]:
    return [in_words(verdict, group) for verdict in claims.verdicts(group)]


def in_words(verdict: Verdict, group: Group) -> Judged:
    return Judged(
        claim=verdict.claim,
        outcome=verdict.outcome,
        why=claims.numbers(verdict, group),
        short=claims.numbers(verdict, group, brief=True),
        where=group.label,
        anchor=f"at-{group.name}",
        means=claims.means(verdict.claim, group),
    )


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- files beside the page


def write_part(made: Part, out: Path) -> None:
    for drawing in (*made.figures, *made.layers):
        write_atomically(out / "figures" / f"{drawing.name}.svg", drawing.svg)
        write_atomically(out / "figures" / f"{drawing.name}.png", drawing.png)
    group = made.group
    title = group.study.title if group.study else made.title
    title += f" ({group.label})" if group.study and group.label else ""
    said = [f"{j.claim.text} {j.outcome.capitalize()}: {j.why}." for j in made.judged]
    text = tables.markdown(title, made.table, group.banners, said)
    if made.every_setting:
        text += "\n" + tables.markdown("Every setting", made.every_setting, group.banners)
    write_atomically(out / "tables" / f"{group.name}.md", text.encode())


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
    finished = [r for r in records if r.status != FAILED]
    css, script = asset("report.css"), asset("report.js")
    return environment.get_template("report.html.j2").render(
        cover=cover,
        sections=sections,
        brief=brief,
        counts=Counter(judged.outcome for _, judged in brief),
        outcomes=(HOLDS, FAILS, OPEN),
        rule=RULE,
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
    return "data:image/svg+xml;base64," + base64.b64encode(drawing.svg).decode()


def settings(hyper: Any) -> str:
    return ", ".join(f"{key} {show(value)}" for key, value in hyper.items())


def environment_of(records: Sequence[Record]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Each thing a result depends on: the values that occur, and in how many runs."""
    rows = []
    for key, name in ENVIRONMENT.items():
        values = Counter(str(r.environment[key]) for r in records if key in r.environment)
        if values:
            rows.append((name, sorted(values.items())))
    return rows


def warnings_of(records: Sequence[Record]) -> list[tuple[str, int, list[str], list[str]]]:
    """Each warning once, in how many runs, with which optimizers and at which commits."""
    seen: dict[str, list[Record]] = {}
    for r in records:
        for said in {*(r.environment.get("warnings") or ())}:
            seen.setdefault(without_paths(str(said)), []).append(r)
    return [
        (
            said,
            len(runs),
            sorted({r.config.optimizer for r in runs}),
            sorted({str(r.environment.get("commit")) for r in runs}),
        )
        for said, runs in sorted(seen.items())
    ]


def without_paths(text: str) -> str:
    """The name of a file, not where it lies on somebody's machine."""
    path = r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+ -]*[\w@+-]){2,}"
    return re.sub(path, lambda m: "…/" + re.split(r"[/\\]", m[0])[-1], text)


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def span(dates: Iterable[str | None]) -> str:
    found = sorted({date for date in dates if date})
    return "" if not found else found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
