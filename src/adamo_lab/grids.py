"""Heat maps as numbers: how wide is the region of good hyper-parameters? Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .groups import Group, Line, own_runs, show
from .studies import Metric
from .tables import Cell, Row, Table, columns_of, heading, number
from .verdicts import Summary

WITHIN = 0.01  # a cell this close to the best counts as good
ROUNDING = 1e-6  # accuracies are float32: a difference of exactly a point may read 0.01000005
HOW_COUNTED = "Every setting is the mean over its runs; verdicts count settings seed by seed."
GRID_METRICS = ("near_share", "region_share")  # of a whole heat map, one value a seed


@dataclass(frozen=True)
class Grid:
    """One optimizer's runs over two of its hyper-parameters, averaged over seeds."""

    line: Line
    axes: tuple[str, str]  # rows, columns
    ticks: tuple[list[float], list[float]]
    values: list[list[float | None]]  # [row][column]
    metric: Metric

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
        return {
            (i, j)
            for i, row in enumerate(self.values)
            for j, v in enumerate(row)
            if v is not None and abs(v - self.best) <= WITHIN + ROUNDING
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
        """All cells, also those without a number: they diverged, or have not run."""
        return sum(map(len, self.values))

    @property
    def share(self) -> str:
        return f"{100 * self.near / self.count:.0f}\N{NO-BREAK SPACE}%"

    @property
    def finding(self) -> str:
        return f"{self.near} of {self.count} settings ({self.share}) within 1 point of its best"

    @property
    def best_setting(self) -> str:
        rows, columns = self.ticks
        where = [(i, j) for i, row in enumerate(self.values) for j, v in enumerate(row)]
        i, j = next(at for at in where if self.values[at[0]][at[1]] == self.best)
        return f"{self.axes[0]} {show(rows[i])}, {self.axes[1]} {show(columns[j])}"


def grids(group: Group) -> list[Grid]:
    """A study's heat maps in the metric its runs have."""
    study = group.study
    if study is None or not study.axes:
        return []
    metric = columns_of(group)[0].metric
    made = []
    for optimizer, axes in zip(study.optimizers, study.axes, strict=True):
        lines = [x for x in group.lines if x.optimizer == optimizer]
        cells = [Summary.of(x.values(metric.key)).mean for x in lines]
        if any(value is not None for value in cells):
            made.append(grid(lines, axes, cells, metric))
    return made


def grid(
    lines: list[Line], axes: tuple[str, str], values: Sequence[float | None], metric: Metric
) -> Grid:
    """Lines with one value each, by the two hyper-parameters they differ in."""
    places = [(float(x.hyper[axes[0]]), float(x.hyper[axes[1]])) for x in lines]
    cells = dict(zip(places, values, strict=True))
    rows, columns = (sorted({place[k] for place in places}) for k in (0, 1))
    ordered = [[cells.get((r, c)) for c in columns] for r in rows]
    return Grid(lines[0], axes, (rows, columns), ordered, metric)


def grid_values(group: Group, optimizer: str, key: str) -> list[float | None]:
    """A share of the settings, for every seed that has run all; one that diverged is not good."""
    study = group.study
    assert study is not None
    wanted = sum(run.optimizer == optimizer for run in own_runs(study.name))
    axes = study.axes[study.optimizers.index(optimizer)]
    metric = columns_of(group)[0].metric
    lines = [x for x in group.lines if x.optimizer == optimizer]
    seeds = set.intersection(*(set(x.seeds) for x in lines)) if len(lines) == wanted else set()
    found: list[float | None] = []
    for seed in sorted(seeds):
        values = [x.values(metric.key)[x.seeds.index(seed)] for x in lines]
        if any(value is not None for value in values):
            one = grid(lines, axes, values, metric)
            found.append((one.near if key == "near_share" else one.region) / len(lines))
    return found


def grid_table(group: Group, maps: list[Grid]) -> Table:
    heads = [("settings", ("",)), (f"best {heading(maps[0].metric)}", ("",))]
    heads += [("at", ("",)), ("within 1 point of its best", ("",))]
    rows = [
        Row(
            m.line.entry.label,
            [
                Cell(str(len(m.measured))),
                Cell(number(m.best, m.metric), m.best == max(x.best for x in maps)),
                Cell(m.best_setting),
                Cell(f"{m.near} ({m.share})"),
            ],
            m.line,
        )
        for m in maps
    ]
    return Table(group.name, heads, rows, [HOW_COUNTED])
