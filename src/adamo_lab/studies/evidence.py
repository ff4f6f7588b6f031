"""What AngularAdamW is worth where users are: equal tuning, ordinary schedules, real data.

Fixed before the runs (docs/log.md, 2026-11-18). A trial is one run of the full length with seed 0,
judged by validation data; all optimizers have the same rates and decays. The best trial of each is
to run on seeds that no trial has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import Arm, Metric, Runs, Study, trials

ACCURACY = Metric("test_accuracy", "test accuracy", percent=True)
LOSS = Metric("valid_loss", "validation loss", higher_is_better=False, digits=4)
HELD_OUT = Metric("valid_accuracy", "held-out accuracy", percent=True)

RATES, EDGES = (5e-4, 1e-3, 2e-3, 4e-3), (1e-4, 1e-2)  # the edges show how wide an optimum is
TINY = {"layers": 12, "heads": 3, "width": 192, "patch": 4, "holdout": 5000, "every": 5}  # DeiT's
ORDINARY = {"schedule": "cosine", "swa": False, "smoothing": 0.0, "holdout": 5000, "every": 5}


def angles(**axes: Sequence[Any]) -> tuple[Arm, ...]:
    """AngularAdamW with both units of the angle: the fixed one, and the initial norm."""
    own = ("angular_initial", "AngularAdamW, initial norm")
    return (*trials("angular", **axes), *trials("angular", *own, **axes, angular_rms=(None,)))


def tuned(decays: tuple[float, ...], *others: str) -> tuple[Arm, ...]:
    """AdamW, AngularAdamW and ``others``, each at the same eight settings."""
    axes: dict[str, Any] = {"lr": RATES, "weight_decay": decays}
    edges: dict[str, Any] = {"lr": EDGES, "weight_decay": decays[:1]}
    rows = [trials("adamw", **axes), angles(**axes), *(trials(name, **axes) for name in others)]
    rows += [trials("adamw", **edges), angles(**edges)]
    return tuple(one for row in rows for one in row)


def faster(decay: float, *rates: float, factors: Sequence[float] = (2.0, 4.0, 10.0)) -> list[Arm]:
    """The control: AdamW, with a faster rate for exactly the weights that AngularAdamW turns."""
    return [
        one
        for n in factors
        for one in trials(
            "adamw",
            f"adamw_turning_{n:g}",
            f"AdamW, {n:g} times the rate on what turns",
            lr=rates or (1e-3, 2e-3),
            weight_decay=(decay,),
            turning_lr=(n,),
        )
    ]


def bounds(decay: float, *rates: float, angles: Sequence[float] = (0.03, 0.1)) -> tuple[Arm, ...]:
    """Other bounds of the angle."""
    own = ("angular_bounds", "AngularAdamW, other bounds")
    axes = {"lr": rates or (2e-3,), "weight_decay": (decay,), "max_angle": angles}
    return trials("angular", *own, **axes)


def all_turn(decay: float, *rates: float) -> tuple[Arm, ...]:
    """All matrices of the layers turn, whether their scale matters or not."""
    own = ("angular_all", "AngularAdamW, all hidden matrices turn")
    rules = ({"layers.*": "scale_invariant"},)
    return trials("angular", *own, lr=rates, weight_decay=(decay,), overrides=rules)


def scheduled(decays: tuple[float, ...], *rates: float, peak: float = 0.05) -> tuple[Arm, ...]:
    """The angle follows the schedule: lr at its highest turns by ``peak``, whatever it is."""
    own = (f"angular_scheduled_{peak:g}", f"AngularAdamW, schedule from {peak:g}")
    return tuple(
        one
        for lr in rates
        for one in trials(
            "angular",
            *own,
            lr=(lr,),
            weight_decay=decays,
            angular_rms=(float(f"{lr / peak:.12g}"),),
            max_angle=(peak,),
        )
    )


def moments_by(kind: str, **axes: Sequence[Any]) -> tuple[Arm, ...]:
    """AngularAdamW with a second moment for every row or entry, in place of one a weight."""
    own = (f"angular_{kind}", f"AngularAdamW, moments by {kind}")
    return trials("angular_by", *own, second_moment=(kind,), **axes)


def all_turn_by(kind: str, *rates: float) -> tuple[Arm, ...]:
    """Both: no weight of the layers changes its norm, and more second moments than one a weight."""
    own = (f"angular_all_{kind}", f"AngularAdamW, all turn, moments by {kind}")
    axes: dict[str, Any] = {"lr": rates, "weight_decay": (0.1,), "second_moment": (kind,)}
    rules = ({"layers.*": "scale_invariant"},)
    return trials("angular_by", *own, **axes, overrides=rules)


# Rates over two decades, with the schedules that people use.
WIDE: dict[str, Any] = {"lr": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "weight_decay": (0.1,)}
SCHEDULES = ("constant", "step", "cosine")
SMALL: dict[str, Any] = {  # on the text that every Python has
    "text": "topics",
    "layers": 2,
    "heads": 4,
    "width": 96,
    "context": 64,
    "batch": 32,
    "precision": "float32",
}
SMALL_ENWIK8: dict[str, Any] = {  # 0.85 M parameters
    **SMALL,
    "text": "enwik8",
    "layers": 4,
    "width": 128,
    "context": 128,
    "batch": 16,
    "every": 50,
}
SMALL_RESNET: dict[str, Any] = {  # 2.8 M parameters on maps of 8 x 8: minutes on a CPU
    **ORDINARY,
    "stem": "7x7",
    "width": 32,
    "precision": "float32",
    "every": 2,
}
COARSE = (1e-3, 3e-3, 1e-2)
COARSE_RATES = (2e-3, 8e-3, 3.2e-2)
AFTER_RATES = (1e-3, 4e-3, 1.6e-2, 6.4e-2)
SMALL_RATES = (2e-3, 4e-3, 8e-3)
LARGE_RATES = (8e-3, 1.6e-2, 3.2e-2)  # where all hidden matrices turn
FAR_RATES = (2.5e-4, 5e-4, 1e-3, 1.6e-2, 3.2e-2)  # with those over two decades

EVIDENCE = (
    Study(
        name="evidence-gpt",
        title="A modern GPT on enwik8",
        about="38 M parameters, QK-norm, 1,500 steps of 32,768 bytes, warm-up and linear to zero.",
        kind="trials",
        runs=(
            Runs(
                "gpt",
                150,
                (
                    *tuned((0.1, 0.3)),
                    *faster(0.1),
                    *bounds(0.1),
                    # asked when these and the small GPT had been seen
                    *bounds(0.1, 1e-3, 2e-3, angles=(0.5,)),
                    *all_turn(0.1, 1e-3, 4e-3, 1.6e-2, 6.4e-2),
                ),
            ),
        ),
        metrics=(LOSS,),
        seeds=(0,),
    ),
    Study(
        name="evidence-gpt-verdict",
        title="A modern GPT on enwik8: the verdict",
        about="The best trial of each, on seeds and test bytes that no trial has seen.",
        runs=(
            Runs(
                "gpt",
                150,
                (
                    *trials("adamw", lr=(1e-3,), weight_decay=(0.1,)),
                    *trials("angular", lr=(1e-3,), weight_decay=(0.1,)),
                    *trials(
                        "angular",
                        "angular_initial",
                        "AngularAdamW, initial norm",
                        lr=(1e-3,),
                        weight_decay=(0.3,),
                        angular_rms=(None,),
                    ),
                    *faster(0.1, 1e-3, factors=(10.0,)),
                ),
                {"judge": "test"},
            ),
        ),
        metrics=(Metric("test_loss", "test loss", higher_is_better=False, digits=4),),
        seeds=(1, 2, 3, 4, 5),
    ),
    Study(
        name="evidence-gpt-after",
        title="A modern GPT whose norms stand after each part, enwik8",
        about="As in OLMo 2: all matrices of its layers are scale-invariant. 38 M parameters, "
        "1,500 steps.",
        kind="trials",
        runs=(
            Runs(
                "gpt",
                150,
                (
                    *trials("adamw", lr=RATES, weight_decay=(0.1,)),
                    *trials("angular", lr=RATES, weight_decay=(0.1,)),
                    *trials(
                        "angular",
                        "angular_row",
                        "AngularAdamW, moments by row",
                        lr=RATES,
                        weight_decay=(0.1,),
                        second_moment=("row",),
                    ),
                ),
                {"norms": "after"},
            ),
        ),
        metrics=(LOSS,),
        seeds=(0,),
    ),
    Study(
        name="evidence-cifar100",
        title="ResNet-18 on CIFAR-100, the ordinary way",
        about="60 epochs, warm-up and cosine, no averaging, judged by 5,000 held-out images.",
        kind="trials",
        runs=(
            Runs(
                "cifar100",
                60,
                (
                    *tuned((0.1, 0.5), "adamp"),
                    *trials("sgd", lr=(0.03, 0.1, 0.3, 1.0), weight_decay=(1e-4, 5e-4)),
                    *faster(0.1),
                    *bounds(0.1),
                ),
                ORDINARY,
            ),
        ),
        metrics=(HELD_OUT,),
        seeds=(0,),
    ),
    Study(
        name="evidence-vit",
        title="A vision transformer with QK-norm on CIFAR-100",
        about="ViT-Tiny, 60 epochs, warm-up and cosine, judged by 5,000 held-out images.",
        kind="trials",
        runs=(
            Runs(
                "vit",
                60,
                (*tuned((0.1, 0.3)), *faster(0.1), *bounds(0.1)),
                TINY,
            ),
        ),
        metrics=(HELD_OUT,),
        seeds=(0,),
    ),
    Study(
        name="evidence-digits",
        title="Any learning rate, any schedule, with BatchNorm",
        about="Handwritten digits, 20 epochs, decay 0.1: does a weight that turns outrun "
        "BatchNorm's statistics?",
        kind="trials",
        runs=tuple(
            Runs(
                "digits",
                20,
                # the bounds were added when the others had been seen
                (
                    *trials("adamw", **WIDE),
                    *angles(**WIDE),
                    *bounds(0.1, 3e-3, 1e-2, angles=(0.1, 0.2, 0.5)),
                    *scheduled((0.1,), 1e-3, 3e-3, 1e-2, 3e-2),
                    *moments_by("row", **WIDE),
                ),
                {"schedule": schedule},
            )
            for schedule in SCHEDULES
        ),
        metrics=(ACCURACY,),
        seeds=(0, 1, 2, 3, 4),
    ),
    Study(
        name="evidence-small-gpt",
        title="A small GPT: the rotation, or only a faster rate?",
        about="Two layers of width 96, QK-norm, 500 steps on the text of Python's help().",
        kind="trials",
        runs=(
            Runs(
                "gpt",
                50,
                (
                    *trials("adamw", lr=SMALL_RATES, weight_decay=(0.1,)),
                    *angles(lr=SMALL_RATES, weight_decay=(0.1,)),
                    *faster(0.1, *SMALL_RATES, factors=(4.0, 10.0)),
                    # added when the others had been seen
                    *bounds(0.1, *SMALL_RATES, angles=(0.1, 0.2, 0.5)),
                    # and these when the bounds had been seen
                    *trials(
                        "angular",
                        "angular_faster",
                        "AngularAdamW, faster turns",
                        lr=SMALL_RATES,
                        weight_decay=(0.1,),
                        angular_rms=(0.005, 0.0015),
                        max_angle=(1.0,),
                    ),
                    # two questions more, asked before their runs
                    # the last two when the best had been the last
                    *all_turn(0.1, *SMALL_RATES, *FAR_RATES, 6.4e-2, 0.128),
                    *trials("muon", lr=(*SMALL_RATES, *FAR_RATES), weight_decay=(0.1,)),
                    # and how wide everything is, when all of the above had been seen
                    *trials("adamw", lr=FAR_RATES, weight_decay=(0.1,)),
                    *angles(lr=FAR_RATES, weight_decay=(0.1,)),
                    *faster(0.1, *FAR_RATES, factors=(10.0,)),
                    *bounds(0.1, *FAR_RATES, angles=(0.5,)),
                    # does it matter that a bound takes the schedule's fall away? asked before
                    *scheduled((0.1,), *SMALL_RATES, 1.6e-2),
                    *scheduled((0.1,), *SMALL_RATES, 1.6e-2, peak=0.1),
                    # is one second moment a weight enough? asked when the same was seen to matter
                    # where norms stand after each part
                    *moments_by("entry", lr=SMALL_RATES, weight_decay=(0.1,)),
                    *moments_by("row", lr=SMALL_RATES, weight_decay=(0.1,)),
                    *all_turn_by("entry", 4e-3, 1.6e-2, 3.2e-2),
                    # and by row, which costs no state: asked when the row above had its verdict
                    *all_turn_by("row", 4e-3, 1.6e-2, 3.2e-2),
                ),
                {**SMALL, "judge": "test"},
            ),
        ),
        metrics=(Metric("test_loss", "test loss", higher_is_better=False, digits=4),),
    ),
    Study(
        name="evidence-small-enwik8",
        title="A small GPT on enwik8",
        about="Four layers of width 128, QK-norm, 1,000 steps of 2,048 bytes, warm-up, linear to "
        "zero.",
        kind="trials",
        runs=(
            Runs(
                "gpt",
                100,
                (
                    *trials("adamw", lr=SMALL_RATES, weight_decay=(0.1,)),
                    *trials("angular", lr=SMALL_RATES, weight_decay=(0.1,)),
                    *all_turn_by("row", *LARGE_RATES),
                    *all_turn_by("entry", *LARGE_RATES),
                ),
                SMALL_ENWIK8,
            ),
        ),
        metrics=(LOSS,),
        seeds=(0,),
    ),
    Study(
        name="evidence-small-enwik8-after",
        title="A small GPT on enwik8 whose norms stand after each part",
        about="The same, and all matrices of its layers are scale-invariant.",
        kind="trials",
        runs=(
            Runs(
                "gpt",
                100,
                (
                    *trials("adamw", lr=COARSE_RATES, weight_decay=(0.1,)),
                    *trials("angular", lr=COARSE_RATES, weight_decay=(0.1,)),
                    *moments_by("row", lr=COARSE_RATES, weight_decay=(0.1,)),
                    # added when AdamW had been best at its smallest rate
                    *trials("adamw", lr=(1e-3,), weight_decay=(0.1,)),
                    *moments_by("row", lr=(1e-3,), weight_decay=(0.1,)),
                ),
                {**SMALL_ENWIK8, "norms": "after"},
            ),
        ),
        metrics=(LOSS,),
        seeds=(0,),
    ),
    Study(
        name="evidence-small-enwik8-after-verdict",
        title="A small GPT on enwik8 whose norms stand after each part: the verdict",
        about="The best trial of each, on seeds and test bytes that no trial has seen.",
        runs=(
            Runs(
                "gpt",
                100,
                (
                    *trials("adamw", lr=(2e-3,), weight_decay=(0.1,)),
                    *trials("angular", lr=(8e-3,), weight_decay=(0.1,)),
                    *moments_by("row", lr=(2e-3,), weight_decay=(0.1,)),
                ),
                {**SMALL_ENWIK8, "norms": "after", "judge": "test"},
            ),
        ),
        metrics=(Metric("test_loss", "test loss", higher_is_better=False, digits=4),),
        seeds=(1, 2, 3),
    ),
    Study(
        name="evidence-small-gpt-after",
        title="A small GPT whose norms stand after each part",
        about="As in OLMo 2: all matrices of the layers are scale-invariant. 500 steps on the text "
        "of Python's help().",
        kind="trials",
        runs=(
            Runs(
                "gpt",
                50,
                (
                    *trials("adamw", lr=AFTER_RATES, weight_decay=(0.1,)),
                    *trials("angular", lr=AFTER_RATES, weight_decay=(0.1,)),
                    *scheduled((0.1,), *AFTER_RATES),
                    *scheduled((0.1,), *AFTER_RATES, peak=0.1),
                    *trials("muon", lr=AFTER_RATES, weight_decay=(0.1,)),
                    # added when the others had been seen
                    *moments_by("entry", lr=AFTER_RATES, weight_decay=(0.1,)),
                    *moments_by("row", lr=AFTER_RATES, weight_decay=(0.1,)),
                ),
                {**SMALL, "judge": "test", "norms": "after"},
            ),
        ),
        metrics=(Metric("test_loss", "test loss", higher_is_better=False, digits=4),),
        seeds=(3, 4, 5),
    ),
    Study(
        name="evidence-small-gpt-after-verdict",
        title="A small GPT whose norms stand after each part: the verdict",
        about="The best of each by seeds 3 to 5, on fresh seeds and on a text that none was judged "
        "by.",
        runs=(
            Runs(
                "gpt",
                50,
                (
                    *trials("adamw", lr=(6.4e-2,), weight_decay=(0.1,)),
                    *trials("angular", lr=(1.6e-2,), weight_decay=(0.1,)),
                    *moments_by("entry", lr=(1.6e-2,), weight_decay=(0.1,)),
                    *moments_by("row", lr=(1.6e-2,), weight_decay=(0.1,)),
                    *trials("muon", lr=(1.6e-2,), weight_decay=(0.1,)),
                ),
                {**SMALL, "norms": "after"},
            ),
        ),
        metrics=(LOSS,),
        seeds=(6, 7, 8, 9, 10),
    ),
    Study(
        name="evidence-small-resnet",
        title="A small ResNet on CIFAR-100",
        about="ResNet-18 at half the width and a sixteenth of the pixels, 8 epochs, warm-up and "
        "cosine, judged by 5,000 held-out images.",
        kind="trials",
        runs=(
            Runs(
                "cifar100",
                8,
                (
                    *trials("adamw", lr=COARSE, weight_decay=(0.1, 0.5)),
                    *trials("angular", lr=COARSE, weight_decay=(0.1, 0.5)),
                    *moments_by("row", lr=COARSE, weight_decay=(0.1, 0.5)),
                    *scheduled((0.1, 0.5), *COARSE),
                    *trials("adamp", lr=COARSE, weight_decay=(0.1, 0.5)),
                    *trials("sgd", lr=(0.03, 0.1, 0.3), weight_decay=(5e-4,)),
                    *faster(0.1, 1e-3, 3e-3, factors=(4.0,)),
                ),
                SMALL_RESNET,
            ),
        ),
        metrics=(HELD_OUT,),
        seeds=(0,),
    ),
    Study(
        name="evidence-small-resnet-verdict",
        title="A small ResNet on CIFAR-100: the verdict",
        about="The best trial of each, on fresh seeds and the test images.",
        runs=(
            Runs(
                "cifar100",
                8,
                (
                    *trials("adamw", lr=(3e-3,), weight_decay=(0.5,)),
                    *trials("angular", lr=(3e-3,), weight_decay=(0.1,)),
                    *moments_by("row", lr=(3e-3,), weight_decay=(0.1,)),
                ),
                {**SMALL_RESNET, "holdout": 0},
            ),
        ),
        metrics=(ACCURACY,),
        seeds=(1, 2, 3),
    ),
    Study(
        name="evidence-small-gpt-verdict",
        title="A small GPT: the verdict",
        about="The best of each by seeds 0 to 2, on fresh seeds and on a text that none was judged "
        "by.",
        runs=(
            Runs(
                "gpt",
                50,
                (
                    *trials("adamw", lr=(4e-3,), weight_decay=(0.1,)),
                    *angles(lr=(4e-3,), weight_decay=(0.1,)),
                    *bounds(0.1, 4e-3, angles=(0.5,)),
                    *faster(0.1, 4e-3, factors=(10.0,)),
                    *all_turn(0.1, 3.2e-2),
                    *trials("muon", lr=(8e-3,), weight_decay=(0.1,)),
                    # added when the others had been seen, before they ran
                    *moments_by("entry", lr=(4e-3,), weight_decay=(0.1,)),
                    *all_turn_by("entry", 1.6e-2),
                    # a third time
                    *moments_by("row", lr=(4e-3,), weight_decay=(0.1,)),
                    *all_turn_by("row", 3.2e-2),
                ),
                SMALL,
            ),
        ),
        metrics=(LOSS,),
        seeds=(3, 4, 5, 6, 7),
    ),
)
