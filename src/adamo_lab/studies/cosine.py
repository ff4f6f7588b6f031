"""CIFAR-100 as most people train on it: sixty epochs, one cosine, neither averaging nor smoothing.

Both optimizers get the same four pairs of learning rate and decay, judged by held-out images; the
rest of AdamO are its defaults.
"""

from __future__ import annotations

from itertools import product

from ..optimizers import OURS, Hyper
from ..records import RunConfig
from .base import Metric, Request, Study, run_with
from .tuning import HELD_OUT, adamw

EPOCHS = 60
PROTOCOL = {"schedule": "cosine", "swa": False, "smoothing": 0.0}
OPTIONS = {**PROTOCOL, "holdout": HELD_OUT, "every": 5}
PAIRS = tuple(product((1e-3, 3e-3), (0.1, 0.5)))


def adamo(lr: float, decay: float) -> tuple[str, Hyper]:
    return "adamo", {**OURS, "lr": lr, "weight_decay": decay}


def trials(request: Request) -> list[RunConfig]:
    return [
        run_with(hyper, "cifar100", name, seed, EPOCHS, request, **OPTIONS)
        for seed in request.seeds
        for name, hyper in [make(*pair) for make in (adamw, adamo) for pair in PAIRS]
    ]


TUNING_COSINE = Study(
    name="tuning-cosine",
    title="Tuning on CIFAR-100 with a cosine",
    about="Sixty epochs, one cosine, neither averaging nor smoothing. Four trials each, judged by "
    "5,000 held-out training images.",
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
