"""A trainer's own parameter groups, made to know the architecture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..groups import param_groups
from ..scale_invariance import is_trainable


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
        Groups in the order given, each split into as many as it holds rules. ``order`` has the
        positions in the groups given, which are those of an AdamW that is made of them.

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
    known = {p: (i, name) for i, group in enumerate(ruled) for name, p in group["params"]}
    result: dict[tuple[int, int], dict[str, Any]] = {}
    for position, (g, given, p) in enumerate(_parameters(groups)):
        if not is_trainable(p):
            continue
        if p not in known:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} in group {g} is none of the model's: "
                "pass the model that the groups were made from."
            )
        i, name = known[p]
        group = result.setdefault((g, i), _with_rule(given, ruled[i]))
        group["params"].append((name, p))
        group["order"].append(position)
    return list(result.values())


def _parameters(
    groups: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[int, Mapping[str, Any], Tensor]]:
    """Every parameter with its group and the group's number."""
    if not isinstance(groups, Iterable):
        raise ValueError(
            f"groups must be a list of dictionaries, got {type(groups).__name__}: of an optimizer "
            "pass its param_groups."
        )
    for g, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(
                f'groups must be dictionaries with "params", got {type(group).__name__}: pass '
                '[{"params": model.parameters()}], or call param_groups.'
            )
        entries = group["params"]
        several = isinstance(entries, Iterable) and not isinstance(entries, Tensor)
        for entry in entries if several else [entries]:
            p = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
            if not isinstance(p, Tensor):
                raise ValueError(
                    f'"params" of group {g} must be parameters or (name, parameter) pairs, got '
                    f"{type(p).__name__}: pass model.parameters() of a module."
                )
            yield g, group, p


def _with_rule(given: Mapping[str, Any], ruled: Mapping[str, Any]) -> dict[str, Any]:
    """The options of both; the rule is that of ``overrides``, of the group, or what was found."""
    declared = given.get("rule", "auto") != "auto" and "found" in ruled
    source, ours = (given if declared else ruled), ("params", "param_names", "rule", "found")
    options = {key: value for key, value in {**given, **ruled}.items() if key not in ours}
    rule = {key: source[key] for key in ("rule", "found") if key in source}
    return {**options, "params": [], **rule, "order": []}
