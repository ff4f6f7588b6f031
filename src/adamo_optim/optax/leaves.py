"""What both transformations share: rules of leaves, options as numbers, trees of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..ranges import CHOICES, OPTIONAL, RANGES, RULES, SHARE, check_inside

NO_PARAMS = "update needs params, the weights it is for: update(grads, state, params)"


def labels(params: Any, rules: Any) -> Any:
    """The rule of every leaf: what ``rules``, a tree or a prefix of it, says, or else its shape."""
    if not jax.tree.leaves(params):  # a placeholder of optax.tree_map_params
        return params
    try:
        tree = jax.tree.broadcast("auto" if rules is None else rules, params)
    except ValueError as error:
        text = "rules must be a tree of names like the parameters, or a prefix of one"
        raise ValueError(text + "".join(_differences(rules, params))) from error

    def label(path: Any, p: Array, rule: str) -> str:
        if rule not in RULES:
            legal = ", ".join(map(repr, RULES))
            place = jax.tree_util.keystr(path)
            raise ValueError(f"the rule of leaf {place} must be one of {legal}, got {rule!r}")
        by_shape = "low_dim" if p.ndim <= 1 or p.size == 1 else "general"
        if rule != "low_dim" and rule != "auto" and jnp.iscomplexobj(p):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is complex and has the rule {rule!r}: keep its "
                "real and its imaginary part as leaves of their own"
            )
        return by_shape if rule == "auto" else rule

    return jax.tree_util.tree_map_with_path(label, params, tree)


def _differences(rules: Any, params: Any) -> Iterator[str]:
    """The first leaf without a rule, and the first rule without a leaf."""
    trees = (jax.tree_util.tree_leaves_with_path(tree) for tree in (rules, params))
    ruled, known = ([jax.tree_util.keystr(path) for path, _ in leaves] for leaves in trees)
    for name in [p for p in known if not any(map(p.startswith, ruled))][:1]:
        yield f"; there is none for {name}"
    for name in [r for r in ruled if not any(p.startswith(r) for p in known)][:1]:
        yield f"; there is no parameter {name}"


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
