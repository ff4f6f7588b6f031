"""AdamP (Heo et al., ICLR 2021, https://arxiv.org/abs/2006.08217), able to run in a CUDA graph.

The same numbers as the package ``adamp`` to rounding. That one asks in Python whether a weight is
scale-invariant, which makes the host wait twice a tensor and cannot be captured; here the answer
stays on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

    Args:
        params: parameters or groups, as for every torch optimizer.
        lr: η; a float, or a tensor with one element, which a captured step reads when it is
            replayed if it lies on the parameters' device.
        betas: β₁ and β₂.
        eps: ε, also the least norm in the cosine.
        weight_decay: λ, decoupled.
        delta: δ, the threshold of the cosine; 0 never projects.
        wd_ratio: r, what a projected weight keeps of its decay.
        nesterov: look ahead by one step of the momentum.
        compiled: fuse the step with ``torch.compile``. Worth it where the step is captured and lr
            is a tensor; for every new float it would be compiled again.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamP(model.parameters(), lr=1e-3, weight_decay=1e-2)
        >>> model(torch.randn(3, 4)).sum().backward()
        >>> optimizer.step()
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
        nesterov: bool = False,
        *,
        compiled: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "delta": delta,
            "wd_ratio": wd_ratio,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)
        self.compiled = compiled

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.is_complex():
                self.param_groups.pop()
                raise ValueError(f"AdamP takes real parameters, got {p.dtype}; use view_as_real")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Bring the step counts to the device; those of the package ``adamp`` are integers."""
        super().__setstate__(state)
        for p, values in self.state.items():
            if "step" in values:
                step = torch.as_tensor(values["step"], dtype=torch.float32, device=p.device)
                values["step"] = step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step; ``closure`` evaluates the model again and returns the loss."""
        change = fused_update() if self.compiled else update
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, decay, ratio = group["lr"], group["weight_decay"], group["wd_ratio"]
            lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
            options = {k: group[k] for k in ("betas", "eps", "delta", "nesterov")}
            trained = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not trained:
                continue
            lists: Any = self.gather(trained)
            for found, _ in self._group_tensors_by_device_and_dtype(lists).values():
                tensors: Any = found
                all_decay, spared = lr * decay, lr * decay * (1 - ratio)
                change(*tensors, lr=lr, decay=all_decay, spared=spared, **options)
        return loss

    def gather(self, trained: Tensors) -> list[Tensors]:
        """Parameters, gradients and state as lists, the state made where there is none."""
        lists: list[Tensors] = [[], [], [], [], []]
        for p in trained:
            if p.grad is None or p.grad.is_sparse:
                raise RuntimeError("AdamP needs dense gradients; set sparse=False in the embedding")
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            found = (p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            for column, tensor in zip(lists, found, strict=True):
                column.append(tensor)
        return lists


def check(options: dict[str, Any]) -> None:
    """Refuse what has no meaning, by name, value and legal range."""
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element, got a tensor of shape {tuple(lr.shape)}")
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
    nesterov: bool,
) -> None:
    """One step of tensors on one device. Nothing here reads a value back from the device.

    ``decay`` is ηλ, and ``spared`` what a projected weight is spared of it.
    """
    beta1, beta2 = betas
    # Bias correction, [tensors]. In double: 1 - 0.999 has only four digits in float32.
    torch._foreach_add_(steps, 1)
    count = torch.stack(steps).double()
    dtype = torch.promote_types(params[0].dtype, torch.float32)  # of the results
    sizes = list((lr / (1 - beta1**count)).to(dtype).unbind())
    roots = list((1 - beta2**count).sqrt().to(dtype).unbind())

    # Adam
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, roots)
    torch._foreach_add_(denominators, eps)
    momenta = torch._foreach_lerp(exp_avgs, grads, 1 - beta1) if nesterov else exp_avgs
    updates = torch._foreach_div(momenta, denominators)

    # Projection and decay in one factor: (1 - ηλ) w - η (u - c w) = (1 - ηλ + η c) w - η u
    wide = [i for i, p in enumerate(params) if p.dim() > 1]
    narrow = [p for p in params if p.dim() <= 1]
    if narrow:
        torch._foreach_mul_(narrow, 1 - decay)
    if wide:
        weights = pick(params, wide)
        projected, coefficients = projection(
            weights, pick(grads, wide), pick(updates, wide), delta=delta, eps=eps
        )
        decays = (1 - (decay - spared * projected.double())).to(dtype).unbind()
        factors = torch._foreach_mul(coefficients, pick(sizes, wide))
        torch._foreach_add_(factors, list(decays))
        for w, factor in zip(weights, factors, strict=True):
            w.mul_(factor)

    # Step
    torch._foreach_mul_(updates, sizes)
    torch._foreach_sub_(params, updates)


@cache
def fused_update() -> Callable[..., None]:
    """``update``, which passes about forty times over memory, fused; compiled once."""
    return torch.compile(update, dynamic=False)


def projection(
    weights: Tensors, grads: Tensors, updates: Tensors, *, delta: float, eps: float
) -> tuple[Tensor, Tensors]:
    """Which weights are projected, [weights], and c in u ← u - c·w of each, [rows, 1, ...].

    The whole weight's products are sums over its rows, so its test costs next to nothing.
    """
    # Inner products and norms by row, [rows, 1, ...]
    gw = [sum_rows(x) for x in torch._foreach_mul(grads, weights)]
    uw = [sum_rows(x) for x in torch._foreach_mul(updates, weights)]
    g_norms = [norm_rows(g) for g in grads]
    w_norms = [norm_rows(w) for w in weights]

    # By channel: the largest cosine over the rows, times √(their length)
    cosines = torch._foreach_div(gw, clamped_products(g_norms, w_norms, eps))
    torch._foreach_abs_(cosines)
    largest = [cosine.amax() for cosine in cosines]
    torch._foreach_mul_(largest, [math.sqrt(w.numel() / len(w)) for w in weights])
    channel = torch.stack(largest) < delta

    # By layer: the same for the whole weight as one row
    whole_gw, whole_uw = ([x.sum() for x in rows] for rows in (gw, uw))
    whole_w_norms = list(torch._foreach_norm(weights))
    bounds = clamped_products(list(torch._foreach_norm(grads)), whole_w_norms, eps)
    whole = torch._foreach_div(whole_gw, bounds)
    torch._foreach_abs_(whole)
    torch._foreach_mul_(whole, [math.sqrt(w.numel()) for w in weights])
    layer = torch.stack(whole) < delta

    by_row = over_squares(uw, w_norms, eps)
    by_layer = torch.stack(over_squares(whole_uw, whole_w_norms, eps))
    otherwise = torch.where(layer, by_layer, 0.0)  # only where the channels' test fails
    cases = zip(channel.unbind(), by_row, otherwise.unbind(), strict=True)
    return channel | layer, [torch.where(*case) for case in cases]


def sum_rows(x: Tensor) -> Tensor:
    """[rows, ...] → [rows, 1, ...]; reduced over dimensions, as channels-last has no flat view."""
    return x.sum(dim=tuple(range(1, x.dim())), keepdim=True)


def norm_rows(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), keepdim=True)


def clamped_products(left: Tensors, right: Tensors, eps: float) -> Tensors:
    """The cosine's denominators, max(‖g‖, ε) · max(‖w‖, ε)."""
    return list(
        torch._foreach_mul(
            torch._foreach_clamp_min(left, eps), torch._foreach_clamp_min(right, eps)
        )
    )


def over_squares(products: Tensors, norms: Tensors, eps: float) -> Tensors:
    """⟨u, w⟩ / (‖w‖ + ε)²."""
    padded = torch._foreach_add(norms, eps)
    return list(torch._foreach_div(products, torch._foreach_mul(padded, padded)))


def pick(tensors: Sequence[Tensor], indices: list[int]) -> Tensors:
    return [tensors[i] for i in indices]
