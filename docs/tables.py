"""Tables from records, and links to lines of code, in the pages: python docs/tables.py

What stands between ``<!-- table NAME -->`` and ``<!-- end -->`` is written by this program, and so
are the line numbers of links such as [`before`](../src/adamo_optim/control.py#L125).
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adamo_lab.optimizers import REGISTRY
from adamo_lab.records import Record, load_all

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
LINK = re.compile(r"(\[`(\w+)`\]\(\.\./(src/[\w/]+\.py)#L)\d+")


def records(study: str) -> dict[str, list[Record]]:
    """The finished runs of a study by optimizer, in the registry's order."""
    found, problems = load_all(ROOT / "results" / study)
    if problems:
        raise ValueError("; ".join(problems))
    finished = [record for record in found.values() if record.status == "finished"]
    runs = {key: [r for r in finished if r.config.optimizer == key] for key in REGISTRY}
    return {key: same for key, same in runs.items() if same}


def study(name: str, columns: dict[str, tuple[str, float, int]]) -> str:
    """Mean ± standard deviation of some results; columns are {result: (title, factor, digits)}."""
    titles = [title for title, _, _ in columns.values()]
    rows = [["optimizer", "settings", *titles, "n", "hardware", "commit"]]
    for key, runs in records(name).items():
        cells = [spread([run.result[column] for run in runs], factor, digits)
                 for column, (_, factor, digits) in columns.items()]  # fmt: skip
        rows.append([
            REGISTRY[key].label, settings(runs[0]), *cells, str(len(runs)),
            *(", ".join(sorted({r.environment[x] for r in runs})) for x in ("device", "commit")),
        ])  # fmt: skip
    return table(rows)


def settings(run: Record) -> str:
    """Those that tell one row from another."""
    shown = ("lr", "weight_decay", "radial_lr", "radial_lr_ratio", "curvature_target", "tangential")
    hyper = {key: run.config.hyper[key] for key in shown if key in run.config.hyper}
    if hyper.get("tangential") == "additive":
        del hyper["tangential"]
    return ", ".join(f"{key} {value}" for key, value in hyper.items())


def spread(values: list[float | None], factor: float, digits: int) -> str:
    """Mean ± standard deviation; a run without a value never got there."""
    found = [factor * value for value in values if value is not None]
    if not found:
        return "never"
    mean = f"{statistics.fmean(found):.{digits}f}"
    text = mean if len(found) == 1 else f"{mean} ± {statistics.stdev(found):.{digits}f}"
    return text if len(found) == len(values) else f"{text} ({len(found)} of {len(values)} runs)"


def bench(name: str) -> str:
    """Time of a step against fused AdamW: every optimizer on every network."""
    found = load_bench(name)["networks"]
    names = list(dict.fromkeys(o for network in found.values() for o in network["optimizers"]))
    rows = [["optimizer", *(f"{k} ({v['parameters'] / 1e6:.1f} M)" for k, v in found.items())]]
    for optimizer in names:
        cells = [network["optimizers"].get(optimizer) for network in found.values()]
        rows.append([optimizer, *(ratio(cell) if cell else "–" for cell in cells)])
    return table(rows)


def ratio(cell: dict[str, Any]) -> str:
    value = cell.get("device_ratio", cell["ratio"])
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def training() -> str:
    rows = [["network", "speed with AdamO / with AdamW fused", "steps/s with AdamO", "file"]]
    for name in ("bench-cuda", "bench-cuda-training"):
        for network, found in load_bench(name)["training"].items():
            share, speed = found["share_of_adamw_fused"], found["steps_per_second"]
            rows.append([network, f"{share:.2f}", f"{speed:.0f}", f"`{name}.json`"])
    return table(rows)


def load_bench(name: str) -> Any:
    return json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())


def table(rows: list[list[str]]) -> str:
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


GROKKING = {
    "test_accuracy": ("test accuracy, %", 100.0, 2),
    "grokking_epoch": ("grokking epoch", 1.0, 0),
}
TABLES: dict[str, Callable[[], str]] = {
    "language": lambda: study("language", {"valid_loss": ("validation loss", 1, 3)}),
    "table1": lambda: study(
        "table1",
        {"swa_test_accuracy": ("SWA, %", 100, 2), "test_accuracy": ("last epoch, %", 100, 2)},
    ),
    "table2": lambda: study("table2", GROKKING),
    "table3": lambda: study("table3", GROKKING),
    "fig1": lambda: study(
        "fig1",
        {
            "weight_norm": ("‖w‖", 1, 1),
            "boundary_length": ("boundary length", 1, 2),
            "test_accuracy": ("test accuracy, %", 100, 1),
        },
    ),
    "cuda": lambda: bench("bench-cuda"),
    "cpu": lambda: bench("bench-cpu"),
    "training": training,
}


def line_of(name: str, path: str) -> int:
    """Where a function or class begins."""
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        if re.match(rf"\s*(?:def|class) {name}\b", line):
            return number
    raise ValueError(f"{path} has no function or class {name}")


def filled(page: str) -> str:
    """A page's text with its tables and line numbers made anew."""
    page = TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)
    return LINK.sub(lambda found: f"{found[1]}{line_of(found[2], found[3])}", page)


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text()
        if (new := filled(text)) != text:
            path.write_text(new)
            print(path)
