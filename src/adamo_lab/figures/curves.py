"""What happens over training: test metrics, loss and norms, mean and range over the seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..groups import YOURS, Group, Line
from ..studies import STUDIES
from ..tables import best_lines, columns_of
from ..tasks import unit
from .look import Drawing, canvas, finish, legend_below, legend_columns, listed, log_axis, plain

MOST_POINTS = 150
SETTLED = 0.1  # of the training is over: from here on, accuracies are worth comparing
MOST_FIGURES = 6
NOT_DRAWN = {"epoch", "lr", "gradient_norm_sd"}
LAST = ("train_loss", "weight_norm", "gradient_norm")  # after the metrics of the test data
LABELS = {"weight_norm": "norm of all weights, ‖w‖", "gradient_norm": "norm of the gradient, ‖g‖"}


def draw(group: Group) -> list[Drawing]:
    """One figure a quantity, each small enough to read on a phone."""
    lines = best_lines(group)
    made = (figure(group, lines, key) for key in keys(group, lines))
    return [drawing for drawing in made if drawing is not None]


def chosen_by(group: Group) -> str:
    """How the lines were chosen, where not all are drawn."""
    metric = columns_of(group)[0].metric
    missing = any(v is None for line in group.lines for v in line.values(metric.key))
    whole = ", of those in which all runs have one if there are any" if missing else ""
    return f" Of every optimizer, its best setting by {metric.key.replace('_', ' ')}{whole}."


def keys(group: Group, lines: list[Line]) -> list[str]:
    """What is worth a figure: test metrics first, then loss and norms."""
    seen = {
        key: None
        for line in lines
        for run in line.runs
        for row in (*run.metrics[:1], *run.metrics[-1:])
        for key, value in row.items()
        if key not in NOT_DRAWN and not isinstance(value, (str, list, dict, bool))
    }
    tested = [k for k in seen if k not in LAST]
    if group.task != YOURS:
        tested = [k for k in tested if k.startswith(("test_", "valid_"))]
        same = {k.replace("_loss", "_perplexity") for k in tested if k.endswith("_loss")}
        tested = [k for k in tested if k not in same]
    last = [k for k in LAST if k in seen]
    if group.study and group.study.kind == "curves":  # the runs of a table, which has the rest
        return sorted(tested)
    return [*sorted(tested)[: MOST_FIGURES - len(last)], *last]


@dataclass
class Curve:
    """One line of a figure: the mean over its runs, and a band around it."""

    line: Line
    runs: int
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve(line: Line, key: str) -> Curve | None:
    tracks = [track for run in line.runs if (track := series(run.metrics, key)) is not None]
    if not tracks:
        return None
    x, mean, low, high = combined(tracks)
    if key == "gradient_norm":
        low, high = deviation(line, x, mean)
    return Curve(line, len(tracks), x, mean, low, high)


def figure(group: Group, lines: list[Line], key: str) -> Drawing | None:
    curves = [found for line in lines if (found := curve(line, key)) is not None]
    if not curves:
        return None
    known = {m.key for study in STUDIES.values() for m in study.metrics}
    shares = key.endswith("accuracy") and (key in known or at_most_one(lines, key))
    factor = 100 if shares else 1
    labels = [c.line.label for c in curves]
    rows = math.ceil(len(labels) / legend_columns(labels))
    picture, (axes,) = canvas(height=2.75 + 0.17 * rows)
    handles: list[Artist] = []
    for c in curves:
        marker = "o" if len(c.x) == 1 else None
        look = {"color": c.line.colour, "linestyle": c.line.entry.line, "marker": marker}
        handles += axes.plot(c.x, factor * c.mean, **look)
        band = (c.x, factor * c.low, factor * c.high)
        axes.fill_between(*band, color=c.line.colour, alpha=0.16, linewidth=0)
        mark_divergence(axes, c.line, key, factor)
    name = LABELS.get(key, key.replace("_", " "))
    shown = f"{name} (%)" if shares else name
    axes.set_title(plain(shown))
    set_axes(axes, group, curves, factor)
    legend_below(picture, handles, labels)
    ends = ", ".join(f"{c.line.label} {factor * c.mean[-1]:.3g}" for c in curves)
    over = f"over {unit(group.task)}s for {listed(labels)}"
    alt = f"Line chart of {shown} {over}; at the end: {ends}"
    return finish(picture, group, key, caption_of(group, curves, name, key), alt)


def set_axes(axes: Axes, group: Group, curves: list[Curve], factor: float) -> None:
    """Logarithmic where numbers span decades; accuracies from where they have settled."""
    means = factor * np.concatenate([c.mean for c in curves])
    lowest, highest = float(np.nanmin(means)), float(np.nanmax(means))
    settled = [c.low[c.x >= SETTLED * c.x[-1]] for c in curves]
    floor = factor * min(float(np.min(low)) for low in settled)
    axes.set_xlabel(unit(group.task))
    if group.task == "grokking":
        log_axis(axes, "x")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if 0 < 20 * lowest < highest and factor == 1:
        log_axis(axes, "y")
    elif factor == 100 and group.task != "grokking" and floor > 0.3 * highest:
        axes.set_ylim(bottom=floor - 0.03 * highest)  # the first climb is not the subject
    axes.margins(x=0.02)


def caption_of(group: Group, curves: list[Curve], name: str, key: str) -> str:
    several = any(c.runs > 1 for c in curves)
    text = f"{name[0].upper()}{name[1:]} over training. {count(curves, several)}"
    if key == "gradient_norm":
        text += f" Band: one standard deviation over the steps of one {unit(group.task)}."
    elif several:
        text += " The band spans lowest to highest."
    return text + (chosen_by(group) if len(best_lines(group)) < len(group.lines) else "")


def series(rows: list[dict], key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Epochs and values of one run, where there is a value."""
    pairs = [(row["epoch"], row[key]) for row in rows if row.get(key) is not None]
    if not pairs:
        return None
    x, y = np.array(pairs, dtype=float).T
    return x, y


