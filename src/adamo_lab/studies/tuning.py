"""The search for hyper-parameters: as many trials for AdamW and for AdamP as for AdamO.

Every trial is spelled out, so that the records keep their meaning when a default changes. Those of
CIFAR-100 are judged by 5,000 training images that were held out, with the paper's schedule at a
third, at half and, because these did not predict it, at its full length (SGD has two, to compare
with); those of the language model by its validation text; those of modular addition by the epoch at
which they generalize, the paper's only measure there. What is chosen then runs on seeds no trial
has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, starmap
from typing import Any

from ..errors import LabError
from ..records import RunConfig
from .base import Claim, Metric, Request, Study, run_with
from .tables import BEST, CORPORA, FINAL, GROKKED, LOSS, SWA, SWA_LOSS

HELD_OUT = 5000
SHORT, LONG, FULL = 100, 150, 300  # epochs on CIFAR-100
SUMS_EPOCHS, TEXT_EPOCHS = 5000, 50
FRESH = 5  # seeds from here on have seen no trial
ADAMW = {"lr": 8e-4, "weight_decay": 0.5}
MATRICES = {**ADAMW, "decay_vectors": False}  # no decay of biases and norm layers
ADAMP = {**ADAMW, "delta": 0.1, "wd_ratio": 0.1}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
COMMON = {"lr": 8e-4, "curvature_target": "auto", "decay_lr": "radial", "guard": True}
ADAMO = {**COMMON, "radial": "adam", "radial_lr_ratio": 1.0, "tangential": "auto"}
ADDITIVE = {**ADAMO, "tangential": "additive"}  # for models without scale-invariant weights
ANGULAR = {**COMMON, "weight_decay": 1e-3, "radial_lr_ratio": 100.0, "tangential": "angular"}

DEFAULT = {**ADAMO, "radial_lr_ratio": 0.5, "weight_decay": 0.75}
TURNING = {**DEFAULT, "angular_rms": 0.015}
EQUILIBRIUM = {**DEFAULT, "angular_rms": "equilibrium"}
SHARED = {"second_moment": "auto"}
GAINS = {"low_dim": None}  # BatchNorm's gains decay, too
VECTORS = {"low_dim_decay": ADAMW["weight_decay"]}  # all vectors do, as under AdamW


def swept(hyper: dict[str, Any], *rates: float | None) -> list[dict[str, Any]]:
    """The same trial at several learning rates of the SWA phase; None is the protocol's."""
    return [hyper if rate is None else {**hyper, "swa_lr": rate} for rate in rates]


