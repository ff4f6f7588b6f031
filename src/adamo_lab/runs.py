"""Records as everything else reads them: groups that share a table, lines that share a row.

A file of records is a study, or runs made by hand. Runs that differ in length, in data or in the
task's options never share a table; runs that differ in their seed alone share a row.
Needs no torch.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .optimizers import REGISTRY, Entry
from .records import FINISHED, Record, RunConfig, canonical, is_number
from .studies import STUDIES, Study
from .tasks import TASKS, unit
from .verdicts import Summary

LANDSCAPE, YOURS = "landscape", "yours"
OBSERVATION = "every"  # how often a run is looked at does not change it
UNKNOWN = "#666666"  # the colour of optimizers that the registry has not


@dataclass
class Line:
    """A row of a table and a line of a figure: runs that differ in their seed alone."""

    name: str  # what claims call it: the study's, or the optimizer's
    optimizer: str
    hyper: Mapping[str, Any]
    runs: list[Record]
    title: str  # the study's name for it, or the optimizer's
    label: str = ""  # and what tells it from another line of that title
    colour: str = UNKNOWN

    @property
    def entry(self) -> Entry:
        return entry_of(self.optimizer)

    def values(self, key: str) -> list[float | None]:
        return [value(run, key) for run in self.runs]

    def of(self, key: str) -> Summary:
        return Summary.of(self.values(key))

    @property
    def seconds(self) -> float:
        """An epoch's, evaluations included."""
        pairs = [(r.environment.get("seconds", 0.0), r.metrics) for r in self.runs if r.metrics]
        return statistics.fmean(s / rows[-1]["epoch"] for s, rows in pairs) if pairs else 0.0

    @property
    def seeds(self) -> list[int]:
        return [run.config.seed for run in self.runs]


@dataclass
class Group:
    """What one table shows."""

    name: str  # fit for a file
    config: RunConfig  # of one of its runs: task, length and kind of data are those of all
    options: dict[str, Any]  # those that tell it from its neighbours
    lines: list[Line]
    study: Study | None = None
    usual: bool = True  # with the options the study is defined with
    landscapes: list[Record] = field(default_factory=list)

    @property
    def banners(self) -> list[str]:
        """What nobody may overlook, beside the table and in every picture."""
        seen, scale = [], self.config.scale
        if scale != 1:
            word = "Shortened" if scale < 1 else "Lengthened"
            seen.append(f"{word} to {100 * scale:g} % of its length")
        if self.config.synthetic:
            seen.append("Made-up data, not the real data set")
        return seen

    @property
    def full(self) -> bool:
        return not self.banners

    @property
    def label(self) -> str:
        return ", ".join(f"{key}: {show(value)}" for key, value in self.options.items())

    @property
    def length(self) -> str:
        c = self.config
        return f"{c.epochs} {unit(c.task)}{'s' if c.epochs != 1 else ''}"

    @property
    def title(self) -> str:
        c = self.config
        parts = ["" if self.study or c.task == YOURS else c.task, self.label, self.length]
        parts += ["shortened"] if c.scale < 1 else ["lengthened"] if c.scale > 1 else []
        parts += ["made-up data"] if c.synthetic else []
        return capitalized(", ".join(filter(None, parts)))

    @property
    def runs(self) -> list[Record]:
        return [run for line in self.lines for run in line.runs]

    def named(self, name: str) -> list[Line]:
        return [line for line in self.lines if line.name == name]


def by_study(records: Iterable[Record]) -> dict[str, list[Group]]:
    """The groups of every file of records: the studies in their order, then the others."""
    files: dict[str, list[Record]] = {name: [] for name in STUDIES}
    for r in records:
        if r.status == FINISHED:
            files.setdefault(r.study, []).append(r)
    return {name: groups(mine, STUDIES.get(name)) for name, mine in files.items() if mine}


def groups(records: list[Record], study: Study | None) -> list[Group]:
    """Separate tables for separate tasks, lengths, kinds of data and options."""
    planes = [r for r in records if r.config.task == LANDSCAPE]
    buckets: dict[tuple[Any, ...], list[Record]] = {}
    for r in (r for r in records if r.config.task != LANDSCAPE):
        c = r.config
        length = -round(c.epochs / c.scale) if study else c.epochs  # of a full run, longest first
        key = (c.task != YOURS, c.task, c.synthetic, -c.scale, length, canonical(dict(c.options)))
        buckets.setdefault(key, []).append(r)
    told_apart = distinguishing([r.config for r in records], study)
    made = [group(buckets[key], study, told_apart) for key in sorted(buckets)]
    taken: Counter[str] = Counter()
    for g in made:
        taken[g.name] += 1
        g.name += f"-{taken[g.name]}" if taken[g.name] > 1 else ""
        g.landscapes = [p for p in planes if any(r.id in str(p.config.options) for r in g.runs)]
    return made


