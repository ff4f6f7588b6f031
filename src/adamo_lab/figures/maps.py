"""Pictures of a plane: decision boundaries, the loss landscape, heat maps of hyper-parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ..grids import Grid, grids
from ..records import Record, shape
from ..runs import Group, capitalized, entry_of, show, value
from ..tables import heading, number
from .look import INK, Drawing, canvas, finish, legend_below, listed, plain

SIDES = LinearSegmentedColormap.from_list("sides", ["#7fb8dd", "#f7f7f7", "#f0b28a"])
LEVELS = 18


# --- Figure 1


def boundaries(group: Group) -> list[Drawing]:
    """A panel per optimizer, of its first seed: what is said where, and the points."""
    firsts = ((line, next(filter(has_boundary, line.runs), None)) for line in group.lines)
    chosen = [(line, run) for line, run in firsts if run]
    if not chosen:
        return []
    rows = math.ceil(len(chosen) / 2)
    picture, axes = canvas(rows, min(2, len(chosen)), height=0.3 + 2.55 * rows)
    for panel in axes[len(chosen) :]:
        panel.remove()
    said = []
    for panel, (line, run) in zip(axes, chosen, strict=False):
        draw_boundary(panel, run)
        norm = value(run, "weight_norm")
        ending = "" if norm is None else f"‖w‖ = {norm:.3g}"
        panel.set_title("\n".join(map(plain, filter(None, (line.title, ending)))))
        said.append(f"{line.title} {ending}".strip())
    seeds = ", ".join(map(str, sorted({run.config.seed for _, run in chosen})))
    caption = f"Decision boundaries (black) and the points of the two classes. Seed {seeds}."
    alt = f"Decision boundaries of {listed([x.title for x, _ in chosen])}: {'; '.join(said)}"
    return [finish(picture, group, "boundaries", caption, alt)]


def has_boundary(run: Record) -> bool:
    """A record may hold anything; what cannot be drawn is left out."""
    keys = ("grid", "points", "labels", "extent")
    grid, points, labels, extent = (shape(run.arrays.get(key)) or () for key in keys)
    return len(grid) == 2 and points == (*labels, 2) and len(labels) == 1 and extent == (4,)


def draw_boundary(panel: Axes, run: Record) -> None:
    arrays = {key: np.array(values, dtype=float) for key, values in run.arrays.items()}
    grid, points, labels = (arrays[key] for key in ("grid", "points", "labels"))
    left, right, bottom, top = arrays["extent"]
    look: Any = {"cmap": SIDES, "vmin": 0, "vmax": 1, "interpolation": "bilinear"}
    panel.imshow(grid, origin="lower", extent=(left, right, bottom, top), aspect="equal", **look)
    x, y = np.linspace(left, right, grid.shape[1]), np.linspace(bottom, top, grid.shape[0])
    if grid.min() < 0.5 < grid.max():
        panel.contour(x, y, grid, levels=[0.5], colors=INK, linewidths=1.1)
    for label, marker, colour in ((0, "o", "#0072B2"), (1, "^", "#D55E00")):
        here = points[labels == label]
        panel.scatter(*here.T, s=9, marker=marker, c=colour, edgecolors="white", linewidths=0.35)
    panel.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[])
    panel.grid(False)
    panel.spines[["top", "right"]].set_visible(True)


# --- Figure 2


def landscapes(group: Group) -> list[Drawing]:
    """The loss in the plane of the paths, and every optimizer's path through it; one seed."""
    fit = [r for r in group.landscapes if has_plane(r)]
    if not fit:
        return []
    # the most paths; a study that was begun with fewer optimizers has left a plane of these alone
    record = min(fit, key=lambda r: (-len(r.arrays), r.config.seed, r.id))
    loss, xs, ys = (np.array(record.arrays[key], dtype=float) for key in ("loss", "xs", "ys"))
    loss = np.ma.masked_invalid(loss)
    picture, (axes,) = canvas(height=4.3)
    low, high = loss.min(), loss.max()
    decades = low > 0 and high > 10 * low
    levels = (np.geomspace if decades else np.linspace)(low, high, LEVELS)
    if low < high:
        look: Any = {"cmap": "Greys", "norm": (LogNorm if decades else Normalize)(low, high)}
        filled = axes.contourf(xs, ys, loss, levels=levels, alpha=0.75, **look)
        axes.contour(xs, ys, loss, levels=levels, colors="white", linewidths=0.5)
        bar = picture.colorbar(filled, ax=axes, shrink=0.85, pad=0.02, format="%.2g")
        bar.set_label("training loss")
        bar.outline.set_linewidth(0.5)  # type: ignore[operator]
    handles, labels = draw_paths(axes, record)
    told: Any = record.result.get("explained_variance")
    names = ["first component", "second component"]
    if shape(told) == (2,):
        names = [f"{name} ({100 * x:.0f} %)" for name, x in zip(names, told, strict=True)]
    axes.set(xlabel=names[0], ylabel=names[1], title="loss and paths")
    axes.grid(False)
    legend_below(picture, handles, labels)
    caption = (
        "The loss in the plane of the paths' first two principal components, with their shares of "
        f"the variance, and the way each optimizer took through it. Seed {record.config.seed}."
    )
    alt = f"Contour map of the training loss with the paths of {listed(labels[:-2] or ['none'])}"
    return [finish(picture, group, "landscape", caption, alt)]


