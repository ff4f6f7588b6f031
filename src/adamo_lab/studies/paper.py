"""Tables 1 to 3 and figures 1 to 4 of the paper, and the language models its abstract announces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .base import Arm, Claim, Metric, Runs, Study, arm, arms, claims, trials

OURS = "ours, not the paper's"
CORPORA = ("shakespeare", "wikitext2")  # characters, words

SWA = Metric("swa_test_accuracy", "SWA", percent=True)
FINAL = Metric("test_accuracy", "final", percent=True)
BEST = Metric("best_test_accuracy", "best", percent=True)
NORM = Metric("weight_norm", "‖w‖", higher_is_better=False)
LOSS = Metric("valid_loss", "validation loss", higher_is_better=False, digits=4)
GROKKED = Metric("grokking_epoch", "grokking epoch", higher_is_better=False, digits=0)
VARIATION = Metric("gradient_norm_variation", "variation of ‖g‖", higher_is_better=False)
NEAR = Metric("near_share", "settings within 1 point of the best", percent=True, digits=0)
REGION = Metric("region_share", "largest region of such settings", percent=True, digits=0)


def percent(mean: float, sd: float | None = None) -> tuple[float, float | None]:
    return mean / 100, None if sd is None else sd / 100


# a row of Table 1: the accuracy that the paper prints, and its standard deviation
PRINTED = {
    "adam": (74.48, 0.12),
    "adamw": (74.75, 0.15),
    "adamp": (75.07, 0.18),
    "adamo_isotropic": (74.82, 0.12),
    "adamo_no_projection": (76.17, 0.14),
    "adamo_no_dimension": (75.99, 0.15),
    "adamo_no_curvature": (75.21, 0.11),
    "adamo_paper": (79.74, 0.09),
}
TUNED = {"weight_decay": 0.5}
BEST_TRIAL = {**TUNED, "decay_vectors": False, "swa_lr": 3e-4}  # of the first in tuning-cifar100
TABLE1 = Study(
    name="table1",
    title="Table 1: CIFAR-100",
    about="ResNet-18 with BatchNorm, 300 epochs, the paper's protocol; and its ablations.",
    runs=(
        Runs(
            "cifar100",
            300,
            (
                *arms("adam", "adamw"),
                arm("adamw", "adamw_tuned", "AdamW, tuned", **TUNED),
                arm("adamw", "adamw_best", "AdamW, best trial", **BEST_TRIAL),
                *arms("adamp", "adamo_isotropic", "adamo_no_projection", "adamo_no_dimension"),
                *arms("adamo_no_curvature", "adamo_paper"),
            ),
        ),
    ),
    metrics=(SWA, FINAL, BEST, NORM),
    paper={name: {SWA.key: percent(*told)} for name, told in PRINTED.items()},
    claims=(
        *claims(
            "Table 1",
            SWA.key,
            {
                "AdamO is more accurate than AdamW.": "adamo_paper > adamw",
                "AdamO is more accurate than AdamP.": "adamo_paper > adamp",
                "AdamP is slightly more accurate than AdamW.": "adamp > adamw",
                "Without projection AdamO is less accurate.": "adamo_no_projection < adamo_paper",
                "Without the rule for low-dimensional parameters AdamO is less accurate.": (
                    "adamo_no_dimension < adamo_paper"
                ),
                "Without curvature adaptation AdamO is less accurate.": (
                    "adamo_no_curvature < adamo_paper"
                ),
                "With isotropic decay AdamO is less accurate.": "adamo_isotropic < adamo_paper",
            },
        ),
        Claim(
            "AdamO-Isotropic is indistinguishable from AdamW (within half a point).",
            SWA.key,
            "adamo_isotropic = adamw",
            "section 3.2",
            0.005,
        ),
        Claim(
            "AdamO ends with a smaller parameter norm than AdamW.",
            NORM.key,
            "adamo_paper < adamw",
            "section 3.3",
        ),
    ),
)

TABLE2 = Study(
    name="table2",
    title="Table 2: grokking on modular addition",
    about="(a + b) mod 97 from 30 % of the pairs; the grokking epoch is the first above 95 %.",
    runs=(Runs("grokking", 5000, arms("adam", "adamw", "adamp", "adamo_paper", "adamo")),),
    metrics=(FINAL, GROKKED),
    paper={
        "adam": {FINAL.key: percent(89.27)},
        "adamw": {FINAL.key: percent(99.02), GROKKED.key: (2508, None)},
        "adamp": {FINAL.key: percent(99.00), GROKKED.key: (2425, None)},
        "adamo_paper": {FINAL.key: percent(99.13), GROKKED.key: (2785, None)},
    },
    claims=(
        *claims(
            "Table 2",
            FINAL.key,
            {
                "AdamO reaches a higher final accuracy than AdamW.": "adamo_paper > adamw",
                "AdamO reaches a higher final accuracy than AdamP.": "adamo_paper > adamp",
                "Adam generalizes less than AdamW (ours has no decay; the paper does not say).": (
                    "adam < adamw"
                ),
            },
        ),
        Claim("AdamO groks later than AdamW.", GROKKED.key, "adamo_paper > adamw", "Table 2"),
        Claim(
            "AdamO with its defaults groks earlier than AdamW.",
            GROKKED.key,
            "adamo < adamw",
            OURS,
        ),
    ),
)

TABLE3 = Study(
    name="table3",
    title="Table 3: decay mechanisms on modular addition",
    about="The step size in front of λ: η_θ (isotropic) or η_ρ,t (radial).",
    runs=(Runs("grokking", 5000, arms("adamw", "adamo_isotropic", "adamo")),),
    metrics=(FINAL, GROKKED),
    paper={
        name: {FINAL.key: percent(mean)}
        for name, mean in (("adamw", 99.02), ("adamo_isotropic", 98.95), ("adamo", 99.13))
    },
    claims=claims(
        "Table 3",
        FINAL.key,
        {
            "Radial decay reaches a higher accuracy than isotropic decay within AdamO.": (
                "adamo > adamo_isotropic"
            ),
            "With isotropic decay AdamO reaches a lower accuracy than AdamW.": (
                "adamo_isotropic < adamw"
            ),
        },
    ),
)

LANGUAGE_ARMS = arms("adam", "adamw", "adamp", "adamo_paper", "adamo")
LANGUAGE = Study(
    name="language",
    title="Language models",
    about="A small GPT on Tiny Shakespeare (characters) and WikiText-2 (words).",
    runs=tuple(Runs("language", 50, LANGUAGE_ARMS, {"corpus": corpus}) for corpus in CORPORA),
    metrics=(LOSS, Metric("valid_perplexity", "perplexity", higher_is_better=False)),
    claims=claims(
        "abstract",
        LOSS.key,
        {
            "AdamO generalizes better than AdamW on language tasks.": "adamo_paper < adamw",
            "AdamO generalizes better than AdamP on language tasks.": "adamo_paper < adamp",
        },
    ),
)

# Every row of a matrix as a block of its own.
BY_ROWS = Study(
    name="language-rows",
    title="AdamO by rows, on text",
    about='The language model on Tiny Shakespeare again, with block="row".',
    runs=(
        Runs(
            "language",
            50,
            (
                arm("adamw"),
                arm("adamo"),
                arm("adamo", "adamo_rows", "AdamO by rows", block="row"),
                arm("adamo_paper", "adamo_paper_rows", "AdamO (paper) by rows", block="row"),
            ),
            {"corpus": "shakespeare"},
        ),
    ),
    metrics=(LOSS,),
    claims=claims(
        OURS,
        LOSS.key,
        {
            "On characters AdamO by rows has a lower loss than by tensors.": "adamo_rows < adamo",
            "On characters AdamO by rows has a lower loss than AdamW.": "adamo_rows < adamw",
        },
    ),
)

NO_DECAY = arm("adamo", "adamo_no_decay", "AdamO, no decay", weight_decay=0.0)
FIG1 = Study(
    name="fig1",
    title="Figure 1: decision boundaries",
    about="A small network on points in the plane, with and without decay.",
    runs=(Runs("toy2d", 1000, (*arms("adam", "adamw"), NO_DECAY, arm("adamo"))),),
    metrics=(NORM, Metric("boundary_length", "boundary length", higher_is_better=False), FINAL),
    claims=tuple(
        Claim(f"{text} (both {how} decay).", metric, sides, "Figure 1")
        for text, metric in (
            ("AdamO ends with smaller norms than Adam", "weight_norm"),
            ("AdamO's decision boundary is smoother (shorter) than Adam's", "boundary_length"),
        )
        for how, sides in (("without", "adamo_no_decay < adam"), ("with", "adamo < adamw"))
    ),
)

FIG2 = Study(
    name="fig2",
    title="Figure 2: optimization dynamics",
    about="The loss in the plane of the paths' principal components; gradient and weight norms.",
    kind="landscape",
    # on the digits, where a landscape costs seconds; snapshots of the weights make the plane
    runs=(Runs("digits", 40, arms("adamw", "adamo"), {"watch": True, "snapshots": True}),),
    metrics=(VARIATION, NORM),
    claims=tuple(
        Claim(text, metric.key, "adamo < adamw", "section 3.3")
        for text, metric in (
            ("AdamO reduces the fluctuations of the gradient's norm.", VARIATION),
            ("AdamO ends with a smaller parameter norm.", NORM),
        )
    ),
)

OVER_200 = "AdamO is more accurate than {} over the first 200 epochs (their mean)."
AT_DROPS = "AdamO gains more than {} when the learning rate drops."
FIG3 = Study(
    name="fig3",
    title="Figure 3: accuracy over training on CIFAR-100",
    about="Test accuracy of AdamW, AdamP and AdamO after every few epochs: the runs of Table 1.",
    kind="curves",
    runs=(Runs("cifar100", 300, arms("adamw", "adamp", "adamo_paper")),),
    metrics=(
        FINAL,
        BEST,
        SWA,
        Metric("early_test_accuracy", "first 200", percent=True),
        Metric("gain_at_drops", "gain at drops", percent=True),
    ),
    claims=tuple(
        Claim(text.format(name), metric, f"adamo_paper > {other}", "Figure 3")
        for text, metric in ((OVER_200, "early_test_accuracy"), (AT_DROPS, "gain_at_drops"))
        for name, other in (("AdamW", "adamw"), ("AdamP", "adamp"))
    ),
)


# Figure 4: lr × weight decay for AdamW, η_θ × η_ρ for AdamO; the paper prints neither grid. Three
# seeds of 50 settings: a network of half the width, and a fifteenth of the epochs.
def maps(
    lrs: Sequence[float], decays: Sequence[float], radial_lrs: Sequence[float]
) -> tuple[Arm, ...]:
    return (
        *trials("adamw", lr=lrs, weight_decay=decays),
        *trials("adamo_paper", lr=lrs, radial_lr=radial_lrs),
    )


FIG4 = Study(
    name="fig4",
    title="Figure 4: sensitivity to hyper-parameters",
    about="CIFAR-100, half the width, 20 epochs, 5,000 held-out images: AdamW over (lr, weight "
    "decay), the paper's AdamO over (η_θ, η_ρ). AdamW decays biases and BatchNorm too.",
    kind="heatmaps",
    runs=(
        Runs(
            "cifar100",
            20,
            maps(
                (2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3),
                (0.01, 0.05, 0.1, 0.5, 1.0),
                (1e-3, 5e-3, 2e-2, 0.1, 0.5),
            ),
            {"width": 32, "holdout": 5000, "every": 10},
        ),
    ),
    metrics=(
        Metric("swa_valid_accuracy", "SWA", percent=True),
        Metric("valid_accuracy", "final", percent=True),
        NEAR,
        REGION,
    ),
    claims=(
        Claim(
            "AdamO has more settings within 1 point of its best than AdamW (one share a seed).",
            "near_share",
            "adamo_paper > adamw",
            "Figure 4",
        ),
        Claim(
            "AdamO's largest connected region of such settings is larger than AdamW's.",
            "region_share",
            "adamo_paper > adamw",
            "Figure 4",
        ),
    ),
)

# The same question where a run takes seconds, over three decades of the learning rate.
DIGIT_MAPS = maps(
    (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (0.001, 0.01, 0.1, 1.0), (1e-3, 5e-3, 2e-2, 0.1)
)


DIGIT_CLAIM = "{} the paper's AdamO has more settings within 1 point of its best than AdamW."
FIG4_DIGITS = Study(
    name="fig4-digits",
    title="Figure 4, on handwritten digits",
    about="A small network with BatchNorm, 20 epochs: AdamW over (lr, weight decay), the paper's "
    "AdamO over (η_θ, η_ρ). Seconds a run, so the grid is wide.",
    kind="heatmaps",
    runs=(Runs("digits", 20, DIGIT_MAPS),),
    metrics=(FINAL, NEAR, REGION),
    claims=claims(OURS, NEAR.key, {DIGIT_CLAIM.format("On digits"): "adamo_paper > adamw"}),
)
WITH_SCHEDULE = DIGIT_CLAIM.format("On digits with a cosine schedule")
FIG4_DIGITS_COSINE = replace(
    FIG4_DIGITS,
    name="fig4-digits-cosine",
    title="Figure 4, on handwritten digits, with a schedule",
    about="The same settings, the learning rate falling to zero along a cosine. With a constant "
    "one the weights of a good network may turn faster than BatchNorm's statistics follow.",
    runs=(Runs("digits", 20, DIGIT_MAPS, {"schedule": "cosine"}),),
    claims=claims(OURS, NEAR.key, {WITH_SCHEDULE: "adamo_paper > adamw"}),
)

# What the paper starts from, on three tasks: does AdamW's decay make the norms oscillate?
RADIAL_SHARE = Metric(
    "radial_share", "radial share", percent=True, higher_is_better=False, digits=3
)
PREMISE_TASKS = {  # its length, its rows, and how it reads in a title and a claim
    "digits": (40, ("adam", "adamw", "adamo_paper", "adamo"), "handwritten digits", "digits"),
    # the paper's AdamO has no norms to speak of there: Table 2
    "grokking": (5000, ("adam", "adamw", "adamo"), "modular addition", "modular addition"),
    "language": (
        50,
        ("adam", "adamw", "adamo_paper", "adamo"),
        "Tiny Shakespeare",
        "Tiny Shakespeare",
    ),
}


def premise(task: str) -> Study:
    epochs, rows, title, where = PREMISE_TASKS[task]
    return Study(
        name=f"premise-{task}",
        title=f"The premise, on {title}",
        about="Way undone: of the distance that norms move within 100 steps, the share that "
        "cancels out (for a random walk 90 %). Radial share: the part of ‖g‖² along the weight, of "
        "the sum over the run, and of a single step.",
        kind="numbers",
        runs=(Runs(task, epochs, arms(*rows), {"watch": "norms"}),),
        metrics=(
            Metric("way_undone", "way undone", percent=True, higher_is_better=False),
            Metric("way_a_step", "way a step", percent=True, higher_is_better=False, digits=3),
            RADIAL_SHARE,
            replace(RADIAL_SHARE, key="radial_share_of_a_step", label="of a single step"),
        ),
        claims=(
            Claim(
                f"On {where} decay adds to how the norms oscillate, however little that is: AdamW "
                "undoes more of their way than Adam.",
                "way_undone",
                "adamw > adam",
                "abstract, section 1",
            ),
            Claim(
                f"On {where} AdamO suppresses that: it undoes less than AdamW.",
                "way_undone",
                f"{rows[2]} < adamw",
                "section 1",
            ),
        ),
    )


PAPER = (
    TABLE1,
    TABLE2,
    TABLE3,
    FIG1,
    FIG2,
    FIG3,
    FIG4,
    FIG4_DIGITS,
    FIG4_DIGITS_COSINE,
    LANGUAGE,
    BY_ROWS,
    *map(premise, PREMISE_TASKS),
)
