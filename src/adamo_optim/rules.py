"""Which rule a parameter follows, and the table that explains it.

Algorithm 1 of the paper knows three kinds of blocks:

    low_dim          plain Adam, scaled by α (biases, norm weights, whatever starts at zero)
    scale_invariant  the tangential step and decay, no radial step
    general          a radial step, a tangential Adam step, decay

Ours, and not the paper's: low_dim blocks decay, unless ``low_dim_decay`` is 0, and a
scale-invariant weight whose step is a rotation does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from .options import users_level

Verdict = tuple[str, str]  # rule, reason

SET_BY_USER = "set by the user"  # the reason of a rule that ``overrides`` names
# What param_groups finds
NOT_EXAMINED = ("auto", "not examined: no example batch was given")
SCALE_INVARIANT = ("scale_invariant", "scale-invariant by Euler's identity")
SCALE_DEPENDENT = ("general", "depends on its scale")
NO_GRADIENT = ("general", "no gradient reached it: unknown, treated as general")
NOT_FINITE = ("general", "its gradient was not finite: unknown, treated as general")
EPS_MATTERS = ("general", "depends on its scale through the eps of a norm layer")
HARDLY_VARIES = ("general", "unknown: features before a BatchNorm hardly vary in the example batch")
VECTOR = ("low_dim", "dim <= 1")
ONE_ENTRY = ("low_dim", "one entry, which has no direction")
RULES_OF_REASONS = {
    reason: rule
    for rule, reason in (
        *(NOT_EXAMINED, SCALE_INVARIANT, SCALE_DEPENDENT, NO_GRADIENT, NOT_FINITE, EPS_MATTERS),
        *(HARDLY_VARIES, VECTOR, ONE_ENTRY),
    )
}


def rule_of(p: Tensor, group: dict[str, Any]) -> Verdict:
    """The rule of a parameter by declaration or shape, and why."""
    declared, reason = group["rule"], group["rule_reason"]
    if RULES_OF_REASONS.get(reason, declared) != declared:  # somebody has changed the rule since
        reason = ""
    if declared != "auto":
        return declared, reason or "declared by its group"
    general = ("general", reason or "by shape; scale invariance was not examined")
    return low_dim_by_shape(p, group["low_dim"]) or general


def low_dim_by_shape(p: Tensor, threshold: str | int | None) -> Verdict | None:
    """LowDim(w): rule and reason, or None."""
    if threshold is not None and p.dim() <= 1:
        return VECTOR
    if threshold is not None and p.numel() == 1 and not p.is_complex():
        return ONE_ENTRY
    if isinstance(threshold, int) and p.numel() < threshold:
        return "low_dim", f"numel < {threshold}"
    return None


def warn_of_declared_rules(parameters: Iterable[tuple[Tensor, str, dict[str, Any], int]]) -> None:
    """Someone who hands ``low_dim`` to AdamO and not to ``param_groups`` is told where it goes."""
    for p, name, group, _ in parameters:
        rule, reason, threshold = group["rule"], group["rule_reason"], group["low_dim"]
        examined = rule != "auto" and reason not in ("", SET_BY_USER)
        if threshold == "auto" or not examined or is_lazy(p):
            continue
        if (low_dim_by_shape(p, threshold) is None) == (rule == "low_dim"):
            warnings.warn(
                f"low_dim={threshold!r} does not reach {name}, whose group declares the rule "
                f"{rule!r} ({reason}): pass low_dim to param_groups instead.",
                UserWarning,
                stacklevel=users_level(),
            )
            return


def norm_moves(rule: str, group: dict[str, Any]) -> bool:
    """Whether a parameter has a radial part: decay, and a step size for it."""
    turns_only = rule == "scale_invariant" and group["tangential"] != "additive"
    return rule != "low_dim" and not turns_only


def decays(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether weight decay changes the norm of a parameter."""
    return not is_lazy(p) and norm_moves(rule_of(p, group)[0], group)


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def rebind(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Groups made of a model before it was wrapped, with the parameters it has now.

    ``fully_shard`` and tensor parallelism put new parameters in the place of the old ones, which
    get no gradients any more. The names stay, and carry rules and options over.

    Args:
        groups: what :func:`adamo_optim.param_groups` returned before wrapping.
        model: the same model after wrapping. What is in no group must be frozen.

    Example:
        >>> groups = param_groups(model, example_batch)
        >>> fully_shard(model)
        >>> optimizer = AdamO(rebind(groups, model), lr=1e-3)
    """
    model = _without_replicas(model)
    names = {p: _unwrapped(name) for name, p in model.named_parameters()}
    aliases = {_unwrapped(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    result: list[dict[str, Any]] = []
    left = set(names)
    for group in groups:
        params = []
        for name in _names(group):
            if name not in aliases:
                some = ", ".join(map(repr, list(aliases)[:5]))
                raise ValueError(f"the model has no parameter {name!r}; its names are like {some}")
            params.append((name, aliases[name]))
            left.discard(aliases[name])
        result.append({**group, "params": params})
        result[-1].pop("param_names", None)
    if missing := sorted(names[p] for p in left if p.requires_grad):
        raise ValueError(
            f"no group has the parameters {', '.join(missing)} of this model. If it gained them "
            "after the groups were made, call param_groups on the finished model, then wrap it; if "
            "they are not to be trained, freeze them: requires_grad_(False)."
        )
    return result


def _names(group: Mapping[str, Any]) -> list[str]:
    """Of a group as it was made, or as an optimizer has left it."""
    if "param_names" in group:
        return list(group["param_names"])
    if any(isinstance(p, Tensor) for p in group["params"]):
        raise ValueError("rebind needs groups with names, (name, parameter), as of param_groups")
    return [name for name, _ in group["params"]]


def _without_replicas(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel, compiled or not: it puts ``module.`` before names."""
    wrapped = getattr(model, "_orig_mod", model)
    replicated = isinstance(wrapped, DistributedDataParallel | nn.DataParallel)
    return wrapped.module if replicated else model


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def needs_previous_gradient(rule: str, group: dict[str, Any]) -> bool:
    """Only the radial step size uses g⁻, only with curvature, and only if the norm moves."""
    return norm_moves(rule, group) and group["curvature_target"] is not None


@dataclass(frozen=True)
class Row:
    """One parameter in the explanation."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str
    backend: str
    note: str = ""  # why it is not a faster backend


class Explanation(list[Row]):
    """The rule and backend of every parameter; prints as a table."""

    def __str__(self) -> str:
        header = ("parameter", "shape", "rule", "backend", "why")
        cells = [
            (
                r.name,
                "×".join(map(str, r.shape)),
                r.rule,
                f"{r.backend} ({r.note})" if r.note else r.backend,
                r.reason,
            )
            for r in self
        ]
        widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in [header, tuple("-" * width for width in widths), *cells]
        ]
        return "\n".join(lines)