# CIFAR-100: (epochs, optimizer, hyper-parameters)
VISION: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (SHORT, "adamw", {**ADAMW, "weight_decay": 0.01}),
    (SHORT, "adamw_tuned", ADAMW),
    (SHORT, "adamw_tuned", {**ADAMW, "swa_lr": 3e-4}),
    (SHORT, "adamw_tuned", MATRICES),
    (SHORT, "adamo", {**ADAMO, "weight_decay": 0.5, "angular_rms": 0.01}),
    (SHORT, "adamo", {**ADAMO, "weight_decay": 0.5, "angular_rms": 0.005}),
    (SHORT, "adamo", {**ADAMO, "weight_decay": 0.1, "angular_rms": 0.02}),
    (SHORT, "adamo_angular", ANGULAR),
    (LONG, "adamw_tuned", MATRICES),
    (LONG, "adamw_tuned", {**MATRICES, "swa_lr": 3e-4}),
    (LONG, "adamw_tuned", {**MATRICES, "weight_decay": 1.5}),
    (LONG, "adamo", {**ADAMO, "weight_decay": 0.5, "angular_rms": 0.01}),
    (LONG, "adamo", {**ADAMO, "weight_decay": 0.5, "angular_rms": 0.006}),
    (LONG, "adamo", {**ADAMO, "weight_decay": 0.5, "angular_rms": 0.015, "swa_lr": 3e-4}),
    (LONG, "adamw_tuned", ADAMW),
    (LONG, "adamw_tuned", {**ADAMW, "swa_lr": 3e-4}),
    (LONG, "sgd", {**SGD, "swa_lr": 0.0125}),
    (LONG, "sgd", {**SGD, "swa_lr": 0.03}),
    (LONG, "adamo", {**EQUILIBRIUM, "swa_lr": 1e-4}),
    (LONG, "adamo", {**EQUILIBRIUM, "swa_lr": 2e-4}),
    (LONG, "adamo", {**TURNING, **SHARED, "swa_lr": 1.5e-4}),
    (LONG, "adamo", {**TURNING, **SHARED, "swa_lr": 3e-4}),
    (LONG, "adamo", {**EQUILIBRIUM, **SHARED, "swa_lr": 1e-4}),
    (LONG, "adamo", {**EQUILIBRIUM, **SHARED, "swa_lr": 2e-4}),
    (LONG, "adamo", {**EQUILIBRIUM, **SHARED, "swa_lr": 4e-4}),
    *((FULL, "adamw_tuned", trial) for trial in swept(ADAMW, None, 3e-4, 1e-3)),
    *((FULL, "adamw_tuned", trial) for trial in swept(MATRICES, None, 3e-4, 1e-3)),
    *((FULL, "adamo", trial) for trial in swept({**TURNING, **SHARED}, 3e-4, 6e-4, 1e-3)),
    *((FULL, "adamo", trial) for trial in swept({**TURNING, **SHARED, **GAINS}, 3e-4, 6e-4, 1e-3)),
    # With the length the best swa_lr falls: lower ones. And until epoch 200 AdamW is better with
    # decay of vectors than without: AdamO with it, too.
    *((FULL, "adamw_tuned", trial) for trial in swept(ADAMW, 5e-5, 1.5e-4, 2e-4)),
    *((FULL, "adamw_tuned", trial) for trial in swept(MATRICES, 5e-5, 1.5e-4, 2e-4)),
    *((FULL, "adamo", trial) for trial in swept({**TURNING, **SHARED}, 1e-4, 1.5e-4, 2e-4)),
    *(
        (FULL, "adamo", trial)
        for trial in swept({**TURNING, **SHARED, **VECTORS}, 1e-4, 2e-4, 3e-4)
    ),
    # AdamP leaves a tenth of the decay to what it projects: three strengths, and AdamW's own for
    # all. The SWA rates are those at which the others were best.
    *(
        (FULL, "adamp", trial)
        for decay, ratio in ((0.1, 0.1), (0.5, 0.1), (2.0, 0.1), (0.5, 1.0))
        for trial in swept({**ADAMP, "weight_decay": decay, "wd_ratio": ratio}, 1e-4, 2e-4, 3e-4)
    ),
)

FINAL_VISION_TRIALS = (
    ("adamw_best", {**ADAMW, "swa_lr": 2e-4}),
    ("adamo_best", {**TURNING, **SHARED, **VECTORS, "swa_lr": 2e-4}),
)

# Modular addition: (lr, weight decay) and (lr, radial_lr_ratio, weight decay). AdamP has AdamW's,
# from which it hardly differs where no norm layer follows a matrix.
SUMS_ADAMW = (
    *((1e-3, decay) for decay in (0.3, 0.5, 1.0, 1.5, 2.0, 3.0)),
    *((2e-3, decay) for decay in (0.5, 1.0, 1.5, 2.0, 3.0)),
    *((4e-3, decay) for decay in (0.5, 1.0, 1.5, 2.0, 3.0)),
    *((8e-3, decay) for decay in (0.5, 1.0, 2.0)),
)
SUMS_ADAMO = (
    *((1e-3, *pair) for pair in ((0.1, 2.0), (0.3, 1.5), (0.5, 1.0), (0.5, 1.5), (0.5, 2.0))),
    *((1e-3, *pair) for pair in ((1.0, 1.0), (1.0, 2.0), (2.0, 0.5), (2.0, 1.0))),
    *((2e-3, *pair) for pair in ((0.5, 1.5), (0.5, 2.25), (0.5, 3.0), (1.0, 1.5))),
    *((4e-3, *pair) for pair in ((0.5, 1.5), (0.5, 2.25), (0.5, 3.0), (1.0, 2.0))),
    *((8e-3, *pair) for pair in ((0.5, 1.5), (0.5, 3.0))),
)


