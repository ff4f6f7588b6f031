"""What a user watches: a table in the terminal, and panels in TensorBoard and W&B."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from .blockwise import Blockwise

KEPT = 16  # values a curve has: the table is to fit into 80 columns
BARS = "▁▂▃▄▅▆▇█"
MEANINGS = {
    "angle": "how far a step turned the weight, in radians",
    "norm": "‖w‖ before the step; a weight that AngularAdamW turns keeps it",
    "gradient_norm": "‖g‖",
    "at_max_angle": "1 where max_angle bounded the turn: a larger lr turns it no faster",
    "eta_radial": "AdamO's step size of the norm",
    "guard_…/total": "in how many parameters this part of AdamO's guard acted",
}
COLUMNS = ("parameter", "shape", "rule", "why")

History = Mapping[str, Mapping[str, Sequence[float]]]  # quantity: parameter: values
_histories: WeakKeyDictionary[Blockwise, Any] = WeakKeyDictionary()


def rules(optimizer: Blockwise) -> list[list[str]]:
    """Which parameter follows which rule, and why: rows of ``COLUMNS``."""
    return [[p.name, "×".join(map(str, p.shape)), p.rule, p.reason] for p in optimizer.explain()]


def markdown(optimizer: Blockwise) -> str:
    """Rules and the meaning of the curves, as a panel of text shows them."""
    tables = [(COLUMNS, rules(optimizer)), (("curve", "meaning"), [*MEANINGS.items()])]
    lines = [f"**{type(optimizer).__name__}**", ""]
    for header, rows in tables:
        marks = ["---"] * len(header)
        lines += [f"| {' | '.join(row)} |" for row in (header, marks, *rows)] + [""]
    return "\n".join(lines)


def layout(prefix: str) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom scalars: a chart for every quantity, a line for every parameter."""
    names = [name for name in MEANINGS if "/" not in name]
    return {prefix: {name: ["Multiline", [f"{prefix}/{name}/.*"]] for name in names}}


def record(optimizer: Blockwise) -> History:
    """Angle and norm of what the last step moved, after those recorded before; synchronizes."""
    fresh = {name: defaultdict(lambda: deque(maxlen=KEPT)) for name in ("angle", "norm")}
    history = _histories.setdefault(optimizer, fresh)
    rows = optimizer.diagnostics(synchronize=True)
    for name, row in rows.items():
        for quantity, curves in history.items():
            curves[name].append(row[quantity])
    return {quantity: {name: curves[name] for name in rows} for quantity, curves in history.items()}


def table(history: History, title: str) -> Any:
    """A ``rich`` table with a line for every parameter that has a history."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    result.add_column("parameter", overflow="fold")
    for quantity in history:
        result.add_column(quantity, justify="right", no_wrap=True)
        result.add_column("over time", no_wrap=True)
    for name in history["norm"]:
        curves = [curves[name] for curves in history.values()]
        cells = [cell for values in curves for cell in (f"{values[-1]:.4g}", spark(values))]
        result.add_row(*map(Text, (name, *cells)))
    return result


def spark(values: Sequence[float]) -> str:
    """A curve from its own least value to its largest; flat where these differ by under 1 %."""
    finite = [x for x in values if abs(x) < float("inf")]  # NaN is not below anything
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low if high - low > 0.01 * abs(high) else 0.0

    def bar(x: float) -> str:
        if not abs(x) < float("inf"):
            return "!"
        return BARS[round((x - low) / span * (len(BARS) - 1))] if span else BARS[3]

    return "".join(map(bar, values))
