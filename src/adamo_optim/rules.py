"""Which rule a parameter follows.

    low_dim          biases, norm weights, whatever has no direction
    scale_invariant  weights whose norm cannot matter, as before BatchNorm
    general          all others

What a rule does is the optimizer's matter: AdamO takes Algorithm 1's three kinds of blocks,
AngularAdamW turns scale-invariant weights and does with all others what AdamW does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Rule(NamedTuple):
    """A rule and a sentence, for people, that says why it is this one."""

    name: str
    reason: str


VECTOR = Rule("low_dim", "dim <= 1")
ONE_ENTRY = Rule("low_dim", "one entry, which has no direction")
NOT_EXAMINED = "by shape; scale invariance was not examined"


def rule_of(p: Tensor, group: Mapping[str, Any]) -> Rule:
    """The rule of a parameter: LowDim(w) first, as in Algorithm 1, unless the user has set it."""
    rule, found = group.get("rule", "auto"), Rule(*(group.get("found") or ("auto", NOT_EXAMINED)))
    if rule not in ("auto", found.name):  # declared, or changed since it was found
        return Rule(rule, "set by the user")
    if low_dim := low_dim_by_shape(p, group.get("low_dim", "auto")):
        return low_dim
    name = "scale_invariant" if rule == "scale_invariant" else "general"
    return Rule(name, found.reason if found.name in (name, "auto") else NOT_EXAMINED)


def low_dim_by_shape(p: Tensor, threshold: str | int | None) -> Rule | None:
    """LowDim(w): the rule, or None."""
    if threshold is not None and p.dim() <= 1:
        return VECTOR
    if threshold is not None and p.numel() == 1 and not p.is_complex():
        return ONE_ENTRY
    if isinstance(threshold, int) and p.numel() < threshold:
        return Rule("low_dim", f"numel < {threshold}")
    return None


def needs_previous_gradient(rule_name: str, group: Mapping[str, Any]) -> bool:
    """Only the radial step size uses g⁻, and only with curvature."""
    return rule_name != "low_dim" and group["curvature_target"] is not None


REPLICAS = "module."  # what DistributedDataParallel puts before names
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
        >>> optimizer = AngularAdamW(rebind(groups, model), lr=1e-3)
    """
    model = _without_replicas(model)
    names = {p: unwrapped(name) for name, p in model.named_parameters()}
    aliases = {unwrapped(n): p for n, p in model.named_parameters(remove_duplicate=False)}
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


def unwrapped(name: str) -> str:
    """Without what compilation, checkpointing and sharding put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
