"""Inside the network, layer by layer, for one seed: norms, angles, step sizes, guards."""

from __future__ import annotations

import math
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
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
PANELS = (  # a key of the dynamics, its title, logarithmic
    ("norm", "norm of the weight, ‖w‖", True),
    ("eta_radial", "radial step size ηᵨ", True),
    ("tau", "curvature τ", True),
    ("angle", "angle of a step (rad)", True),
    ("radial_share_update", "radial share of the step", False),
)
GUARDS = {  # part: what it does, a marker
    "scale": ("step scale bounded", "s"),
    "factor": ("radial factor bounded", "^"),
    "decay": ("decay skipped", "v"),
    "update": ("update bounded", "D"),
    "noise": ("gradient at rounding level", "."),
    "skipped": ("gradient not finite", "x"),
}
GUARD_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#6b6b6b", "#000000")

Place = Literal["lower left", "lower center", "lower right"]
Layer = tuple[str, tuple[float, float, float, float]]  # its name and colour, in order of depth


def draw(group: Group, seen: set[str]) -> list[Drawing]:
    """All norms side by side, all angles, then everything AdamO says about itself.

    ``seen`` holds the runs that an earlier study has shown, and grows.
    """
    chosen = [(line, run) for line in best_lines(group) if (run := first_run(line))]
    fresh = [(line, run) for line, run in chosen if run.id not in seen]
    seen |= {run.id for _, run in fresh}
    telling = [(line, run) for line, run in fresh if reported(run, "eta_radial")]
    turning = [(line, run) for line, run in chosen if reported(run, "angle")]
    apart = any(not reported(run, "eta_radial") for _, run in turning)  # AdamO says its own below
    made = [norms(group, chosen)] if len(chosen) > 1 and fresh else []
    made += [angles(group, turning)] if len(turning) > 1 and fresh and apart else []
    return [*made, *(inside(group, line, run) for line, run in telling)]


def first_run(line: Line) -> Record | None:
    return next((run for run in line.runs if run.dynamics), None)


def layers(run: Record) -> list[Layer]:
    """Every weight and its colour, from the input to the output."""
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, max(len(run.dynamics), 2)))
    return [(row["weight"], tuple(colours[i])) for i, row in enumerate(run.dynamics)]


