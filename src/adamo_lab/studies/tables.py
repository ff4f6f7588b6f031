"""Tables 1, 2 and 3 of the paper, and the language comparison its abstract announces."""

from __future__ import annotations

from ..records import RunConfig
from .base import Claim, Metric, Request, Study, run

TABLE1_ROWS = (
    "adam",
    "adamw",
    "adamw_tuned",
    "adamw_best",
    "adamp",
    "adamo_isotropic",
    "adamo_no_projection",
    "adamo_no_dimension",
    "adamo_no_curvature",
    "adamo_paper",
)
TABLE2_ROWS = ("adam", "adamw", "adamp", "adamo_paper", "adamo")
TABLE3_ROWS = ("adamw", "adamo_isotropic", "adamo")
LANGUAGE_ROWS = ("adam", "adamw", "adamp", "adamo_paper", "adamo")
CORPORA = ("shakespeare", "wikitext2")  # characters, words

SWA = Metric("swa_test_accuracy", "SWA", percent=True)
FINAL = Metric("test_accuracy", "final", percent=True)
BEST = Metric("best_test_accuracy", "best", percent=True)
NORM = Metric("weight_norm", "‖w‖", higher_is_better=False)
LOSS = Metric("valid_loss", "validation loss", higher_is_better=False, digits=4)
GROKKED = Metric("grokking_epoch", "grokking epoch", higher_is_better=False, digits=0)


def table1(request: Request) -> list[RunConfig]:
    return [
        run("cifar100", name, seed, 300, request) for seed in request.seeds for name in TABLE1_ROWS
    ]


def table2(request: Request) -> list[RunConfig]:
    return [
        run("grokking", name, seed, 5000, request) for seed in request.seeds for name in TABLE2_ROWS
    ]


def table3(request: Request) -> list[RunConfig]:
    return [
        run("grokking", name, seed, 5000, request) for seed in request.seeds for name in TABLE3_ROWS
    ]


def language(request: Request) -> list[RunConfig]:
    return [
        run("language", name, seed, 50, request, corpus=corpus)
        for corpus in CORPORA
        for seed in request.seeds
        for name in LANGUAGE_ROWS
    ]


def percent(mean: float, sd: float | None = None) -> tuple[float, float | None]:
    return mean / 100, None if sd is None else sd / 100


TABLE1 = Study(
    name="table1",
    title="Table 1: CIFAR-100",
    about="ResNet-18 with BatchNorm, 300 epochs, the paper's protocol; and its ablations.",
    kind="table",
    runs=table1,
    metrics=(SWA, FINAL, BEST, NORM),
    optimizers=TABLE1_ROWS,
    paper={
        name: {"swa_test_accuracy": percent(mean, sd)}
        for name, mean, sd in (
            ("adam", 74.48, 0.12),
            ("adamw", 74.75, 0.15),
            ("adamp", 75.07, 0.18),
            ("adamo_isotropic", 74.82, 0.12),
            ("adamo_no_projection", 76.17, 0.14),
            ("adamo_no_dimension", 75.99, 0.15),
            ("adamo_no_curvature", 75.21, 0.11),
            ("adamo_paper", 79.74, 0.09),
        )
    },
    claims=(
        Claim(
            "AdamO is more accurate than AdamW.",
            "swa_test_accuracy", "adamo_paper", ">", "adamw", source="Table 1",
        ),
        Claim(
            "AdamO is more accurate than AdamP.",
            "swa_test_accuracy", "adamo_paper", ">", "adamp", source="Table 1, conclusion",
        ),
        Claim(
            "AdamP is slightly more accurate than AdamW.",
            "swa_test_accuracy", "adamp", ">", "adamw", source="Table 1",
        ),
        Claim(
            "AdamO-Isotropic is indistinguishable from AdamW (within half a point).",
            "swa_test_accuracy", "adamo_isotropic", "=", "adamw", 0.005, "section 3.2",
        ),
        Claim(
            "With isotropic decay AdamO is less accurate.",
            "swa_test_accuracy", "adamo_isotropic", "<", "adamo_paper", source="section 3.2",
        ),
        Claim(
            "Without projection AdamO is less accurate.",
            "swa_test_accuracy", "adamo_no_projection", "<", "adamo_paper", source="Table 1",
        ),
        Claim(
            "Without the rule for low-dimensional parameters AdamO is less accurate.",
            "swa_test_accuracy", "adamo_no_dimension", "<", "adamo_paper", source="Table 1",
        ),
        Claim(
            "Without curvature adaptation AdamO is less accurate.",
            "swa_test_accuracy", "adamo_no_curvature", "<", "adamo_paper", source="Table 1",
        ),
        Claim(
            "AdamO ends with a smaller parameter norm than AdamW.",
            "weight_norm", "adamo_paper", "<", "adamw", source="section 3.3",
        ),
    ),
    example="adamo-lab study table1 --data-dir ~/data",
)  # fmt: skip