def adamw(lr: float, decay: float) -> tuple[str, dict[str, Any]]:
    return "adamw", {"lr": lr, "weight_decay": decay}


def adamp(lr: float, decay: float) -> tuple[str, dict[str, Any]]:
    return "adamp", {**ADAMP, "lr": lr, "weight_decay": decay}


def adamo_on_text(lr: float, ratio: float) -> tuple[str, dict[str, Any]]:
    return "adamo", {**ADDITIVE, "lr": lr, "weight_decay": 0.1, "radial_lr_ratio": ratio}


TEXT_LRS = (1e-3, 2e-3, 4e-3, 8e-3)
TEXT_DECAYS = (0.01, 0.1, 0.5)
TEXT = (
    *starmap(adamw, product(TEXT_LRS, TEXT_DECAYS)),
    *starmap(adamp, product(TEXT_LRS, TEXT_DECAYS)),
    *starmap(adamo_on_text, product(TEXT_LRS, (1.0, 2.0, 4.0))),
)
RULE_ON_TEXT = {**ADDITIVE, "lr": 8e-3, "weight_decay": 0.15, "radial_lr_ratio": 0.5}
FINAL_TEXT_TRIALS = (
    adamw(8e-3, 0.1),
    adamp(8e-3, 0.01),
    adamo_on_text(8e-3, 4.0),
    # AdamW's second best, whose loss was larger by 0.0002
    ("adamw_tuned", adamw(2e-3, 0.1)[1]),
    # a control: that AdamO does not decay biases and norm layers; is that all there is to it?
    ("adamw_matrices", {**adamw(8e-3, 0.1)[1], "decay_vectors": False}),
    # and the other way round: AdamO with AdamW's decay of them
    ("adamo_vectors", {**adamo_on_text(8e-3, 4.0)[1], "low_dim_decay": 0.1}),
    # not tuned: what the first rule makes of AdamW's best trial
    ("adamo_rule", RULE_ON_TEXT),
    # and that without curvature adaptation, which costs a buffer
    ("adamo_constant", {**RULE_ON_TEXT, "curvature_target": None}),
)

# The best trials of AdamW and of AdamO on WikiText-2.
FINAL_WORDS_TRIALS = (
    ("adamw_best", adamw(4e-3, 0.1)[1]),
    ("adamo_best", adamo_on_text(2e-3, 4.0)[1]),
)


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


def final_vision(request: Request) -> list[RunConfig]:
    """The best trial of each at the full length, now with all training images."""
    return runs_of(FINAL_VISION_TRIALS, "cifar100", FULL, fresh(request))


def adamo_on_sums(lr: float, ratio: float, decay: float) -> tuple[str, dict[str, Any]]:
    return "adamo", {**ADDITIVE, "lr": lr, "radial_lr_ratio": ratio, "weight_decay": decay}


def sums(request: Request) -> list[RunConfig]:
    theirs = [*starmap(adamw, SUMS_ADAMW), *starmap(adamp, SUMS_ADAMW)]
    ours = starmap(adamo_on_sums, SUMS_ADAMO)
    return runs_of([*theirs, *ours], "grokking", SUMS_EPOCHS, request)


def final_sums(request: Request) -> list[RunConfig]:
    """The best trial of each, at the paper's learning rate and at any; not on their seed."""
    trials = [
        adamw(1e-3, 1.5),
        adamp(1e-3, 2.0),
        adamo_on_sums(1e-3, 0.3, 1.5),
        ("adamw_best", adamw(8e-3, 2.0)[1]),
        ("adamp_best", adamp(8e-3, 2.0)[1]),
        ("adamo_best", adamo_on_sums(8e-3, 0.5, 1.5)[1]),
    ]
    return runs_of(trials, "grokking", SUMS_EPOCHS, fresh(request))


