"""The groups' options as vectors over the blocks of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]


class OptionTable:
    """The groups' options as vectors over the blocks of one device.

    The numbers travel to the device only when one has changed, and keep their place there; options
    that are tensors on that device are read there in every step, so that a replayed CUDA graph sees
    their new values.

    Args:
        kind: the NamedTuple of ``law.py`` that the vectors are handed over in.
        numbers_of: a group's options as numbers or tensors, in its order.
        check: raises for illegal options of a group; it must not read devices.
        sizes: how many blocks each group has.
    """

    def __init__(
        self,
        kind: Any,
        numbers_of: Callable[[Group], Iterator[float | Tensor]],
        check: Callable[[Group], None],
        sizes: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.kind, self.numbers_of, self.check = kind, numbers_of, check
        self.device, self.dtype = device, dtype
        index = [i for i, size in enumerate(sizes) for _ in range(size)]
        self.index = torch.tensor(index, dtype=torch.long, device=device)
        self.rows: list[tuple[float, ...]] = []
        self.small = self.matrix = torch.empty(0)
        self.vectors: Any = None
        self.in_graph = False  # a captured graph reads the matrix: it must stay as it is

    def __call__(self, groups: Sequence[Group], differentiable: bool = False) -> Any:
        tensors: list[tuple[int, int, Tensor]] = []
        rows = []
        for i, group in enumerate(groups):
            try:
                row = list(self.numbers_of(group))
            except (KeyError, TypeError, ValueError):
                self.check(group)  # says which option is wrong
                raise
            for j, value in enumerate(row):
                if isinstance(value, Tensor):
                    if differentiable or value.device.type != "cpu":
                        tensors.append((j, i, value))
                        row[j] = 0.0
                    else:
                        row[j] = value.item()
            rows.append(tuple(row))
        if rows != self.rows or self.vectors is None:
            for i, (group, row) in enumerate(zip(groups, rows, strict=True)):
                if self.vectors is None or row != self.rows[i]:
                    self.check(group)
            self.rows = rows
            self.upload(elsewhere=self.vectors is None or self.in_graph or differentiable)
        return self.with_tensors(tensors) if tensors else self.vectors

    def upload(self, elsewhere: bool) -> None:
        """The numbers to their place on the device, or elsewhere, where somebody keeps the old."""
        columns = list(zip(*self.rows, strict=True))
        self.small = torch.tensor(columns, dtype=self.dtype, device="cpu")
        small = self.small.to(self.device, non_blocking=True)
        if elsewhere:
            self.matrix = small.index_select(1, self.index)
            self.vectors, self.in_graph = self.kind(*self.matrix.unbind()), False
        else:
            torch.index_select(small, 1, self.index, out=self.matrix)

    def for_graph(self) -> tuple[Tensor, ...]:
        """What a step reads, on the host and on the device, for a captured graph to keep."""
        self.in_graph = True
        return self.small, self.matrix, self.index

    def matrix_of(self, options: Any) -> Tensor:
        """The vectors as one matrix, one row per option."""
        return self.matrix if options is self.vectors else torch.stack(list(options))

    def with_tensors(self, tensors: list[tuple[int, int, Tensor]]) -> Any:
        """The vectors with device tensors filled in at (option, group)."""
        columns = list(self.matrix.unbind())
        for row, group, value in tensors:
            value = value.to(self.device, self.dtype).reshape(())
            columns[row] = torch.where(self.index == group, value, columns[row])
        return self.kind(*columns)
