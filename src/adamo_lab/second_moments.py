"""AngularAdamW with a second moment for every entry of a weight that turns, for studies.

The optimizer itself has one for the whole weight or for each row, which is half of AdamW's state.
What that costs in loss is measured with this: plain torch calls, otherwise the same formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import require

SQUARES: dict[str, Callable[[Tensor], Tensor]] = {  # what of g² a second moment is of
    "tensor": lambda g: g.square().mean(),
    "row": lambda g: g.square().flatten(1).mean(1).view(-1, *(1,) * (g.dim() - 1)),
    "entry": torch.square,
}


class AngularBy(torch.optim.Optimizer):
    """AdamW, except for groups of the rule ``scale_invariant``, which turn."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        second_moment: str = "entry",
        angular_rms: float = 0.015,
        max_angle: float = 0.05,
    ) -> None:
        known = f"second_moment must be {', '.join(SQUARES)}, got {second_moment!r}"
        require(second_moment in SQUARES, known)
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        defaults |= {"angular_rms": angular_rms, "max_angle": max_angle, "rule": "general"}
        super().__init__(params, {**defaults, "second_moment": second_moment})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            turns = group["rule"] == "scale_invariant"
            square = SQUARES[group["second_moment"] if turns else "entry"]
            for p in (p for p in group["params"] if p.grad is not None):
                u = quotient(p, p.grad, self.state[p], square, group)
                (turn if turns else follow)(p, u, self.state[p], group)
        return loss


def quotient(
    w: Tensor,
    g: Tensor,
    state: dict[str, Any],
    square: Callable[[Tensor], Tensor],
    options: dict[str, Any],
) -> Tensor:
    """Adam's u = m̂/(√v̂ + ε); makes the state before the first step."""
    if not state:
        state.update(step=0, m=torch.zeros_like(w), v=torch.zeros_like(square(w)), norm=w.norm())
    state["step"] += 1
    beta1, beta2 = options["betas"]
    m = state["m"].lerp_(g, 1 - beta1)
    v = state["v"].lerp_(square(g), 1 - beta2)
    debias1, debias2 = (1 - beta ** state["step"] for beta in (beta1, beta2))
    return (m / debias1) / ((v / debias2).sqrt() + options["eps"])


def follow(w: Tensor, u: Tensor, _: dict[str, Any], options: dict[str, Any]) -> None:
    """AdamW's step."""
    w.mul_(1 - options["lr"] * options["weight_decay"]).sub_(options["lr"] * u)


def turn(w: Tensor, u: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
    """The rotation by φ, back to the first norm."""
    across = u - (u * w).sum() / w.square().sum() * w
    length = across.norm()
    asked = min(options["lr"] / options["angular_rms"], options["max_angle"])
    angle = asked * length / math.sqrt(w.numel())
    side = torch.where(length > 0, across / length, across)
    w.copy_(state["norm"] * (angle.cos() * w / w.norm() - angle.sin() * side))
