"""One page that says what the runs say: tables, verdicts and figures, from records alone.

Needs no torch and no network, neither to make nor to read: everything is inside ``index.html``.
The figures are also written to ``figures/``, as SVG.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import figures, tables
from .claims import Judged, judged
from .disk import write_atomically
from .errors import LabError
from .figures import Drawing
from .optimizers import REGISTRY
from .records import FAILED, Record, load_all
from .runs import YOURS, Group, by_study, show
from .studies import STUDIES
from .tables import Table
from .verdicts import FAILS, HOLDS, OPEN, RULE, after_correction

EVIDENCE = "evidence"  # how the studies begin that help to choose
ENVIRONMENT = {  # a key of the records: how it reads
    "device": "hardware",
    "threads": "threads",
    "adamo_optim": "adamo-optim",
    "torch": "PyTorch",
    "python": "Python",
    "commit": "commit",
    "date": "date",
    "warnings": "Warnings from the optimizers",
}


@dataclass(frozen=True)
class Part:
    """A group as the page shows it."""

    group: Group
    table: Table
    every_setting: Table | None
    judged: list[Judged]
    figures: list[Drawing]

    @classmethod
    def of(cls, group: Group) -> Part:
        shown, every = tables.table(group), None
        if len(group.lines) > tables.MOST_LINES:
            shown, every = tables.best_table(group), shown
        return cls(group, shown, every, judged(group), figures.draw(group))

    @property
    def hypers(self) -> list[tuple[str, str]]:
        chosen = tables.best_lines(self.group)
        return [(x.label, ", ".join(f"{k} {show(v)}" for k, v in x.hyper.items())) for x in chosen]


@dataclass(frozen=True)
class Section:
    """A study, or runs that belong to none."""

    anchor: str
    title: str
    about: str
    parts: list[Part]


@dataclass(frozen=True)
class Cover:
    """What a page is about."""

    title: str = "AdamW, AngularAdamW, AdamO: which one?"
    lead: str = (
        "AdamW, unless your network has BatchNorm, or QK-norm after q and k of their own: there "
        "AngularAdamW is level with a tuned AdamW so far, with half of the state for the weights "
        "that turn. AdamO, if you want the paper."
    )
    stories: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Runs outside of studies, by task: a title, and what to look for."""


OWN_STORY = ("Your model", "A model of your own, trained with the optimizers side by side.")


def write_report(results: Path, out: Path, cover: Cover | None = None) -> Path:
    """Make ``out/index.html`` from every record below ``results``."""
    if not results.is_dir():
        raise LabError(f"there is no folder {results}; run a study first: adamo-lab study fig1")
    records, problems = load_all(results)
    if not records:
        odd = f" ({'; '.join(problems)})" if problems else ""
        raise LabError(f"no records below {results}{odd}; run a study first: adamo-lab study fig1")
    cover = cover or Cover()
    made = sections(by_study(sorted(records, key=lambda r: r.id)), cover)
    for drawing in (d for section in made for part in section.parts for d in part.figures):
        write_atomically(out / "figures" / f"{drawing.name}.svg", drawing.svg)
    problems = [said.replace(str(results), "").lstrip("/") for said in problems]
    write_atomically(out / "index.html", render(cover, made, records, problems).encode())
    return out / "index.html"


def sections(files: Mapping[str, list[Group]], cover: Cover) -> list[Section]:
    """Your own runs, the stories of a cover, then the studies: first what helps to choose."""
    others = [g for name, mine in files.items() if name not in STUDIES for g in mine]
    told = {YOURS: OWN_STORY, **cover.stories}
    rest = [g for g in others if g.config.task not in told]
    made = [
        (f"story-{task}", title, about, [g for g in others if g.config.task == task])
        for task, (title, about) in told.items()
    ]
    made.append(("other", "Other runs", "Runs and sweeps that belong to no study.", rest))
    studies = sorted(STUDIES.items(), key=lambda item: not item[0].startswith(EVIDENCE))
    made += [(name, s.title, s.about, files.get(name, [])) for name, s in studies]
    return [
        Section(anchor, title, about, [Part.of(group) for group in groups])
        for anchor, title, about, groups in made
        if groups
    ]


def answers(sections: Sequence[Section]) -> list[tuple[Section, str]]:
    """What the optimizers reached at their best, task by task."""
    found = []
    for section in (s for s in sections if s.anchor.startswith(EVIDENCE)):
        for group in (part.group for part in section.parts if part.group.full):
            metric, told = tables.columns_of(group)[0], []
            for line in (x for x in tables.best_lines(group) if x.name in REGISTRY):
                ours = line.of(metric.key)
                told.append(f"{line.title} {tables.spread(ours.mean, ours.sd, metric)}")
            what = ", ".join(filter(None, [group.label, tables.heading(metric)]))
            found.append((section, f"{what} {', '.join(told)}"))
    return found


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
    environment.filters["data_uri"] = data_uri
    brief = [
        (section, found)
        for section in sections
        for part in section.parts
        for found in (part.judged if part.group.full else ())
    ]
    finished = [*{r.id: r for r in records if r.status != FAILED}.values()]
    css = (files("adamo_lab") / "templates" / "report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        cover=cover,
        sections=sections,
        brief=brief,
        answers=answers(sections),
        outcomes=(HOLDS, FAILS, OPEN),
        rule=RULE,
        corrected=after_correction(found.verdict for _, found in brief),
        finished=finished,
        failed=[(r, without_paths(r.error)) for r in records if r.status == FAILED],
        problems=[without_paths(problem) for problem in problems],
        environment=environment_of(finished),
        hours=sum(r.environment.get("seconds") or 0 for r in finished) / 3600,
        css=Markup(css),
    )


def data_uri(drawing: Drawing) -> str:
    """Percent signs where they must be: shorter than base64."""
    return "data:image/svg+xml," + quote(drawing.svg, safe=" !$&'()*+,-./:;=?@[]^_`{|}~")


def environment_of(records: Sequence[Record]) -> dict[str, list[tuple[str, int]]]:
    """Each thing a result depends on: the values that occur, and in how many runs."""

    def every(value: Any) -> set[str]:
        return {without_paths(str(v)) for v in (value if isinstance(value, list) else [value])}

    told = {
        name: Counter(v for r in records if key in r.environment for v in every(r.environment[key]))
        for key, name in ENVIRONMENT.items()
    }
    return {name: sorted(values.items()) for name, values in told.items() if values}


def without_paths(text: str) -> str:
    """The name of a file, not where it lies on somebody's machine."""
    path = r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+ -]*[\w@+-]){2,}"
    return re.sub(path, lambda m: "…/" + re.split(r"[/\\]", m[0])[-1], text)
