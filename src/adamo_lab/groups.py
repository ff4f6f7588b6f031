"""Which records belong together: to a study, to a table, to a row. Needs no torch.

A file of records is a study, or runs made by hand. Runs that differ in length, in data or in the
task's options never share a table; runs that differ in their seed alone share a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .derived import value
from .optimizers import REGISTRY, Entry
from .records import FINISHED, Record, RunConfig, canonical
from .studies import STUDIES, Request, Study
from .tasks import TASKS

LANDSCAPE, YOURS = "landscape", "yours"
OBSERVATION = "every"  # how often a run is looked at does not change it
SPARE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass
class Line:
    """A row of a table and a line of a figure: runs that differ in their seed alone."""

    name: str  # what claims call it: the study's, or the optimizer's
    optimizer: str
    entry: Entry
    hyper: Mapping[str, Any]
    runs: list[Record]
    title: str  # the study's name for it, or the optimizer's
    label: str  # and what tells it from another line of that title
    colour: str

    def values(self, key: str) -> list[float | None]:
        return [value(run, key) for run in self.runs]

    @property
    def seeds(self) -> list[int]:
        return [run.config.seed for run in self.runs]


@dataclass
class Group:
    """What one table shows."""

    name: str  # fit for a file
    task: str
    epochs: int
    scale: float
    synthetic: bool
    options: dict[str, Any]  # those that tell it from its neighbours
    lines: list[Line]
    study: Study | None = None
    usual: bool = True  # with the options the study is defined with
    landscapes: list[Record] = field(default_factory=list)

    @property
    def banners(self) -> list[str]:
        """What nobody may overlook, beside the table and in every picture."""
        seen = []
        if self.scale != 1:
            word = "Shortened" if self.scale < 1 else "Lengthened"
            seen.append(f"{word} to {100 * self.scale:g} % of its length")
        if self.synthetic:
            seen.append("Made-up data, not the real data set")
        return seen

    @property
    def label(self) -> str:
        return ", ".join(f"{key}: {show(value)}" for key, value in self.options.items())

    @property
    def runs(self) -> list[Record]:
        return [run for line in self.lines for run in line.runs]

    @property
    def full(self) -> bool:
        return not self.banners


def by_study(records: Iterable[Record]) -> dict[str, list[Group]]:
    """The groups of every file of records: the studies in their order, then the others."""
    files: dict[str, list[Record]] = {name: [] for name in STUDIES}
    for r in records:
        if r.status == FINISHED:
            files.setdefault(r.study, []).append(r)
    return {name: groups(mine, STUDIES.get(name)) for name, mine in files.items() if mine}


def groups(records: list[Record], study: Study | None) -> list[Group]:
    """Separate tables for separate tasks, lengths, kinds of data and options."""
    buckets: dict[tuple[Any, ...], list[Record]] = {}
    for r in (r for r in records if r.config.task != LANDSCAPE):
        c = r.config
        length = -round(c.epochs / c.scale) if study else c.epochs  # of a full run, longest first
        key = (c.task != YOURS, c.task, c.synthetic, -c.scale, length, canonical(dict(c.options)))
        buckets.setdefault(key, []).append(r)
    told_apart = distinguishing([r.config for r in records], study)
    made = [group(buckets[key], study, told_apart) for key in sorted(buckets)]
    unique: dict[str, int] = {}
    for g in made:
        unique[g.name] = unique.get(g.name, 0) + 1
        g.name += f"-{unique[g.name]}" if unique[g.name] > 1 else ""
        ids = {run.id for run in g.runs}
        planes = (r for r in records if r.config.task == LANDSCAPE)
        g.landscapes = [r for r in planes if any(id in str(r.config.options) for id in ids)]
    return made


def distinguishing(configs: list[RunConfig], study: Study | None) -> set[tuple[str, str]]:
    """(task, option) pairs with more than one value, a study's own runs or defaults counted."""
    known = [(c.task, c.options) for c in configs]
    if study:
        known += [(c.task, c.options) for c in study.configs(Request(seeds=(0,)))]
    else:
        known += [(c.task, TASKS[c.task].defaults) for c in configs if c.task in TASKS]
    found = set()
    for task in {task for task, _ in known}:
        found |= {(task, option) for option in telling([o for t, o in known if t == task])}
    return {(task, option) for task, option in found if option != OBSERVATION}


