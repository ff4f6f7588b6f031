"""A group of runs as cells of text: for the page, for a terminal. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .records import is_number
from .runs import DERIVED, Group, Line, value
from .studies import STUDIES, Metric
from .verdicts import LEVEL, Summary

MOST_LINES = 10  # beyond that, the best setting of each row
MOST_COLUMNS = 6  # of runs that belong to no study
NOT_METRICS = {"epoch", "lr", "diverged_at", "matrix_norm", "gradient_norm", "gradient_norm_sd"}
HIGHER = {"accuracy", "acc", "auc", "f1", "score", "r2", "bleu", "precision", "recall"}
LOWER = {"loss", "error", "perplexity", "mse", "mae", "rmse", "norm", "variation", "length"}

EXPLAINED = {  # columns whose names say too little
    "swa_test_accuracy": "SWA: test accuracy of the averaged weights.",
    "test_accuracy": "Final: test accuracy after the last epoch.",
    "best_test_accuracy": "Best: the highest test accuracy on the way, which flatters.",
    "weight_norm": "‖w‖: the norm of all weights at the end.",
    "early_test_accuracy": "First 200: mean test accuracy over these epochs.",
    "gain_at_drops": "Gain at drops: the rise of test accuracy when the learning rate drops.",
}


@dataclass(frozen=True)
class Cell:
    text: str
    best: bool = False
    note: str = ""  # small print below the number


@dataclass(frozen=True)
class Row:
    label: str
    cells: list[Cell]
    line: Line  # drawn as a swatch


@dataclass(frozen=True)
class Table:
    heads: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


# --- numbers


def number(value: float, metric: Metric, signed: bool = False) -> str:
    """With the metric's digits, or as many as it takes to see a number that is not zero; numbers
    far off that scale in three digits, a real minus.
    """
    value *= 100 if metric.percent else 1
    digits = metric.digits
    if value and abs(value) < 0.5 * 10**-digits:
        digits = -math.floor(math.log10(abs(value)))
    far = digits > 6 or abs(value) >= 1e6
    text = f"{value:.2e}" if far else f"{value:.{digits}f}"
    if value == 0:
        text = text.lstrip("-")
    sign = "+" if signed and float(text) > 0 else ""
    return sign + text.replace("-", "−")


def spread(mean: float | None, sd: float | None, metric: Metric) -> str:
    if mean is None:
        return "–"
    return number(mean, metric) + (f" ± {number(sd, metric)}" if sd is not None else "")


def p_value(p: float) -> str:
    """Two digits, and where these would hide on which side of 0.05 it lies, as many as it takes."""
    if p < 1e-4:
        return "p < 0.0001"
    digits = next(n for n in (2, 3, 4) if n == 4 or (float(f"{p:.{n}g}") < LEVEL) == (p < LEVEL))
    return f"p = {p:.{digits}g}" if p < 0.1 else f"p = {p:.2f}"


def heading(metric: Metric) -> str:
    return f"{metric.label} (%)" if metric.percent else metric.label


def text(made: Table, most: int | None = None) -> str:
    """Columns for a terminal, the first to the left and the numbers to the right."""
    rows = [["optimizer", *made.heads[:most]]]
    for row in made.rows:
        cells = (f"{c.text} ({c.note})" if c.note else c.text for c in row.cells[:most])
        rows.append([row.label, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    each = ("  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in rows)
    return "\n".join(each)


# --- tables


def table(group: Group) -> Table:
    """A row per line; for every metric our value, the paper's and the difference."""
    heads: list[str] = []
    rows: list[list[Cell]] = [[] for _ in group.lines]
    metrics, missing = columns_of(group), False
    for metric in metrics:
        every = [line.of(metric.key) for line in group.lines]
        missing |= any(ours.missing for ours in every)
        best = best_of(every, metric)
        printed = group.study.paper if group.study else {}
        paper = {name: row[metric.key] for name, row in printed.items() if metric.key in row}
        leader = metric.better(mean for mean, _ in paper.values()) if paper else None
        # a shortened run is no match for the paper's number: it is shown, but not subtracted
        subtracted = bool(paper) and group.full
        heads += [f"{heading(metric)}, ours" if paper else heading(metric)]
        heads += [f"{heading(metric)}, paper"] if paper else []
        heads += ["difference"] if subtracted else []
        for i, (row, line, ours) in enumerate(zip(rows, group.lines, every, strict=True)):
            mean, sd = paper.get(line.name, (None, None))
            gap = None if mean is None or ours.mean is None else ours.mean - mean
            row += [our_cell(ours, metric, i in best)]
            theirs = Cell(spread(mean, sd, metric), mean is not None and mean == leader)
            row += [theirs] if paper else []
            row += [Cell("–" if gap is None else number(gap, metric, True))] if subtracted else []
    counts = (Cell(str(len(x.runs))) for x in group.lines)
    made = [Row(x.label, [*r, n], x) for x, r, n in zip(group.lines, rows, counts, strict=True)]
    return Table([*heads, "runs"], made, notes(group, metrics, missing))


