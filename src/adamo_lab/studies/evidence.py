"""What AngularAdamW is worth where users are: equal tuning, ordinary schedules, real data.

Fixed before the runs (docs/log.md, 2026-11-18). A trial is one run of the full length with seed 0,
judged by validation data; all optimizers have the same rates and decays. The best trial of each is
to run on seeds that no trial has seen.
"""

from __future__ import annotations

from typing import Any

from .base import Arm, Metric, Runs, Study, trials

LOSS = Metric("valid_loss", "validation loss", higher_is_better=False, digits=4)
HELD_OUT = Metric("valid_accuracy", "held-out accuracy", percent=True)

RATES, EDGES = (5e-4, 1e-3, 2e-3, 4e-3), (1e-4, 1e-2)  # the edges show how wide an optimum is
TINY = {"layers": 12, "heads": 3, "width": 192, "patch": 4, "holdout": 5000, "every": 5}  # DeiT's
ORDINARY = {"schedule": "cosine", "swa": False, "smoothing": 0.0, "holdout": 5000, "every": 5}


def tuned(decays: tuple[float, ...], *others: str) -> tuple[Arm, ...]:
    """AdamW, both units of AngularAdamW's angle and ``others``, each at the same eight settings."""
    axes: dict[str, Any] = {"lr": RATES, "weight_decay": decays}
    rows = [trials("adamw", **axes), trials("angular", **axes)]
    rows += [trials("angular", **axes, angular_rms=(None,))]
    rows += [trials(name, **axes) for name in others]
    edges: dict[str, Any] = {"lr": EDGES, "weight_decay": decays[:1]}
    rows += [trials("adamw", **edges), trials("angular", **edges)]
    rows += [trials("angular", **edges, angular_rms=(None,))]
    return tuple(one for row in rows for one in row)


def faster(decay: float) -> tuple[Arm, ...]:
    """The control: AdamW, with a faster rate for exactly the weights that AngularAdamW turns."""
    return trials("adamw", lr=(1e-3, 2e-3), weight_decay=(decay,), turning_lr=(2.0, 4.0, 10.0))


def bounds(decay: float) -> tuple[Arm, ...]:
    """Other bounds of the angle."""
    return trials("angular", lr=(2e-3,), weight_decay=(decay,), max_angle=(0.03, 0.1))


EVIDENCE = (
    Study(
        name="evidence-gpt",
        title="A modern GPT on enwik8",
        about="38 M parameters, QK-norm, 1,500 steps of 32,768 bytes, warm-up and linear to zero.",
        kind="trials",
        runs=(Runs("gpt", 150, (*tuned((0.1, 0.3)), *faster(0.1), *bounds(0.1))),),
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
                    *(*faster(0.1), *bounds(0.1)),
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
)
