"""AdamP (Heo et al., ICLR 2021, https://arxiv.org/abs/2006.08217), able to run in a CUDA graph.

The same numbers as the package ``adamp`` to rounding. That one asks in Python whether a weight is
scale-invariant, which makes the host wait twice a tensor and cannot be captured; here the answer
stays on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Tensors = list[Tensor]


class AdamP(Optimizer):
    r"""AdamW that takes the radial part out of the update of scale-invariant weights.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2,
            \quad u = m / (\sqrt{v / (1-\beta_2^t)} + \epsilon) \\
        u &\leftarrow u - \hat w \langle \hat w, u\rangle, \quad \lambda \leftarrow r \lambda
            \qquad \text{where } \max |\cos(g, w)| < \delta / \sqrt{\dim w} \\
        w &\leftarrow (1 - \eta\lambda)\, w - \eta\, u / (1-\beta_1^t)

    The test is made for every row of a weight (a channel), and they pass together or not at all;
    then for the whole weight (a layer). The first that passes decides what is projected. Parameters
    with fewer than two dimensions are never projected.

    lr (η) may be a 0-D tensor on the parameters' device, which a captured step reads when it is
    replayed; delta (δ) 0 never projects; wd_ratio (r) is what a projected weight keeps of its
    decay. ``compiled`` fuses the step, which is worth it where the step is captured and lr is a
    tensor; for every new float it would be compiled again.
    """

    compiled = False  # of a copy, too: torch keeps groups and state alone

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        *,
        compiled: bool = False,
    ) -> None:
        first: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options = {**first, "delta": delta, "wd_ratio": wd_ratio}
        check(options)
        super().__init__(params, options)
        self.compiled = compiled

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step; the laboratory's loop has no closures."""
        change = fused_update() if self.compiled else update
        for group in self.param_groups:
            lr, decay = group["lr"], group["lr"] * group["weight_decay"]
            options = {k: group[k] for k in ("betas", "eps", "delta")}
            trained = [p for p in group["params"] if p.grad is not None and p.numel()]
            if trained:
                spared = decay * (1 - group["wd_ratio"])
                change(*self.gather(trained), lr=lr, decay=decay, spared=spared, **options)

    def gather(self, trained: Tensors) -> list[Tensors]:
        """Parameters, gradients and state as lists, the state made where there is none."""
        for p in trained:
            if p.is_complex():
                raise RuntimeError("AdamP takes real parameters")
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }
        lists = [trained, [p.grad for p in trained if p.grad is not None]]
        lists += [[self.state[p][key] for p in trained] for key in ("exp_avg", "exp_avg_sq")]
        # 0-D ones as vectors: torch 2.13, compiled, loses what is written into them on a CPU
        vectors = [[torch.atleast_1d(x) for x in tensors] for tensors in lists]
        return [*vectors, [self.state[p]["step"] for p in trained]]


def check(options: dict[str, Any]) -> None:
    """Refuse what has no meaning, by name, value and legal range."""
    for name in ("lr", "eps", "weight_decay", "delta", "wd_ratio"):
        if not 0 <= options[name] < math.inf:
            raise ValueError(f"{name} must be >= 0 and finite, got {options[name]}")
    betas = tuple(options["betas"])
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {options['betas']}")


def update(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    lr: float | Tensor,
    decay: float | Tensor,
    spared: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    delta: float,
) -> None:
    """One step. Nothing here reads a value back from the device.

    ``decay`` is ηλ, and ``spared`` what a projected weight is spared of it.
    """
    beta1, beta2 = betas
    for w, g, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        # Adam. Bias correction in double: 1 - 0.999 has only four digits in float32.
        step += 1
        count = step.double()
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        u = m / (v.sqrt() / (1 - beta2**count).sqrt() + eps)

        # Projection, decay, step
        kept: Any = 1 - decay
        if w.dim() > 1:
            u, projected = projection(w, g, u, delta, eps)
            kept = 1 - (decay - spared * projected.double())
        w.mul_(kept).sub_(u * (lr / (1 - beta1**count)))


def projection(w: Tensor, g: Tensor, u: Tensor, delta: float, eps: float) -> tuple[Tensor, Tensor]:
    """u without its radial part where a test passes, and whether one did; by channel, by layer."""
    found, passed = u, torch.zeros((), dtype=torch.bool, device=w.device)
    for first in (1, 0):  # reduced over dimensions, as channels-last has no flat view
        dims = tuple(range(first, w.dim()))
        g_norm, w_norm = (torch.linalg.vector_norm(x, dim=dims, keepdim=True) for x in (g, w))
        products = (g * w).sum(dims, keepdim=True)
        cosine = products.abs() / (g_norm.clamp_min(eps) * w_norm.clamp_min(eps))
        passes = cosine.amax() < delta / math.sqrt(math.prod(w.shape[first:]))
        unit = w / (w_norm + eps)
        tangential = u - unit * (unit * u).sum(dims, keepdim=True)
        found = torch.where(passes & ~passed, tangential, found)
        passed = passed | passes
    return found, passed


@cache
def fused_update() -> Callable[..., None]:
    """``update``, which passes about forty times over memory, fused; compiled once."""
    return torch.compile(update, dynamic=False)
