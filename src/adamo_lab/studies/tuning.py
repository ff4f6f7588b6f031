"""What AdamW, AdamP and SGD can do: the trials that an optimizer has to be compared with.

Those of CIFAR-100 are judged by 5,000 training images that were held out, with the paper's schedule
at a third, at half and, because these did not predict it, at its full length; those of the language
model by its validation text; those of modular addition by the epoch at which they generalize, the
paper's only measure there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import Arm, Metric, Runs, Study, arm, trials
from .paper import CORPORA, FINAL, GROKKED, LOSS

SHORT, LONG, FULL = 100, 150, 300  # epochs on CIFAR-100


def swept(hyper: dict[str, Any], *rates: float | None) -> list[Arm]:
    """AdamW at several learning rates of the SWA phase; None is the protocol's."""
    made = (hyper if rate is None else {**hyper, "swa_lr": rate} for rate in rates)
    return [arm("adamw", **one) for one in made]


ALL = {"lr": 8e-4, "weight_decay": 0.5}
MATRICES = {**ALL, "decay_vectors": False}  # no decay of biases and norm layers
VISION = {
    SHORT: (
        arm("adamw", lr=8e-4, weight_decay=0.01),
        *swept(ALL, None, 3e-4),
        *swept(MATRICES, None),
    ),
    LONG: (
        *swept(ALL, None, 3e-4),
        *swept(MATRICES, None, 3e-4),
        *swept({**MATRICES, "weight_decay": 1.5}, None),
        *trials("sgd", swa_lr=(0.0125, 0.03)),
    ),
    # With the length the best SWA rate falls: lower ones, too. AdamP leaves a tenth of the decay to
    # what it projects: three strengths, and AdamW's own for all.
    FULL: (
        *swept(ALL, None, 5e-5, 1.5e-4, 2e-4, 3e-4, 1e-3),
        *swept(MATRICES, None, 5e-5, 1.5e-4, 2e-4, 3e-4, 1e-3),
        *trials("adamp", weight_decay=(0.1, 0.5, 2.0), swa_lr=(1e-4, 2e-4, 3e-4)),
        *trials("adamp", weight_decay=(0.5,), wd_ratio=(1.0,), swa_lr=(1e-4, 2e-4, 3e-4)),
    ),
}

# Modular addition: weight decays by lr, the same for AdamW and for AdamP.
SUMS = {
    1e-3: (0.3, 0.5, 1.0, 1.5, 2.0, 3.0),
    2e-3: (0.5, 1.0, 1.5, 2.0, 3.0),
    4e-3: (0.5, 1.0, 1.5, 2.0, 3.0),
    8e-3: (0.5, 1.0, 2.0),
}
SUMS_ARMS = tuple(
    one
    for optimizer in ("adamw", "adamp")
    for lr, decays in SUMS.items()
    for one in trials(optimizer, lr=(lr,), weight_decay=decays)
)
RATES, DECAYS = (1e-3, 2e-3, 4e-3, 8e-3), (0.01, 0.1, 0.5)
TEXT_ARMS = (
    *trials("adamw", lr=RATES, weight_decay=DECAYS),
    *trials("adamp", lr=RATES, weight_decay=DECAYS),
)

# The paper prints neither τ_target nor β_τ, nor whether the schedule moves η_ρ, nor a reason for δ
# to wait until epoch 200. Its η_ρ is 6.25 times its η_θ.
SCHEDULED = {"radial_lr": None, "radial_lr_ratio": 6.25}
FROM_THE_FIRST = {"late": {}, "delta": 0.1, "wd_ratio": 0.5}
TARGETS = (1e-4, 1e-2, 1.0, 1e2, 1e4)


def reading(name: str, label: str, targets: Sequence[float], **changes: Any) -> list[Arm]:
    """The paper's AdamO, read in one way, at several τ_target."""
    return [arm("adamo_paper", name, label, curvature_target=x, **changes) for x in targets]


CONSTANTS = (
    *reading("adamo_paper", "AdamO (paper)", TARGETS),
    *reading("scheduled", "η_ρ follows the schedule", TARGETS[1:], **SCHEDULED),
    *reading("projected", "δ from the first epoch", TARGETS[2:4], **FROM_THE_FIRST),
    *reading("slow", "β_τ = 0.99", TARGETS[2:3], curvature_beta=0.99),
)

TUNING = (
    Study(
        name="tuning-cifar100",
        title="Tuning on CIFAR-100",
        about="Trials of AdamW, AdamP and SGD, judged by 5,000 held-out training images: twelve "
        "each of AdamW and of AdamP at the full length.",
        kind="trials",
        runs=tuple(
            # evaluated every five epochs, to save time
            Runs("cifar100", n, rows, {"holdout": 5000, "every": None if n == SHORT else 5})
            for n, rows in VISION.items()
        ),
        metrics=(
            Metric("swa_valid_accuracy", "SWA", percent=True),
            Metric("swa_valid_loss", "SWA loss", higher_is_better=False, digits=3),
            Metric("valid_accuracy", "final", percent=True),
        ),
        seeds=(0,),
    ),
    Study(
        name="constants",
        title="What the paper does not print",
        about="The paper's AdamO on CIFAR-100 in twelve readings, judged by 5,000 held-out images.",
        kind="trials",
        runs=(Runs("cifar100", FULL, CONSTANTS, {"holdout": 5000, "every": 5}),),
        metrics=(Metric("swa_valid_accuracy", "SWA", percent=True),),
        seeds=(0,),
    ),
    Study(
        name="tuning-grokking",
        title="Tuning on modular addition",
        about="Nineteen trials each of AdamW and of AdamP: the epoch at which they generalize.",
        kind="trials",
        runs=(Runs("grokking", 5000, SUMS_ARMS),),
        metrics=(GROKKED, FINAL),
        seeds=(0,),
    ),
    Study(
        name="tuning-language",
        title="Tuning on text",
        about="Twelve trials each of AdamW and of AdamP on either corpus, judged by the validation "
        "text.",
        kind="trials",
        runs=tuple(Runs("language", 50, TEXT_ARMS, {"corpus": corpus}) for corpus in CORPORA),
        metrics=(LOSS,),
        seeds=(0,),
    ),
)
