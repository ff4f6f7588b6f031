"""What the paper starts from, on three tasks: does AdamW's decay make the norms oscillate?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..records import RunConfig
from .base import Claim, Metric, Request, Study, run

RADIAL_SHARE = Metric(
    "radial_share", "radial share", percent=True, higher_is_better=False, digits=3
)
ROWS = ("adam", "adamw", "adamo_paper", "adamo")
DESTROYED = {("grokking", "adamo_paper")}  # has no norms to speak of: Table 2
TASKS = {  # its length, and how it reads in a title and a claim
    "digits": (40, "handwritten digits", "digits"),
    "grokking": (5000, "modular addition", "modular addition"),
    "language": (50, "Tiny Shakespeare", "Tiny Shakespeare"),
}


def runs(task: str, request: Request) -> list[RunConfig]:
    epochs, *_ = TASKS[task]
    return [
        run(task, name, seed, epochs, request, watch="norms")
        for seed in request.seeds
        for name in ROWS
        if (task, name) not in DESTROYED
    ]


def premise(task: str) -> Study:
    _, title, where = TASKS[task]
    papers = "adamo" if (task, "adamo_paper") in DESTROYED else "adamo_paper"
    return Study(
        name=f"premise-{task}",
        title=f"The premise, on {title}",
        about="Way undone: of the distance that norms move within 100 steps, the share that "
        "cancels out (for a random walk 90 %). Radial share: the part of ‖g‖² along the weight, of "
        "the sum over the run, and of a single step.",
        kind="table",
        runs=partial(runs, task),
        metrics=(
            Metric("way_undone", "way undone", percent=True, higher_is_better=False),
            Metric("way_a_step", "way a step", percent=True, higher_is_better=False, digits=3),
            RADIAL_SHARE,
            replace(RADIAL_SHARE, key="radial_share_of_a_step", label="of a single step"),
        ),
        optimizers=ROWS,
        claims=(
            Claim(
                f"On {where} decay adds to how the norms oscillate, however little that is: AdamW "
                "undoes more of their way than Adam.",
                "way_undone", "adamw", ">", "adam", source="abstract, section 1",
            ),
            Claim(
                f"On {where} AdamO suppresses that: it undoes less than AdamW.",
                "way_undone", papers, "<", "adamw", source="section 1",
            ),
        ),
        example=f"adamo-lab study premise-{task}",
    )  # fmt: skip


PREMISE = tuple(map(premise, TASKS))
