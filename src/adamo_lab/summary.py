"""The records of a comparison as a table in plain text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from . import optimizers as registry
from .records import FAILED, FINISHED, Record

OWN_COLUMNS = ("epoch", "train_loss", "lr", "weight_norm", "valid_loss", "seconds_per_epoch")


def table(name: str, records: Sequence[Record]) -> str:
    """Optimizers × final numbers, and below it what they do not say."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.config.optimizer, []).append(record)
    finished = [record for record in records if record.status == FINISHED]
    own = ("train_loss", "valid_loss")
    extra = dict.fromkeys(k for r in finished for k in r.metrics[-1] if k not in OWN_COLUMNS)
    keys = [key for key in (*own, *extra) if any(key in r.result for r in finished)]
    heading = ["optimizer", "n", *(key.replace("_", " ") for key in keys), "s/epoch", "time ratio"]
    base = mean_of(next(iter(runs.values())), "seconds_per_epoch")
    rows = [heading]
    for key, group in runs.items():
        seconds = mean_of(group, "seconds_per_epoch")
        ratio = f"{seconds / base:.2f}" if seconds and base else "-"
        count = str(sum(r.status == FINISHED for r in group))
        cells = [spread_of(group, k) for k in (*keys, "seconds_per_epoch")]
        rows.append([registry.entry(key).label, count, *cells, ratio])
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


def notes(records: Sequence[Record], runs: Mapping[str, list[Record]]) -> list[str]:
    """How to read the table; the settings; what failed, diverged or was warned of."""
    seeds = len({record.config.seed for record in records})
    many = f"Mean ± standard deviation over {seeds} seeds"
    lines = [f"{many if seeds > 1 else 'One seed, so no error bars'}; n: runs that finished."]
    for name, group in runs.items():
        hyper = ", ".join(f"{k} {v}" for k, v in group[0].config.hyper.items())
        lines.append(f"{registry.entry(name).label}: {hyper}")
    told = set()
    for r in records:
        who = f"{registry.entry(r.config.optimizer).label}, seed {r.config.seed}"
        if r.status == FAILED:
            lines.append(f"{who} failed: {r.error}")
        if "diverged_at" in r.result:
            lines.append(f"{who} diverged in epoch {r.result['diverged_at']}")
        for warning in r.environment.get("warnings", ()):
            if (r.config.optimizer, warning) not in told:
                told.add((r.config.optimizer, warning))
                lines.append(f"{who}: {warning}")
    return lines
