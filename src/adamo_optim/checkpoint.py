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
from .rules import REPLICAS, unwrapped

if TYPE_CHECKING:
    from .blockwise import Blockwise

KEEP_GROUPS = (
    "Give the optimizer the groups that the other one was made of: adamo_optim.integrations."
    'with_rules(groups, model, example_batch), where one group is [{"params": parameters}].'
)
# What belongs to the parameters of an optimizer and not to the options of a checkpoint.
OURS = ("params", "param_names", "rule", "found", "order")
NOT_NEGATIVE = ("step", "curvature_step", "tau_reference", "mean_square")


def checked(state_dict: Mapping[str, Any], optimizer: Blockwise) -> dict[str, Any]:
    """The state_dict in the groups of this optimizer, or ``ValueError`` with what is wrong."""
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        raise ValueError("a state_dict has a list 'param_groups' and a dictionary 'state'")
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise ValueError("every group of a state_dict is a dictionary with a list 'params'")
    result = optimizer._adapted({**state_dict, "param_groups": [dict(g) for g in groups]})
    if sorted_otherwise(result["param_groups"], optimizer.param_groups):
        result = regrouped(result, optimizer)
    _check_sizes(result["param_groups"], optimizer)
    pairs = zip(optimizer.param_groups, result["param_groups"], strict=True)
    result["param_groups"] = [_merged(ours, theirs) for ours, theirs in pairs]
    for group in result["param_groups"]:
        try:
            check_options(group)
            optimizer._check_differentiable(group)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ValueError(f"this state_dict has an illegal option: {error}") from error
    keys = list(chain.from_iterable(group["params"] for group in result["param_groups"]))
    for p, name, _, number in optimizer._parameters():
        state = states.get(keys[number])
        if state:
            if not isinstance(state, Mapping):
                raise ValueError(f"the state of {name} must be a dictionary, got {state!r}")
            optimizer._check_state(state, p, name)
    return result


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """A group with the options of the checkpoint; what it does not have stays as it is here.

    So does a rule that was found or declared here: the model may be another than it was.
    """
    kept = {k: v for k, v in ours.items() if k not in ("params", "param_names")}
    if ours["rule"] != "auto":
        theirs = {k: v for k, v in theirs.items() if k not in ("rule", "found", "order")}
    return {**kept, **theirs}


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


def check_shape(moment: Tensor | None, p: Tensor, name: str) -> None:
    """Before a step: a parameter may have become another one under the same name."""
    if moment is not None and not moment.is_meta and moment.shape != p.shape:
        raise RuntimeError(
            f"{name} had the shape {tuple(moment.shape)} and now has {tuple(p.shape)}, which its "
            "state does not fit. Let it start afresh with optimizer.state.pop(parameter), or build "
            "a new optimizer."
        )


def check_numbers(
    state: Mapping[str, Any],
    p: Tensor,
    name: str,
    keys: tuple[str, ...],
    by_row: tuple[str, ...],
) -> None:
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
        legal = [torch.Size(), torch.Size([1]), *([rows] if key in by_row else [])]
        if value.shape not in legal:
            raise ValueError(f"{key} of {name} must be a number, got shape {tuple(value.shape)}")
        value = local(value)
        if value.is_meta:
            continue
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{key} of {name} must be finite, got {value}")
        if key in NOT_NEGATIVE and bool((value < 0).any()):
            raise ValueError(f"{key} of {name} must be >= 0, got {value}")


def from_adamw(state_dict: dict[str, Any], optimizer: Blockwise) -> dict[str, Any]:
    """The state_dict of torch's AdamW, or Adam, in our groups."""
    for group in state_dict["param_groups"]:
        if "schema" in group:
            raise ValueError(
                "this state_dict was written by AdamO, whose moments are others than AdamW's: "
                "start afresh"
            )
        if "betas" not in group:
            raise ValueError("this state_dict is neither AdamW's, Adam's nor AngularAdamW's")
        if group.get("amsgrad"):
            raise ValueError(
                "this state_dict has amsgrad=True, and AngularAdamW keeps no maximum of second "
                "moments: continue it with torch.optim.AdamW, or set amsgrad=False in its groups"
            )
        coupled = group.get("decoupled_weight_decay") is False
        if coupled and float(group.get("weight_decay", 0)) > 0:
            raise ValueError(
                f"this state_dict is torch.optim.Adam's with weight_decay={group['weight_decay']}, "
                "an L2 term in the gradient, which AngularAdamW does not have: set weight_decay in "
                "its groups to 0, load it, and then set what you want as AdamW's"
            )
    return regrouped(state_dict, optimizer)