def fresh(request: Request) -> Request:
    """Seeds that no trial has seen: as they are if they begin there, else moved there."""
    shift = 0 if min(request.seeds, default=FRESH) >= FRESH else FRESH
    return replace(request, seeds=tuple(seed + shift for seed in request.seeds))


def text(request: Request) -> list[RunConfig]:
    made = (replace(request, options={"corpus": c, **request.options}) for c in CORPORA)
    return [run for asked in made for run in runs_of(TEXT, "language", TEXT_EPOCHS, asked)]


def final_text(request: Request) -> list[RunConfig]:
    """The best trial of each, and not on the seed of the trials."""
    return runs_of(FINAL_TEXT_TRIALS, "language", TEXT_EPOCHS, fresh(request))


def final_words(request: Request) -> list[RunConfig]:
    if request.options.get("corpus", "wikitext2") != "wikitext2":
        raise LabError("final-wikitext2 is about WikiText-2; on characters it is final-language")
    words = replace(fresh(request), options={**request.options, "corpus": "wikitext2"})
    return runs_of(FINAL_WORDS_TRIALS, "language", TEXT_EPOCHS, words)


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
    about="Judged by 5,000 held-out training images. At the full length as many trials of AdamW "
    "and of AdamP as of AdamO; the shorter ones came before.",
    kind="trials",
    runs=vision,
    metrics=(
        Metric("swa_valid_accuracy", "SWA", percent=True),
        Metric("swa_valid_loss", "SWA loss", higher_is_better=False, digits=3),
        Metric("valid_accuracy", "final", percent=True),
    ),
    optimizers=("adamw", "adamw_tuned", "adamp", "sgd", "adamo_angular", "adamo"),
    seeds=1,
    example="adamo-lab study tuning-cifar100 --seeds 1 --data-dir ~/data",
)

FINAL_VISION = Study(
    name="final-cifar100",
    title="CIFAR-100, tuned",
    about="The best trials of AdamW and of AdamO at the full length, on seeds no trial has seen: "
    "Table 1's protocol, the test set.",
    kind="table",
    runs=final_vision,
    metrics=(SWA, SWA_LOSS, FINAL, BEST),
    optimizers=("adamw_best", "adamo_best"),
    claims=(
        Claim(
            "With the best of their trials, AdamO is more accurate than AdamW.",
            "swa_test_accuracy", "adamo_best", ">", "adamw_best", source="ours, not the paper's",
        ),
        Claim(
            "With the best of their trials, AdamO has a lower test loss than AdamW.",
            "swa_test_loss", "adamo_best", "<", "adamw_best", source="ours, not the paper's",
        ),
    ),
    seeds=6,
    example="adamo-lab study final-cifar100 --data-dir ~/data",
)  # fmt: skip

TUNING_SUMS = Study(
    name="tuning-grokking",
    title="Tuning on modular addition",
    about="Nineteen trials each for AdamW, AdamP and AdamO: the epoch at which they generalize.",
    kind="trials",
    runs=sums,
    metrics=(GROKKED, FINAL),
    optimizers=("adamw", "adamp", "adamo"),
    seeds=1,
    example="adamo-lab study tuning-grokking --seeds 1",
)