def best_table(group: Group) -> Table:
    """How many settings a row has, and the best of them."""
    metric, chosen = columns_of(group)[0], best_lines(group)
    every = [line.of(metric.key) for line in chosen]
    best, rows = best_of(every, metric), []
    for i, (line, ours) in enumerate(zip(chosen, every, strict=True)):
        same = group.named(line.name)
        at = line.label.removeprefix(line.title).removeprefix(", ")
        counts = [Cell(str(len(same))), Cell(str(sum(len(x.runs) for x in same)))]
        cells = [our_cell(ours, metric, i in best), Cell(at), *counts]
        rows.append(Row(line.title, cells, line))
    heads = [f"best {heading(metric)}", "at", "settings", "runs"]
    return Table(heads, rows, ["Every setting is the mean over its runs."])


def best_lines(group: Group) -> list[Line]:
    """All lines, or where there are many the best of each name, by the first metric."""
    if len(group.lines) <= MOST_LINES:
        return group.lines
    metric = columns_of(group)[0]
    sign = 1 if metric.higher_is_better else -1

    def score(line: Line) -> tuple[bool, float]:
        """Settings of which a run is missing come after all others."""
        found = line.of(metric.key)
        return not found.missing, -math.inf if found.mean is None else sign * found.mean

    best: dict[str, Line] = {}
    for line in sorted(group.lines, key=score, reverse=True):  # of equals the first
        best.setdefault(line.name, line)
    return [line for line in group.lines if line is best[line.name]]


def best_of(every: list[Summary], metric: Metric) -> set[int]:
    """The rows with the best mean among those whose runs all got there; none if all are alike."""
    means = {i: s.mean for i, s in enumerate(every) if s.mean is not None and s.missing == 0}
    if not metric.ranked or not means:
        return set()
    shown = number(metric.better(means.values()), metric)  # what reads alike is alike
    found = {i for i, mean in means.items() if number(mean, metric) == shown}
    return found if len(found) < len(every) else set()


def our_cell(ours: Summary, metric: Metric, best: bool) -> Cell:
    if ours.n and not ours.values:
        return Cell("never" if metric.key == "grokking_epoch" else "–", note=f"0 of {ours.n}")
    note = f"{len(ours.values)} of {ours.n}" if ours.missing else ""
    return Cell(spread(ours.mean, ours.sd, metric), best, note)


def notes(group: Group, metrics: list[Metric], missing: bool) -> list[str]:
    several = any(len(line.runs) > 1 for line in group.lines)
    many = "Mean ± standard deviation of the sample over the runs."
    found = [many if several else "One run each, so there is no standard deviation."]
    found += ["Best in bold.", *(EXPLAINED[m.key] for m in metrics if m.key in EXPLAINED)]
    found += ["“k of n”: only k runs got there, and the mean is of those."] if missing else []
    for line in group.lines:
        if count := sum("diverged_at" in r.result for r in line.runs):
            found.append(f"{line.label}: {count} run{'s' if count > 1 else ''} diverged.")
    return found


# --- columns


def columns_of(group: Group) -> list[Metric]:
    """A study's metrics; for other runs, whatever numbers their results hold."""
    told = (pair for run in group.runs for pair in run.result.items() if pair[0] not in NOT_METRICS)
    seen = {key for key, found in told if found is None or is_number(found)}
    if group.study:
        seen |= {k for k in DERIVED if any(value(run, k) is not None for run in group.runs)}
        return [m for m in group.study.metrics if m.key in seen] or [*group.study.metrics]
    known = {m.key: m for study in STUDIES.values() for m in study.metrics}

    def place(key: str) -> tuple[bool, bool, str]:
        """Where a run ended comes first; the best on the way, which flatters, last."""
        ended = key.startswith(("swa_", "test_", "valid_", "val_"))
        return key.startswith("best_"), not ended, key

    chosen = sorted(seen, key=place)[:MOST_COLUMNS]
    return [known.get(key) or guessed(key, group) for key in chosen]


def guessed(key: str, group: Group) -> Metric:
    """A metric that no study names: its kind shows in its words."""
    values = [v for run in group.runs if (v := value(run, key)) is not None]
    words = {*key.lower().split("_")}
    percent = bool(words & {"accuracy", "acc"}) and all(0 <= v <= 1 for v in values)
    whole = bool(values) and all(float(v).is_integer() for v in values)
    digits = 2 if percent else 0 if whole else 4
    higher, lower = bool(words & HIGHER), bool(words & LOWER)
    return Metric(key, key.replace("_", " "), percent, higher, digits, higher or lower)