def group(records: list[Record], study: Study | None, told_apart: set[tuple[str, str]]) -> Group:
    c = records[0].config
    options = {k: v for k, v in sorted(c.options.items()) if (c.task, k) in told_apart}
    parts = [study.name if study else f"{records[0].study}-{c.task}-{c.epochs}-epochs"]
    parts += [f"{key}-{value}" for key, value in options.items()]
    parts += [f"scale-{c.scale:g}"] if c.scale != 1 else []
    parts += ["made-up"] if c.synthetic else []
    own = study.configs(Request((0,), c.scale, c.synthetic)) if study else []
    return Group(
        name=slug("-".join(parts)),
        task=c.task,
        epochs=c.epochs,
        scale=c.scale,
        synthetic=c.synthetic,
        options=options,
        lines=lines(records, study),
        study=study,
        usual=study is None or canonical(dict(c.options)) in {canonical(o.options) for o in own},
    )


def lines(records: list[Record], study: Study | None) -> list[Line]:
    """Rows in the study's order; the label names the hyper-parameters that tell rows apart."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for r in sorted(records, key=lambda r: r.config.seed):
        rows.setdefault((r.config.optimizer, canonical(dict(r.config.hyper))), []).append(r)
    entries = entries_of(name for name, _ in rows)
    made = []
    for (optimizer, _), runs in rows.items():
        own = study.arm(runs[0].config) if study else None
        name, title = (own.name, own.label) if own else (optimizer, entries[optimizer].label)
        what = (name, optimizer, entries[optimizer], runs[0].config.hyper, runs, title)
        made.append(Line(*what, title, entries[optimizer].colour))
    told = {x.title: telling([y.hyper for y in made if y.title == x.title]) for x in made}
    order = [*(a.name for part in (study.runs if study else ()) for a in part.arms), *REGISTRY]

    def place(line: Line) -> tuple[Any, ...]:
        at = order.index(line.name) if line.name in order else len(order)
        return at, line.name, [sortable(line.hyper.get(key)) for key in told[line.title]]

    made.sort(key=place)
    for line in made:
        named = (f"{k} {show(line.hyper[k])}" for k in told[line.title] if k in line.hyper)
        line.label = ", ".join([line.title, *named])
    for optimizer in entries:
        same = [line for line in made if line.optimizer == optimizer]
        for i, line in enumerate(same):
            line.colour = lightened(line.colour, 0.6 * (1 - (i + 1) / len(same)))
    return made


def lightened(colour: str, share: float) -> str:
    """Mixed with white, so that the settings of one optimizer can be told apart."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def telling(dicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which these differ."""
    return sorted(key for key in {k for d in dicts for k in d} if differs(key, dicts))


def differs(key: str, dicts: Iterable[Mapping[str, Any]]) -> bool:
    """None is a value, and not the same as none given."""
    return len({canonical([d[key]] if key in d else []) for d in dicts}) > 1


def entries_of(names: Iterable[str]) -> dict[str, Entry]:
    """Of the registry; a name it does not know gets a colour of its own."""
    unknown = sorted({*names} - {*REGISTRY})
    made = {
        name: Entry(name, SPARE_COLOURS[i % len(SPARE_COLOURS)], "-", "")
        for i, name in enumerate(unknown)
    }
    return {**REGISTRY, **made}


def sortable(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, (int, float))
    return (not is_number, float(value) if is_number else 0.0, str(value))


def show(value: Any) -> str:
    """A hyper-parameter as one would write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} {show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(show(v) for v in value) + ")"
    return str(value)


def slug(text: str) -> str:
    """A name for a file or an anchor, whatever was in the record."""
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-.")[:80] or "unnamed"
