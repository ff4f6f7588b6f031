"""Where every parameter's state lies, and whether anybody has changed something about it since."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import geometry
from .backends import choose
from .rules import rule_of
from .state import Bucket, same

if TYPE_CHECKING:
    from .optimizer import AdamO

# Options that decide how state is laid out; the others are numbers that a step reads.
STRUCTURE = (
    "rule",
    "low_dim",
    "previous_gradient",
    "decay_lr",
    "tangential",
    "radial",
    "rounding",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)


class Layout:
    """The blocks in buckets by device, backend and mesh, with what they were made from."""

    def __init__(self, optimizer: AdamO) -> None:
        self.groups = list(optimizer.param_groups)
        self.structure = structure(self.groups)
        self.resting: list[Tensor] = []  # frozen so far: no state, no place in a bucket
        self.on_mesh: Counter[Any] = Counter()  # how many parameters, frozen ones too
        buckets: dict[tuple[torch.device, str, Any], Bucket] = {}
        for p, name, group, number in optimizer._parameters():
            mesh = geometry.mesh_of(p)
            mesh_row = self.on_mesh[mesh]
            self.on_mesh[mesh] += 1
            if not optimizer._trains(p):
                self.resting.append(p)
                continue
            key = (p.device, choose(p, group, name)[0], mesh)
            bucket = buckets.setdefault(key, Bucket(*key))
            if not bucket.groups or bucket.groups[-1] is not group:
                bucket.add_group(group)
            bucket.add(p, name, rule_of(p, group)[0], number, optimizer.state[p], mesh_row)
        self.buckets = list(buckets.values())
        for bucket in self.buckets:
            bucket.finish()
        self.states = list(optimizer.state.values())
        self.own = states_of_tensors(optimizer)

    def is_current(self, optimizer: AdamO) -> bool:
        """False when groups, options, parameters or state are not what they were; in every step."""
        return (
            same(optimizer.param_groups, self.groups)
            and structure(self.groups) == self.structure
            and not any(map(optimizer._trains, self.resting))
            and self.has_states(optimizer)
            and all(bucket.is_current() for bucket in self.buckets)
        )

    def has_states(self, optimizer: AdamO) -> bool:
        """Whether every parameter's dictionary is the one it was; others may come and go."""
        states = list(optimizer.state.values())
        if not same(states, self.states):
            if not same(states_of_tensors(optimizer), self.own):
                return False
            self.states = states
        return True


def states_of_tensors(optimizer: AdamO) -> list[Any]:
    return [state for p, state in optimizer.state.items() if isinstance(p, Tensor)]


def structure(groups: list[dict[str, Any]]) -> list[Any]:
    """What of the groups decides a layout."""
    return [
        (
            list(map(id, group["params"])),
            [group[name] for name in STRUCTURE],
            group["curvature_target"] is None,
        )
        for group in groups
    ]
