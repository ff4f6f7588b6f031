"""Figures 1 to 4 of the paper as lists of runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from ..records import RunConfig
from .base import Claim, Metric, Request, Study, run
from .tables import BEST, FINAL, NORM, SWA

FIG1_ROWS = ("adam", "adamw", "adamo_no_decay", "adamo")
FIG2_ROWS = ("adamw", "adamo")
FIG3_ROWS = ("adamw", "adamp", "adamo_paper")

# Figure 4: lr × weight decay for AdamW, η_θ × η_ρ for AdamO; the paper prints neither grid. Three
# seeds of 50 settings: a network of half the width, and a fifteenth of the epochs.
LRS = (2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
DECAYS = (0.01, 0.05, 0.1, 0.5, 1.0)
RADIAL_LRS = (1e-3, 5e-3, 2e-2, 0.1, 0.5)
GRID_EPOCHS = 20
GRID = {"width": 32, "holdout": 5000, "every": 10}

# The same question where a run takes seconds, over three decades of the learning rate.
DIGIT_LRS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
DIGIT_DECAYS = (0.001, 0.01, 0.1, 1.0)
DIGIT_RADIAL_LRS = (1e-3, 5e-3, 2e-2, 0.1)
DIGIT_EPOCHS = 20

MAPS = {"adamw": "weight_decay", "adamo_paper": "radial_lr"}  # beside lr
SHARES = (
    Metric("near_share", "settings within 1 point of the best", percent=True, digits=0),
    Metric("region_share", "largest region of such settings", percent=True, digits=0),
)


def fig1(request: Request) -> list[RunConfig]:
    return [run("toy2d", name, seed, 1000, request) for seed in request.seeds for name in FIG1_ROWS]


def fig2(request: Request) -> list[RunConfig]:
    """On the digits, where a landscape costs seconds; snapshots of the weights make the plane."""
    return [
        run("digits", name, seed, 40, request, watch=True, snapshots=True)
        for seed in request.seeds
        for name in FIG2_ROWS
    ]


def fig3(request: Request) -> list[RunConfig]:
    """The runs of table 1: the same ids, so nothing is trained twice."""
    return [
        run("cifar100", name, seed, 300, request) for seed in request.seeds for name in FIG3_ROWS
    ]


def cells_of(lrs: Sequence[float], *columns: Sequence[float]) -> list[tuple[str, dict[str, float]]]:
    """The settings of all maps, ``columns`` being the values beside lr of each."""
    return [
        (name, {"lr": lr, key: value})
        for (name, key), values in zip(MAPS.items(), columns, strict=True)
        for lr, value in product(lrs, values)
    ]


def fig4(request: Request) -> list[RunConfig]:
    return [
        run("cifar100", name, seed, GRID_EPOCHS, request, hyper=hyper, **GRID)
        for seed in request.seeds
        for name, hyper in cells_of(LRS, DECAYS, RADIAL_LRS)
    ]


def fig4_digits(request: Request, **options: Any) -> list[RunConfig]:
    return [
        run("digits", name, seed, DIGIT_EPOCHS, request, hyper=hyper, **options)
        for seed in request.seeds
        for name, hyper in cells_of(DIGIT_LRS, DIGIT_DECAYS, DIGIT_RADIAL_LRS)
    ]


FIG1 = Study(
    name="fig1",
    title="Figure 1: decision boundaries",
    about="A small network on points in the plane, with and without decay.",
    kind="boundaries",
    runs=fig1,
    metrics=(
        NORM,
        Metric("boundary_length", "boundary length", higher_is_better=False),
        FINAL,
    ),
    optimizers=FIG1_ROWS,
    claims=(
        Claim(
            "AdamO ends with smaller norms than Adam (both without decay).",
            "weight_norm", "adamo_no_decay", "<", "adam", source="Figure 1",
        ),
        Claim(
            "AdamO ends with smaller norms than Adam (both with decay).",
            "weight_norm", "adamo", "<", "adamw", source="Figure 1",
        ),
        Claim(
            "AdamO's decision boundary is smoother (shorter) than Adam's (both without decay).",
            "boundary_length", "adamo_no_decay", "<", "adam", source="Figure 1",
        ),
        Claim(
            "AdamO's decision boundary is smoother (shorter) than Adam's (both with decay).",
            "boundary_length", "adamo", "<", "adamw", source="Figure 1",
        ),
    ),
    example="adamo-lab study fig1",
)  # fmt: skip

FIG2 = Study(
    name="fig2",
    title="Figure 2: optimization dynamics",
    about="The loss in the plane of the paths' principal components; gradient and weight norms.",
    kind="landscape",
    runs=fig2,
    metrics=(
        Metric("gradient_norm_variation", "variation of ‖g‖", higher_is_better=False),
        NORM,
    ),
    optimizers=FIG2_ROWS,
    claims=(
        Claim(
            "AdamO reduces the fluctuations of the gradient's norm.",
            "gradient_norm_variation", "adamo", "<", "adamw", source="section 3.3",
        ),
        Claim(
            "AdamO ends with a smaller parameter norm.",
            "weight_norm", "adamo", "<", "adamw", source="section 3.3",
        ),
    ),
    example="adamo-lab study fig2",
)  # fmt: skip

FIG3 = Study(
    name="fig3",
    title="Figure 3: accuracy over training on CIFAR-100",
    about="Test accuracy of AdamW, AdamP and AdamO after every few epochs: the runs of Table 1.",
    kind="curves",
    runs=fig3,
    metrics=(
        FINAL,
        BEST,
        SWA,
        Metric("early_test_accuracy", "first 200", percent=True),
        Metric("gain_at_drops", "gain at drops", percent=True),
    ),
    optimizers=FIG3_ROWS,
    claims=(
        Claim(
            "AdamO is more accurate than AdamW over the first 200 epochs (their mean).",
            "early_test_accuracy", "adamo_paper", ">", "adamw", source="Figure 3",
        ),
        Claim(
            "AdamO is more accurate than AdamP over the first 200 epochs (their mean).",
            "early_test_accuracy", "adamo_paper", ">", "adamp", source="Figure 3",
        ),
        Claim(
            "AdamO gains more than AdamW when the learning rate drops.",
            "gain_at_drops", "adamo_paper", ">", "adamw", source="Figure 3",
        ),
        Claim(
            "AdamO gains more than AdamP when the learning rate drops.",
            "gain_at_drops", "adamo_paper", ">", "adamp", source="Figure 3",
        ),
    ),
    example="adamo-lab study fig3 --data-dir ~/data",
)  # fmt: skip

FIG4 = Study(
    name="fig4",
    title="Figure 4: sensitivity to hyper-parameters",
    about="CIFAR-100, half the width, 20 epochs, 5,000 held-out images: AdamW over (lr, weight "
    "decay), the paper's AdamO over (η_θ, η_ρ). AdamW decays biases and BatchNorm too.",
    kind="heatmaps",
    runs=fig4,
    metrics=(
        Metric("swa_valid_accuracy", "SWA", percent=True),
        Metric("valid_accuracy", "final", percent=True),
        *SHARES,
    ),
    optimizers=tuple(MAPS),
    axes=tuple(("lr", key) for key in MAPS.values()),
    claims=(
        Claim(
            "AdamO has more settings within 1 point of its best than AdamW (one share a seed).",
            "near_share", "adamo_paper", ">", "adamw", source="Figure 4",
        ),
        Claim(
            "AdamO's largest connected region of such settings is larger than AdamW's.",
            "region_share", "adamo_paper", ">", "adamw", source="Figure 4",
        ),
    ),
    example="adamo-lab study fig4 --data-dir ~/data",
)  # fmt: skip

FIG4_DIGITS = Study(
    name="fig4-digits",
    title="Figure 4, on handwritten digits",
    about="A small network with BatchNorm, 20 epochs: AdamW over (lr, weight decay), the paper's "
    "AdamO over (η_θ, η_ρ). Seconds a run, so the grid is wide.",
    kind="heatmaps",
    runs=fig4_digits,
    metrics=(
        FINAL,
        *SHARES,
    ),
    optimizers=tuple(MAPS),
    axes=tuple(("lr", key) for key in MAPS.values()),
    claims=(
        Claim(
            "On digits the paper's AdamO has more settings within 1 point of its best than AdamW.",
            "near_share", "adamo_paper", ">", "adamw", source="ours, not the paper's",
        ),
    ),
    example="adamo-lab study fig4-digits",
)  # fmt: skip

FIG4_DIGITS_COSINE = Study(
    name="fig4-digits-cosine",
    title="Figure 4, on handwritten digits, with a schedule",
    about="The same settings, the learning rate falling to zero along a cosine. With a constant "
    "one the weights of a good network may turn faster than BatchNorm's statistics follow.",
    kind="heatmaps",
    runs=partial(fig4_digits, schedule="cosine"),
    metrics=FIG4_DIGITS.metrics,
    optimizers=FIG4_DIGITS.optimizers,
    axes=FIG4_DIGITS.axes,
    claims=(
        Claim(
            "On digits with a cosine schedule the paper's AdamO has more settings within 1 point "
            "of its best than AdamW.",
            "near_share", "adamo_paper", ">", "adamw", source="ours, not the paper's",
        ),
    ),
    example="adamo-lab study fig4-digits-cosine",
)  # fmt: skip
