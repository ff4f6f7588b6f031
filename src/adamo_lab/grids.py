"""Heat maps as numbers: how wide is the region of good hyper-parameters? Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .derived import value
from .groups import Group, Line, own_runs, show
from .optimizers import REGISTRY
from .studies import Metric
from .tables import Cell, Row, Table, columns_of, heading, number
from .verdicts import Summary

WITHIN = 0.01  # a cell this close to the best counts as good
ROUNDING = 1e-6  # accuracies are float32: a difference of exactly a point may read 0.01000005
HOW_COUNTED = (
    "Every setting is the mean over its runs, and not good if one of them diverged; verdicts count "
    "settings seed by seed."
)
GRID_METRICS = ("near_share", "region_share")  # of a whole heat map, one value a seed


@dataclass(frozen=True)
class Grid:
    """One optimizer's runs over two of its hyper-parameters: all settings of the study."""

    line: Line  # one of the settings
    axes: tuple[str, str]  # rows, columns
    ticks: tuple[list[float], list[float]]
    cells: list[list[Summary]]  # [row][column]; empty where nothing has run yet
    seeds: int  # that occur
    metric: Metric

    @property
    def values(self) -> list[list[float | None]]:
        """The mean of every setting; none where a run diverged, for that is no good setting."""
        return [[None if cell.missing else cell.mean for cell in row] for row in self.cells]

    @property
    def measured(self) -> list[float]:
        return [v for row in self.values for v in row if v is not None]

    @property
    def best(self) -> float:
        return (max if self.metric.higher_is_better else min)(self.measured)

    @property
    def near(self) -> int:
        """Cells within a point of the best one."""
        return len(self.good)

    @property
    def good(self) -> set[tuple[int, int]]:
        best = self.best if self.measured else 0.0
        return {
            (i, j)
            for i, row in enumerate(self.values)
            for j, v in enumerate(row)
            if v is not None and abs(v - best) <= WITHIN + ROUNDING
        }

    @property
    def region(self) -> int:
        """The largest number of good cells that hang together, side by side."""
        left, largest = self.good, 0
        while left:
            reached, edge = 0, [left.pop()]
            while edge:
                i, j = edge.pop()
                reached += 1
                beside = {(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)} & left
                left -= beside
                edge += beside
            largest = max(largest, reached)
        return largest

    @property
    def count(self) -> int:
        """All settings, also those that diverged or have not run."""
        return sum(map(len, self.cells))

    @property
    def runs(self) -> int:
        return sum(cell.n for row in self.cells for cell in row)

    @property
    def complete(self) -> bool:
        return self.runs == self.count * self.seeds

    @property
    def share(self) -> str:
        return f"{100 * self.near / self.count:.0f}\N{NO-BREAK SPACE}%"

    @property
    def finding(self) -> str:
        """A share of some of the runs would mean nothing."""
        if not self.complete:
            return f"{self.runs} of {self.count * self.seeds} runs so far"
        return f"{self.near} of {self.count} settings ({self.share}) within 1 point of its best"

    def text(self, row: int, column: int) -> str:
        """What stands in a cell."""
        cell, value = self.cells[row][column], self.values[row][column]
        if value is None:
            return f"{len(cell.values)} of {cell.n}" if cell.n else "–"
        return f"{100 * value:.1f}" if self.metric.percent else f"{value:.3g}"

    @property
    def best_setting(self) -> str:
        rows, columns = self.ticks
        where = [(i, j) for i, row in enumerate(self.values) for j, v in enumerate(row)]
        i, j = next(at for at in where if self.values[at[0]][at[1]] == self.best)
        return f"{self.axes[0]} {show(rows[i])}, {self.axes[1]} {show(columns[j])}"


def grids(group: Group) -> list[Grid]:
    """A study's heat maps in the metric its runs have; none without a number."""
    study = group.study
    if study is None or not study.axes:
        return []
    made = (grid(group, optimizer) for optimizer in study.optimizers)
    return [one for one in made if one is not None and one.measured]


def grid(group: Group, optimizer: str, seed: int | None = None) -> Grid | None:
    """An optimizer's settings with the runs of all seeds or of one; None if it has no runs."""
    study, metric = group.study, columns_of(group)[0].metric
    assert study is not None
    axes = study.axes[study.optimizers.index(optimizer)]
    lines = {place(x.hyper, axes): x for x in group.lines if x.optimizer == optimizer}
    if not lines:
        return None
    own = (c for c in own_runs(study.name) if c.optimizer == optimizer)
    wanted = {place(c.hyper, axes) for c in own}
    rows, columns = (sorted({at[k] for at in wanted}) for k in (0, 1))

    def cell(at: tuple[float, float]) -> Summary:
        runs = lines[at].runs if at in lines else []
        chosen = [run for run in runs if seed in (None, run.config.seed)]
        return Summary.of([value(run, metric.key) for run in chosen])

    cells = [[cell((r, c)) for c in columns] for r in rows]
    seeds = {seed for x in lines.values() for seed in x.seeds} if seed is None else {seed}
    return Grid(next(iter(lines.values())), axes, (rows, columns), cells, len(seeds), metric)


def place(hyper: Mapping[str, Any], axes: tuple[str, str]) -> tuple[float, float]:
    return float(hyper[axes[0]]), float(hyper[axes[1]])


def grid_values(group: Group, optimizer: str, key: str) -> list[float | None]:
    """A share of the settings, for every seed that has run all; one that diverged is not good."""
    seeds = sorted({s for x in group.lines if x.optimizer == optimizer for s in x.seeds})
    found = (grid(group, optimizer, seed) for seed in seeds)
    complete = [one for one in found if one is not None and one.complete]
    return [(one.near if key == "near_share" else one.region) / one.count for one in complete]


def grid_table(group: Group, maps: list[Grid]) -> Table:
    heads = [("settings", ("",)), ("runs", ("",)), (f"best {heading(maps[0].metric)}", ("",))]
    heads += [("at", ("",)), ("within 1 point of its best", ("",))]
    ranked = len(maps) > 1 and all(m.complete for m in maps)
    rows = [
        Row(
            m.line.entry.label,
            [
                Cell(str(m.count)),
                Cell(str(m.runs)),
                Cell(number(m.best, m.metric), ranked and m.best == max(x.best for x in maps)),
                Cell(m.best_setting),
                Cell(f"{m.near} ({m.share})" if m.complete else m.finding),
            ],
            m.line,
        )
        for m in maps
    ]
    return Table(group.name, heads, rows, [HOW_COUNTED, *absent(group, maps)])


def absent(group: Group, maps: list[Grid]) -> list[str]:
    """The optimizers of the study that have no map, and why."""
    assert group.study is not None
    left = [o for o in group.study.optimizers if o not in {m.line.optimizer for m in maps}]
    ran = {x.optimizer for x in group.lines}
    reasons = {
        "No runs yet": [o for o in left if o not in ran],
        "No setting without a run that diverged": [o for o in left if o in ran],
    }
    return [
        f"{why}: {', '.join(REGISTRY[o].label for o in names)}."
        for why, names in reasons.items()
        if names
    ]
