"""What the passes in torch calls work on: the tensors of the blocks that have a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .dtensor import as_real
from .geometry import flat, lie_alike

# Entries that a pass holds copies of at a time: what fits into a CPU's cache, and elsewhere enough
# that launches do not count. It bounds the memory a step needs beside its state.
PIECE = {"cpu": 1 << 17}
LARGE_PIECE = 1 << 20
READ_PIECE = 1 << 19  # where Python reads the numbers: less is copied, and every piece costs calls


@dataclass
class Block:
    """The real tensors of one parameter; of a sharded one, this rank's shards.

    ``rows`` is None where the parameter is one block. Otherwise its rows are blocks of their own,
    ``rows`` of them from ``first_row`` on lie here.
    """

    member: int  # its number in the bucket
    w: Tensor
    g: Tensor
    m: Tensor
    v: Tensor | None = None
    previous: Tensor | None = None  # g⁻
    sampled: Tensor | None = None  # the part of g that it is of
    ratio: float = 1.0  # what κ of that part is multiplied by
    seed: int | None = None  # for stochastic rounding; None: to nearest
    places: Tensor | None = None  # for it: in the whole tensor; None: as in memory
    rows: int | None = None
    first_row: int = 0

    def pieces(
        self, *tensors: Tensor, whole: bool = False, limit: int | None = None
    ) -> Iterator[Piece]:
        """Tensors of the block's shape in parts that bound the memory a pass needs."""
        first, limit = tensors[0], limit or PIECE.get(tensors[0].device.type, LARGE_PIECE)
        whole = whole or self.places is not None or torch.compiler.is_compiling()
        if whole or first.numel() <= limit:
            yield Piece(list(tensors), slice(None))
        elif self.rows is not None:
            length = max(1, limit * self.rows // first.numel())
            for start in range(0, self.rows, length):
                part = slice(start, min(start + length, self.rows))
                yield Piece([x[part] for x in tensors], part)
        elif lie_alike(*tensors):
            lines = [flat(x).split(limit) for x in tensors]
            for k, parts in enumerate(zip(*lines, strict=True)):
                yield Piece(list(parts), slice(None), k * limit)
        else:
            yield Piece(list(tensors), slice(None))

    def shape(self, coefficient: Tensor) -> Tensor:
        """A block's numbers, one or one per row, so that they multiply its tensors."""
        if self.rows is None:
            return coefficient[0]
        return coefficient.narrow(0, self.first_row, self.rows).view(-1, *(1,) * (self.w.dim() - 1))


@dataclass
class Piece:
    """Parts of tensors, the rows they are of, and where they start in memory if they are flat."""

    tensors: list[Tensor]
    rows: slice
    start: int | None = None

    def of(self, coefficient: Any) -> Any:
        """The numbers of a block, shaped by :meth:`Block.shape`, for this piece."""
        is_column = isinstance(coefficient, Tensor) and coefficient.dim() > 0
        return coefficient[self.rows] if is_column else coefficient


class Blocks(list[Block]):
    """The blocks of a step; ``sizes``: how many places each member of the bucket has in vectors.

    ``replace`` is for the differentiable backend: new tensors then take the place of the old ones,
    which autograd may still need. ``together``: small tensors are worked on side by side.
    ``read``: numbers are Python's, which kernels take faster; for a CPU, where nothing waits.
    """

    def __init__(
        self,
        scalar: torch.dtype,
        sizes: list[int],
        replace: bool = False,
        together: bool = False,
        read: bool = False,
    ) -> None:
        super().__init__()
        self.scalar, self.sizes, self.replace, self.read = scalar, sizes, replace, read
        self.together = together and not torch.compiler.is_compiling()
        self.plain = all(size == 1 for size in sizes)
        self.first = list(accumulate(sizes, initial=0))  # place of each member

    def pick(self, vector: Tensor) -> list[Any]:
        """A law's vector as the blocks' own numbers, each shaped to multiply its tensors."""
        if self.plain:
            read = self.read and not torch.compiler.is_compiling()
            entries = vector.tolist() if read else vector.unbind()
            return [entries[block.member] for block in self]
        entries = vector.split(self.sizes)
        return [block.shape(entries[block.member]) for block in self]

    def write(self, block: Block, name: str, part: Tensor, value: Tensor) -> None:
        """``value`` into ``part`` of the block's tensor; or, differentiably, in its place."""
        if self.replace:
            setattr(block, name, value.to(part.dtype))
        else:
            part.copy_(value)


def block_of(
    member: int, p: Tensor, g: Tensor, state: dict[str, Any], clone: bool = False, **more: Any
) -> Block:
    """A block from a parameter, its gradient and its buffers."""
    v = state.get("exp_avg_sq")
    return Block(
        member,
        as_real(p.clone() if clone else p),
        as_real(g),
        as_real(state["exp_avg"]),
        None if v is None else as_real(v),
        previous=state.get("previous_grad"),
        **more,
    )