def distinguishing(configs: list[RunConfig], study: Study | None) -> set[tuple[str, str]]:
    """(task, option) pairs with more than one value, a study's own runs or defaults counted."""
    known = [(c.task, c.options) for c in configs]
    if study:
        known += [(c.task, c.options) for c in study.configs((0,))]
    else:
        known += [(c.task, TASKS[c.task].defaults) for c in configs if c.task in TASKS]
    tasks = {task for task, _ in known}
    found = ((task, k) for task in tasks for k in telling([o for t, o in known if t == task]))
    return {(task, option) for task, option in found if option != OBSERVATION}


def group(records: list[Record], study: Study | None, told_apart: set[tuple[str, str]]) -> Group:
    c = records[0].config
    every = {**(TASKS[c.task].later if c.task in TASKS else {}), **c.options}
    options = {k: v for k, v in sorted(every.items()) if (c.task, k) in told_apart}
    parts = [study.name if study else f"{records[0].study}-{c.task}-{c.epochs}-epochs"]
    parts += [f"{key}-{value}" for key, value in options.items()]
    parts += [f"scale-{c.scale:g}"] if c.scale != 1 else []
    parts += ["made-up"] if c.synthetic else []
    own = study.configs((0,), c.scale, c.synthetic) if study else []
    usual = study is None or canonical(dict(c.options)) in {canonical(o.options) for o in own}
    return Group(slug("-".join(parts)), c, options, lines(records, study), study, usual)


def lines(records: Sequence[Record], study: Study | None = None) -> list[Line]:
    """Rows in the study's order; the label names the hyper-parameters that tell rows apart."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for r in sorted(records, key=lambda r: r.config.seed):
        rows.setdefault((r.config.optimizer, canonical(dict(r.config.hyper))), []).append(r)
    made = []
    for (optimizer, _), runs in rows.items():
        arm = study.arm(runs[0].config) if study else None
        name, title = (arm.name, arm.label) if arm else (optimizer, entry_of(optimizer).label)
        made.append(Line(name, optimizer, runs[0].config.hyper, runs, title))
    told = {x.title: telling([y.hyper for y in made if y.title == x.title]) for x in made}
    order = [*(a.name for part in (study.runs if study else ()) for a in part.arms), *REGISTRY]

    def place(line: Line) -> tuple[Any, ...]:
        at = order.index(line.name) if line.name in order else len(order)
        return at, line.name, [sortable(line.hyper.get(key)) for key in told[line.title]]

    made.sort(key=place)
    for line in made:
        named = (f"{k} {show(line.hyper[k])}" for k in told[line.title] if k in line.hyper)
        line.label = ", ".join([line.title, *named])
        same = [other for other in made if other.optimizer == line.optimizer]
        share = 1 - (1 + next(i for i, x in enumerate(same) if x is line)) / len(same)
        line.colour = lightened(line.entry.colour, 0.6 * share)
    return made


def lightened(colour: str, share: float) -> str:
    """Mixed with white, so that the settings of one optimizer can be told apart."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def telling(dicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which these differ; None is a value, and not the same as none given."""
    keys = sorted({key for d in dicts for key in d})
    return [k for k in keys if len({canonical([d[k]] if k in d else []) for d in dicts}) > 1]


def entry_of(name: str) -> Entry:
    return REGISTRY.get(name) or Entry(name, UNKNOWN, "-", "")


# --- words


def sortable(value: Any) -> tuple[bool, float, str]:
    number = float(value) if isinstance(value, (int, float)) else None
    return number is None, number or 0.0, str(value)


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


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- numbers

FULL, SHOWN = 300, 200  # epochs of CIFAR-100's protocol, and those that the paper's Figure 3 shows
DROPS = (50, 100, 150)  # of the learning rate, within those
AROUND = 10  # epochs before and after a drop


def value(run: Record, key: str) -> float | None:
    """A result of a run; None where it never got there, or has something else than a number."""
    found = DERIVED[key](run) if key in DERIVED else run.result.get(key)
    return found if is_number(found) else None


def accuracy(run: Record, after: float, until: float) -> float | None:
    """The mean over some epochs of a full run. A curve that divergence has cut off has none."""
    told = ((row["epoch"], row.get("test_accuracy")) for row in run.metrics)
    points = [(FULL / run.config.epochs * epoch, y) for epoch, y in told if y is not None]
    found = [y for epoch, y in points if after < epoch <= until]
    reached = any(epoch >= until for epoch, _ in points)
    return statistics.fmean(found) if found and reached else None


def gain_at_drops(run: Record) -> float | None:
    """By how much test accuracy rises when the learning rate drops: means of the epochs around."""
    gains = []
    for drop in DROPS:
        before, after = accuracy(run, drop - AROUND, drop), accuracy(run, drop, drop + AROUND)
        if before is None or after is None:
            return None
        gains.append(after - before)
    return statistics.fmean(gains)


DERIVED: dict[str, Callable[[Record], float | None]] = {  # from curves, not among the results
    "early_test_accuracy": lambda run: accuracy(run, -1, SHOWN),
    "gain_at_drops": gain_at_drops,
}
