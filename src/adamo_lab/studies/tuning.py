"""What AdamW, AdamP and SGD can do: the trials that an optimizer has to be compared with.

Every trial is spelled out, so that the records keep their meaning when a default changes. Those of
CIFAR-100 are judged by 5,000 training images that were held out, with the paper's schedule at a
third, at half and, because these did not predict it, at its full length; those of the language
model by its validation text; those of modular addition by the epoch at which they generalize, the
paper's only measure there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, starmap
from typing import Any

from ..records import RunConfig
from .base import Metric, Request, Study, run_with
from .tables import CORPORA, FINAL, GROKKED, LOSS

HELD_OUT = 5000
SHORT, LONG, FULL = 100, 150, 300  # epochs on CIFAR-100
SUMS_EPOCHS, TEXT_EPOCHS = 5000, 50
ADAMW = {"lr": 8e-4, "weight_decay": 0.5}
MATRICES = {**ADAMW, "decay_vectors": False}  # no decay of biases and norm layers
ADAMP = {**ADAMW, "delta": 0.1, "wd_ratio": 0.1}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}


def swept(hyper: dict[str, Any], *rates: float | None) -> list[dict[str, Any]]:
    """The same trial at several learning rates of the SWA phase; None is the protocol's."""
    return [hyper if rate is None else {**hyper, "swa_lr": rate} for rate in rates]


# CIFAR-100: (epochs, optimizer, hyper-parameters)
VISION: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (SHORT, "adamw", {**ADAMW, "weight_decay": 0.01}),
    *((SHORT, "adamw_tuned", trial) for trial in swept(ADAMW, None, 3e-4)),
    (SHORT, "adamw_tuned", MATRICES),
    *((LONG, "adamw_tuned", trial) for trial in swept(ADAMW, None, 3e-4)),
    *((LONG, "adamw_tuned", trial) for trial in swept(MATRICES, None, 3e-4)),
    (LONG, "adamw_tuned", {**MATRICES, "weight_decay": 1.5}),
    *((LONG, "sgd", trial) for trial in swept(SGD, 0.0125, 0.03)),
    # With the length the best SWA rate falls: lower ones, too.
    *((FULL, "adamw_tuned", x) for x in swept(ADAMW, None, 5e-5, 1.5e-4, 2e-4, 3e-4, 1e-3)),
    *((FULL, "adamw_tuned", x) for x in swept(MATRICES, None, 5e-5, 1.5e-4, 2e-4, 3e-4, 1e-3)),
    # AdamP leaves a tenth of the decay to what it projects: three strengths, and AdamW's own for
    # all.
    *(
        (FULL, "adamp", trial)
        for decay, ratio in ((0.1, 0.1), (0.5, 0.1), (2.0, 0.1), (0.5, 1.0))
        for trial in swept({**ADAMP, "weight_decay": decay, "wd_ratio": ratio}, 1e-4, 2e-4, 3e-4)
    ),
)

# Modular addition: (lr, weight decay), the same for AdamW and for AdamP.
SUMS = (
    *((1e-3, decay) for decay in (0.3, 0.5, 1.0, 1.5, 2.0, 3.0)),
    *((2e-3, decay) for decay in (0.5, 1.0, 1.5, 2.0, 3.0)),
    *((4e-3, decay) for decay in (0.5, 1.0, 1.5, 2.0, 3.0)),
    *((8e-3, decay) for decay in (0.5, 1.0, 2.0)),
)
TEXT = tuple(product((1e-3, 2e-3, 4e-3, 8e-3), (0.01, 0.1, 0.5)))


def adamw(lr: float, decay: float) -> tuple[str, dict[str, Any]]:
    return "adamw", {"lr": lr, "weight_decay": decay}


def adamp(lr: float, decay: float) -> tuple[str, dict[str, Any]]:
    return "adamp", {**ADAMP, "lr": lr, "weight_decay": decay}


def both(pairs: Sequence[tuple[float, float]]) -> list[tuple[str, dict[str, Any]]]:
    return [*starmap(adamw, pairs), *starmap(adamp, pairs)]


def vision(request: Request) -> list[RunConfig]:
    return [
        run_with(
            *(hyper, "cifar100", name, seed, epochs, request),
            holdout=HELD_OUT,
            every=5 if epochs >= LONG else None,  # epochs between two evaluations, to save time
        )
        for seed in request.seeds
        for epochs, name, hyper in VISION
    ]


def sums(request: Request) -> list[RunConfig]:
    return runs_of(both(SUMS), "grokking", SUMS_EPOCHS, request)


def text(request: Request) -> list[RunConfig]:
    made = (replace(request, options={"corpus": c, **request.options}) for c in CORPORA)
    return [run for asked in made for run in runs_of(both(TEXT), "language", TEXT_EPOCHS, asked)]


def runs_of(
    trials: Sequence[tuple[str, dict[str, Any]]], task: str, epochs: int, request: Request
) -> list[RunConfig]:
    """Every trial, (optimizer, hyper-parameters), with every seed."""
    return [
        run_with(hyper, task, name, seed, epochs, request)
        for seed in request.seeds
        for name, hyper in trials
    ]


TUNING_VISION = Study(
    name="tuning-cifar100",
    title="Tuning on CIFAR-100",
    about="Trials of AdamW, AdamP and SGD, judged by 5,000 held-out training images: twelve each "
    "of AdamW and of AdamP at the full length.",
    kind="trials",
    runs=vision,
    metrics=(
        Metric("swa_valid_accuracy", "SWA", percent=True),
        Metric("swa_valid_loss", "SWA loss", higher_is_better=False, digits=3),
        Metric("valid_accuracy", "final", percent=True),
    ),
    optimizers=("adamw", "adamw_tuned", "adamp", "sgd"),
    seeds=1,
    example="adamo-lab study tuning-cifar100 --seeds 1 --data-dir ~/data",
)

TUNING_SUMS = Study(
    name="tuning-grokking",
    title="Tuning on modular addition",
    about="Nineteen trials each of AdamW and of AdamP: the epoch at which they generalize.",
    kind="trials",
    runs=sums,
    metrics=(GROKKED, FINAL),
    optimizers=("adamw", "adamp"),
    seeds=1,
    example="adamo-lab study tuning-grokking --seeds 1",
)

TUNING_TEXT = Study(
    name="tuning-language",
    title="Tuning on text",
    about="Twelve trials each of AdamW and of AdamP on either corpus, judged by the validation "
    "text.",
    kind="trials",
    runs=text,
    metrics=(LOSS,),
    optimizers=("adamw", "adamp"),
    seeds=1,
    example="adamo-lab study tuning-language --seeds 1 --data-dir ~/data",
)