def has_plane(record: Record) -> bool:
    xs, ys = (shape(record.arrays.get(key)) or () for key in ("xs", "ys"))
    paths = [shape(a) or () for key, a in record.arrays.items() if key.startswith("path_")]
    flat = all(len(path) == 2 and path[1] == 2 for path in paths)
    return flat and len(xs) == len(ys) == 1 and shape(record.arrays.get("loss")) == (*ys, *xs)


def draw_paths(axes: Axes, record: Record) -> tuple[list[Artist], list[str]]:
    names = [key.removeprefix("path_") for key in record.arrays if key.startswith("path_")]
    handles: list[Artist] = []
    for name in names:
        x, y = np.array(record.arrays[f"path_{name}"], dtype=float).T
        colour = entry_of(name).colour
        axes.plot(x, y, color="white", linewidth=3.6, alpha=0.8)  # a halo, for the dark regions
        handles += axes.plot(x, y, color=colour, linestyle=entry_of(name).line, linewidth=1.8)
        axes.plot(x[0], y[0], "o", color=colour, markeredgecolor="white", markersize=7)
        axes.plot(x[-1], y[-1], "*", color=colour, markeredgecolor="white", markersize=13)
    for marker, size in (("o", 7), ("*", 10)):
        handles.append(Line2D([], [], marker=marker, markersize=size, color="#6b6b6b", ls="none"))
    return handles, [*(entry_of(name).label for name in names), "start", "end"]


# --- Figure 4


def heat_maps(group: Group) -> list[Drawing]:
    """One figure an optimizer, with one colour scale for all of them."""
    maps = grids(group)
    values = [v for grid in maps for v in grid.values[~np.isnan(grid.values)].tolist()]
    return [heat_map(group, grid, min(values), max(values)) for grid in maps]


def heat_map(group: Group, grid: Grid, low: float, high: float) -> Drawing:
    (rows, columns), title = grid.ticks, grid.line.title
    factor = 100 if grid.metric.percent else 1
    values, low, high = factor * grid.values, factor * low, factor * max(high, low + 1e-9)
    picture, (axes,) = canvas(height=1.5 + 0.44 * len(rows))
    axes.set_facecolor("#ececec")
    look: Any = {"cmap": "cividis", "edgecolors": "white", "linewidth": 1.2}
    axes.pcolormesh(values, vmin=low, vmax=high, **look)
    for (i, j), shown in np.ndenumerate(values):
        dark = shown - low <= 0.55 * (high - low)  # not where there is no number
        best = shown == factor * grid.best
        look = {"ha": "center", "va": "center", "color": "white" if dark else INK}
        weight = "bold" if best else "normal"
        axes.text(j + 0.5, i + 0.5, grid.text(i, j), fontweight=weight, **look)
        if best:
            axes.add_patch(Rectangle((j, i), 1, 1, fill=False, edgecolor="#D55E00", linewidth=2.4))
    axes.set_xticks(np.arange(len(columns)) + 0.5, [show(v) for v in columns])
    axes.set_yticks(np.arange(len(rows)) + 0.5, [show(v) for v in rows])
    axes.set(xlabel=grid.axes[1], ylabel=grid.axes[0])
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(plain(title))
    best = f"{number(grid.best, grid.metric)} at {grid.best_setting}"
    what = f"{heading(grid.metric)} of {title} over {grid.axes[0]} and {grid.axes[1]}"
    caption = f"{capitalized(what)}: {grid.finding}. The frame marks the best, {best}."
    alt = f"Heat map: {what}; best {best}; {grid.finding}"
    return finish(picture, group, f"heat-map-{grid.line.name}", caption, alt)
