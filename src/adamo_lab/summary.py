"""What the records of a comparison say, in plain text: a sentence for each optimizer, a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from . import tables
from .records import FAILED, Record
from .runs import Group, Line, entry_of, lines
from .verdicts import LEVEL, welch

SCHEDULES = {
    "constant": "is constant",
    "cosine": "falls along a cosine to zero",
    "linear": "falls linearly to zero",
    "step": "falls to a fifth after every sixth of the training",
}


def settings(records: Sequence[Record]) -> list[Line]:
    """A line for every setting, the optimizers in the order of the comparison."""
    names = [record.config.optimizer for record in records]
    return sorted(lines(records), key=lambda line: names.index(line.optimizer))


# --- verdicts


def verdicts(records: Sequence[Record]) -> list[str]:
    """How every other optimizer did beside the first, each at its best learning rate."""
    key = "valid_loss" if any("valid_loss" in r.result for r in records) else "train_loss"
    every, best = settings(records), {}
    for name in dict.fromkeys(line.title for line in every):
        # a run that failed or diverged rules a setting out
        whole = [x for x in every if x.title == name and not x.of(key).missing]
        best[name] = min(whole, key=lambda x: statistics.mean(x.of(key).values), default=None)
    first, *others = best
    return [verdict((name, first), (best[name], best[first]), key) for name in others]


def verdict(names: tuple[str, str], best: tuple[Line | None, Line | None], key: str) -> str:
    """One sentence: which is better, by how much, how sure, from how many runs."""
    if lost := [name for name, line in zip(names, best, strict=True) if line is None]:
        return f"No verdict: {' and '.join(lost)} failed or diverged in every setting."
    chosen = [line for line in best if line]
    a, b = (line.of(key) for line in chosen)
    means = [statistics.mean(x.values) for x in (a, b)]
    rates = [f"{m:.4g} at lr {x.hyper['lr']:g}" for m, x in zip(means, chosen, strict=True)]
    what, difference = f"{key.replace('_', ' ')} {' and '.join(rates)}", means[0] - means[1]
    if min(a.n, b.n) < 2:
        word = "lower" if difference < 0 else "higher"
        return (
            f"{names[0]} ended {abs(difference):.2g} {word} than {names[1]} ({what}); with one "
            f"seed nobody knows whether that is chance: give seeds=3 or more."
        )
    test = welch(a, b)
    low, high = test.confidence_interval(1 - LEVEL)
    numbers = (
        f"{what}: a difference of {difference:+.2g}, 95 % interval {low:+.2g} to {high:+.2g}, "
        f"n = {a.n} and {b.n}"
    )
    if not test.pvalue < LEVEL:  # NaN where nothing varies at all
        return f"No difference found between {names[0]} and {names[1]} ({numbers})."
    return f"{names[0]} is {'better' if difference < 0 else 'worse'} than {names[1]} ({numbers})."


# --- the table


def table(name: str, records: Sequence[Record]) -> str:
    """The report's table of these runs, and below it what it does not say."""
    group = Group("", records[0].config, {}, settings(records))
    title = f"{name}, {group.length}"
    return "\n".join([title, "", tables.text(tables.table(group)), "", *notes(records)])


def notes(records: Sequence[Record]) -> list[str]:
    """How to read the table; how it was trained; what failed, diverged or was warned of."""
    seeds = len({record.config.seed for record in records})
    many = f"Mean ± standard deviation over {seeds} seeds."
    said = [many if seeds > 1 else "One seed, so no error bars."]
    said.append(training(records[0].config.options))
    times: dict[str, list[float]] = {}
    for line in settings(records):
        times.setdefault(line.title, []).append(line.seconds)
    each = (f"{title} {statistics.fmean(found):.2g}" for title, found in times.items())
    said.append(f"Seconds an epoch: {', '.join(each)}.")
    for c in {r.config.optimizer: r.config for r in records}.values():
        hyper = ", ".join(f"{k} {v}" for k, v in c.hyper.items() if k != "lr")
        said.append(f"{entry_of(c.optimizer).label}: {hyper}")
    warned: dict[tuple[str, str], str] = {}  # each warning once an optimizer
    for r in records:
        label = entry_of(r.config.optimizer).label
        who = f"{label}, lr {r.config.hyper['lr']:g}, seed {r.config.seed}"
        said += [f"{who} failed: {r.error}"] if r.status == FAILED else []
        if "diverged_at" in r.result:
            said.append(f"{who} diverged in epoch {r.result['diverged_at']}")
        for text in r.environment.get("warnings", ()):
            warned.setdefault((label, text), f"{who}: {text}")
    return [*said, *warned.values()]


def training(options: Mapping[str, Any]) -> str:
    """The schedule and the like, in a sentence."""
    schedule = str(options.get("schedule"))
    said = [f"The learning rate {SCHEDULES.get(schedule, f'follows {schedule}')}"]
    said += [f"after a warm-up of {options['warmup']:.0%}"] if options.get("warmup") else []
    said += [f"gradients are clipped at {options['clip']:g}"] if options.get("clip") else []
    said += [f"autocast to {options['autocast']}"] if options.get("autocast") else []
    return ", ".join(said) + "."
