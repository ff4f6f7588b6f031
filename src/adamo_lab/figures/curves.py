"""Lines: metrics, loss and norms over training; the best of every learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..runs import YOURS, Group, Line, capitalized
from ..studies import STUDIES, Metric
from ..tables import best_lines, columns_of, heading, number
from ..tasks import unit
from ..verdicts import Summary
from .look import Drawing, canvas, finish, legend_below, listed, log_axis, plain, with_legend

MOST_POINTS = 150
SETTLED = 0.1  # of the training is over: from here on, accuracies are worth comparing
MOST_FIGURES = 6
NOT_DRAWN = {"epoch", "lr", "gradient_norm_sd"}
# after the metrics of the test data
LAST = ("train_loss", "weight_norm", "matrix_norm", "gradient_norm")
LABELS = {
    "weight_norm": "norm of all weights, ‖w‖",
    "matrix_norm": "norm of all matrices",
    "gradient_norm": "norm of the gradient, ‖g‖",
}
FEWEST = 3  # learning rates that make a curve

Track = tuple[np.ndarray, np.ndarray]  # epochs and values of one run
Band = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # epochs; mean, lowest, highest


def draw(group: Group) -> list[Drawing]:
    """One figure a quantity, each small enough to read on a phone."""
    return [figure(group, key) for key in keys(group)]


def keys(group: Group) -> list[str]:
    """What is worth a figure: test metrics first, then loss and norms."""
    rows = [row for x in best_lines(group) for run in x.runs for row in run.metrics]
    seen = {key for row in rows for key, value in row.items() if value is not None} - NOT_DRAWN
    tested, last = sorted(seen - {*LAST}), [key for key in LAST if key in seen]
    if group.config.task != YOURS:  # perplexity is the loss once more
        tested = [k for k in tested if k.startswith(("test_", "valid_"))]
        tested = [k for k in tested if k.replace("_perplexity", "_loss") not in {*tested} - {k}]
    if group.study and group.study.kind == "curves":  # the runs of a table, which has the rest
        return tested
    return [*tested[: MOST_FIGURES - len(last)], *last]


def figure(group: Group, key: str) -> Drawing:
    """Means over the runs of every line, and a band around each."""
    tracks = [(x, [t for r in x.runs if (t := series(r.metrics, key))]) for x in best_lines(group)]
    tracks = [(line, mine) for line, mine in tracks if mine]
    known = {m.key for study in STUDIES.values() for m in study.metrics}
    values = np.concatenate([y for _, mine in tracks for _, y in mine])
    shares = key.endswith("accuracy") and (key in known or bool(np.all(abs(values - 0.5) <= 0.5)))
    factor = 100 if shares else 1
    labels = [line.label for line, _ in tracks]
    picture, (axes,) = canvas(height=with_legend(2.6, labels))
    handles: list[Artist] = []
    bands = []
    for line, mine in tracks:
        x, mean, low, high = band = combined([(x, factor * y) for x, y in mine])
        bands.append(band)
        marker = "o" if len(x) == 1 else ""
        handles += axes.plot(x, mean, color=line.colour, ls=line.entry.line, marker=marker)
        axes.fill_between(x, low, high, color=line.colour, alpha=0.16, linewidth=0)
        for run in line.runs:  # a cross where one came to an end before its time
            if "diverged_at" in run.result and (track := series(run.metrics, key)):
                end = (track[0][-1], factor * track[1][-1])
                axes.plot(*end, marker="x", ms=8, mew=2, color=line.colour)
    name = LABELS.get(key, key.replace("_", " "))
    shown = f"{name} (%)" if shares else name
    axes.set_title(plain(shown))
    set_axes(axes, group, bands, shares)
    legend_below(picture, handles, labels)
    ends = [f"{label} {mean[-1]:.3g}" for label, (_, mean, *_) in zip(labels, bands, strict=True)]
    over = f"over {unit(group.config.task)}s for {listed(labels)}"
    alt = f"Line chart of {shown} {over}; at the end: {', '.join(ends)}"
    counts = [len(mine) for _, mine in tracks]
    return finish(picture, group, key, caption_of(group, counts, name), alt)


def set_axes(axes: Axes, group: Group, bands: Sequence[Band], shares: bool) -> None:
    """Logarithmic where numbers span decades; accuracies from where they have settled."""
    means = np.concatenate([mean for _, mean, *_ in bands])
    lowest, highest = float(np.nanmin(means)), float(np.nanmax(means))
    floor = min(float(np.min(low[x >= SETTLED * x[-1]])) for x, _, low, _ in bands)
    axes.set_xlabel(unit(group.config.task))
    grokking = group.config.task == "grokking"
    if grokking:
        log_axis(axes, "x")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if 0 < 20 * lowest < highest and not shares:
        log_axis(axes, "y")
    elif shares and not grokking and floor > 0.3 * highest:
        axes.set_ylim(bottom=floor - 0.03 * highest)  # the first climb is not the subject
    axes.margins(x=0.02)


def caption_of(group: Group, counts: Sequence[int], name: str) -> str:
    """What is shown; how many runs; how the lines were chosen if not all are."""
    amount = " to ".join(map(str, sorted({min(counts), max(counts)})))
    several = f"Mean of {amount} runs. The band spans lowest to highest."
    text = f"{capitalized(name)} over training. "
    text += several if max(counts) > 1 else "One run each."
    if len(best_lines(group)) < len(group.lines):
        first = columns_of(group)[0].key
        missing = any(line.of(first).missing for line in group.lines)
        text += f" Of every optimizer, its best setting by {first.replace('_', ' ')}"
        text += ", of those in which all runs have one if there are any." if missing else "."
    return text


def series(rows: list[dict], key: str) -> Track | None:
    """Epochs and values of one run, where there is a value."""
    pairs = [(row["epoch"], row[key]) for row in rows if row.get(key) is not None]
    x, y = np.array(pairs, dtype=float).reshape(-1, 2).T
    return (x, y) if pairs else None


def combined(tracks: list[Track]) -> Band:
    """Mean, lowest and highest over runs, on the epochs of all of them, thinned."""
    x = np.unique(np.concatenate([track[0] for track in tracks]))
    if len(x) > MOST_POINTS:
        x = x[np.unique(np.linspace(0, len(x) - 1, MOST_POINTS).round().astype(int))]
    # before its first and after its last evaluation a run says nothing
    y = np.array([np.interp(x, *track, left=np.nan, right=np.nan) for track in tracks])
    heard = ~np.isnan(y).all(axis=0)
    x, y = x[heard], y[:, heard]
    return x, np.nanmean(y, axis=0), np.nanmin(y, axis=0), np.nanmax(y, axis=0)


# --- learning rates


def draw_rates(group: Group) -> list[Drawing]:
    """How good every row is at each learning rate, with the best of its other settings."""
    metric = columns_of(group)[0]
    names = dict.fromkeys(line.name for line in group.lines)
    curves = [best_by_rate(group.named(name), metric) for name in names]
    curves = [found for found in curves if len(found) >= FEWEST]
    if not curves:
        return []
    factor = 100 if metric.percent else 1
    titles = [next(iter(found.values()))[0].title for found in curves]
    picture, (axes,) = canvas(height=with_legend(2.6, titles))
    handles, labels, ends = [], [], []
    for found in curves:
        rates, line = [*found], next(iter(found.values()))[0]
        every = [factor * np.array(ours.values) for _, ours in found.values()]
        means, low, high = ([float(f(y)) for y in every] for f in (np.mean, np.min, np.max))
        look = line.entry
        style = ":" if look.label in labels else look.line  # another row of the same optimizer
        handles += axes.plot(rates, means, color=look.colour, ls=style, marker="o", ms=4)
        axes.fill_between(rates, low, high, color=look.colour, alpha=0.16, linewidth=0)
        labels.append(line.title)
        best = metric.better(means)
        ends.append(f"{line.title} {number(best / factor, metric)} at {rates[means.index(best)]:g}")
    log_axis(axes, "x")
    axes.set(title=plain(heading(metric)), xlabel="learning rate")
    legend_below(picture, handles, labels)
    caption = (
        f"{capitalized(metric.label)} at every learning rate, with the best of the other settings "
        "that were tried there. A band spans the seeds."
    )
    alt = f"Line chart over the learning rate of {listed(labels)}; best: {', '.join(ends)}"
    return [finish(picture, group, "learning-rates", caption, alt)]


def best_by_rate(lines: list[Line], metric: Metric) -> dict[float, tuple[Line, Summary]]:
    """The best line at each learning rate, and its values; none that lost a run."""
    best: dict[float, tuple[Line, Summary]] = {}
    for line in lines:
        rate, ours = line.hyper.get("lr"), line.of(metric.key)
        if isinstance(rate, float) and ours.mean is not None and not ours.missing:
            known = best[rate][1].mean if rate in best else None
            if known is None or metric.better([known, ours.mean]) != known:
                best[rate] = (line, ours)
    return dict(sorted(best.items()))
