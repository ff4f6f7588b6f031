"""Which records belong together: to a study, to a table, to a row. Needs no torch.

Runs that differ in length, in data or in the task's options never share a table; runs that differ
in their seed alone share a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .derived import value
from .errors import LabError
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

    optimizer: str
    entry: Entry
    hyper: Mapping[str, Any]
    runs: list[Record]
    label: str
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
        return label_of(self.options)

    @property
    def runs(self) -> list[Record]:
        return [run for line in self.lines for run in line.runs]

    @property
    def full(self) -> bool:
        return not self.banners


def by_study(records: Iterable[Record]) -> tuple[dict[str, list[Group]], list[Group]]:
    """The groups of every study, and those of the runs that belong to none.

    What ``run`` or ``sweep`` has made is shown whole among the latter. A study counts it too, where
    it is one of its runs and others of that table were not made by hand.
    """
    finished = [r for r in records if r.status == FINISHED]
    landscapes = [r for r in finished if r.config.task == LANDSCAPE]
    members: dict[str, list[Record]] = {name: [] for name in STUDIES}
    rest: list[Record] = []
    for r in (r for r in finished if r.config.task != LANDSCAPE):
        found = studies_of(r)
        for name in found:
            members[name].append(r)
        if not found or by_hand(r):
            rest.append(r)
    studies = {
        name: [g for g in groups(mine, STUDIES[name]) if not all(map(by_hand, g.runs))]
        for name, mine in members.items()
    }
    others = groups(rest, None)
    for landscape in landscapes:
        about = set(landscape.result.get("runs") or ())
        for group in (*(g for gs in studies.values() for g in gs), *others):
            if about & {run.id for run in group.runs}:
                group.landscapes.append(landscape)
    return studies, others


def by_hand(record: Record) -> bool:
    """Made by ``run`` or ``sweep``? Their folders are called after them and the task."""
    return folder_of(record) in (f"run-{record.config.task}", f"sweep-{record.config.task}")


def folder_of(record: Record) -> str:
    """What the folder is called in which the run's own lies: a study, or what made it by hand."""
    return record.study


def studies_of(record: Record) -> list[str]:
    """The studies that a run belongs to.

    It belongs to those that are defined with it. Unless there is one, it belongs to those that are
    with the options it changes: a trial with held-out images is no row of Table 1. Changes are to
    what the study has in whose folder it lies, where that is one, and else to the task's defaults.
    """
    c = record.config
    found = [name for name in STUDIES if contains(name, c, {})]
    if not any(is_row(name, c) for name in found) and not by_hand(record):
        home = own_runs(folder_of(record)) if folder_of(record) in STUDIES else []
        usual = [run.options for run in home if run.task == c.task] or [defaults(c.task)]
        changes = min((changed(c.options, options) for options in usual), key=len)
        found += [name for name in STUDIES if name not in found and contains(name, c, changes)]
    return [name for name in found if is_row(name, c)] or found


def changed(options: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if differs(k, (options, usual))}


def is_row(name: str, config: RunConfig) -> bool:
    """What was chosen runs again, on other seeds and for other studies: those are no trials."""
    return STUDIES[name].kind != "trials" or config.seed < STUDIES[name].seeds


def contains(name: str, config: RunConfig, options: Mapping[str, Any]) -> bool:
    """Is it a run of this study, with its seed, length and data and with these options changed?"""
    if all(config.task != run.task for run in own_runs(name)):
        return False
    asked = (config.seed, config.scale, config.synthetic, canonical(options))
    return config.id in ids_of(name, *asked)


@cache
def ids_of(name: str, seed: int, scale: float, synthetic: bool, options: str) -> set[str]:
    request = Request((seed,), scale, synthetic, json.loads(options))
    try:
        return {run.id for run in STUDIES[name].runs(request)}
    except LabError:  # an option that this version no longer has
        return set()


@cache
def own_runs(name: str) -> list[RunConfig]:
    """A study's runs as it is defined, for one seed."""
    return STUDIES[name].runs(Request(seeds=(0,)))


@cache
def own_options(name: str) -> set[str]:
    return {canonical(dict(run.options)) for run in own_runs(name)}


def defaults(task: str) -> Mapping[str, Any]:
    return TASKS[task].defaults if task in TASKS else {}


