"""What the records of a comparison say, in plain text: a sentence for each optimizer, a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from . import optimizers as registry
from .records import FAILED, FINISHED, Record, canonical
from .verdicts import LEVEL, Summary, welch

OWN_COLUMNS = ("epoch", "train_loss", "lr", "weight_norm", "valid_loss", "seconds_per_epoch")
SCHEDULES = {
    "constant": "is constant",
    "cosine": "falls along a cosine to zero",
    "linear": "falls linearly to zero",
    "step": "falls to a fifth after every sixth of the training",
}
Settings = dict[tuple[str, str], list[Record]]  # by optimizer and hyper-parameters: one run a seed


def by_setting(records: Sequence[Record]) -> Settings:
    found: Settings = {}
    for record in records:
        key = record.config.optimizer, canonical(dict(record.config.hyper))
        found.setdefault(key, []).append(record)
    return found


def finished(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.status == FINISHED]


def summary(records: Sequence[Record], key: str) -> Summary:
    return Summary.of([record.result.get(key) for record in finished(records)])


def label(record: Record) -> str:
    return registry.entry(record.config.optimizer).label


# --- verdicts


def verdicts(records: Sequence[Record]) -> list[str]:
    """How every other optimizer did beside the first, each at its best learning rate."""
    names = list(dict.fromkeys(record.config.optimizer for record in records))
    validated = any("valid_loss" in r.result for r in finished(records))
    key = "valid_loss" if validated else "train_loss"
    first, *others = (best_of(records, name, key) for name in names)
    labels = [registry.entry(name).label for name in names]
    return [
        verdict((name, labels[0]), (other, first), key)
        for name, other in zip(labels[1:], others, strict=True)
    ]


def best_of(records: Sequence[Record], name: str, key: str) -> list[Record]:
    """The runs of the setting with the lowest mean; a run that failed or diverged rules one out."""
    settings = (runs for (optimizer, _), runs in by_setting(records).items() if optimizer == name)
    whole = [runs for runs in settings if len(summary(runs, key).values) == len(runs)]
    return min(whole, key=lambda runs: statistics.mean(summary(runs, key).values), default=[])


def verdict(names: tuple[str, str], best: tuple[list[Record], list[Record]], key: str) -> str:
    """One sentence: which is better, by how much, how sure, from how many runs."""
    if lost := [name for name, runs in zip(names, best, strict=True) if not runs]:
        return f"No verdict: {' and '.join(lost)} failed or diverged in every setting."
    a, b = (summary(runs, key) for runs in best)
    means = [statistics.mean(x.values) for x in (a, b)]
    lrs = [runs[0].config.hyper["lr"] for runs in best]
    rates = [f"{mean:.4g} at lr {lr:g}" for mean, lr in zip(means, lrs, strict=True)]
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
    """Settings × final numbers, and below it what they do not say."""
    runs, done = by_setting(records), finished(records)
    extra = dict.fromkeys(k for r in done for k in r.metrics[-1] if k not in OWN_COLUMNS)
    keys = [k for k in ("train_loss", "valid_loss", *extra) if any(k in r.result for r in done)]
    rows = [["optimizer", "lr", "n", *(k.replace("_", " ") for k in keys), "s/epoch", "ratio"]]
    seconds = [summary(group, "seconds_per_epoch").mean for group in runs.values()]
    for group, time in zip(runs.values(), seconds, strict=True):
        cells = [cell(summary(group, k)) for k in (*keys, "seconds_per_epoch")]
        ratio = f"{time / seconds[0]:.2f}" if time and seconds[0] else "-"
        start = [label(group[0]), f"{group[0].config.hyper['lr']:g}", str(len(finished(group)))]
        rows.append([*start, *cells, ratio])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ("  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in rows)
    title = f"{name}, {records[0].config.epochs} epochs"
    return "\n".join([title, "", *aligned, "", *notes(records)])


def cell(found: Summary) -> str:
    if found.mean is None:
        return "-"
    text = f"{found.mean:.4g}" + ("" if found.sd is None else f" ± {found.sd:.2g}")
    return f"{text} ({len(found.values)} of {found.n})" if found.missing else text


def notes(records: Sequence[Record]) -> list[str]:
    """How to read the table; how it was trained; what failed, diverged or was warned of."""
    seeds = len({record.config.seed for record in records})
    many = f"Mean ± standard deviation over {seeds} seeds"
    lines = [f"{many if seeds > 1 else 'One seed, so no error bars'}; n: runs that finished."]
    lines.append(training(records[0].config.options))
    for record in {r.config.optimizer: r for r in records}.values():
        hyper = ", ".join(f"{k} {v}" for k, v in record.config.hyper.items() if k != "lr")
        lines.append(f"{label(record)}: {hyper}")
    told = set()
    for r in records:
        who = f"{label(r)}, lr {r.config.hyper['lr']:g}, seed {r.config.seed}"
        if r.status == FAILED:
            lines.append(f"{who} failed: {r.error}")
        if "diverged_at" in r.result:
            lines.append(f"{who} diverged in epoch {r.result['diverged_at']}")
        for warning in r.environment.get("warnings", ()):
            if (label(r), warning) not in told:
                told.add((label(r), warning))
                lines.append(f"{who}: {warning}")
    return lines


def training(options: Mapping[str, Any]) -> str:
    """The schedule and the like, in a sentence."""
    schedule = str(options.get("schedule"))
    said = [f"The learning rate {SCHEDULES.get(schedule, f'follows {schedule}')}"]
    said += [f"after a warm-up of {options['warmup']:.0%}"] if options.get("warmup") else []
    said += [f"gradients are clipped at {options['clip']:g}"] if options.get("clip") else []
    said += [f"autocast to {options['autocast']}"] if options.get("autocast") else []
    return ", ".join(said) + "."
