"""What the records of a comparison say, in plain text: a sentence for each optimizer, a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from . import optimizers as registry
from .records import FAILED, FINISHED, Record, canonical

OWN_COLUMNS = ("epoch", "train_loss", "lr", "weight_norm", "valid_loss", "seconds_per_epoch")
LEVEL = 0.05
Settings = dict[tuple[str, str], list[Record]]  # by optimizer and hyper-parameters: one run a seed


def by_setting(records: Sequence[Record]) -> Settings:
    found: Settings = {}
    for record in records:
        key = record.config.optimizer, canonical(dict(record.config.hyper))
        found.setdefault(key, []).append(record)
    return found


# --- verdicts


def verdicts(records: Sequence[Record]) -> list[str]:
    """How every other optimizer did beside the first, each at its best learning rate."""
    names = list(dict.fromkeys(record.config.optimizer for record in records))
    finished = [record for record in records if record.status == FINISHED]
    key = "valid_loss" if any("valid_loss" in r.result for r in finished) else "train_loss"
    best = {name: best_of(records, name, key) for name in names}
    return [verdict(names[0], other, best, key) for other in names[1:]]


def best_of(records: Sequence[Record], name: str, key: str) -> list[Record]:
    """The runs of the setting with the lowest mean; a run that failed or diverged rules one out."""
    whole = [
        runs
        for (optimizer, _), runs in by_setting(records).items()
        if optimizer == name and len(values_of(runs, key)) == len(runs)
    ]
    return min(whole, key=lambda runs: statistics.mean(values_of(runs, key)), default=[])


def verdict(first: str, other: str, best: Mapping[str, list[Record]], key: str) -> str:
    """One sentence: which is better, by how much, how sure, from how many runs."""
    from scipy.stats import ttest_ind

    names = [registry.entry(name).label for name in (other, first)]
    if lost := [label for label, o in zip(names, (other, first), strict=True) if not best[o]]:
        return f"No verdict: {' and '.join(lost)} failed or diverged in every setting."
    ours, theirs = (values_of(best[name], key) for name in (other, first))
    difference = statistics.mean(ours) - statistics.mean(theirs)
    rates = [f"{best[name][0].config.hyper['lr']:g}" for name in (other, first)]
    what = (
        f"{key.replace('_', ' ')} {statistics.mean(ours):.4g} at lr {rates[0]} and "
        f"{statistics.mean(theirs):.4g} at lr {rates[1]}"
    )
    if min(len(ours), len(theirs)) < 2:
        word = "lower" if difference < 0 else "higher"
        return (
            f"{names[0]} ended {abs(difference):.2g} {word} than {names[1]} ({what}); with one "
            f"seed nobody knows whether that is chance: give seeds=3 or more."
        )
    test: Any = ttest_ind(ours, theirs, equal_var=False)
    low, high = test.confidence_interval(1 - LEVEL)
    numbers = (
        f"{what}: a difference of {difference:+.2g}, 95 % interval {low:+.2g} to {high:+.2g}, "
        f"n = {len(ours)} and {len(theirs)}"
    )
    if not test.pvalue < LEVEL:  # NaN where nothing varies at all
        return f"No difference found between {names[0]} and {names[1]} ({numbers})."
    return f"{names[0]} is {'better' if difference < 0 else 'worse'} than {names[1]} ({numbers})."


# --- the table


def table(name: str, records: Sequence[Record]) -> str:
    """Settings × final numbers, and below it what they do not say."""
    runs = by_setting(records)
    finished = [record for record in records if record.status == FINISHED]
    own = ("train_loss", "valid_loss")
    extra = dict.fromkeys(k for r in finished for k in r.metrics[-1] if k not in OWN_COLUMNS)
    keys = [key for key in (*own, *extra) if any(key in r.result for r in finished)]
    heading = ["optimizer", "lr", "n", *(key.replace("_", " ") for key in keys), "s/epoch", "ratio"]
    base = mean_of(next(iter(runs.values())), "seconds_per_epoch")
    rows = [heading]
    for (optimizer, _), group in runs.items():
        seconds = mean_of(group, "seconds_per_epoch")
        ratio = f"{seconds / base:.2f}" if seconds and base else "-"
        count = str(sum(r.status == FINISHED for r in group))
        cells = [spread_of(group, k) for k in (*keys, "seconds_per_epoch")]
        rate = f"{group[0].config.hyper['lr']:g}"
        rows.append([registry.entry(optimizer).label, rate, count, *cells, ratio])
    epochs = records[0].config.epochs
    return "\n".join([f"{name}, {epochs} epochs", "", *aligned(rows), "", *notes(records, runs)])


def values_of(records: Sequence[Record], key: str) -> list[float]:
    found = [r.result.get(key) for r in records if r.status == FINISHED]
    return [value for value in found if value is not None]


def mean_of(records: Sequence[Record], key: str) -> float | None:
    values = values_of(records, key)
    return statistics.mean(values) if values else None


def spread_of(records: Sequence[Record], key: str) -> str:
    values = values_of(records, key)
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.4g}"
    text = mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2g}"
    finished = sum(r.status == FINISHED for r in records)
    return text if len(values) == finished else f"{text} ({len(values)} of {finished})"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def notes(records: Sequence[Record], runs: Settings) -> list[str]:
    """How to read the table; how it was trained; what failed, diverged or was warned of."""
    seeds = len({record.config.seed for record in records})
    many = f"Mean ± standard deviation over {seeds} seeds"
    lines = [f"{many if seeds > 1 else 'One seed, so no error bars'}; n: runs that finished."]
    lines.append(training(records[0].config.options))
    hypers = {
        o: {k: v for k, v in g[0].config.hyper.items() if k != "lr"} for (o, _), g in runs.items()
    }
    for name, hyper in hypers.items():
        lines.append(
            f"{registry.entry(name).label}: {', '.join(f'{k} {v}' for k, v in hyper.items())}"
        )
    told = set()
    for r in records:
        label, lr = registry.entry(r.config.optimizer).label, r.config.hyper["lr"]
        who = f"{label}, lr {lr:g}, seed {r.config.seed}"
        if r.status == FAILED:
            lines.append(f"{who} failed: {r.error}")
        if "diverged_at" in r.result:
            lines.append(f"{who} diverged in epoch {r.result['diverged_at']}")
        for warning in r.environment.get("warnings", ()):
            if (label, warning) not in told:
                told.add((label, warning))
                lines.append(f"{who}: {warning}")
    return lines


def training(options: Mapping[str, object]) -> str:
    """The schedule and the like, in a sentence."""
    schedule = str(options.get("schedule"))
    shape = {
        "constant": "constant",
        "cosine": "falls along a cosine to zero",
        "linear": "falls linearly to zero",
        "step": "falls to a fifth after every sixth of the training",
    }.get(schedule, f"follows {schedule}")
    said = [f"The learning rate {'is ' if shape == 'constant' else ''}{shape}"]
    if options.get("warmup"):
        said.append(f"after a warm-up of {options['warmup']:.0%}")
    if options.get("clip"):
        said.append(f"gradients are clipped at {options['clip']:g}")
    if options.get("autocast"):
        said.append(f"autocast to {options['autocast']}")
    return ", ".join(said) + "."
