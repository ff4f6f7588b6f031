r"""Both optimizers written to be read: the truth every backend is tested against.

``algorithm1`` is Algorithm 1 of the paper, line for line, one block at a time. ``ReferenceAdamO``
adds this package's options in the same plain form and equals it when they are off.
``ReferenceAngularAdamW`` is AdamW with a rotation. Both are optimizers that train models; they
branch on values, keep the whole vector m^ρ and care for no speed.

Symbols: w; g, g⁻ = ``g_previous``; m^θ, v^θ = ``m_tangential``, ``v_tangential``; m^ρ =
``m_radial``; τ = ``tau``; η_θ = ``lr``; η_ρ = ``radial_lr``; η_ρ,t = ``eta_radial``; λ =
``weight_decay``; α = ``low_dim_scale``; φ^ρ_w, φ^θ_w = ``radial``, ``tangential``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import geometry
from .rounding import round_stochastically
from .rules import rule_of
from .sampling import sample


def inner(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩ in float64."""
    return (x.double() * y.double()).sum()


def radial(z: Tensor, w: Tensor) -> Tensor:
    """φ^ρ_w(z), Eq. 1."""
    return (inner(z, w) / inner(w, w)).to(w.dtype) * w


def tangential(z: Tensor, w: Tensor) -> Tensor:
    """φ^θ_w(z) = z − φ^ρ_w(z), Eq. 1."""
    return z - radial(z, w)


# ---- the paper ---------------------------------------------------------------------------------


def algorithm1(
    w: Tensor,
    g: Tensor,
    state: dict[str, Any],
    *,
    lr: float = 8e-4,
    radial_lr: float = 5e-3,
    weight_decay: float = 2e-4,
    eps: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.999),
    radial_beta: float = 0.9,
    curvature_beta: float = 0.9,
    curvature_target: float = 1.0,
    low_dim: bool = False,
    low_dim_scale: float = 1.0,
    scale_invariant: bool = False,
) -> Tensor:
    """One iteration of Algorithm 1 for one block; returns the new w and updates ``state``."""
    beta1, beta2 = betas

    # line 1
    if not state:
        state.update(t=0, m_tangential=0 * w, v_tangential=0 * w, m_radial=0 * w)
        state.update(tau=curvature_target, g_previous=0 * w)
    m, v, m_radial = state["m_tangential"], state["v_tangential"], state["m_radial"]

    # lines 3–5
    t = state["t"] + 1
    kappa = float(inner(g - state["g_previous"], g - state["g_previous"]))
    tau = curvature_beta * state["tau"] + (1 - curvature_beta) * kappa
    eta_radial = radial_lr / math.sqrt(tau / curvature_target + eps)
    state.update(t=t, tau=tau, g_previous=g.clone())

    # lines 6–10
    if low_dim:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        state.update(m_tangential=m, v_tangential=v)
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        return w - low_dim_scale * lr * m_hat / (v_hat.sqrt() + eps)

    # lines 11–14
    g_radial = radial(g, w)
    g_tangential = g - g_radial
    m_radial = radial_beta * radial(m_radial, w) + (1 - radial_beta) * g_radial
    m = beta1 * tangential(m, w) + (1 - beta1) * g_tangential
    v = beta2 * v + (1 - beta2) * g_tangential * g_tangential
    state.update(m_tangential=m, v_tangential=v, m_radial=m_radial)

    # lines 15–19
    m_radial_hat = m_radial / (1 - radial_beta**t)
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    step_radial = eta_radial * radial(m_radial_hat, w)
    step_tangential = lr * tangential(m_hat / (v_hat.sqrt() + eps), w)
    step = step_tangential if scale_invariant else step_radial + step_tangential
    return (1 - eta_radial * weight_decay) * w - step


# ---- AdamO -------------------------------------------------------------------------------------