def track(run: Record, name: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Epochs and values of one layer; NaN where there is none."""
    row = next(row for row in run.dynamics if row["weight"] == name)
    epochs = np.array(row["epoch"], dtype=float)
    return epochs, np.array(row.get(key, [None] * len(epochs)), dtype=float)


def reported(run: Record, key: str) -> bool:
    return any(key in row for row in run.dynamics)


def depth_legend(found: list[Layer]) -> tuple[list[Artist], list[str]]:
    """Every layer's name, or with many the first and the last and what lies between."""
    if len(found) <= NAMED:
        shown = [(name, colour) for name, colour in found]
    else:
        (first, start), (_, middle), (last, end) = found[0], found[len(found) // 2], found[-1]
        between = f"{len(found) - 2} layers between"
        shown = [(f"first: {first}", start), (between, middle), (f"last: {last}", end)]
    handles: list[Artist] = [Line2D([], [], color=colour) for _, colour in shown]
    return handles, [name for name, _ in shown]


def plot_layers(axes: Axes, run: Record, key: str, log: bool) -> None:
    """A line for each layer, on a log axis where that helps."""
    seen: list[float] = []
    for name, colour in layers(run):
        x, y = track(run, name, key)
        y = np.where(y > 0, y, np.nan) if log else y
        if not np.isnan(y).all():
            axes.plot(x, y, color=colour, linewidth=1.0, marker="." if len(x) == 1 else None)
            seen += [float(np.nanmin(y)), float(np.nanmax(y))]
    if log and seen and max(seen) > DECADE * min(seen):
        log_axis(axes, "y")
    if not seen:
        axes.text(0.5, 0.5, "not in use", transform=axes.transAxes, ha="center", color="#6b6b6b")
        axes.set_yticks([])


def panels(count: int, legend_rows: int, group: Group) -> tuple[Figure, list[Axes]]:
    """Two columns at fixed places: with so many panels, working out a layout takes seconds."""
    rows = math.ceil(count / 2)
    top, bottom = (0.5 if group.banners else 0.3), 0.45 + 0.17 * legend_rows
    height = top + bottom + 1.75 * rows - 0.45
    picture = Figure(figsize=(WIDTH, height))
    grid = picture.add_gridspec(
        rows, 2, left=0.11, right=0.965, top=1 - top / height, bottom=bottom / height,
        wspace=0.34, hspace=0.38,
    )  # fmt: skip
    axes = [picture.add_subplot(grid[i // 2, i % 2]) for i in range(count)]
    for panel in axes[-2:]:
        panel.set_xlabel(unit(group.task))
    return picture, axes


def legend_at_foot(
    picture: Figure, handles: list[Artist], labels: list[str], place: Place = "lower center"
) -> None:
    picture.legend(
        handles, [plain(label) for label in labels], loc=place, borderaxespad=0.15,
        labelspacing=0.25, fontsize=8, handlelength=1.5,
    )  # fmt: skip


def norms(group: Group, chosen: list[tuple[Line, Record]]) -> Drawing:
    caption = f"Norm of every weight over training{seed_of(chosen)}; dark is near the input."
    alt = f"Small multiples: the norm of every weight over epochs, one panel each {among(chosen)}"
    return finish(side_by_side(group, chosen, "norm"), group, "layer-norms", caption, alt)


def angles(group: Group, chosen: list[tuple[Line, Record]]) -> Drawing:
    caption = (
        f"How far a step turns every weight, in radians{seed_of(chosen)}; dark is near the input."
    )
    alt = f"Small multiples: the angle of a step over epochs, one panel each {among(chosen)}"
    return finish(side_by_side(group, chosen, "angle"), group, "layer-angles", caption, alt)


def among(chosen: list[tuple[Line, Record]]) -> str:
    return f"for {listed([line.label for line, _ in chosen])}"


def side_by_side(group: Group, chosen: list[tuple[Line, Record]], key: str) -> Figure:
    """One panel a run, all with the same limits."""
    found = layers(chosen[0][1])
    picture, axes = panels(len(chosen), legend_rows(found), group)
    limits = [
        value for _, run in chosen for name, _ in layers(run)
        for value in track(run, name, key)[1] if value > 0
    ]  # fmt: skip
    for i, (panel, (line, run)) in enumerate(zip(axes, chosen, strict=True)):
        plot_layers(panel, run, key, log=False)
        panel.set_title(plain(line.label), fontsize=8.5)
        if limits:
            panel.set_ylim(min(limits) / 1.1, max(limits) * 1.1)
            if max(limits) > DECADE * min(limits):
                log_axis(panel, "y")
        if group.task == "grokking":
            log_axis(panel, "x")
        panel.tick_params(labelleft=i % 2 == 0, labelbottom=i >= len(chosen) - 2)
    legend_at_foot(picture, *depth_legend(found))
    return picture


def inside(group: Group, line: Line, run: Record) -> Drawing:
    """Everything that one AdamO run reports."""
    found = layers(run)
    rows = max(legend_rows(found), len(guard_events(run)))
    picture, axes = panels(len(PANELS) + 1, rows, group)
    for panel, (key, title, log) in zip(axes, PANELS, strict=False):
        plot_layers(panel, run, key, log)
        panel.set_title(title, fontsize=8.5, fontweight="normal")
    guards = plot_guards(axes[-1], run)
    for i, panel in enumerate(axes):
        panel.set_xlim(0, run.config.epochs)
        panel.tick_params(labelbottom=i >= len(axes) - 2)
    legend_at_foot(picture, *depth_legend(found), "lower left")
    legend_at_foot(picture, guards, [str(g.get_label()) for g in guards], "lower right")
    caption = f"{line.label}, layer by layer{seed_of([(line, run)])}; dark is near the input."
    alt = (
        f"Small multiples for {line.label}: norm, radial step size, curvature, angle, radial "
        f"share and guard activity of {len(found)} weights; {guard_summary(run)}"
    )
    return finish(picture, group, f"layers-{slugged(line)}", caption, alt)


def legend_rows(found: list[Layer]) -> int:
    return len(found) if len(found) <= NAMED else 3


def plot_guards(axes: Axes, run: Record) -> list[Artist]:
    """When which part of the guard acted, and in which layer (the input at the bottom)."""
    axes.set_title("guard at work, by layer", fontsize=8.5, fontweight="normal")
    axes.set_yticks([])
    seen = guard_events(run)
    if not seen:
        text = "never at work" if reported(run, "guard") else "not recorded"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color="#6b6b6b")
        axes.grid(False)
    handles: list[Artist] = []
    for (part, points), colour in zip(sorted(seen.items()), GUARD_COLOURS * 3, strict=False):
        what, marker = GUARDS.get(part, (part, "o"))
        x, y = np.array(points).T
        handles += axes.plot(x, y, marker, color=colour, markersize=3.2, label=plain(what))
    axes.set_ylim(-0.8, len(layers(run)) - 0.2)
    return handles


def guard_events(run: Record) -> dict[str, list[tuple[float, int]]]:
    """By part: the epochs and layers where it acted."""
    seen: dict[str, list[tuple[float, int]]] = {}
    for place, row in enumerate(run.dynamics):
        for epoch, parts in zip(row["epoch"], row.get("guard", ()), strict=False):
            for part in parts or ():
                seen.setdefault(str(part), []).append((epoch, place))
    return seen


def guard_summary(run: Record) -> str:
    seen = guard_events(run)
    if not seen:
        return "the guard never acted"
    named = [f"{GUARDS.get(part, (part, ''))[0]} {len(at)} times" for part, at in seen.items()]
    return f"guard: {listed(named)}"


def seed_of(chosen: list[tuple[Line, Record]]) -> str:
    seeds = {run.config.seed for _, run in chosen}
    return f" (seed {seeds.pop()})" if len(seeds) == 1 else " (one seed each)"


def slugged(line: Line) -> str:
    return line.name if line.label == line.title else line.label
