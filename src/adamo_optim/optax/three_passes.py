"""AdamO for JAX: the three passes that ``law.py`` describes, on every leaf."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from . import laws
from .leaves import (
    NO_PARAMS,
    check,
    compute_dtype,
    labels,
    map_leaves,
    numbers,
    rate,
    refuse_unreal,
)


class AdamOState(NamedTuple):
    """All but ``count`` are trees. Numbers have one entry for a block: a leaf, or each row."""

    count: Any
    exp_avg: Any
    exp_avg_sq: Any
    previous_grad: Any  # a 0 where curvature is not looked at
    # as in law.py's Memory
    step: Any
    radial_momentum: Any
    tau: Any
    tau_reference: Any
    curvature_step: Any
    initial_norm: Any


class Leaf(NamedTuple):
    """What a step makes of one leaf."""

    update: Any
    exp_avg: Any
    exp_avg_sq: Any
    previous_grad: Any
    step: Any
    radial_momentum: Any
    tau: Any
    tau_reference: Any
    curvature_step: Any
    initial_norm: Any


def adamo(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    betas: tuple[Any, Any] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 1e-3,
    *,
    radial_lr_ratio: Any = 100.0,
    radial_lr: Any = None,
    radial_beta: Any = 0.9,
    curvature_target: Any = "auto",
    curvature_beta: Any = 0.9,
    decay_lr: str = "radial",
    low_dim_scale: Any = 1.0,
    delta: Any = None,
    wd_ratio: Any = 1.0,
    block: str = "tensor",
    guard: bool = True,
    rules: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamO: a weight's norm and its direction, each with a step size of its own.

    The options mean what they mean to :class:`adamo_optim.AdamO`. The previous gradient is kept
    exactly.

    Args:
        learning_rate: η_θ, a number or an optax schedule; torch's ``lr``.
        betas: (β₁, β₂) of Adam's moments.
        eps: ε, in the denominators of Adam and of the curvature scale.
        weight_decay: λ, SGD's: AdamW's divided by ``radial_lr_ratio``.
        radial_lr_ratio: η_ρ = ``radial_lr_ratio``·``learning_rate``.
        radial_lr: an absolute η_ρ in its place, which no schedule moves.
        radial_beta: momentum of the radial step.
        curvature_target: τ_target as a number, ``"auto"``, or ``None`` (no adaptation).
        curvature_beta: β_τ.
        decay_lr: λ is multiplied by η_ρ,t (``"radial"``) or by η_θ (``"tangential"``).
        low_dim_scale: α in (0, 1], on the step of low-dimensional leaves.
        delta: AdamP's online test of scale invariance; ``None``: off.
        wd_ratio: multiplies λ wherever the scale-invariant rule is active.
        block: the whole ``"tensor"`` or every ``"row"`` of it has a norm and a direction.
        guard: bounds what a step can do; ``False`` is the literal paper.
        rules: "auto" (by shape), "general", "low_dim" or "scale_invariant" for every leaf: a tree
            like the parameters, or a prefix of one; :func:`find_rules` makes it.

    Example:
        >>> rules = find_rules(lambda p, x: model.apply({"params": p}, x), params, batch)
        >>> optimizer = adamo(1e-3, rules=rules)
    """
    check({k: v for k, v in locals().items() if k != "rules"})
    if not isinstance(guard, bool):
        raise ValueError(f"guard must be True or False, got {guard!r}")
    isotropic = decay_lr == "tangential"
    auto = isinstance(curvature_target, str)
    options = {  # of laws.Options, all but lr
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": eps,
        "weight_decay": 0.0 if isotropic else weight_decay,
        "isotropic_decay": weight_decay if isotropic else 0.0,
        "radial_lr_ratio": radial_lr_ratio if radial_lr is None else 0.0,
        "radial_lr": 0.0 if radial_lr is None else radial_lr,
        "radial_beta": radial_beta,
        "curvature_auto": float(auto),
        "curvature_target": 0.0 if auto or curvature_target is None else curvature_target,
        "curvature_beta": curvature_beta,
        "low_dim_scale": low_dim_scale,
        "delta": 0.0 if delta is None else delta,
        "wd_ratio": wd_ratio,
        "guard": float(guard),
        "sign": 1.0,  # optax has no maximize
    }
    curved = curvature_target is not None

    def init(params: Any) -> AdamOState:
        jax.tree_util.tree_map_with_path(refuse_unreal, params)

        def one(w: Array, rule: str) -> Leaf:
            return first_leaf(w, rule, block, curved)

        first = map_leaves(one, Leaf, params, labels(params, rules))
        return AdamOState(jnp.zeros((), jnp.int32), *first[1:])

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdamOState]:
        if params is None:
            raise ValueError(NO_PARAMS)
        numbers_of_step = {"lr": rate(learning_rate, state.count), **options}

        def one(
            w: Array, g: Array, rule: str, m: Array, v: Array, g_: Array, *memory: Array
        ) -> Leaf:
            last = laws.Memory(*memory)
            return step(w, g, numbers_of_step, rule, block, m, v, g_, last)

        new = map_leaves(one, Leaf, params, updates, labels(params, rules), *state[1:])
        return new.update, AdamOState(state.count + 1, *new[1:])

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def has_rows(w: Array, rule: str, block: str) -> bool:
    """A row of one entry has no direction, and one row is the leaf itself."""
    several = w.ndim > 1 and w.shape[0] > 1 and w.size > w.shape[0]
    return block == "row" and rule != "low_dim" and several


