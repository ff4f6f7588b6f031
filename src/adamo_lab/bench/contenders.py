"""What is timed: our optimizers, torch's and peers that a user might pick instead, on the shapes of
some networks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from adamo_optim import AdamO, AngularAdamW

Parameters = list[torch.nn.Parameter]
MANY = 2e8  # parameters, above which what is slow is left out


class Contender(NamedTuple):
    make: Callable[[Parameters], torch.optim.Optimizer]
    bytes: float  # that a step must move per float32 parameter, each pass reading it anew
    slow: bool = False


# module, class, options; torch.compile makes the last two, which takes minutes: by name only
PEERS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "adamp": ("adamp", "AdamP", {}, 28),
    "pytorch_optimizer": ("pytorch_optimizer", "AdamP", {}, 28),
    "schedulefree": ("schedulefree", "AdamWScheduleFree", {}, 28),
    "heavyball": ("heavyball", "AdamW", {"consume_grad": False}, 28),
    "torchao": ("torchao.optim", "AdamW8bit", {}, 16),
}
QUICK = ["adamp", "pytorch_optimizer", "schedulefree"]


def contenders() -> dict[str, Contender]:
    adamw, rows = torch.optim.AdamW, {"block": "row"}
    none: dict[str, Any] = {"curvature_target": None}
    return {
        # what all are compared with: beside itself it shows the noise
        "AdamW fused": Contender(lambda ps: adamw(ps, fused=True), 28),
        "AdamW foreach": Contender(lambda ps: adamw(ps, foreach=True), 28),
        "AngularAdamW": Contender(lambda ps: AngularAdamW(turning(ps)), 28),
        "AngularAdamW, moments by row": Contender(
            lambda ps: AngularAdamW(turning(ps, second_moment="row")), 28
        ),
        "AdamO rows": Contender(lambda ps: AdamO(ps, **rows), 36),
        "AdamO rows, no curvature": Contender(lambda ps: AdamO(ps, **rows, **none), 28),
        "AdamO": Contender(lambda ps: AdamO(ps), 60),
        "AdamO, no curvature": Contender(lambda ps: AdamO(ps, **none), 52),
        "AdamO, bfloat16 g⁻": Contender(lambda ps: AdamO(ps, previous_gradient="bfloat16"), 56),
        "AdamO, sampled g⁻": Contender(lambda ps: AdamO(ps, previous_gradient="sampled"), 52.5),
        # what one gets where no kernel was compiled, or Triton is missing: torch fused for the rest
        "AngularAdamW, no kernel": Contender(
            lambda ps: AngularAdamW(turning(ps, foreach=True)), 28, slow=True
        ),
        "AngularAdamW foreach": Contender(
            lambda ps: AngularAdamW(turning(ps), foreach=True), 28, slow=True
        ),
        "AdamO foreach": Contender(lambda ps: AdamO(ps, foreach=True), 60, slow=True),
        "AdamO for-loop": Contender(lambda ps: AdamO(ps, foreach=False), 60, slow=True),
    }


def peers(names: list[str]) -> tuple[dict[str, Contender], dict[str, str]]:
    """Those that are installed, and why the others are not here."""
    found, absent = {}, {}
    for name in names:
        module, kind, options, moved = PEERS[name]
        try:
            cls = getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError) as error:
            absent[name] = str(error)
            continue

        def make(ps: Parameters, cls: Any = cls, options: Any = options) -> torch.optim.Optimizer:
            optimizer = cls(ps, lr=1e-3, **options)
            getattr(optimizer, "train", lambda: None)()  # schedule-free asks for it
            return optimizer

        found[f"{kind} ({name})"] = Contender(make, moved, slow=True)
    return found, absent


def turning(params: Parameters, **options: Any) -> list[dict[str, Any]]:
    """The weights that AngularAdamW turns, as their shapes say, with options; and the others."""
    turn = [p for p in params if getattr(p, "turns", False)]
    others = [p for p in params if not getattr(p, "turns", False)]
    groups = [
        {"params": turn, "rule": "scale_invariant", **options},
        {"params": others, "rule": "general"},
    ]
    return [group for group in groups if group["params"]]


# --- shapes

Shape = tuple[int, ...]


class Turning(tuple[int, ...]):
    """The shape of a weight whose scale cannot matter: AngularAdamW turns it."""


def resnet18(classes: int = 100) -> list[Shape]:
    """ResNet-18 with a 3×3 stem: 62 tensors, 11.2 M parameters; BatchNorm follows convolutions."""
    shapes: list[Shape] = [Turning((64, 3, 3, 3)), (64,), (64,)]
    inside = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [Turning((width, inside, 3, 3)), (width,), (width,)]
            shapes += [Turning((width, width, 3, 3)), (width,), (width,)]
            if block == 0 and inside != width:
                shapes += [Turning((width, inside, 1, 1)), (width,), (width,)]
            inside = width
    return [*shapes, (classes, 512), (classes,)]


def gpt(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """GPT-2 with QK-norm: tied embeddings, q, k, v apart, a gain before each part of a layer."""
    shapes: list[Shape] = [(vocabulary, width), (context, width)]
    square = (width, width)
    for _ in range(layers):
        shapes += [(width,), Turning(square), Turning(square), square, square]
        shapes += [(width,), (4 * width, width), (width, 4 * width)]
    return [*shapes, (width,)]


NETWORKS = {
    "resnet18": resnet18(),
    "gpt-124m": gpt(12, 768),
    "gpt-350m": gpt(24, 1024),
    "gpt-1.3b": gpt(24, 2048),
    "200-small": [(64, 48), (64,)] * 100,
}


def parameters(network: str, device: torch.device) -> Parameters:
    """Random weights and gradients in the shapes of a network."""
    torch.manual_seed(0)
    params = []
    for shape in NETWORKS[network]:
        p: Any = torch.nn.Parameter(torch.randn(tuple(shape), device=device) * 0.02)
        p.grad, p.turns = torch.randn_like(p) * 1e-3, isinstance(shape, Turning)
        params.append(p)
    return params