class ReferenceAdamO(Optimizer):
    """AdamO with all its options; ``options`` are those of :class:`adamo_optim.AdamO`."""

    def __init__(self, params: Any, **options: Any) -> None:
        from .adamo import AdamO

        defaults = AdamO([torch.zeros(1)], **options).defaults
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = -1
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                if p.grad is None:
                    continue
                rule = rule_of(p, group).name
                dtype = geometry.compute_dtype(p)
                # complex numbers count as pairs of real ones
                w, g = (as_real(x.detach()).to(dtype) for x in (p, p.grad))
                kept = as_real(sample(p.grad, number)).to(dtype)
                by_row = group["block"] == "row" and rule != "low_dim"
                by_row = by_row and geometry.row_count(p) is not None
                if by_row:
                    states = self.state[p].setdefault("rows", [{} for _ in w])
                    zipped = zip(w, g, states, strict=True)
                    news = [one_block(p, x, y, y, s, group, rule) for x, y, s in zipped]
                    new, steps = torch.stack(news), torch.tensor([s["t"] for s in states])
                    steps = steps.view(-1, *(1,) * (w.dim() - 1))
                else:
                    new = one_block(p, w, g, kept, self.state[p], group, rule)
                    steps = torch.tensor(self.state[p]["t"])
                if p.dtype == torch.bfloat16 and group["rounding"] == "stochastic":
                    places = torch.arange(p.numel()).as_strided(p.shape, p.stride())
                    p.copy_(round_stochastically(new, steps, number, places))
                else:
                    p.copy_(torch.view_as_complex(new) if p.is_complex() else new)


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def one_block(
    p: Tensor,
    w: Tensor,
    g: Tensor,
    g_sampled: Tensor,
    state: dict[str, Any],
    options: dict[str, Any],
    rule: str,
) -> Tensor:
    """One step of AdamO for one block; returns the new w. ``state`` is empty before the first."""
    sign = -1.0 if options["maximize"] else 1.0
    guard, eps = options["guard"], options["eps"]
    beta1, beta2 = (float(b) for b in options["betas"])
    lr = float(options["lr"])
    if not state:
        state.update(t=0, m_tangential=0 * w, v_tangential=0 * w, m_radial=0 * w)
        state.update(tau=None, reference=0.0, nonzero_gradients=0, initial_norm=None)
        kept = g_sampled if options["previous_gradient"] == "sampled" else g
        state["g_previous"] = torch.zeros_like(kept)  # 0 · ∞ would be NaN

    # The guard leaves a block alone whose norm is not finite or whose gradient's square does not
    # fit into v.
    gg, ww = float(inner(g, g)), float(inner(w, w))
    if guard and not (gg <= geometry.largest_square(p) and math.isfinite(ww)):
        return w.clone()
    t = state["t"] = state["t"] + 1
    if state["initial_norm"] is None:
        state["initial_norm"] = math.sqrt(ww)
    if state["initial_norm"] == 0 or ww == 0:
        rule = "low_dim"
    m, v = state["m_tangential"], state["v_tangential"]
    eps_adam = max(eps, geometry.smallest_eps(p))

    # LowDim(w)
    if rule == "low_dim":
        m = beta1 * m + (1 - beta1) * sign * g
        v = beta2 * v + (1 - beta2) * g * g
        state.update(m_tangential=m, v_tangential=v)
        u = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps_adam)
        return w - options["low_dim_scale"] * lr * (_bounded(u) if guard else u)

    # curvature-adaptive radial step size
    scale = _curvature_scale(g, g_sampled, gg, state, options)
    if guard:
        scale = min(max(scale, 0.1), 10.0)
    ratio, absolute = options["radial_lr_ratio"], options["radial_lr"]
    eta_radial = scale * (float(ratio * lr) if absolute is None else float(absolute))

    # ScaleInv(w): declared, or AdamP's cosine test on the whole block
    gw = float(inner(g, w))
    scale_invariant = rule == "scale_invariant"
    if options["delta"] is not None and gg > 0:
        cosine = abs(gw) / math.sqrt(gg * ww)
        scale_invariant = scale_invariant or cosine < options["delta"] / math.sqrt(g.numel())

    # projected states
    g_radial, g_tangential = sign * radial(g, w), sign * tangential(g, w)
    noise = geometry.rounding_level(p.dtype, torch.float64) * gg
    if guard and gg - gw * gw / ww <= noise:
        g_tangential = torch.zeros_like(g)
    radial_beta = float(options["radial_beta"])
    m_radial = radial_beta * radial(state["m_radial"], w) + (1 - radial_beta) * g_radial
    m = beta1 * tangential(m, w) + (1 - beta1) * g_tangential
    v = beta2 * v + (1 - beta2) * g_tangential * g_tangential
    state.update(m_tangential=m, v_tangential=v, m_radial=m_radial)
    u = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps_adam)
    u = _bounded(u) if guard else u

    # decay and radial step as one factor on w
    isotropic = options["decay_lr"] == "tangential"
    decay = float(options["weight_decay"]) * (lr if isotropic else eta_radial)
    if scale_invariant:
        decay *= options["wd_ratio"]
    if guard and math.sqrt(ww) < 0.1 * state["initial_norm"]:
        decay = 0.0
    m_radial_hat = m_radial / (1 - radial_beta**t)
    pull = 0.0 if scale_invariant else eta_radial * float(inner(m_radial_hat, w)) / ww
    factor = 1 - decay - pull
    if guard:
        factor = min(max(factor, 0.5), 2.0)
    return factor * w - lr * tangential(u, w)