FINAL_SUMS = Study(
    name="final-grokking",
    title="Modular addition, tuned",
    about="The best trials of AdamW, AdamP and AdamO, at the paper's lr and at any (best trial), "
    "on seeds no trial has seen.",
    kind="table",
    runs=final_sums,
    metrics=(GROKKED, FINAL),
    optimizers=("adamw", "adamp", "adamo", "adamw_best", "adamp_best", "adamo_best"),
    claims=(
        Claim(
            "Tuned alike at the paper's learning rate, AdamO groks earlier than AdamW.",
            "grokking_epoch", "adamo", "<", "adamw", source="ours, not the paper's",
        ),
        Claim(
            "Tuned alike at any learning rate, AdamO groks earlier than AdamW.",
            "grokking_epoch", "adamo_best", "<", "adamw_best", source="ours, not the paper's",
        ),
        Claim(
            "Tuned alike at the paper's learning rate, AdamO groks earlier than AdamP.",
            "grokking_epoch", "adamo", "<", "adamp", source="ours, not the paper's",
        ),
        Claim(
            "Tuned alike at any learning rate, AdamO groks earlier than AdamP.",
            "grokking_epoch", "adamo_best", "<", "adamp_best", source="ours, not the paper's",
        ),
    ),
    seeds=5,
    example="adamo-lab study final-grokking",
)  # fmt: skip

TUNING_TEXT = Study(
    name="tuning-language",
    title="Tuning on text",
    about="Twelve trials each for AdamW, AdamP and AdamO on either corpus, judged by the "
    "validation text.",
    kind="trials",
    runs=text,
    metrics=(LOSS,),
    optimizers=("adamw", "adamp", "adamo"),
    seeds=1,
    example="adamo-lab study tuning-language --seeds 1 --data-dir ~/data",
)

FINAL_TEXT = Study(
    name="final-language",
    title="Language models, tuned on Tiny Shakespeare",
    about="The best trial of AdamW, its equal at lr 2e-3, and the best of AdamP and of AdamO, on "
    "fresh seeds. With --option corpus=wikitext2 the same settings on words, where they were not "
    "tuned.",
    kind="table",
    runs=final_text,
    metrics=(LOSS,),
    optimizers=(
        *("adamw", "adamw_tuned", "adamw_matrices", "adamp"),
        *("adamo_rule", "adamo_constant", "adamo", "adamo_vectors"),
    ),
    claims=(
        Claim(
            "With the best of their trials on characters, AdamO has a lower loss than AdamW.",
            "valid_loss", "adamo", "<", "adamw", source="ours, not the paper's",
        ),
        Claim(
            "AdamO's best trial has a lower loss than AdamW's second best (lr 2e-3).",
            "valid_loss", "adamo", "<", "adamw_tuned", source="ours, not the paper's",
        ),
        Claim(
            "It also has a lower loss than AdamW without decay of biases and norm layers.",
            "valid_loss", "adamo", "<", "adamw_matrices", source="ours, not the paper's",
        ),
        Claim(
            "AdamO with the settings of AdamW's best trial, converted by the first rule, has a "
            "lower loss than it.",
            "valid_loss", "adamo_rule", "<", "adamw", source="ours, not the paper's",
        ),
        Claim(
            "AdamO by the first rule has a lower loss with curvature adaptation than without.",
            "valid_loss", "adamo_rule", "<", "adamo_constant", source="ours, not the paper's",
        ),
        Claim(
            "AdamO's best trial has a lower loss than with decay of biases and norm layers.",
            "valid_loss", "adamo", "<", "adamo_vectors", source="ours, not the paper's",
        ),
        Claim(
            "With the best of their trials on characters, AdamO has a lower loss than AdamP.",
            "valid_loss", "adamo", "<", "adamp", source="ours, not the paper's",
        ),
    ),
    seeds=8,
    example="adamo-lab study final-language --data-dir ~/data",
)  # fmt: skip

FINAL_WORDS = Study(
    name="final-wikitext2",
    title="WikiText-2, tuned",
    about="The best trials of AdamW and of AdamO on WikiText-2, on seeds no trial has seen.",
    kind="table",
    runs=final_words,
    metrics=(LOSS,),
    optimizers=("adamw_best", "adamo_best"),
    claims=(
        Claim(
            "With the best of their trials on words, AdamO has a lower loss than AdamW.",
            "valid_loss", "adamo_best", "<", "adamw_best", source="ours, not the paper's",
        ),
    ),
    seeds=6,
    example="adamo-lab study final-wikitext2 --data-dir ~/data",
)  # fmt: skip
