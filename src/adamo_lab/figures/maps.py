"""Pictures of a plane: decision boundaries, the loss landscape, heat maps of hyper-parameters."""

from __future__ import annotations

import math
import textwrap

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ..derived import value
from ..grids import Grid
from ..groups import Group, entries_of, show
from ..records import Record, shape
from .look import INK, WIDTH, Drawing, canvas, finish, legend_below, listed, plain

SIDES = LinearSegmentedColormap.from_list("sides", ["#7fb8dd", "#f7f7f7", "#f0b28a"])
LEVELS = 18
TITLE_WIDTH = 62  # characters of a heat map's title in one line


# --- Figure 1


def boundaries(group: Group) -> list[Drawing]:
    """A panel per optimizer, all of the same seed: what is said where, and the points."""
    with_grid = [[r for r in x.runs if has_boundary(r)] for x in group.lines]
    panels = [(x, runs) for x, runs in zip(group.lines, with_grid, strict=True) if runs]
    if not panels:
        return []
    shared = set.intersection(*({r.config.seed for r in runs} for _, runs in panels))
    seed = min(shared) if shared else None
    chosen = [(x, next(r for r in runs if seed in (None, r.config.seed))) for x, runs in panels]
    rows = math.ceil(len(chosen) / 2)
    columns = min(2, len(chosen))
    picture, axes = canvas(rows, columns, height=0.3 + 2.55 * rows)
    for panel in axes[len(chosen) :]:
        panel.remove()
    said = []
    for panel, (line, run) in zip(axes, chosen, strict=False):
        draw_boundary(panel, run)
        norm = value(run, "weight_norm")
        ending = "" if norm is None else f"‖w‖ = {norm:.3g}"
        title = "\n".join(plain(text) for text in (line.title, ending) if text)
        panel.set_title(title, fontsize=9)
        said.append(f"{line.title} {ending}".strip())
    where = "" if seed is None else f" Seed {seed}."
    caption = f"Decision boundaries (black) and the training points of the two classes.{where}"
    alt = f"Decision boundaries of {listed([x.title for x, _ in chosen])}: {'; '.join(said)}"
    return [finish(picture, group, "boundaries", caption, alt)]


def has_boundary(run: Record) -> bool:
    grid, points, labels, extent = (
        shape(run.arrays.get(key)) or () for key in ("grid", "points", "labels", "extent")
    )
    return len(grid) == 2 and points == (*labels, 2) and len(labels) == 1 and extent == (4,)


