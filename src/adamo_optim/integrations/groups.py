"""A trainer's own parameter groups, made to know the architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..rules import SET_BY_USER
from ..scale_invariance import is_trainable, param_groups


def with_rules(
    groups: Iterable[Mapping[str, Any]], model: nn.Module, example_batch: Any, **options: Any
) -> list[dict[str, Any]]:
    """Split groups that somebody else made by the rule each parameter should follow.

    Trainers sort parameters by weight decay or by depth (timm's ``lr_scale``). Those options stay
    as they are, a ``rule`` too; :func:`adamo_optim.param_groups` adds rule, reason and names.

    Args:
        groups: groups of parameters or of (name, parameter) pairs of ``model``, with any options.
        model: the model, before it is wrapped for distributed training.
        example_batch: what the model takes, as in ``param_groups``.
        options: the other arguments of ``param_groups``: ``forward``, ``overrides``, and so on.
            Options in ``overrides`` win over those of the group.

    Returns:
        Groups for AdamO, in the order given, each split into as many as it holds rules.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 2))
        >>> groups = [{"params": model.parameters(), "weight_decay": 0.0}]
        >>> for group in with_rules(groups, model, torch.randn(4, 4)):
        ...     print(group["rule"], group["weight_decay"], [name for name, _ in group["params"]])
        scale_invariant 0.0 ['0.weight']
        low_dim 0.0 ['1.weight', '1.bias', '2.bias']
        general 0.0 ['2.weight']
    """
    ruled = param_groups(model, example_batch, **options)
    found = {p: (i, name) for i, group in enumerate(ruled) for name, p in group["params"]}
    result: dict[tuple[int, int], dict[str, Any]] = {}
    for g, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(
                f'groups must be dictionaries with "params", got {type(group).__name__}: pass '
                '[{"params": model.parameters()}], or call param_groups.'
            )
        entries = group["params"]
        for entry in [entries] if isinstance(entries, Tensor) else entries:
            p: Tensor = entry[1] if isinstance(entry, tuple) else entry
            if not is_trainable(p):
                continue
            if p not in found:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} in group {g} is none of the model's: "
                    "pass the model that the groups were made from."
                )
            i, name = found[p]
            kept = {key: value for key, value in group.items() if key != "param_names"}
            new = {**kept, **ruled[i], "params": []}
            if kept.get("rule", "auto") != "auto" and new["rule_reason"] != SET_BY_USER:
                new |= {"rule": kept["rule"], "rule_reason": kept.get("rule_reason", "")}
            result.setdefault((g, i), new)["params"].append((name, p))
    return list(result.values())