TABLE2 = Study(
    name="table2",
    title="Table 2: grokking on modular addition",
    about="(a + b) mod 97 from 30 % of the pairs; the grokking epoch is the first above 95 %.",
    kind="table",
    runs=table2,
    metrics=(FINAL, GROKKED),
    optimizers=TABLE2_ROWS,
    paper={
        "adam": {"test_accuracy": percent(89.27)},
        "adamw": {"test_accuracy": percent(99.02), "grokking_epoch": (2508, None)},
        "adamp": {"test_accuracy": percent(99.00), "grokking_epoch": (2425, None)},
        "adamo_paper": {"test_accuracy": percent(99.13), "grokking_epoch": (2785, None)},
    },
    claims=(
        Claim(
            "AdamO reaches a higher final accuracy than AdamW.",
            "test_accuracy", "adamo_paper", ">", "adamw", source="Table 2",
        ),
        Claim(
            "AdamO reaches a higher final accuracy than AdamP.",
            "test_accuracy", "adamo_paper", ">", "adamp", source="Table 2",
        ),
        Claim(
            "AdamO groks later than AdamW.",
            "grokking_epoch", "adamo_paper", ">", "adamw", source="Table 2",
        ),
        Claim(
            "AdamO with its defaults groks earlier than AdamW.",
            "grokking_epoch", "adamo", "<", "adamw", source="ours, not the paper's",
        ),
        Claim(
            "Adam generalizes less than AdamW (ours has no decay; the paper does not say).",
            "test_accuracy", "adam", "<", "adamw", source="Table 2",
        ),
    ),
    example="adamo-lab study table2 --seeds 3",
)  # fmt: skip

TABLE3 = Study(
    name="table3",
    title="Table 3: decay mechanisms on modular addition",
    about="The step size in front of λ: η_θ (isotropic) or η_ρ,t (radial).",
    kind="table",
    runs=table3,
    metrics=(FINAL, GROKKED),
    optimizers=TABLE3_ROWS,
    paper={
        "adamw": {"test_accuracy": percent(99.02)},
        "adamo_isotropic": {"test_accuracy": percent(98.95)},
        "adamo": {"test_accuracy": percent(99.13)},
    },
    claims=(
        Claim(
            "Radial decay reaches a higher accuracy than isotropic decay within AdamO.",
            "test_accuracy", "adamo", ">", "adamo_isotropic", source="Table 3",
        ),
        Claim(
            "With isotropic decay AdamO reaches a lower accuracy than AdamW.",
            "test_accuracy", "adamo_isotropic", "<", "adamw", source="Table 3",
        ),
    ),
    example="adamo-lab study table3 --seeds 3",
)  # fmt: skip

LANGUAGE = Study(
    name="language",
    title="Language models",
    about="A small GPT on Tiny Shakespeare (characters) and WikiText-2 (words).",
    kind="table",
    runs=language,
    metrics=(
        LOSS,
        Metric("valid_perplexity", "perplexity", higher_is_better=False),
    ),
    optimizers=LANGUAGE_ROWS,
    claims=(
        Claim(
            "AdamO generalizes better than AdamW on language tasks.",
            "valid_loss", "adamo_paper", "<", "adamw", source="abstract",
        ),
        Claim(
            "AdamO generalizes better than AdamP on language tasks.",
            "valid_loss", "adamo_paper", "<", "adamp", source="conclusion",
        ),
    ),
    example="adamo-lab study language --data-dir ~/data",
)  # fmt: skip
