"""Heat maps as numbers: how wide is the region of good hyper-parameters? Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .groups import Group, Line, show
from .studies import Metric
from .tables import Cell, Row, Table, columns_of, heading, number
from .verdicts import Summary

WITHIN = 0.01  # a cell this close to the best counts as good


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
        return sum(abs(v - self.best) <= WITHIN + 1e-12 for v in self.measured)

    @property
    def share(self) -> str:
        return f"{100 * self.near / len(self.measured):.0f}\N{NO-BREAK SPACE}%"

    @property
    def finding(self) -> str:
        count = len(self.measured)
        return f"{self.near} of {count} settings ({self.share}) within 1 point of its best"

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
        cells = {
            (float(x.hyper[axes[0]]), float(x.hyper[axes[1]])): Summary.of(
                x.values(metric.key)
            ).mean
            for x in lines
        }
        if all(value is None for value in cells.values()):
            continue
        rows, columns = (sorted({at[k] for at in cells}) for k in (0, 1))
        values = [[cells.get((r, c)) for c in columns] for r in rows]
        made.append(Grid(lines[0], axes, (rows, columns), values, metric))
    return made


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
    return Table(group.name, heads, rows, ["Every setting is the mean over its runs."])
