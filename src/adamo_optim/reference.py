r"""AdamO written to be read: the truth every backend is tested against.

``algorithm1`` is Algorithm 1 of the paper, line for line, one block at a time. ``reference_step``
adds this package's options in the same plain form and equals ``algorithm1`` when they are off.
Neither is a backend: both branch on values, keep the whole vector m^ρ and care for no speed.

Symbols: w; g, g⁻ = ``g_previous``; m^θ, v^θ = ``m_tangential``, ``v_tangential``; m^ρ =
``m_radial``; τ = ``tau``; η_θ = ``lr``; η_ρ = ``radial_lr``; η_ρ,t = ``eta_radial``; λ =
``weight_decay``; α = ``low_dim_scale``; φ^ρ_w, φ^θ_w = ``radial``, ``tangential``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import geometry


def inner(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩ in float64."""
    return (x.double() * y.double()).sum()


def radial(z: Tensor, w: Tensor) -> Tensor:
    """φ^ρ_w(z), Eq. 1."""
    return (inner(z, w) / inner(w, w)).to(w.dtype) * w


def tangential(z: Tensor, w: Tensor) -> Tensor:
    """φ^θ_w(z) = z − φ^ρ_w(z), Eq. 1."""
    return z - radial(z, w)


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


def reference_step(
    p: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    options: dict[str, Any],
    *,
    rule: str = "general",
    seed: int = 0,
) -> Tensor:
    """One step of AdamO with all its options for one block; returns the new parameter.

    Args:
        p: the parameter; complex ones count as pairs of real numbers, low precision is computed
            in float32.
        grad: its gradient.
        state: the block's state, empty before the first step, in the names of this file.
        options: a parameter group of :class:`adamo_optim.AdamO`.
        rule: ``"general"``, ``"scale_invariant"`` or ``"low_dim"``.
        seed: the parameter's running number, which places the slice of ``"sampled"``.
    """
    dtype = geometry.compute_dtype(p)
    w = geometry.as_real(p.detach()).to(dtype)
    g = geometry.as_real(grad).to(dtype)
    g_sampled = geometry.as_real(geometry.sample(grad, seed)).to(dtype)
    sign = -1.0 if options["maximize"] else 1.0
    guard, eps = options["guard"], options["eps"]
    beta1, beta2 = (float(b) for b in options["betas"])
    lr = float(options["lr"])
    if not state:
        state.update(t=0, m_tangential=0 * w, v_tangential=0 * w, m_radial=0 * w)
        state.update(tau=None, reference=0.0, nonzero_gradients=0, initial_norm=None)
        state["g_previous"] = 0 * (g_sampled if options["previous_gradient"] == "sampled" else g)

    # The guard leaves a block alone whose norm is not finite or whose gradient's square is not.
    gg, ww = float(inner(g, g)), float(inner(w, w))
    if guard and not (gg <= geometry.largest_square(p) and math.isfinite(ww)):
        return p.detach().clone()
    t = state["t"] = state["t"] + 1
    if state["initial_norm"] is None:
        state["initial_norm"] = math.sqrt(ww)
    if state["initial_norm"] == 0 or ww == 0:
        rule = "low_dim"
    m, v = state["m_tangential"], state["v_tangential"]
    floor = geometry.smallest_eps(p)

    # LowDim(w): Adam and, unlike the paper's, decay where asked for
    if rule == "low_dim":
        m = beta1 * m + (1 - beta1) * sign * g
        v = beta2 * v + (1 - beta2) * g * g
        state.update(m_tangential=m, v_tangential=v)
        u = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + max(eps, floor))
        u = _bounded(u) if guard else u
        decay = options["low_dim_decay"]
        factor = 1 - lr * float(options["weight_decay"] if decay is None else decay)
        factor = max(factor, 0.5) if guard else factor
        return _like(p, factor * w - options["low_dim_scale"] * lr * u, options, t, seed)

    # A weight that turns and is declared scale-invariant: its norm sets neither the output nor the
    # angle, and is left alone.
    declared = rule == "scale_invariant"
    keeps_norm = declared and options["tangential"] != "additive"

    # curvature-adaptive radial step size
    scale = 1.0 if keeps_norm else _curvature_scale(g, g_sampled, gg, state, options)
    if guard:
        scale = min(max(scale, 0.1), 10.0)
    ratio, absolute = options["radial_lr_ratio"], options["radial_lr"]
    eta_radial = scale * (float(ratio * lr) if absolute is None else float(absolute))

    # ScaleInv(w): declared, or AdamP's cosine test on the whole tensor
    gw = float(inner(g, w))
    scale_invariant = declared
    if options["delta"] is not None and gg > 0:
        cosine = abs(gw) / math.sqrt(gg * ww)
        scale_invariant = declared or cosine < options["delta"] / math.sqrt(g.numel())

    # projected states
    g_radial, g_tangential = sign * radial(g, w), sign * tangential(g, w)
    noise = geometry.rounding_level(p.dtype, torch.float64) * gg
    if guard and gg - gw * gw / ww <= noise:
        g_tangential = torch.zeros_like(g)
    whole = options["radial"] == "adam"  # moments of the whole gradient, and its radial part
    g_seen = sign * g if whole else g_tangential
    radial_beta = float(options["radial_beta"])
    m_radial = radial_beta * radial(state["m_radial"], w) + (1 - radial_beta) * g_radial
    m = beta1 * (m if whole else tangential(m, w)) + (1 - beta1) * g_seen
    v = beta2 * v + (1 - beta2) * g_seen * g_seen
    state.update(m_tangential=m, v_tangential=v, m_radial=m_radial)
    v_hat = v / (1 - beta2**t)
    if options["second_moment"] == "block" or (options["second_moment"] == "auto" and declared):
        v_hat = v_hat.double().mean().to(v.dtype)
    u = (m / (1 - beta1**t)) / (v_hat.sqrt() + max(eps, floor))
    u = _bounded(u) if guard else u

    # decay and radial step as one factor f on w
    decay = float(options["weight_decay"]) * (
        lr if options["decay_lr"] == "tangential" else eta_radial
    )
    if scale_invariant:
        decay *= options["wd_ratio"]
    norm = math.sqrt(ww)
    if keeps_norm or (guard and norm < 0.1 * state["initial_norm"]):
        decay = 0.0
    step_radial = u if whole else m_radial / (1 - radial_beta**t)
    pull = eta_radial * float(inner(step_radial, w)) / ww
    factor = 1 - decay - (0.0 if scale_invariant else pull)
    if guard:
        factor = min(max(factor, 0.5), 2.0)

    # tangential step
    u_tangential = tangential(u, w)
    if not (keeps_norm or options["tangential"] == "angular"):
        return _like(p, factor * w - lr * u_tangential, options, t, seed)
    k = lr * norm / _unit_of_angles(w, state["initial_norm"], options, scale_invariant)
    stretch = math.sqrt(1 + k * k * float(inner(u_tangential, u_tangential)) / ww)
    return _like(p, factor * (w - k * u_tangential) / stretch, options, t, seed)