def _curvature_scale(
    g: Tensor, g_sampled: Tensor, gg: float, state: dict[str, Any], options: dict[str, Any]
) -> float:
    """η_ρ,t/η_ρ before the guard; updates τ, its slow reference and g⁻ (lines 4–5)."""
    target, kind = options["curvature_target"], options["previous_gradient"]
    if target is None:
        return 1.0
    x = g_sampled if kind == "sampled" else g
    change = x - state["g_previous"]
    kappa = float(inner(change, change)) * g.numel() / max(x.numel(), 1)
    kappa = min(kappa, torch.finfo(torch.float64).max)
    beta, auto = float(options["curvature_beta"]), target == "auto"

    if gg > 0:
        state["nonzero_gradients"] += 1
    count = state["nonzero_gradients"] - 1  # how many κ the reference has seen
    counts = gg > 0 and count >= 1
    if counts:
        state["reference"] = 0.999 * state["reference"] + 0.001 * kappa
    if counts or not auto:
        start = kappa if auto else float(target)
        previous = start if state["tau"] is None else state["tau"]
        state["tau"] = beta * previous + (1 - beta) * kappa
    if gg > 0 or not auto:
        state["g_previous"] = x.bfloat16().to(x.dtype) if kind == "bfloat16" else x.clone()

    if auto:
        target = state["reference"] / (1 - 0.999**count) if count >= 1 else 0.0
    if not target > 0:
        return 1.0
    x = state["tau"] / float(target) + options["eps"]
    return 1 / math.sqrt(x) if x > 0 else math.inf


def _bounded(u: Tensor) -> Tensor:
    """The guard: a root mean square of 100 at most."""
    rms = math.sqrt(float(inner(u, u)) / max(u.numel(), 1))
    if not math.isfinite(rms):
        return torch.zeros_like(u)
    return u * (100 / rms) if rms > 100 else u


# ---- AngularAdamW ------------------------------------------------------------------------------


class ReferenceAngularAdamW(Optimizer):
    """AdamW, except for weights of the rule ``scale_invariant``, which turn."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        angular_rms: float | None = 0.015,
        max_angle: float = 0.05,
        second_moment: str = "tensor",
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"angular_rms": angular_rms, "max_angle": max_angle}
        defaults["second_moment"] = second_moment
        super().__init__(params, {**defaults, "maximize": maximize, "rule": "auto"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                w, g = as_real(p.detach()), as_real(p.grad)
                g = -g if group["maximize"] else g
                if not state:
                    norm, entries = math.sqrt(float(inner(w, w))), w.numel()
                    declared = rule_of(p, group).name == "scale_invariant"
                    state.update(t=0, m=torch.zeros_like(w), initial_norm=norm)
                    state["turns"] = declared and norm > 0 and entries > 1
                    by_row = group["second_moment"] == "row" and declared
                    state["by_row"] = by_row and geometry.row_count(p) is not None
                    state["v"] = 0.0 if state["turns"] else torch.zeros_like(w)
                state["t"] += 1
                new = (turned if state["turns"] else follow_adamw)(w, g, state, group)
                p.copy_(torch.view_as_complex(new) if p.is_complex() else new)


def follow_adamw(w: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """AdamW."""
    (beta1, beta2), lr, t = options["betas"], options["lr"], state["t"]
    m = state["m"] = beta1 * state["m"] + (1 - beta1) * g
    v = state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    return (1 - lr * options["weight_decay"]) * w - lr * m_hat / (v_hat.sqrt() + options["eps"])


def turned(w: Tensor, g: Tensor, state: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """A rotation of w by the angle φ, back to the norm ρ₀."""
    (beta1, beta2), lr, t = options["betas"], options["lr"], state["t"]
    n, rho = w.numel(), state["initial_norm"]
    wide = torch.float32 if w.dtype in (torch.bfloat16, torch.float16) else w.dtype
    m = state["m"] = (beta1 * state["m"].to(wide) + (1 - beta1) * g.to(wide)).to(w.dtype)
    m, w, squares = m.double(), w.double(), g.double().square()
    across = tuple(range(1 if state["by_row"] else 0, w.dim()))
    s = state["v"] = beta2 * state["v"] + (1 - beta2) * squares.mean(across, keepdim=True)
    u = m / (1 - beta1**t) / ((s / (1 - beta2**t)).sqrt() + options["eps"])
    u_tangential = tangential(u, w)
    length = math.sqrt(float(inner(u_tangential, u_tangential)))
    rms = rho / math.sqrt(n) if options["angular_rms"] is None else options["angular_rms"]
    phi = min(lr / rms, options["max_angle"]) * length / math.sqrt(n)
    state["angle"] = phi
    if phi == 0:
        return w
    return rho * (math.cos(phi) * w / w.norm() - math.sin(phi) * u_tangential / length)
