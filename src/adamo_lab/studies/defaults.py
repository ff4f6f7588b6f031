"""Better defaults? Two ways to carry AdamW's settings over; the second is the default now.

By the first rule: one and a half times the decay, the norm at half speed; with AdamW's decay of
vectors too, but on CIFAR-100, because it lost on characters with it. To the letter: all of AdamW's
own numbers, the norm at twice its speed; on the other tasks these are runs of :mod:`.speed`.
"""

from __future__ import annotations

from functools import partial

from ..optimizers import FIRST, Hyper, settings
from ..records import RunConfig
from .base import Claim, Metric, Request, Study, run, run_with
from .speed import EPOCHS, OPTIONS, SPEEDS, at_speed
from .tables import BEST, FINAL, GROKKED, LOSS, SWA, SWA_LOSS
from .tuning import FINAL_VISION_TRIALS, FULL, SHARED, fresh, runs_of

RULE, LETTER = "adamo", "adamo_double"
FACTOR = 1.5  # of AdamW's decay


def by_the_rule(adamw: Hyper) -> Hyper:
    """With what AdamO's best trial on CIFAR-100 has beyond the first defaults.

    ``second_moment`` is felt by scale-invariant weights only: on the other tasks there are none.
    """
    decay = adamw["weight_decay"]
    changed = {"weight_decay": round(FACTOR * decay, 9), "low_dim_decay": decay}
    return {**FIRST, "second_moment": "auto", **adamw, **changed}


def runs(task: str, request: Request) -> list[RunConfig]:
    adamw, epochs = settings(task, "adamw"), EPOCHS[task]
    ours = {RULE: by_the_rule(adamw), LETTER: at_speed(SPEEDS[LETTER], adamw)}
    made = []
    for options in OPTIONS[task]:
        for seed in request.seeds:
            made.append(run(task, "adamw", seed, epochs, request, **options))
            for name, hyper in ours.items():
                made.append(run_with(hyper, task, name, seed, epochs, request, **options))
    return made


def defaults(task: str, where: str, metrics: tuple[Metric, ...], better: str, seeds: int) -> Study:
    """``better`` is what a smaller value of the first metric means."""
    key = metrics[0].key
    return Study(
        name=f"defaults-{task}",
        title=f"Better defaults, on {where}",
        about="AdamW's settings carried over with its decay of vectors as well: by the first "
        "rule (1.5 times the decay, the norm at half speed), and as they are with the norm at "
        "double speed. What loses to AdamW here does not become the default.",
        kind="table",
        runs=partial(runs, task),
        metrics=metrics,
        optimizers=("adamw", RULE, LETTER),
        labels={RULE: "AdamO, by the first rule"},
        claims=(
            Claim(
                f"By the first rule, with AdamW's decay of vectors, AdamO {better} than that "
                "AdamW.",
                key, RULE, "<", "adamw", source="ours, not the paper's",
            ),
            Claim(
                f"With AdamW's own numbers and a norm twice as fast AdamO {better} than AdamW.",
                key, LETTER, "<", "adamw", source="ours, not the paper's",
            ),
        ),
        seeds=seeds,
        example=f"adamo-lab study defaults-{task}"
        + (" --data-dir ~/data" if key == LOSS.key else ""),
    )  # fmt: skip


def vision(request: Request) -> list[RunConfig]:
    """AdamW's best trial, by the first rule and to the letter; with AdamO's best second moments."""
    (theirs, adamw), *_ = FINAL_VISION_TRIALS
    rule = {**by_the_rule(adamw), "low_dim_decay": 0.0}
    letter = {**at_speed(SPEEDS[LETTER], adamw), **SHARED}
    trials = [(theirs, adamw), (RULE, rule), (LETTER, letter)]
    return runs_of(trials, "cifar100", FULL, fresh(request))


VISION = Study(
    name="defaults-cifar100",
    title="Better defaults, on CIFAR-100",
    about="AdamW's best trial carried over, with second moments that a weight shares: by the "
    "first rule without decay of vectors, and with AdamW's own numbers and a norm twice as fast.",
    kind="table",
    runs=vision,
    metrics=(SWA, SWA_LOSS, FINAL, BEST),
    optimizers=("adamw_best", RULE, LETTER),
    labels={RULE: "AdamO, first rule, shared moments"},
    claims=(
        Claim(
            "By the first rule, with shared second moments, AdamO is more accurate than that "
            "AdamW.",
            "swa_test_accuracy", RULE, ">", "adamw_best", source="ours, not the paper's",
        ),
        Claim(
            "With AdamW's own numbers and a norm twice as fast AdamO is more accurate than AdamW.",
            "swa_test_accuracy", LETTER, ">", "adamw_best", source="ours, not the paper's",
        ),
    ),
    seeds=6,
    example="adamo-lab study defaults-cifar100 --data-dir ~/data",
)  # fmt: skip

DEFAULTS = (
    VISION,
    defaults("grokking", "modular addition", (GROKKED, FINAL), "groks earlier", 30),
    defaults("language", "text", (LOSS,), "has a lower loss", 6),
)