def groups(records: list[Record], study: Study | None) -> list[Group]:
    """Separate tables for separate tasks, lengths, kinds of data and options."""
    buckets: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        c = r.config
        length = -round(c.epochs / c.scale) if study else c.epochs  # of a full run, longest first
        key = (c.task != YOURS, c.task, c.synthetic, -c.scale, length, canonical(dict(c.options)))
        buckets.setdefault(key, []).append(r)
    told_apart = distinguishing(records, study)
    made = [group(buckets[key], study, told_apart) for key in sorted(buckets)]
    unique: dict[str, int] = {}
    for g in made:
        unique[g.name] = unique.get(g.name, 0) + 1
        g.name += f"-{unique[g.name]}" if unique[g.name] > 1 else ""
    return made


def distinguishing(records: list[Record], study: Study | None) -> set[tuple[str, str]]:
    """(task, option) pairs with more than one value, a study's own runs or defaults counted."""
    configs = [r.config for r in records]
    known = [(c.task, c.options) for c in configs]
    if study:
        known += [(c.task, c.options) for c in own_runs(study.name)]
    else:
        known += [(c.task, defaults(c.task)) for c in configs]
    found = set() if study else {pair for s in STUDIES.values() for pair in distinguishing([], s)}
    for task in {task for task, _ in known}:
        options = [o for t, o in known if t == task]
        found |= {(task, k) for k in {k for o in options for k in o} if differs(k, options)}
    return {(task, option) for task, option in found if option != OBSERVATION}


def expected_options(study: Study) -> list[dict[str, Any]]:
    """What tells the groups of a complete study apart; one empty entry if it has one group."""
    told_apart = distinguishing([], study)
    found = {}
    for c in own_runs(study.name):
        options = {k: v for k, v in sorted(c.options.items()) if (c.task, k) in told_apart}
        found[canonical(options)] = options
    return list(found.values())


def label_of(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {show(value)}" for key, value in options.items())


def group(records: list[Record], study: Study | None, told_apart: set[tuple[str, str]]) -> Group:
    c = records[0].config
    options = {k: v for k, v in sorted(c.options.items()) if (c.task, k) in told_apart}
    parts = [study.name if study else f"{c.task}-{c.epochs}-epochs"]
    parts += [f"{key}-{value}" for key, value in options.items()]
    parts += [f"scale-{c.scale:g}"] if c.scale != 1 else []
    parts += ["made-up"] if c.synthetic else []
    return Group(
        name=slug("-".join(parts)),
        task=c.task,
        epochs=c.epochs,
        scale=c.scale,
        synthetic=c.synthetic,
        options=options,
        lines=lines(records, study),
        study=study,
        usual=study is None or canonical(dict(c.options)) in own_options(study.name),
    )


def lines(records: list[Record], study: Study | None) -> list[Line]:
    """Rows in the study's order; the label names the hyper-parameters that tell rows apart."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for r in sorted(records, key=lambda r: r.config.seed):
        rows.setdefault((r.config.optimizer, canonical(dict(r.config.hyper))), []).append(r)
    order = [*(study.optimizers if study else ()), *REGISTRY]
    entries = entries_of(name for name, _ in rows)
    made = []
    for (name, _), runs in rows.items():
        hyper = runs[0].config.hyper
        same = [other[0].config.hyper for (o, _), other in rows.items() if o == name]
        differing = sorted(k for k in {*hyper}.union(*same) if differs(k, same))
        named = [f"{key} {show(hyper[key])}" for key in differing if key in hyper]
        label = ", ".join([entries[name].label, *named])
        place = order.index(name) if name in order else len(order)
        key = (place, name, [sortable(hyper.get(k)) for k in differing])
        made.append((key, Line(name, entries[name], hyper, runs, label, entries[name].colour)))
    ordered = [line for _, line in sorted(made, key=lambda pair: pair[0])]
    for name in entries:
        same = [line for line in ordered if line.optimizer == name]
        for i, line in enumerate(same):
            line.colour = lightened(line.colour, 0.6 * (1 - (i + 1) / len(same)))
    return ordered


def lightened(colour: str, share: float) -> str:
    """Mixed with white, so that the settings of one optimizer can be told apart."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


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
