"""How fast should the norm move? All of AdamW's numbers, and one factor: ``radial_lr_ratio``."""

from __future__ import annotations

from functools import partial

from ..optimizers import FIRST, Hyper, settings
from ..records import RunConfig
from .base import Claim, Metric, Request, Study, run, run_with
from .tables import CORPORA, FINAL, GROKKED, LOSS
from .tuning import SUMS_EPOCHS, TEXT_EPOCHS

# The norm's learning rate as a multiple of AdamW's, which moves norm and direction at one speed.
SPEEDS = {"adamo_half": 0.5, "adamo_equal": 1.0, "adamo_double": 2.0, "adamo_fast": 4.0}
# A faster norm decays faster, too: AdamW with as much more of it, on text.
DECAYS = {"grokking": {}, "language": {"adamw_decay2": 2.0, "adamw_decay4": 4.0}}
EPOCHS = {"grokking": SUMS_EPOCHS, "language": TEXT_EPOCHS}
OPTIONS = {"grokking": [{}], "language": [{"corpus": corpus} for corpus in CORPORA]}


def at_speed(ratio: float, adamw: Hyper) -> Hyper:
    """AdamO with AdamW's learning rate and decay of every parameter, and a norm at this speed."""
    decay = adamw["weight_decay"]
    return {**FIRST, **adamw, "low_dim_decay": decay, "radial_lr_ratio": ratio}


def runs(task: str, request: Request) -> list[RunConfig]:
    """AdamW, also with more decay, and AdamO with its lr and its decay of every parameter."""
    adamw, epochs = settings(task, "adamw"), EPOCHS[task]
    made = []
    for options in OPTIONS[task]:
        for seed in request.seeds:
            made.append(run(task, "adamw", seed, epochs, request, **options))
            for name, factor in DECAYS[task].items():
                hyper = {**adamw, "weight_decay": round(factor * adamw["weight_decay"], 9)}
                made.append(run_with(hyper, task, name, seed, epochs, request, **options))
            for name, ratio in SPEEDS.items():
                hyper = at_speed(ratio, adamw)
                made.append(run_with(hyper, task, name, seed, epochs, request, **options))
    return made


def speed(task: str, where: str, metrics: tuple[Metric, ...], better: str) -> Study:
    """``better`` is what a smaller value of the first metric means."""
    key = metrics[0].key
    return Study(
        name=f"speed-{task}",
        title=f"Speed of the norm, on {where}",
        about="AdamW's learning rate and decay, of vectors too; the norm moves at half, once, "
        "twice and four times that rate.",
        kind="table",
        runs=partial(runs, task),
        metrics=metrics,
        optimizers=("adamw", *DECAYS[task], *SPEEDS),
        claims=(
            Claim(
                f"With AdamW's numbers and a norm four times as fast AdamO {better} than AdamW.",
                key, "adamo_fast", "<", "adamw", source="ours, not the paper's",
            ),
            Claim(
                f"It is the norm's speed: AdamO {better} with it than at AdamW's own.",
                key, "adamo_fast", "<", "adamo_equal", source="ours, not the paper's",
            ),
            *(
                Claim(
                    f"It is not the decay alone: AdamO with a norm four times as fast {better} "
                    f"than AdamW with {round(factor)} times its decay.",
                    key, "adamo_fast", "<", name, source="ours, not the paper's",
                )
                for name, factor in DECAYS[task].items()
            ),
        ),
        seeds=6,
        example=f"adamo-lab study speed-{task}" + (" --data-dir ~/data" if key == LOSS.key else ""),
    )  # fmt: skip


SPEED = (
    speed("grokking", "modular addition", (GROKKED, FINAL), "groks earlier"),
    speed("language", "text", (LOSS,), "has a lower loss"),
)
