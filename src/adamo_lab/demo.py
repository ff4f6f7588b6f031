"""The demo: three small tasks, our optimizers beside AdamW, and a page that says what to see."""

from __future__ import annotations

from typing import Any

from .records import RunConfig
from .report import Cover
from .studies import Arm, Request, Runs
from .studies.base import arms
from .studies.paper import NO_DECAY

DEMO: tuple[tuple[str, tuple[Arm, ...], int, tuple[int, ...], dict[str, Any]], ...] = (
    # task, rows, epochs, seeds, options of the task
    ("toy2d", (*arms("adam", "adamw"), NO_DECAY, *arms("adamo")), 500, (0,), {}),
    ("digits", arms("adamw", "adamo", "angular"), 15, (0, 1), {"schedule": "cosine"}),
    ("grokking", arms("adamw", "adamo"), 3500, (1,), {}),
)
QUICK = 0.02

COVER = Cover(
    title="AdamW, AdamO and AngularAdamW, side by side",
    lead="Three small tasks in minutes; for each seed all optimizers start from the same "
    "weights and see the same batches. One or two runs each: enough to see how they "
    "differ, not enough to say which is better.",
    stories={
        "grokking": (
            "Modular addition: when does understanding set in?",
            "The network learns (a + b) mod 97 from 30 % of all pairs. It soon knows those by "
            "heart (train loss), while the other pairs stay a mystery for a long time (test "
            "accuracy), until decay has made the weights small enough for a rule to be cheaper "
            "than a memory. Watch the norm of the weights: AdamO moves it at a pace of its own.",
        ),
        "digits": (
            "Handwritten digits: a network with BatchNorm",
            "BatchNorm makes the length of most weights meaningless. AngularAdamW has found out "
            "which, leaves it as it is and turns them all by about the same angle; everything else "
            "follows AdamW. The learning rate falls along a cosine. Layer by layer, the figures "
            "show the norm and the angle of a step.",
        ),
        "toy2d": (
            "Two spirals: decision boundaries",
            "Adam and AdamO without decay, AdamW and AdamO with it draw the line between two noisy "
            "spirals. Each picture gives the norm of the weights; the paper says that AdamO's are "
            "smaller and its boundaries smoother. No norm layer, so AngularAdamW would be AdamW.",
        ),
    },
)


def demo_runs(quick: bool = False) -> list[RunConfig]:
    """About three minutes on two cores; the long runs first, so that no core idles at the end."""
    scale = QUICK if quick else 1.0
    runs = [
        config
        for task, rows, epochs, seeds, options in DEMO
        for config in Runs(task, max(2, round(epochs * scale)), rows, options).configs(
            Request(seeds)
        )
    ]
    return list(reversed(runs))
