"""CIFAR-100 as most people train on it: sixty epochs, one cosine, neither averaging nor smoothing.

Both optimizers get the same four pairs of learning rate and decay, judged by held-out images; the
rest of AdamO are its defaults. The best pair of each then runs on seeds no trial has seen.
"""

from __future__ import annotations

from itertools import product

from ..optimizers import OURS, Hyper
from ..records import RunConfig
from .base import Metric, Request, Study, run_with
from .tuning import HELD_OUT

EPOCHS = 60
OPTIONS = {"schedule": "cosine", "swa": False, "smoothing": 0.0}
PAIRS = tuple(product((1e-3, 3e-3), (0.1, 0.5)))


def adamw(lr: float, decay: float) -> tuple[str, Hyper]:
    return "adamw", {"lr": lr, "weight_decay": decay}


def adamo(lr: float, decay: float) -> tuple[str, Hyper]:
    return "adamo", {**OURS, "lr": lr, "weight_decay": decay}


def trials(request: Request) -> list[RunConfig]:
    return [
        run_with(
            *(hyper, "cifar100", name, seed, EPOCHS, request),
            **{**OPTIONS, "holdout": HELD_OUT, "every": 5},
        )
        for seed in request.seeds
        for name, hyper in [make(*pair) for make in (adamw, adamo) for pair in PAIRS]
    ]


TUNING = Study(
    name="tuning-cosine",
    title="Tuning on CIFAR-100 with a cosine",
    about="Sixty epochs, one cosine, no averaged weights; judged by 5,000 held-out training "
    "images. Four trials each.",
    kind="trials",
    runs=trials,
    metrics=(
        Metric("valid_accuracy", "final", percent=True),
        Metric("valid_loss", "loss", higher_is_better=False, digits=3),
    ),
    optimizers=("adamw", "adamo"),
    seeds=1,
    example="adamo-lab study tuning-cosine --seeds 1 --data-dir ~/data",
)

COSINE = (TUNING,)