def regrouped(state_dict: dict[str, Any], optimizer: Blockwise) -> dict[str, Any]:
    """A state_dict in our groups: matched by name, or by the order of the model.

    ``param_groups`` sorts parameters by rule and remembers where each stood; AdamW has them in
    groups of its own, mostly one in the order of the model.
    """
    theirs, ours = state_dict["param_groups"], optimizer.param_groups
    saved = [(key, g) for g, group in enumerate(theirs) for key in group["params"]]
    by_name = _places_by_name(theirs, ours)
    places = _places_by_order(len(saved), ours) if by_name is None else by_name
    if places is None:
        return state_dict
    for i in set(range(len(saved))).difference(places):
        if state_dict["state"].get(saved[i][0]):
            raise ValueError(
                f"this state_dict has {len(saved)} parameters, and the optimizer {len(places)}: "
                f"number {i} has state, and nobody would go on with it. {KEEP_GROUPS}"
            )
    groups, remaining = [], iter(places)
    for group in ours:
        those = [saved[next(remaining)] for _ in group["params"]]
        sources = [theirs[g] for g in sorted({g for _, g in those})]
        options = [{k: v for k, v in old.items() if k not in OURS} for old in sources] or [{}]
        # without names, several groups of theirs say that the order is not the model's
        alike = len(options) == 1 or by_name is not None
        if not alike or any(repr(other) != repr(options[0]) for other in options):
            name = group.get("param_names", ["its first parameter"])[0]
            raise ValueError(
                f"{name} and others share a group here and were in different ones in this "
                f"state_dict. {KEEP_GROUPS}"
            )
        kept = {k: v for k, v in group.items() if k in OURS or k not in options[0]}
        groups.append({**kept, **options[0], "params": [key for key, _ in those]})
    return {**state_dict, "param_groups": groups}


def sorted_otherwise(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> bool:
    """The same named parameters in other groups, as after a rule has changed."""
    places = _places_by_name(theirs, ours)
    sizes = [[len(group["params"]) for group in groups] for groups in (theirs, ours)]
    return places is not None and (places != sorted(places) or sizes[0] != sizes[1])


def _names(groups: list[dict[str, Any]]) -> list[str]:
    return [name for group in groups for name in group.get("param_names", [])]


def _bare(name: str) -> str:
    """As the model has it without wrappers."""
    return unwrapped(name).removeprefix(REPLICAS)


def _places_by_name(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[int] | None:
    """Where each of our parameters, in our order, stands in theirs; None: names do not tell."""
    for spelled in (str, _bare):
        index = {spelled(name): i for i, name in enumerate(_names(theirs))}
        wanted = [*map(spelled, _names(ours))]
        complete = len(wanted) == sum(len(group["params"]) for group in ours)
        complete &= len(index) == sum(len(group["params"]) for group in theirs)
        if complete and len(set(wanted)) == len(wanted) and index.keys() >= set(wanted):
            return [index[name] for name in wanted]
    return None


def _places_by_order(count: int, ours: list[dict[str, Any]]) -> list[int] | None:
    """The same among ``count`` parameters by ``order``, which has gaps where we have none."""
    order = [i for group in ours for i in group.get("order", [])]
    if len(set(order)) != sum(len(group["params"]) for group in ours):
        return None  # groups made by hand: in the same place
    if count < len(order):
        raise ValueError(
            f"this state_dict has {count} parameters, and the optimizer has {len(order)}, frozen "
            f"ones included. {KEEP_GROUPS}"
        )
    if count == len(order):
        place = {i: rank for rank, i in enumerate(sorted(order))}
        return [place[i] for i in order]
    return order if count > max(order, default=-1) else None
