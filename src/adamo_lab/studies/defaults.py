"""Better defaults? AdamW's settings by the rule, with its decay of vectors as well."""

from __future__ import annotations

from functools import partial

from ..optimizers import OURS, Hyper, settings
from ..records import RunConfig
from .base import Claim, Metric, Request, Study, run, run_with
from .tables import CORPORA, FINAL, GROKKED, LOSS
from .tuning import SUMS_EPOCHS, TEXT_EPOCHS

# What AdamO's best trial on CIFAR-100 has beyond today's defaults; there is nothing here that
# "second_moment" would change, because no weight of these models is scale-invariant.
CANDIDATE = {**OURS, "second_moment": "auto"}
FACTOR = 1.5  # of AdamW's decay
EPOCHS = {"grokking": SUMS_EPOCHS, "language": TEXT_EPOCHS}
OPTIONS = {"grokking": [{}], "language": [{"corpus": corpus} for corpus in CORPORA]}


def carried_over(adamw: Hyper) -> Hyper:
    """AdamW's settings by the rule: one and a half times its decay, and its own for vectors."""
    decay = adamw["weight_decay"]
    changed = {"weight_decay": round(FACTOR * decay, 9), "low_dim_decay": decay}
    return {**CANDIDATE, **adamw, **changed}


def runs(task: str, request: Request) -> list[RunConfig]:
    hyper, epochs = carried_over(settings(task, "adamw")), EPOCHS[task]
    made = []
    for options in OPTIONS[task]:
        for seed in request.seeds:
            made.append(run(task, "adamw", seed, epochs, request, **options))
            made.append(run_with(hyper, task, "adamo", seed, epochs, request, **options))
    return made


def defaults(task: str, where: str, metrics: tuple[Metric, ...], better: str, seeds: int) -> Study:
    """``better`` is what a smaller value of the first metric means."""
    key = metrics[0].key
    return Study(
        name=f"defaults-{task}",
        title=f"Defaults to be, on {where}",
        about="AdamW's settings carried over by the rule, with its decay of vectors as well: what "
        "AdamO's defaults become unless it loses to AdamW here.",
        kind="table",
        runs=partial(runs, task),
        metrics=metrics,
        optimizers=("adamw", "adamo"),
        claims=(
            Claim(
                f"With its decay of vectors, too, AdamO {better} than the AdamW it comes from.",
                key, "adamo", "<", "adamw", source="ours, not the paper's",
            ),
        ),
        seeds=seeds,
        example=f"adamo-lab study defaults-{task}"
        + (" --data-dir ~/data" if key == LOSS.key else ""),
    )  # fmt: skip


DEFAULTS = (
    defaults("grokking", "modular addition", (GROKKED, FINAL), "groks earlier", 15),
    defaults("language", "text", (LOSS,), "has a lower loss", 6),
)
