"""The demo's runs: three small tasks, AdamW and AdamO on each."""

from __future__ import annotations

from .records import RunConfig
from .studies import Request
from .studies.base import run

DEMO = (  # task, optimizers, epochs, seeds
    ("toy2d", ("adam", "adamw", "adamo_no_decay", "adamo"), 500, (0,)),
    ("digits", ("adamw", "adamo"), 15, (0, 1)),
    ("grokking", ("adamw", "adamo"), 2500, (0,)),
)
QUICK = 0.04


def demo_runs(quick: bool = False) -> list[RunConfig]:
    """About three minutes on two cores; the long runs first, so that no core idles at the end."""
    scale = QUICK if quick else 1.0
    runs = [
        run(task, name, seed, max(2, round(epochs * scale)), Request())
        for task, names, epochs, seeds in DEMO
        for seed in seeds
        for name in names
    ]
    return list(reversed(runs))
