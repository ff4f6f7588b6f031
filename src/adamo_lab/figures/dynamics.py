"""Inside the network, layer by layer, for one seed: a figure a quantity, a panel a row."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..groups import Group, Line
from ..records import Record
from ..tables import best_lines
from ..tasks import unit
from .look import WIDTH, Drawing, finish, listed, log_axis, plain

DECADE = 10  # a range this wide gets a log axis
NAMED = 5  # up to so many layers each has a name in the legend
QUANTITIES = {  # a column of the dynamics, and what it is
    "norm": "norm of every weight, ‖w‖",
    "angle": "angle by which a step turns every weight, in radians",
    "eta_radial": "radial step size ηᵨ of every weight",
    "tau": "curvature τ of every weight",
    "radial_share_update": "radial share of every weight's step",
}


def draw(group: Group, seen: set[str]) -> list[Drawing]:
    """What several rows report, side by side; ``seen`` has the runs shown before, and grows."""
    firsts = (
        (line, next((r for r in line.runs if r.dynamics), None)) for line in best_lines(group)
    )
    chosen = [(line, run) for line, run in firsts if run]
    fresh = {run.id for _, run in chosen} - seen
    seen |= fresh
    telling = {key: [pair for pair in chosen if positive(pair[1], key)] for key in QUANTITIES}
    return [figure(group, pairs, key) for key, pairs in telling.items() if pairs and fresh]


def positive(run: Record, key: str) -> list[float]:
    values = (v for row in run.dynamics for v in row.get(key, ()))
    return [v for v in values if v is not None and v > 0]


def figure(group: Group, chosen: list[tuple[Line, Record]], key: str) -> Drawing:
    """One panel a run, all with the same limits."""
    handles, names = depth_legend(chosen[0][1])
    picture, axes = panels(len(chosen), len(names), group)
    limits = [value for _, run in chosen for value in positive(run, key)]
    for i, (panel, (line, run)) in enumerate(zip(axes, chosen, strict=True)):
        for row, colour in zip(run.dynamics, colours(len(run.dynamics)), strict=False):
            x = np.array(row["epoch"], dtype=float)
            y = np.array(row.get(key, [None] * len(x)), dtype=float)
            panel.plot(x, y, color=colour, linewidth=1.0, marker="." if len(x) == 1 else None)
        panel.set_title(plain(line.label), fontsize=8.5)
        panel.set_ylim(min(limits) / 1.1, max(limits) * 1.1)
        if max(limits) > DECADE * min(limits):
            log_axis(panel, "y")
        if group.task == "grokking":
            log_axis(panel, "x")
        panel.tick_params(labelleft=i % 2 == 0, labelbottom=i >= len(chosen) - 2)
    look = {"borderaxespad": 0.15, "labelspacing": 0.25, "fontsize": 8, "handlelength": 1.5}
    picture.legend(handles, [plain(name) for name in names], loc="lower center", **look)
    what, rows = QUANTITIES[key], listed([line.label for line, _ in chosen])
    seeds = {run.config.seed for _, run in chosen}
    which = f"seed {seeds.pop()}" if len(seeds) == 1 else "one seed each"
    caption = f"{what[0].upper()}{what[1:]} ({which}); dark is near the input."
    alt = f"Small multiples: the {what} over {unit(group.task)}s, one panel each for {rows}"
    return finish(picture, group, f"layers-{key}", caption, alt)


def colours(count: int) -> np.ndarray:
    """From the input to the output."""
    return matplotlib.colormaps["viridis"](np.linspace(0, 0.88, max(count, 2)))


def depth_legend(run: Record) -> tuple[list[Line2D], list[str]]:
    """Every layer's name, or with many the first and the last and what lies between."""
    names = [row["weight"] for row in run.dynamics]
    shown = [*zip(names, colours(len(names)), strict=False)]
    if len(names) > NAMED:
        (first, start), (_, middle), (last, end) = shown[0], shown[len(shown) // 2], shown[-1]
        between = f"{len(names) - 2} layers between"
        shown = [(f"first: {first}", start), (between, middle), (f"last: {last}", end)]
    return [Line2D([], [], color=colour) for _, colour in shown], [name for name, _ in shown]


def panels(count: int, legend_rows: int, group: Group) -> tuple[Figure, list[Axes]]:
    """Two columns at fixed places: with so many panels, working out a layout takes seconds."""
    rows = math.ceil(count / 2)
    top, bottom = (0.5 if group.banners else 0.3), 0.45 + 0.17 * legend_rows
    height = top + bottom + 1.75 * rows - 0.45
    picture = Figure(figsize=(WIDTH, height))
    edges = {"left": 0.11, "right": 0.965, "top": 1 - top / height, "bottom": bottom / height}
    grid = picture.add_gridspec(rows, 2, wspace=0.34, hspace=0.38, **edges)
    axes = [picture.add_subplot(grid[i // 2, i % 2]) for i in range(count)]
    for panel in axes[-2:]:
        panel.set_xlabel(unit(group.task))
    return picture, axes
