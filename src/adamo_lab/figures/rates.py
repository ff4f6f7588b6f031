"""How good an optimizer is at every learning rate, with the best of its other settings."""

from __future__ import annotations

import math

from ..groups import Group, Line
from ..tables import columns_of, number
from ..verdicts import Summary
from .look import Drawing, canvas, finish, legend_below, listed, log_axis, plain

FEWEST = 3  # learning rates that make a curve


def draw(group: Group) -> list[Drawing]:
    """One figure of the first metric, where some row was tried at several learning rates."""
    metric = columns_of(group)[0].metric
    sign, factor = (1 if metric.higher_is_better else -1), (100 if metric.percent else 1)
    curves = {}
    for name in dict.fromkeys(line.name for line in group.lines):
        found = curve([line for line in group.lines if line.name == name], metric.key, sign)
        if len(found) >= FEWEST:
            curves[name] = found
    if not curves:
        return []
    picture, (axes,) = canvas(height=3.1)
    handles, labels, ends = [], [], []
    for found in curves.values():
        line, rates = found[0][1], [rate for rate, _, _ in found]
        means = [factor * (s.mean or 0.0) for _, _, s in found]
        low = [factor * min(s.values) for _, _, s in found]
        high = [factor * max(s.values) for _, _, s in found]
        what = line.entry
        handles += axes.plot(rates, means, color=what.colour, linestyle=what.line, marker="o", ms=4)
        axes.fill_between(rates, low, high, color=what.colour, alpha=0.16, linewidth=0)
        labels.append(line.title)
        best = max(found, key=lambda point: sign * (point[2].mean or 0.0))
        ends.append(f"{line.title} {number(best[2].mean or 0.0, metric)} at {best[0]:g}")
    log_axis(axes, "x")
    name = plain(metric.label) + (" (%)" if metric.percent else "")
    axes.set(title=name, xlabel="learning rate")
    legend_below(picture, handles, labels)
    caption = (
        f"{metric.label[0].upper()}{metric.label[1:]} at every learning rate, with the best of the "
        "other settings that were tried there. A band spans the seeds."
    )
    alt = f"Line chart over the learning rate of {listed(labels)}; best: {', '.join(ends)}"
    return [finish(picture, group, "learning-rates", caption, alt)]


def curve(lines: list[Line], key: str, sign: int) -> list[tuple[float, Line, Summary]]:
    """(learning rate, line, its values) of the best line at each rate; none that lost a run."""
    best: dict[float, tuple[float, Line, Summary]] = {}
    for line in lines:
        rate, found = line.hyper.get("lr"), Summary.of(line.values(key))
        if not isinstance(rate, float) or found.mean is None or found.missing:
            continue
        known = best.get(rate)
        if known is None or sign * found.mean > sign * (known[2].mean or -math.inf):
            best[rate] = (rate, line, found)
    return [best[rate] for rate in sorted(best)]