def combined(
    tracks: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lowest and highest over runs, on the epochs of all of them, thinned."""
    x = np.unique(np.concatenate([track[0] for track in tracks]))
    if len(x) > MOST_POINTS:
        x = x[np.unique(np.linspace(0, len(x) - 1, MOST_POINTS).round().astype(int))]
    # before its first and after its last evaluation a run says nothing
    y = np.array([np.interp(x, *track, left=np.nan, right=np.nan) for track in tracks])
    heard = ~np.isnan(y).all(axis=0)
    x, y = x[heard], y[:, heard]
    return x, np.nanmean(y, axis=0), np.nanmin(y, axis=0), np.nanmax(y, axis=0)


def deviation(line: Line, x: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A standard deviation around the gradient's norm, averaged over the runs."""
    tracks = [t for run in line.runs if (t := series(run.metrics, "gradient_norm_sd")) is not None]
    if not tracks:
        return mean, mean
    at, sd, _, _ = combined(tracks)
    sd = np.interp(x, at, sd)
    return np.maximum(mean - sd, 0.02 * mean), mean + sd  # a log axis must not meet zero


def mark_divergence(axes: Axes, line: Line, key: str, factor: float) -> None:
    """A cross where a run came to an end before its time."""
    for run in line.runs:
        track = series(run.metrics, key)
        if "diverged_at" in run.result and track is not None:
            x, y = track[0][-1], factor * track[1][-1]
            axes.plot(x, y, marker="x", markersize=8, markeredgewidth=2, color=line.colour)


def at_most_one(lines: list[Line], key: str) -> bool:
    values = [row.get(key) for line in lines for run in line.runs for row in run.metrics]
    return all(0 <= v <= 1 for v in values if v is not None)


def count(curves: list[Curve], several: bool) -> str:
    numbers = sorted({c.runs for c in curves})
    if not several:
        return "One run each."
    amount = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"Mean of {amount} runs."