def draw_boundary(panel: Axes, run: Record) -> None:
    arrays = {key: np.array(values, dtype=float) for key, values in run.arrays.items()}
    grid, points, labels = (arrays[key] for key in ("grid", "points", "labels"))
    left, right, bottom, top = arrays["extent"]
    panel.imshow(
        grid, origin="lower", extent=(left, right, bottom, top), cmap=SIDES, vmin=0, vmax=1,
        interpolation="bilinear", aspect="equal",
    )  # fmt: skip
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
    norm = Normalize(loss.min(), loss.max())
    levels = np.linspace(loss.min(), loss.max(), LEVELS)
    if loss.min() > 0 and loss.max() > 10 * loss.min():
        norm = LogNorm(loss.min(), loss.max())
        levels = np.geomspace(loss.min(), loss.max(), LEVELS)
    if levels[0] < levels[-1]:
        filled = axes.contourf(xs, ys, loss, levels=levels, cmap="Greys", norm=norm, alpha=0.75)
        axes.contour(xs, ys, loss, levels=levels, colors="white", linewidths=0.5)
        bar = picture.colorbar(filled, ax=axes, shrink=0.85, pad=0.02, format="%.2g")
        bar.set_label("training loss")
        bar.outline.set_linewidth(0.5)  # type: ignore[operator]
    handles, labels = draw_paths(axes, record)
    told = record.result.get("explained_variance")
    shares: list[float | None] = told if shape(told) == (2,) else [None, None]  # type: ignore[assignment]
    for name, share, set_label in zip(
        ("first", "second"), shares, (axes.set_xlabel, axes.set_ylabel), strict=True
    ):
        part = "" if share is None else f" ({100 * share:.0f} % of the variance)"
        set_label(f"{name} principal component{part}")
    axes.grid(False)
    axes.set_title("loss landscape and paths")
    legend_below(picture, handles, labels, columns=4)
    caption = (
        "The loss in the plane of the paths' first two principal components, and the way each "
        f"optimizer took through it. Seed {record.config.seed}."
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
    entries = entries_of(names)
    handles: list[Artist] = []
    labels: list[str] = []
    for name in names:
        x, y = np.array(record.arrays[f"path_{name}"], dtype=float).T
        what = entries[name]
        axes.plot(x, y, color="white", linewidth=3.6, alpha=0.8)  # a halo, for the dark regions
        (handle,) = axes.plot(x, y, color=what.colour, linestyle=what.line, linewidth=1.8)
        axes.plot(x[0], y[0], "o", color=what.colour, markeredgecolor="white", markersize=7)
        axes.plot(x[-1], y[-1], "*", color=what.colour, markeredgecolor="white", markersize=13)
        handles.append(handle)
        labels.append(what.label)
    for marker, size in (("o", 7), ("*", 10)):
        handles.append(Line2D([], [], marker=marker, markersize=size, color="#6b6b6b", ls="none"))
    return handles, [*labels, "start", "end"]


# --- Figure 4


def heat_maps(group: Group, grids: list[Grid]) -> list[Drawing]:
    """One figure an optimizer, with one colour scale for all of them."""
    low = min((float(np.nanmin(grid.values)) for grid in grids), default=0.0)
    high = max((float(np.nanmax(grid.values)) for grid in grids), default=0.0)
    return [heat_map(group, grid, low, high) for grid in grids]


def heat_map(group: Group, grid: Grid, low: float, high: float) -> Drawing:
    rows, columns = grid.ticks
    factor = 100 if grid.metric.percent else 1
    values = factor * grid.values
    height = 1.5 + 0.44 * len(rows)
    picture, (axes,) = canvas(width=WIDTH, height=height)
    axes.set_facecolor("#ececec")
    high = high if high > low else low + 1e-9
    image = axes.pcolormesh(
        values, cmap="cividis", vmin=factor * low, vmax=factor * high, edgecolors="white",
        linewidth=1.2,
    )  # fmt: skip
    for (i, j), shown in np.ndenumerate(values):
        bright = (shown - factor * low) > 0.55 * factor * (high - low)
        text, best = grid.text(i, j), shown == factor * grid.best
        axes.text(
            j + 0.5, i + 0.5, f"{text} ★" if best else text, ha="center", va="center", fontsize=9,
            fontweight="bold" if best else "normal",
            color=INK if bright or np.isnan(shown) else "white",
        )  # fmt: skip
        if best:
            axes.add_patch(Rectangle((j, i), 1, 1, fill=False, edgecolor="#D55E00", linewidth=2.4))
    axes.set_xticks(np.arange(len(columns)) + 0.5, [show(v) for v in columns])
    axes.set_yticks(np.arange(len(rows)) + 0.5, [show(v) for v in rows])
    axes.set_xlabel(axis_name(grid, 1))
    axes.set_ylabel(axis_name(grid, 0))
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = textwrap.fill(f"{grid.line.title}: {grid.finding}", TITLE_WIDTH)
    axes.set_title(title, fontsize=8.5)
    bar = picture.colorbar(image, ax=axes, shrink=0.9, pad=0.02, aspect=16)
    bar.outline.set_visible(False)  # type: ignore[operator]
    unit = " (%)" if factor == 100 else ""
    caption = (
        f"{grid.line.title}: {grid.metric.label} accuracy{unit}" if grid.metric.percent else
        f"{grid.line.title}: {grid.metric.label}"
    )  # fmt: skip
    caption += f" over its two hyper-parameters; ★ marks the best ({grid.best_setting}). "
    caption += f"{grid.finding[0].upper()}{grid.finding[1:]}. All maps share one colour scale."
    alt = (
        f"Heat map of {grid.line.title} over {grid.axes[0]} and {grid.axes[1]}: "
        f"best {factor * grid.best:.4g} at {grid.best_setting}; {grid.finding}"
    )
    return finish(picture, group, f"heat-map-{grid.line.name}", caption, alt)


def axis_name(grid: Grid, which: int) -> str:
    tangential = grid.line.entry.kind == "adamo"
    names = {
        "lr": "tangential learning rate" if tangential else "learning rate",
        "radial_lr": "radial learning rate",
        "weight_decay": "weight decay",
    }
    return names.get(grid.axes[which], plain(grid.axes[which]))
