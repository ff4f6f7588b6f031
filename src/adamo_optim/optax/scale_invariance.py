"""Which leaves are scale-invariant: Euler's identity in float64.

A leaf is scale-invariant when f(c·w) = f(w) for every c > 0. Every gradient g = Jᵀy is then
orthogonal to w, whatever the cotangent y. The eps of a norm layer breaks that by eps/variance, and
a JAX function cannot be looked into; but leaves that are nearly invariant may be made larger, and
the variance grows by the square.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .leaves import by_shape

# |cos(g, w)|·√(entries) is about eps/variance with the function as it is, and about 1 where no norm
# layer follows: above this the scale of w does matter.
FELT_EPS = 0.1
ENLARGED = 1e5  # an eps of 1e-5 is then felt by 1e-15/variance
ROUNDING = 1e-13  # ‖g‖‖w‖ below this share of the largest is cancellation noise

if hasattr(jax, "enable_x64"):
    enable_x64: Any = jax.enable_x64
else:  # JAX before 0.8; for Python 3.10 there is no newer one
    from jax.experimental import enable_x64  # pyright: ignore


def find_rules(
    f: Callable[..., Any], params: Any, *inputs: Any, trials: int = 3, tolerance: float = 1e-9
) -> Any:
    """The rule of every leaf, a tree for ``rules=``: by shape, and by Euler's identity in float64.

    Leaves of zeros are "general", for they have no direction yet. Complex and integer leaves have
    the rule of their shape. Call it outside ``jit``.

    Args:
        f: ``f(params, *inputs)`` returns what the loss is made of, an array or a tree of arrays,
            computed as in training: BatchNorm with the statistics of the batch, and without casts
            to float32 or bfloat16, whose rounding hides the identity.
        params: the parameters, of which a perturbed float64 copy is looked at.
        inputs: a real batch, or random numbers like one; floating arrays become float64.
        trials: the number of random cotangents.
        tolerance: the largest |cos(g, w)| of a scale-invariant leaf.

    Example:
        >>> rules = find_rules(lambda p, x: model.apply({"params": p}, x), params, batch)
    """
    _check(f, (params, inputs), trials, tolerance)
    random = np.random.default_rng(0)  # the same verdicts every time
    with enable_x64(True):
        given, structure = jax.tree.flatten(params)
        places = [i for i, x in enumerate(given) if _is(jnp.floating, x)]
        values = [np.asarray(given[i]) for i in places]
        leaves = [_off_special_points(x, random) for x in values]
        fixed, wide = jax.tree.map(_widened, (given, inputs))

        def outputs(leaves: list[Any]) -> Any:
            whole = [*fixed]
            for i, w in zip(places, leaves, strict=True):
                whole[i] = w
            return f(structure.unflatten(whole), *wide)

        @jax.jit
        def gradients(leaves: list[Any], key: Any) -> Any:
            result, pull = jax.vjp(outputs, leaves)
            return pull(_cotangents(result, key))[0]

        def measure(scales: list[float]) -> list[list[tuple[float, float]]]:
            """⟨g, w⟩ and ‖g‖‖w‖ of every leaf, per trial."""
            scaled = [c * w for c, w in zip(scales, leaves, strict=True)]
            keys = jax.random.split(jax.random.key(0), trials)
            rows = [[np.asarray(g) for g in gradients(scaled, key)] for key in keys]
            return [[_alignment(row[i], w) for row in rows] for i, w in enumerate(scaled)]

        plain = measure([1.0] * len(leaves))
        largest = max((s for pairs in plain for _, s in pairs if np.isfinite(s)), default=0.0)

        def within(pairs: list[tuple[float, float]], bound: float) -> bool:
            reached = [pair for pair in pairs if not pair[1] <= ROUNDING * largest]
            return bool(reached) and all(abs(inner) <= bound * size for inner, size in reached)

        may = [
            w.ndim > 1 and w.size > 1 and bool(np.any(x)) and within(p, FELT_EPS * w.size**-0.5)
            for w, x, p in zip(leaves, values, plain, strict=True)
        ]
        together = measure([ENLARGED if candidate else 1.0 for candidate in may])

        def turns(i: int) -> bool:
            """Leaves that are not invariant may saturate what others need: then it alone."""
            if not may[i] or within(together[i], tolerance):
                return may[i]
            alone = measure([ENLARGED if i == k else 1.0 for k in range(len(leaves))])
            return within(alone[i], tolerance)

        rules = [by_shape(x) for x in given]
        for i, place in enumerate(places):
            if turns(i):
                rules[place] = "scale_invariant"
    return structure.unflatten(rules)


def _check(f: Any, arrays: Any, trials: Any, tolerance: float) -> None:
    if not callable(f):
        raise ValueError(f"f must be a function of (params, *inputs), got {type(f).__name__}")
    if type(trials) is not int or trials < 1:
        raise ValueError(f"trials must be an integer >= 1, got {trials!r}")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance!r}")
    for path, x in jax.tree_util.tree_leaves_with_path(arrays):
        if isinstance(x, jax.core.Tracer):
            raise ValueError("find_rules looks at values: call it outside of jit")
        # −∞ masks attention
        if _is(jnp.floating, x) and not bool(np.all(np.isfinite(x) | (np.asarray(x) == -np.inf))):
            place = ("params", "inputs")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise ValueError(f"{place} has NaN or infinity: pass values that are finite")


def _is(kind: Any, x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, kind)


def _alignment(g: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    return float((g * w).sum()), float(np.linalg.norm(g) * np.linalg.norm(w))


def _widened(x: Any) -> Any:
    if not _is(jnp.inexact, x):
        return x
    return jnp.asarray(np.asarray(x), jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)


def _off_special_points(w: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Perturbed: what holds only at 0, at 1 or at an identity does not last.

    Entries that are not 0 move away from it, so that what must be positive stays so.
    """
    w = w.astype(np.float64)
    noise = random.standard_normal(w.shape) * (0.1 * np.abs(w).max(initial=0.0) or 0.02)
    constant = w.size == 0 or bool((w == w.flat[0]).all())
    return w + (noise if constant else np.where(w == 0, noise, np.abs(noise) * np.sign(w)))


def _cotangents(result: Any, key: Any) -> Any:
    """Random numbers like the outputs; nothing flows back from integers."""
    outputs, structure = jax.tree.flatten(result)
    if not any(_is(jnp.inexact, y) for y in outputs):
        raise ValueError("f returned no floating array: return what the loss is made of")
    random = [
        jax.random.normal(k, y.shape, y.dtype)
        if _is(jnp.inexact, y)
        else np.zeros(y.shape, jax.dtypes.float0)
        for k, y in zip(jax.random.split(key, len(outputs)), outputs, strict=True)
    ]
    return structure.unflatten(random)
