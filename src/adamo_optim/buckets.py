"""What one backend updates together: parameters, their state as matrices, their options.

``optimizer.state[p]`` is an ordinary dictionary of tensors. Its numbers are views into the bucket's
matrix ``memory``, one row for each quantity and one column for each block, so that a law works on
vectors and ``state_dict`` still sees ordinary tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .dtensor import (
    counted_once,
    is_sharded,
    local,
    local_gradient,
    rows_like,
    rows_of_shard,
)
from .geometry import scalar_dtype
from .option_table import OptionTable
from .options import check_numbers


@dataclass
class Member:
    """One parameter of a bucket."""

    p: Tensor
    name: str
    rule: str
    number: int  # its running number in the optimizer
    state: dict[str, Any]
    group: dict[str, Any]
    rows: int | None  # None: it is one block; else how many, one for each of its rows, of this
    # rank's alone if the bucket has no mesh
    mesh_row: int  # its place among the blocks on its mesh

    @property
    def size(self) -> int:
        """How many blocks it is."""
        return 1 if self.rows is None else self.rows

    def rows_here(self, mesh: Any) -> tuple[int | None, int]:
        """How many of its rows lie on this rank, and the first of them."""
        if self.rows is None or mesh is None:
            return self.rows, 0
        first, count = rows_of_shard(self.p)
        return count, first


class Bucket(ABC):
    """The blocks of one device, and one mesh if they are sharded, that one backend updates.

    Its subclasses say what the law of their optimizer needs: AdamO's, and that of the weights
    that AngularAdamW turns.
    """

    Options: Any  # NamedTuples of law.py
    Traits: Any
    Memory: Any
    RECORD: tuple[str, ...]
    BUFFERS: tuple[str, ...]
    SHARED: tuple[str, ...] = ()  # numbers that all blocks of a parameter have in common

    def __init__(self, device: torch.device, backend: str, mesh: Any = None) -> None:
        self.device, self.backend, self.mesh = device, backend, mesh
        self.dtype = scalar_dtype(device)
        self.members: list[Member] = []
        self.present: list[bool] = []
        self.takes_part: list[bool] = []  # the same, and stand-ins for gradients of other ranks
        self.last: Tensor | Callable[[], Tensor] | None = None  # the record of the last step
        self.kept: list[Any] = []  # what captured graphs read
        self.plan: Any = None  # what a fused backend prepared for this bucket

    # ---- what subclasses say ----

    @abstractmethod
    def traits_of(self, member: Member) -> Any:
        """The block's ``Traits`` as numbers."""

    @staticmethod
    @abstractmethod
    def numbers_of(group: Mapping[str, Any]) -> Iterator[float | Tensor]:
        """A group's options as numbers, in the order of ``Options``."""

    @abstractmethod
    def quantities(self, record: dict[str, Tensor], memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """What diagnostics show of a step."""

    @abstractmethod
    def work(self, amp: Mapping[str, Tensor | None]) -> Any:
        """This step, ready to run; None without a gradient."""

    # ---- layout ----

    def finish(self) -> None:
        """Lay out the matrices once all members are in."""
        members = self.members
        if any(member.rows is not None for member in members):
            # a backend may handle rows apart: the others, large ones first, come before them
            members.sort(key=lambda m: (m.rows is not None, -m.p.numel()))
        self.params = [member.p for member in members]
        self.names = [member.name for member in members]
        self.states = [member.state for member in members]
        self.sizes = [member.size for member in members]
        self.starts = [0, *accumulate(self.sizes)][:-1]  # the first block of every member
        self.blocks = sum(self.sizes)
        self.looks = self._looks()
        self.rows_here = [member.rows_here(self.mesh) for member in members]
        self.holds_shards = any(map(is_sharded, self.params))
        self.groups: list[dict[str, Any]] = []
        counts: list[int] = []  # blocks of each group
        for member in members:
            if not self.groups or self.groups[-1] is not member.group:
                self.groups.append(member.group)
                counts.append(0)
            counts[-1] += member.size
        check = partial(check_numbers, reads_devices=False)
        self.table = OptionTable(
            self.Options, self.numbers_of, check, counts, self.device, self.dtype
        )
        columns = zip(*map(self.traits_of, members), strict=True)
        self.traits = torch.stack([self.vector(column) for column in columns])
        if self.mesh is not None:
            rows = [m.mesh_row + i for m in members for i in range(m.size)]
            self.index_on_mesh = torch.tensor(rows, device=self.device)
            self.counted = self.vector([counted_once(p) for p in self.params])
        if self.differentiable:
            return
        keys = self.Memory._fields
        self.memory = torch.stack([self._stacked(key) for key in keys])
        for key, row in zip(keys, self.memory, strict=True):
            for member, view in zip(members, self.numbers_by_member(row), strict=True):
                member.state[key] = self.as_state(key, view, member)
        # compared by identity in every step
        self.entries = list(chain.from_iterable(map(dict.values, self.states)))
        self.own = self._own_entries()

    def numbers_by_member(self, row: Tensor) -> Sequence[Tensor]:
        """A number for each block as views: one for each member, 0-D unless its rows are blocks."""
        if all(member.rows is None for member in self.members):
            return row.unbind()
        parts = zip(self.members, row.split(self.sizes), strict=True)
        return [part[0] if member.rows is None else part for member, part in parts]

    def as_state(self, key: str, numbers: Tensor, member: Member) -> Tensor:
        """A member's numbers as its state has them; rows that other ranks lack are a DTensor's."""
        if member.rows is None:
            return numbers
        if key in self.SHARED:
            return numbers[0]
        alone = self.mesh is None and is_sharded(member.p)
        return rows_like(numbers, member.p) if alone else numbers

    def _stacked(self, key: str) -> Tensor:
        """One quantity of all members as a vector."""
        numbers = [local(state[key]) for state in self.states]
        if all(size == 1 for size in self.sizes):
            return torch.stack([x.reshape(()) for x in numbers]).to(self.dtype)
        pairs = zip(numbers, self.sizes, strict=True)
        return torch.cat([x.reshape(-1).expand(size) for x, size in pairs]).to(self.dtype)

    def vector(self, values: Sequence[float]) -> Tensor:
        """A number for each member as one for each block, on the device."""
        host = torch.tensor(values, dtype=self.dtype, device="cpu")
        if self.blocks != len(self.members):
            host = host.repeat_interleave(torch.tensor(self.sizes, device="cpu"))
        return host.to(self.device, non_blocking=True)

    @property
    def differentiable(self) -> bool:
        return self.backend == "differentiable"

    def is_current(self) -> bool:
        """False when somebody changed a parameter's storage or replaced a tensor of its state."""
        if self._looks() != self.looks:
            return False
        if self.differentiable:
            return True
        entries = list(chain.from_iterable(map(dict.values, self.states)))
        if not same(entries, self.entries):
            if not same(self._own_entries(), self.own):
                return False
            self.entries = entries  # somebody keeps things of theirs beside ours
        return True

    def hand_back(self) -> None:
        """Before another layout: numbers are this matrix's, whatever their own memory says.

        Somebody may have moved that, by ``x.data = x.data.to(device)``.
        """
        if self.differentiable:
            return
        keys, ours = (*self.Memory._fields, *self.BUFFERS), iter(self.own)
        rows = [self.numbers_by_member(row) for row in self.memory]
        for i, member in enumerate(self.members):
            for k, key in enumerate(keys):
                if member.state.get(key) is next(ours) and k < len(rows):
                    member.state[key] = self.as_state(key, rows[k][i], member)

    def _looks(self) -> list[Any]:
        """What of the parameters a layout depends on."""
        return [(p.dtype, p.device, p.shape, p.stride()) for p in self.params]

    def _own_entries(self) -> list[Any]:
        keys = (*self.Memory._fields, *self.BUFFERS)
        return [state.get(key) for state in self.states for key in keys]

    # ---- the scalar state ----

    def read(self) -> Any:
        """The scalar state as vectors."""
        if self.differentiable:
            return self.Memory(*map(self._stacked, self.Memory._fields))
        return self.Memory(*self.memory.unbind())

    def write(self, memory: Any) -> None:
        """Store the scalar state after a step."""
        if not self.differentiable:
            self.memory.copy_(torch.stack(list(memory)))
            return
        for key, vector in zip(self.Memory._fields, memory, strict=True):
            for member, part in zip(self.members, self.numbers_by_member(vector), strict=True):
                member.state[key] = self.as_state(key, part, member)

    # ---- a step ----

    def prepare(self) -> list[Tensor | None] | None:
        """The gradients of a step; None where no parameter has one."""
        self.last = None
        grads = [p.grad for p in self.params]
        present = takes_part = [g is not None for g in grads]
        if self.mesh is not None:
            if self.mesh.get_coordinate() is None:  # this rank holds no part of them
                return None
            grads = self._local_gradients()
            takes_part = [g is not None for g in grads]
        elif True not in present:
            return None
        elif self.holds_shards:
            grads = [
                g if g is None or not is_sharded(p) else local_gradient(p, g, name)
                for p, g, name in zip(self.params, grads, self.names, strict=True)
            ]
            # of a weight with few rows a rank may have none
            grads = [g if size else None for g, size in zip(grads, self.sizes, strict=True)]
            takes_part = [g is not None for g in grads]
            if True not in takes_part:
                return None
        self._mark_active(present, takes_part)
        for i, g in enumerate(grads):
            if g is None:
                continue
            if g.layout is not torch.strided:
                refuse_sparse(self.names[i])
            if g.is_neg() or g.is_conj():  # lazily: memory does not show it
                grads[i] = g.resolve_conj().resolve_neg()
        return grads

    def options(self) -> Any:
        """The options of this step as vectors."""
        result = self.table(self.groups, self.differentiable)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # a later step may replace them, and the graph knows their addresses only
            self.kept.append((self.active, self.index, self.takes, *self.table.for_graph()))
        return result

    def _mark_active(self, present: list[bool], takes_part: list[bool]) -> None:
        """Which blocks have a gradient, as mask and index; uploaded only when it changes."""
        if present != self.present or takes_part != self.takes_part:
            self.present, self.takes_part = present, takes_part
            self.active, self.takes = self.vector(present) > 0, self.vector(takes_part) > 0
            here = [t for t, size in zip(takes_part, self.sizes, strict=True) for _ in range(size)]
            slots = [slot for slot, takes in enumerate(here) if takes]
            index = torch.tensor(slots, dtype=torch.long, device="cpu")
            self.index = index.to(self.device, non_blocking=True)

    def _local_gradients(self) -> list[Tensor | None]:
        """This rank's shards of the gradients.

        A sharded block that has no gradient here may have one on other ranks: there is no way to
        know before the sums are added up, so zeros stand in for it. ``requires_grad`` is the same
        on all ranks.
        """
        result: list[Tensor | None] = []
        for p, name in zip(self.params, self.names, strict=True):
            if p.grad is not None:
                result.append(local_gradient(p, p.grad, name))
            else:
                result.append(torch.zeros_like(local(p)) if p.requires_grad else None)
        return result

    def moments_of_stand_ins(self) -> list[tuple[int, Tensor, Tensor]]:
        """What pass 1 changes of members for whose gradient zeros stand in, with a copy of it.

        Each with the member's first block.
        """
        return []

    def local_state(self, member: Member) -> dict[str, Any]:
        """A member's state, with this rank's shards of its buffers."""
        if not self.holds_shards:
            return member.state
        return {key: local(member.state[key]) for key in self.BUFFERS if key in member.state}

    def spread(self, values: list[Tensor], members: list[int], width: int) -> Tensor:
        """Sums of the members in this step → one row for every block, 0 for the others."""
        rows = []
        for value, i in zip(values, members, strict=True):
            count, first = self.rows_here[i]
            if count is None:
                value = value.unsqueeze(0)
            elif count != self.sizes[i]:  # the other rows lie on other ranks
                whole = value.new_zeros(self.sizes[i], width)
                whole[first : first + count] = value
                value = whole
            rows.append(value)
        if len(values) == len(self.members):
            return torch.cat(rows)
        zeros = torch.zeros(self.blocks, width, dtype=self.dtype, device=self.device)
        return zeros.index_copy(0, self.index, torch.cat(rows)) if rows else zeros

    def record(self) -> dict[str, Tensor] | None:
        """The vectors of the last step by name; no synchronisation."""
        if self.last is None:
            return None
        rows = self.last if isinstance(self.last, Tensor) else self.last()
        return dict(zip(self.RECORD, rows.unbind(), strict=True))


def same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    """The very same objects in the same order; a comparison that every step can afford."""
    return len(new) == len(old) and all(map(is_, new, old))


def refuse_sparse(name: str) -> None:
    """A sparse gradient has no norm in the directions it leaves out."""
    raise RuntimeError(
        f"sparse gradients are not supported, and the gradient of {name} is one. "
        "Use sparse=False in the embedding, or torch.optim.SparseAdam for this parameter; "
        "see docs/troubleshooting.md."
    )
