"""Heat maps as numbers: how wide is the region of good hyper-parameters? Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .runs import Group, Line, show, telling, value
from .studies import Metric
from .tables import columns_of
from .verdicts import Summary

WITHIN = 0.01  # a cell this close to the best counts as good
ROUNDING = 1e-6  # accuracies are float32: a difference of exactly a point may read 0.01000005
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

    @cached_property
    def values(self) -> np.ndarray:
        """The mean of every setting; NaN where a run diverged, for that is no good setting."""
        found = [[None if c.missing else c.mean for c in row] for row in self.cells]
        return np.array(found, dtype=float)

    @property
    def best(self) -> float:
        return self.metric.better(self.values[~np.isnan(self.values)].tolist())

    @property
    def good(self) -> np.ndarray:
        """Cells within a point of the best one; not those without a value."""
        none = np.isnan(self.values).all()
        return np.abs(self.values - (0 if none else self.best)) <= WITHIN + ROUNDING

    @property
    def region(self) -> int:
        """The largest number of good cells that hang together, side by side."""
        from scipy.ndimage import label

        parts, _ = label(self.good)  # type: ignore[misc]
        return int(np.bincount(parts[parts > 0], minlength=1).max())

    @property
    def count(self) -> int:
        """All settings, also those that diverged or have not run."""
        return self.values.size

    @property
    def runs(self) -> int:
        return sum(cell.n for row in self.cells for cell in row)

    @property
    def complete(self) -> bool:
        return self.runs == self.count * self.seeds

    @property
    def finding(self) -> str:
        """A share of some of the runs would mean nothing."""
        if not self.complete:
            return f"{self.runs} of {self.count * self.seeds} runs so far"
        near = int(self.good.sum())
        share = f"{100 * near / self.count:.0f}\N{NO-BREAK SPACE}%"
        return f"{near} of {self.count} settings ({share}) within 1 point of its best"

    def text(self, row: int, column: int) -> str:
        """What stands in a cell."""
        cell, value = self.cells[row][column], self.values[row, column]
        if np.isnan(value):
            return f"{len(cell.values)} of {cell.n}" if cell.n else "–"
        return f"{100 * value:.1f}" if self.metric.percent else f"{value:.3g}"

    @property
    def best_setting(self) -> str:
        at = np.argwhere(self.values == self.best)[0]
        named = zip(self.axes, self.ticks, at, strict=True)
        return ", ".join(f"{axis} {show(ticks[i])}" for axis, ticks, i in named)


def grids(group: Group) -> list[Grid]:
    """A study's heat maps in the metric its runs have; none without a number."""
    if group.study is None or group.study.kind != "heatmaps":
        return []
    made = (grid(group, name) for name in dict.fromkeys(line.name for line in group.lines))
    return [one for one in made if one and not np.isnan(one.values).all()]


def grid(group: Group, name: str, seed: int | None = None) -> Grid | None:
    """A row's settings with the runs of all seeds or of one; None if it has no runs."""
    study, metric = group.study, columns_of(group)[0]
    assert study is not None
    wanted = [a.hyper for runs in study.runs for a in runs.arms if a.name == name]
    first, second = sorted(telling(wanted), key=list(wanted[0]).index)
    mine = [x for x in group.named(name) if study.arm(x.runs[0].config)]
    if not mine:
        return None
    rows, columns = (sorted({float(hyper[axis]) for hyper in wanted}) for axis in (first, second))
    cells = [[Summary(()) for _ in columns] for _ in rows]
    for line in mine:
        row, column = rows.index(line.hyper[first]), columns.index(line.hyper[second])
        runs = [run for run in line.runs if seed in (None, run.config.seed)]
        cells[row][column] = Summary.of([value(run, metric.key) for run in runs])
    seeds = {seed for x in mine for seed in x.seeds} if seed is None else {seed}
    return Grid(mine[0], (first, second), (rows, columns), cells, len(seeds), metric)


def grid_values(group: Group, name: str, key: str) -> list[float | None]:
    """A share of the settings, for every seed that has run all; one that diverged is not good."""
    seeds = sorted({s for x in group.named(name) for s in x.seeds})
    complete = [g for seed in seeds if (g := grid(group, name, seed)) and g.complete]
    return [(int(g.good.sum()) if key == "near_share" else g.region) / g.count for g in complete]
