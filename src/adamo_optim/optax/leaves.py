"""What both transformations share: rules of leaves, options as numbers, trees of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..ranges import CHOICES, OPTIONAL, RANGES, RULES, SHARE, check_inside

NO_PARAMS = "update needs params, the weights it is for: update(grads, state, params)"


def labels(params: Any, rules: Any) -> Any:
    """The rule of every leaf: what ``rules``, a tree or a prefix of it, says, or else its shape."""
    if not jax.tree.leaves(params):  # a placeholder of optax.tree_map_params
        return params
    ruled = dict(jax.tree_util.tree_leaves_with_path("auto" if rules is None else rules))
    _check_places(ruled, params)

    def label(path: Any, p: Array) -> str:
        rule = next(ruled[start] for start in _starts(path) if start in ruled)
        if rule not in RULES:
            legal = ", ".join(map(repr, RULES))
            place = jax.tree_util.keystr(path)
            raise ValueError(f"the rule of leaf {place} must be one of {legal}, got {rule!r}")
        return by_shape(p) if rule == "auto" else rule

    return jax.tree_util.tree_map_with_path(label, params)


def by_shape(p: Any) -> str:
    return "low_dim" if np.ndim(p) <= 1 or np.size(p) == 1 else "general"


def _starts(path: Any) -> list[Any]:
    return [path[:i] for i in range(len(path) + 1)]


def _check_places(ruled: Mapping[Any, Any], params: Any) -> None:
    """Raise for the first leaf without a rule, and for the first rule without a leaf.

    What is empty may have any rules: optax.partition and optax.masked put one MaskedNode in the
    place of a whole branch.
    """
    known = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: not jax.tree.leaves(x))
    empty = {path for path, x in known if not jax.tree.leaves(x)}
    above = {start for path, _ in known for start in _starts(path)}
    bare = [p for p, _ in known if p not in empty and ruled.keys().isdisjoint(_starts(p))]
    lost = [r for r in ruled if r not in above and empty.isdisjoint(_starts(r))]
    if bare or lost:
        text = "rules must be a tree of names like the parameters, or a prefix of one"
        text += "".join(f"; there is none for {jax.tree_util.keystr(p)}" for p in bare[:1])
        text += "".join(f"; there is no parameter {jax.tree_util.keystr(r)}" for r in lost[:1])
        raise ValueError(text)


def refuse_unreal(path: Any, p: Any) -> None:
    """optax.adamw steps along complex numbers; the laws are for real ones."""
    if not jnp.issubdtype(p.dtype, jnp.floating):
        raise ValueError(
            f"leaf {jax.tree_util.keystr(path)} is {p.dtype}, not real floating numbers: keep real "
            "and imaginary parts as leaves of their own, and integers out by optax.partition"
        )


def check(options: Mapping[str, Any]) -> None:
    """Raise for the first illegal option. Arrays, which may be tracers, are taken on trust."""
    betas = options["betas"]
    if isinstance(betas, str) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise ValueError(f"betas must be a pair of numbers, got {betas!r}")
    named = {f"betas[{i}]": (beta, SHARE) for i, beta in enumerate(betas)}
    for name, value in options.items():
        if name == "learning_rate" and not callable(value):
            named[name] = value, RANGES["lr"]
        elif name in RANGES and not (value is None and name in OPTIONAL):
            named[name] = value, RANGES[name]
        elif name in CHOICES and value not in CHOICES[name]:
            legal = ", ".join(map(repr, CHOICES[name]))
            raise ValueError(f"{name} must be one of {legal}, got {value!r}")
    if named.get("curvature_target", (None,))[0] == "auto":
        del named["curvature_target"]
    for name, (value, bounds) in named.items():
        if not isinstance(value, jax.Array):
            check_inside(name, value, bounds)


def rate(learning_rate: Any, count: Array) -> Any:
    """A schedule's value after ``count`` updates, or the number."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def numbers(kind: Any, dtype: Any, values: Mapping[str, Any]) -> Any:
    """A NamedTuple of the laws, filled with arrays."""
    return kind(**{name: jnp.asarray(x, dtype) for name, x in values.items()})


def compute_dtype(w: Array) -> Any:
    """Of the arithmetic and of all sums: float32, or float64 for weights in float64."""
    return jnp.promote_types(w.dtype, jnp.float32)


def map_leaves(function: Callable[..., Any], kind: Any, tree: Any, *more: Any) -> Any:
    """A NamedTuple of trees from a function that returns one of arrays for every leaf."""
    leaves, structure = jax.tree.flatten(tree)
    columns = [structure.flatten_up_to(x) for x in more]
    rows = [function(*row) for row in zip(leaves, *columns, strict=True)]
    return kind(*(structure.unflatten([row[i] for row in rows]) for i in range(len(kind._fields))))
