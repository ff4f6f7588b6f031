"""Lines: metrics, loss and norms over training; the best of every learning rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..groups import YOURS, Group, Line
from ..studies import STUDIES
from ..tables import best_lines, columns_of, heading, number
from ..tasks import unit
from ..verdicts import Summary
from .look import Drawing, canvas, finish, legend_below, legend_columns, listed, log_axis, plain

MOST_POINTS = 150
SETTLED = 0.1  # of the training is over: from here on, accuracies are worth comparing
MOST_FIGURES = 6
NOT_DRAWN = {"epoch", "lr", "gradient_norm_sd"}
LAST = ("train_loss", "weight_norm", "gradient_norm")  # after the metrics of the test data
LABELS = {"weight_norm": "norm of all weights, ‖w‖", "gradient_norm": "norm of the gradient, ‖g‖"}
FEWEST = 3  # learning rates that make a curve

Track = tuple[np.ndarray, np.ndarray]  # epochs and values of one run


def draw(group: Group) -> list[Drawing]:
    """One figure a quantity, each small enough to read on a phone."""
    lines = best_lines(group)
    made = (figure(group, lines, key) for key in keys(group, lines))
    return [drawing for drawing in made if drawing is not None]


def keys(group: Group, lines: list[Line]) -> list[str]:
    """What is worth a figure: test metrics first, then loss and norms."""
    rows = [row for x in lines for r in x.runs for row in (*r.metrics[:1], *r.metrics[-1:])]
    seen = dict.fromkeys(key for row in rows for key in row if key not in NOT_DRAWN)
    tested = [k for k in seen if k not in LAST]
    if group.task != YOURS:
        tested = [k for k in tested if k.startswith(("test_", "valid_"))]
        same = {k.replace("_loss", "_perplexity") for k in tested if k.endswith("_loss")}
        tested = [k for k in tested if k not in same]
    last = [k for k in LAST if k in seen]
    if group.study and group.study.kind == "curves":  # the runs of a table, which has the rest
        return sorted(tested)
    return [*sorted(tested)[: MOST_FIGURES - len(last)], *last]


def figure(group: Group, lines: list[Line], key: str) -> Drawing | None:
    """Means over the runs of every line, and a band around each."""
    tracks = {id(x): [t for r in x.runs if (t := series(r.metrics, key))] for x in lines}
    lines = [x for x in lines if tracks[id(x)]]
    if not lines:
        return None
    known = {m.key for study in STUDIES.values() for m in study.metrics}
    values = np.concatenate([y for x in lines for _, y in tracks[id(x)]])
    shares = key.endswith("accuracy") and (key in known or bool(np.all(abs(values - 0.5) <= 0.5)))
    factor = 100 if shares else 1
    labels = [x.label for x in lines]
    rows = math.ceil(len(labels) / legend_columns(labels))
    picture, (axes,) = canvas(height=2.75 + 0.17 * rows)
    handles: list[Artist] = []
    curves = []
    for line in lines:
        x, mean, low, high = combined(tracks[id(line)])
        if key == "gradient_norm":
            low, high = deviation(line, x, mean)
        curves.append((x, factor * mean, factor * low))
        marker = "o" if len(x) == 1 else None
        look: Any = {"color": line.colour, "linestyle": line.entry.line, "marker": marker}
        handles += axes.plot(x, factor * mean, **look)
        band = {"color": line.colour, "alpha": 0.16, "linewidth": 0}
        axes.fill_between(x, factor * low, factor * high, **band)
        mark_divergence(axes, line, key, factor)
    name = LABELS.get(key, key.replace("_", " "))
    shown = f"{name} (%)" if shares else name
    axes.set_title(plain(shown))
    set_axes(axes, group, curves, shares)
    legend_below(picture, handles, labels)
    ends = ", ".join(
        f"{label} {y[-1]:.3g}" for label, (_, y, _) in zip(labels, curves, strict=True)
    )
    over = f"over {unit(group.task)}s for {listed(labels)}"
    alt = f"Line chart of {shown} {over}; at the end: {ends}"
    counts = sorted({len(tracks[id(x)]) for x in lines})
    return finish(picture, group, key, caption_of(group, counts, name, key), alt)


def set_axes(axes: Axes, group: Group, curves: list[Any], shares: bool) -> None:
    """Logarithmic where numbers span decades; accuracies from where they have settled."""
    means = np.concatenate([mean for _, mean, _ in curves])
    lowest, highest = float(np.nanmin(means)), float(np.nanmax(means))
    floor = min(float(np.min(low[x >= SETTLED * x[-1]])) for x, _, low in curves)
    axes.set_xlabel(unit(group.task))
    if group.task == "grokking":
        log_axis(axes, "x")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if 0 < 20 * lowest < highest and not shares:
        log_axis(axes, "y")
    elif shares and group.task != "grokking" and floor > 0.3 * highest:
        axes.set_ylim(bottom=floor - 0.03 * highest)  # the first climb is not the subject
    axes.margins(x=0.02)


def caption_of(group: Group, counts: list[int], name: str, key: str) -> str:
    """What is shown; how many runs; what the band is; how the lines were chosen if not all are."""
    amount = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    several = counts[-1] > 1
    text = f"{name[0].upper()}{name[1:]} over training. "
    text += f"Mean of {amount} runs." if several else "One run each."
    if key == "gradient_norm":
        text += f" Band: one standard deviation over the steps of one {unit(group.task)}."
    elif several:
        text += " The band spans lowest to highest."
    if len(best_lines(group)) < len(group.lines):
        first = columns_of(group)[0].key
        missing = any(v is None for line in group.lines for v in line.values(first))
        text += f" Of every optimizer, its best setting by {first.replace('_', ' ')}"
        text += ", of those in which all runs have one if there are any." if missing else "."
    return text


def series(rows: list[dict], key: str) -> Track | None:
    """Epochs and values of one run, where there is a value."""
    pairs = [(row["epoch"], row[key]) for row in rows if row.get(key) is not None]
    if not pairs:
        return None
    x, y = np.array(pairs, dtype=float).T
    return x, y


def combined(tracks: list[Track]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
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
    tracks = [t for run in line.runs if (t := series(run.metrics, "gradient_norm_sd"))]
    if not tracks:
        return mean, mean
    at, sd, _, _ = combined(tracks)
    sd = np.interp(x, at, sd)
    return np.maximum(mean - sd, 0.02 * mean), mean + sd  # a log axis must not meet zero


def mark_divergence(axes: Axes, line: Line, key: str, factor: float) -> None:
    """A cross where a run came to an end before its time."""
    for run in line.runs:
        if "diverged_at" in run.result and (track := series(run.metrics, key)):
            x, y = track[0][-1], factor * track[1][-1]
            axes.plot(x, y, marker="x", markersize=8, markeredgewidth=2, color=line.colour)


# --- learning rates


def draw_rates(group: Group) -> list[Drawing]:
    """How good every row is at each learning rate, with the best of its other settings."""
    metric = columns_of(group)[0]
    sign, factor = (1 if metric.higher_is_better else -1), (100 if metric.percent else 1)
    names = dict.fromkeys(line.name for line in group.lines)
    curves = (
        best_by_rate([x for x in group.lines if x.name == n], metric.key, sign) for n in names
    )
    curves = [found for found in curves if len(found) >= FEWEST]
    if not curves:
        return []
    picture, (axes,) = canvas(height=3.1)
    handles, labels, ends = [], [], []
    for found in curves:
        line, rates = found[0][1], [rate for rate, _, _ in found]
        means, low, high = (
            [factor * pick(s.values) for _, _, s in found] for pick in (np.mean, min, max)
        )
        what = line.entry
        handles += axes.plot(rates, means, color=what.colour, linestyle=what.line, marker="o", ms=4)
        axes.fill_between(rates, low, high, color=what.colour, alpha=0.16, linewidth=0)
        labels.append(line.title)
        best = max(found, key=lambda point: sign * (point[2].mean or 0.0))
        ends.append(f"{line.title} {number(best[2].mean or 0.0, metric)} at {best[0]:g}")
    log_axis(axes, "x")
    axes.set(title=plain(heading(metric)), xlabel="learning rate")
    legend_below(picture, handles, labels)
    caption = (
        f"{metric.label[0].upper()}{metric.label[1:]} at every learning rate, with the best of the "
        "other settings that were tried there. A band spans the seeds."
    )
    alt = f"Line chart over the learning rate of {listed(labels)}; best: {', '.join(ends)}"
    return [finish(picture, group, "learning-rates", caption, alt)]


def best_by_rate(lines: list[Line], key: str, sign: int) -> list[tuple[float, Line, Summary]]:
    """(learning rate, line, its values) of the best line at each rate; none that lost a run."""
    best: dict[float, tuple[float, Line, Summary]] = {}
    for line in lines:
        rate, found = line.hyper.get("lr"), Summary.of(line.values(key))
        if isinstance(rate, float) and found.mean is not None and not found.missing:
            known = best.get(rate)
            if known is None or sign * found.mean > sign * (known[2].mean or -math.inf):
                best[rate] = (rate, line, found)
    return [best[rate] for rate in sorted(best)]
