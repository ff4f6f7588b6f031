"""AngularAdamW for JAX: optax.adamw, except for weights whose scale cannot matter, which turn."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.core
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


class TurnState(NamedTuple):
    """The state of the leaves that turn. All but ``count`` are trees."""

    count: Any
    exp_avg: Any
    mean_square: Any
    initial_norm: Any


class Leaf(NamedTuple):
    """What a step makes of one leaf."""

    update: Any
    exp_avg: Any
    mean_square: Any
    initial_norm: Any


def angular_adamw(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    betas: tuple[Any, Any] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.01,
    *,
    angular_rms: Any = 0.015,
    max_angle: Any = 0.05,
    rules: Any = None,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW, except for leaves of the rule "scale_invariant": these turn and keep their norm.

    The formulas are those of :class:`adamo_optim.AngularAdamW`; all other leaves are updated by
    ``optax.adamw``.

    Args:
        learning_rate: a number or an optax schedule; torch's ``lr``.
        betas: optax's ``b1`` and ``b2``.
        eps: ε of Adam's quotient.
        weight_decay: AdamW's; leaves that turn do not decay.
        angular_rms: the root mean square that a weight is taken to have when ``learning_rate``
            becomes an angle; ``None``: the one of its own first step.
        max_angle: the largest angle of a step, in radians, for an update of root mean square 1.
        rules: "auto" (by shape), "general", "low_dim" or "scale_invariant" for every leaf: a tree
            like the parameters, or a prefix of one; :func:`find_rules` makes it.
        mask: which leaves decay, as in ``optax.adamw``.

    Example:
        >>> rules = find_rules(lambda p, x: model.apply({"params": p}, x), params, batch)
        >>> optimizer = angular_adamw(1e-3, weight_decay=0.1, rules=rules)
    """
    check({k: v for k, v in locals().items() if k not in ("rules", "mask")})
    beta1, beta2 = betas

    def kinds(params: Any) -> Any:
        named = labels(params, rules)
        if named is params:
            return params
        return jax.tree.map(
            lambda p, rule: "turns" if rule == "scale_invariant" and p.size > 1 else "adamw",
            params,
            named,
        )

    adamw = optax.adamw(learning_rate, beta1, beta2, eps, weight_decay=weight_decay, mask=mask)
    options = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "angular_rms": 0.0 if angular_rms is None else angular_rms,
        "max_angle": max_angle,
        "sign": 1.0,  # optax has no maximize
    }
    turns = turn(learning_rate, options)
    return optax.partition({"adamw": adamw, "turns": turns}, kinds)


def turn(learning_rate: Any, options: dict[str, Any]) -> optax.GradientTransformation:
    """The rotation of every leaf; ``options`` are those of ``TurnOptions`` but lr."""

    def init(params: Any) -> TurnState:
        jax.tree_util.tree_map_with_path(refuse_unreal, params)
        jax.tree_util.tree_map_with_path(refuse_zero, params)
        first = map_leaves(first_leaf, Leaf, params)
        return TurnState(jnp.zeros((), jnp.int32), *first[1:])

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, TurnState]:
        if params is None:
            raise ValueError(NO_PARAMS)
        numbers_of_step = {"lr": rate(learning_rate, state.count), **options}

        def one(w: Array, g: Array, *memory: Array) -> Leaf:
            return turned(w, g, state.count, numbers_of_step, *memory)

        new = map_leaves(one, Leaf, params, updates, *state[1:])
        return new.update, TurnState(state.count + 1, *new[1:])

    return optax.GradientTransformation(init, update)


def refuse_zero(path: Any, w: Any) -> None:
    """Where values are known: under jit they are not, and a leaf of zeros then stays as it is."""
    if isinstance(w, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():  # a constant inside of jit
        is_zero = not bool(jnp.any(jnp.asarray(w) != 0))
    if is_zero:
        raise ValueError(
            f"leaf {jax.tree_util.keystr(path)} has the rule 'scale_invariant' and is 0: it has no "
            "direction to turn. Give it the rule 'general'"
        )


def first_leaf(w: Array) -> Leaf:
    zero, unset = (jnp.full((), x, compute_dtype(w)) for x in (0.0, laws.UNSET))
    return Leaf(None, jnp.zeros_like(w), zero, unset)


def turned(
    w: Array,
    g: Array,
    count: Array,
    options: dict[str, Any],
    exp_avg: Array,
    mean_square: Array,
    initial_norm: Array,
) -> Leaf:
    """One step of one leaf: the two passes that ``law.py`` describes."""
    kept, dtype = w.dtype, compute_dtype(w)
    w, g, m = w.astype(dtype), g.astype(dtype), exp_avg.astype(dtype)
    o = numbers(laws.TurnOptions, dtype, options)

    # pass 1
    m = (o.beta1 * m + (1 - o.beta1) * g).astype(kept)
    exp_avg, m = m, m.astype(dtype)
    sums = laws.TurnSums(*(jnp.sum(x * y) for x, y in ((w, w), (g, g), (m, w), (m, m))))
    root, active = w.size**-0.5, jnp.asarray(True)
    traits = numbers(laws.TurnTraits, dtype, {"inverse_root": root, "block_inverse_root": root})
    memory = laws.TurnMemory(count.astype(dtype), mean_square, initial_norm)
    scaled, memory = laws.square_law(o, traits, memory, sums, active)
    whole = laws.Whole(sums.ww, scaled.uw, scaled.uu)
    law, memory = laws.turn_law(o, traits, memory, scaled, whole, active)
    # pass 2
    update = law.a1 * w - law.b * m
    return Leaf(update.astype(kept), exp_avg, memory.mean_square, memory.initial_norm)