def _unit_of_angles(
    w: Tensor, initial_norm: float, options: dict[str, Any], scale_invariant: bool
) -> float:
    """The norm at which an additive step would turn w as far as an angular one does."""
    rms, lr, absolute = options["angular_rms"], float(options["lr"]), options["radial_lr"]
    if rms == "equilibrium":  # AdamW's weight at rest: decay takes 2ηλ‖w‖², noise adds lr²·numel
        eta = float(options["radial_lr_ratio"]) * lr if absolute is None else float(absolute)
        eta = lr if options["decay_lr"] == "tangential" else eta
        rate = (
            float(options["weight_decay"]) * eta * (options["wd_ratio"] if scale_invariant else 1)
        )
        rms = lr / math.sqrt(2 * rate) if rate > 0 and lr > 0 else None
    unit = initial_norm if rms is None else rms * math.sqrt(w.numel())
    return max(unit, 10 * lr * math.sqrt(w.numel())) if options["guard"] else unit


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


def _like(p: Tensor, w: Tensor, options: dict[str, Any], t: int, seed: int) -> Tensor:
    """Back to the parameter's own dtype."""
    if p.dtype == torch.bfloat16 and options["rounding"] == "stochastic":
        return geometry.round_stochastically(w, torch.tensor(t), seed)
    return torch.view_as_complex(w) if p.is_complex() else w.to(p.dtype)