def first_leaf(w: Array, rule: str, block: str, curved: bool) -> Leaf:
    """Every array is one of its own, so that a jitted step may be given them for good."""
    dtype = compute_dtype(w)
    shape = (w.shape[0], *(1,) * (w.ndim - 1)) if has_rows(w, rule, block) else ()
    m, v, previous = (jnp.zeros_like(w, dtype) for _ in range(3))
    if not curved or rule == "low_dim":
        previous = jnp.zeros((), dtype)
    unset = {"tau", "initial_norm"}
    memory = [
        jnp.full(shape, laws.UNSET if name in unset else 0.0, dtype) for name in laws.Memory._fields
    ]
    return Leaf(None, m, v, previous, *memory)


def step(
    w: Array,
    g: Array,
    options: dict[str, Any],
    rule: str,
    block: str,
    m: Array,
    v: Array,
    previous: Array,
    memory: laws.Memory,
) -> Leaf:
    """One step of one leaf."""
    kept, dtype = w.dtype, compute_dtype(w)
    by_row, curved = has_rows(w, rule, block), previous.shape == w.shape and rule != "low_dim"
    axes = tuple(range(1, w.ndim)) if by_row else None
    w, g = w.astype(dtype), g.astype(dtype)
    o, traits = numbers(laws.Options, dtype, options), traits_of(w, kept, rule, by_row)

    def inner(x: Array, y: Array) -> Array:
        return jnp.sum(x * y, axes, keepdims=by_row)

    # pass 1
    change = g - previous
    kappa = inner(change, change) if curved else jnp.zeros_like(memory.step)
    sums = laws.Sums(inner(w, w), inner(g, w), inner(g, g), kappa, inner(m, w))
    first, memory = laws.moments_law(o, traits, memory, sums, jnp.asarray(True))

    # pass 2; 0, and not 0·∞, for what the guard leaves alone
    x = jnp.where(first.live, w, 0)
    g_tangential = jnp.where(first.use_gradient, g, 0) - first.p * x
    m = first.beta1 * (m - first.q * x) + (1 - first.beta1) * g_tangential
    v = first.beta2 * v + (1 - first.beta2) * g_tangential * g_tangential
    u = m * first.debias1 / (jnp.sqrt(v * first.debias2) + first.eps)
    if curved:
        previous = jnp.where(first.keep_gradient, g, previous)
    products = laws.Products(inner(u, x), inner(u, u))
    second, memory = laws.weights_law(o, traits, memory, sums, first, products)

    # pass 3; once more 0·∞
    lost = (second.guarded_update | ~first.live) & (second.b == 0)
    update = second.a1 * jnp.where(second.a1 == 0, 0, w) - second.b * jnp.where(lost, 0, u)
    return Leaf(update.astype(kept), m, v, previous, *memory)


def traits_of(w: Array, kept: Any, rule: str, by_row: bool) -> laws.Traits:
    """``kept`` is the weight's own dtype, ``w`` has the one of the arithmetic."""
    entries = w.size // w.shape[0] if by_row else w.size
    narrow, wide = jnp.finfo(kept), jnp.finfo(w.dtype)
    values = {
        "low_dim": float(rule == "low_dim"),
        "scale_invariant": float(rule == "scale_invariant"),
        "inverse_root": max(entries, 1) ** -0.5,
        # what a difference of sums resolves, or two units of the gradient's own precision
        "rounding": max((2 * float(narrow.eps)) ** 2, 16 * float(wide.eps)),
        "smallest_eps": 1e-161 if w.dtype == jnp.float64 else 1e-22,
        "largest_square": float(wide.max),
    }
    return numbers(laws.Traits, w.dtype, values)
