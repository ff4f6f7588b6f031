"""Loading a state: everything is checked first, so that it is loaded whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .dtensor import is_sharded, local, refuse_shards
from .options import check_options

if TYPE_CHECKING:
    from .blockwise import Blockwise

# What belongs to the parameters of an optimizer and not to the options of a checkpoint.
OURS = ("params", "param_names", "rule", "found", "order")


def checked(state_dict: Mapping[str, Any], optimizer: Blockwise) -> dict[str, Any]:
    """The state_dict in the groups of this optimizer, or ``ValueError`` with what is wrong."""
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        raise ValueError("a state_dict has a list 'param_groups' and a dictionary 'state'")
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise ValueError("every group of a state_dict is a dictionary with a list 'params'")
    result = optimizer._adapted({**state_dict, "param_groups": [dict(g) for g in groups]})
    _check_sizes(result["param_groups"], optimizer)
    # what its groups do not have stays as it is here
    result["param_groups"] = [
        {**{k: v for k, v in ours.items() if k not in ("params", "param_names")}, **theirs}
        for ours, theirs in zip(optimizer.param_groups, result["param_groups"], strict=True)
    ]
    for group in result["param_groups"]:
        try:
            check_options(group)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ValueError(f"this state_dict has an illegal option: {error}") from error
    keys = list(chain.from_iterable(group["params"] for group in result["param_groups"]))
    for p, name, _, number in optimizer._parameters():
        state = states.get(keys[number])
        if state:
            optimizer._check_state(state, p, name)
    return result


def _check_sizes(groups: list[dict[str, Any]], optimizer: Blockwise) -> None:
    theirs, ours = ([len(g["params"]) for g in gs] for gs in (groups, optimizer.param_groups))
    if theirs != ours:
        raise ValueError(
            f"this state_dict has groups of {theirs} parameters, and the optimizer of {ours}"
        )


def check_buffers(state: Mapping[str, Any], p: Tensor, name: str, keys: tuple[str, ...]) -> None:
    """Moments that are missing or of another shape must not turn into zeros unnoticed."""
    for key in keys:
        found = state.get(key)
        if is_lazy(p):
            continue
        if not isinstance(found, Tensor):
            wrong = "none"
        elif found.layout is not torch.strided:
            wrong = f"a {found.layout} one"
        elif found.shape != p.shape:
            wrong = f"one of shape {tuple(found.shape)}"
        else:
            if not is_sharded(p):
                refuse_shards(found)
            continue
        raise ValueError(
            f"{name} of shape {tuple(p.shape)} needs a dense {key} of that shape, and this "
            f"state_dict has {wrong}: it is damaged, or of another model."
        )


def check_numbers(state: Mapping[str, Any], p: Tensor, name: str, keys: tuple[str, ...]) -> None:
    """Numbers are numbers: one, or one for each row; finite; and the steps are counted."""
    if "step" not in state:
        raise ValueError(f"the state of {name} has no step: the state_dict is damaged.")
    rows = p.shape[:1] if not is_lazy(p) and p.dim() > 1 else torch.Size()
    for key in keys:
        if key not in state:
            continue
        try:
            value = torch.as_tensor(state[key])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{key} of {name} must be a number, got {state[key]!r}") from error
        value = local(value)
        if value.shape not in (torch.Size(), torch.Size([1]), rows):
            raise ValueError(f"{key} of {name} must be a number, got shape {tuple(value.shape)}")
        if not value.is_meta and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{key} of {name} must be finite, got {value}")


def regrouped(state_dict: dict[str, Any], optimizer: Blockwise) -> dict[str, Any]:
    """Another optimizer's state_dict in our groups: matched by name, or by the model's order.

    ``param_groups`` sorts parameters by rule and remembers where each stood; AdamW has them in
    groups of its own, mostly one in the order of the model.
    """
    theirs, ours = state_dict["param_groups"], optimizer.param_groups
    saved = [(key, group) for group in theirs for key in group["params"]]
    count = sum(len(group["params"]) for group in ours)
    if len(saved) != count:
        raise ValueError(
            f"this state_dict has {len(saved)} parameters, and the optimizer has {count}"
        )
    places = _places(theirs, ours)
    if places is None:
        return state_dict
    groups = []
    for group in ours:
        those = [saved[places.pop(0)] for _ in group["params"]]
        options = [{k: v for k, v in old.items() if k not in OURS} for _, old in those]
        if any(repr(other) != repr(options[0]) for other in options):
            names = group.get("param_names", ["its parameters"])
            raise ValueError(
                f"{names[0]} and others share a group here and had different options in this "
                "state_dict. Keep your own groups: adamo_optim.integrations.with_rules(groups, "
                "model, example_batch) splits them by rule."
            )
        kept = {k: v for k, v in group.items() if k in OURS or k not in (options or [{}])[0]}
        groups.append({**kept, **(options or [{}])[0], "params": [key for key, _ in those]})
    return {**state_dict, "param_groups": groups}


def _places(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[int] | None:
    """Where each of our parameters, in our order, stands in theirs; None: in the same place."""
    names = [name for group in theirs for name in group.get("param_names", [])]
    wanted = [name for group in ours for name in group.get("param_names", [])]
    if names and wanted and sorted(names) == sorted(wanted):
        index = {name: i for i, name in enumerate(names)}
        return [index[name] for name in wanted]
    order = [i for group in ours for i in group.get("order", [])]
    if sorted(order) == list(range(sum(len(group["params"]) for group in ours))):
        return order
    return None
