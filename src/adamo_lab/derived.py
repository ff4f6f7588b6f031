"""Numbers that a record holds in its curves, not among its results. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from .records import Record, is_number

FULL, SHOWN = 300, 200  # epochs of CIFAR-100's protocol, and those that the paper's Figure 3 shows
DROPS = (50, 100, 150)  # of the learning rate, within those
AROUND = 10  # epochs before and after a drop


def value(run: Record, key: str) -> float | None:
    """A result of a run; None where it never got there, or has something else than a number."""
    found = DERIVED[key](run) if key in DERIVED else run.result.get(key)
    return found if is_number(found) else None


def accuracies(run: Record) -> list[tuple[float, float]]:
    """(epoch, accuracy), the epochs as those of a run of full length."""
    share = FULL / run.config.epochs
    found = ((row["epoch"], row.get("test_accuracy")) for row in run.metrics)
    return [(share * epoch, accuracy) for epoch, accuracy in found if accuracy is not None]


def reaches(points: list[tuple[float, float]], epoch: float) -> bool:
    """A curve that divergence has cut off before is no shorter one to compare with."""
    return any(reached >= epoch for reached, _ in points)


def early_test_accuracy(run: Record) -> float | None:
    """Mean test accuracy over the epochs that Figure 3 shows."""
    points = accuracies(run)
    found = [y for epoch, y in points if epoch <= SHOWN]
    return statistics.fmean(found) if found and reaches(points, SHOWN) else None


def gain_at_drops(run: Record) -> float | None:
    """By how much test accuracy rises when the learning rate drops: means of the epochs around."""
    points, gains = accuracies(run), []
    if not reaches(points, DROPS[-1] + AROUND):
        return None
    for drop in DROPS:
        before = [y for epoch, y in points if drop - AROUND < epoch <= drop]
        after = [y for epoch, y in points if drop < epoch <= drop + AROUND]
        if not before or not after:
            return None
        gains.append(statistics.fmean(after) - statistics.fmean(before))
    return statistics.fmean(gains)


DERIVED: dict[str, Callable[[Record], float | None]] = {
    "early_test_accuracy": early_test_accuracy,
    "gain_at_drops": gain_at_drops,
}
