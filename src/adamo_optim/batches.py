"""What a pass in torch calls works on at a time: a piece of a block, or many small blocks at once.

The coefficients are on the device, one for each block, where torch's foreach functions would launch
a kernel for each tensor. So small tensors are copied side by side into lines of a matrix, each of
which belongs to one block, and their coefficients are columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import LARGE_PIECE, PIECE, READ_PIECE, Block, Blocks, Piece
from .geometry import compute_dtype, total
from .rounding import round_stochastically

LINE = 512  # entries


class Part(NamedTuple):
    """A piece of a block, and the block's place in the list."""

    i: int
    block: Block
    piece: Piece

    @property
    def numel(self) -> int:
        return self.piece.tensors[0].numel()


def batches(blocks: Blocks, names: str, *vectors: Tensor) -> Iterator[Batch]:
    """All pieces of the named tensors, and the numbers of a law's vectors that multiply them."""
    columns = [blocks.pick(vector) for vector in vectors]
    matrix = torch.stack(vectors) if vectors and blocks.together else None
    masks = [vector.dtype == torch.bool for vector in vectors]
    waiting: dict[Any, list[Part]] = {}
    entries: Counter[Any] = Counter()
    for i, block in enumerate(blocks):
        tensors = [getattr(block, name) for name in names.split()]
        if any(x is None for x in tensors):  # it has no g⁻
            continue
        limit = PIECE.get(block.w.device.type, LARGE_PIECE)
        limit = READ_PIECE if blocks.read else limit
        for piece in block.pieces(*tensors, whole=blocks.replace, limit=limit):
            part = Part(i, block, piece)
            alone = block.rows is not None or block.seed is not None or not blocks.together
            if alone or part.numel > limit // 2:
                yield Batch(blocks, names, part, [piece.of(column[i]) for column in columns])
                continue
            key = tuple(x.dtype for x in tensors)
            entries[key] += part.numel
            if entries[key] > limit // 2:
                yield Lines(blocks, names, waiting.pop(key), matrix, masks)
                entries[key] = part.numel
            waiting.setdefault(key, []).append(part)
    for parts in waiting.values():
        yield Lines(blocks, names, parts, matrix, masks)


class Sums(list[list[Tensor]]):
    """Rows of sums of every block's pieces."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__([] for _ in blocks)
        self.blocks = blocks

    def add_up(self, width: int) -> list[Tensor]:
        """``width`` sums of each block, or of each row of it; 0 where there was nothing to add."""
        result: list[Tensor] = []
        if not self.blocks:
            return result
        nothing = self.blocks[0].w.new_zeros(width, dtype=self.blocks.scalar)
        for block, rows in zip(self.blocks, self, strict=True):
            if block.rows is not None:
                result.append(torch.cat(rows) if rows else nothing.expand(block.rows, -1))
            elif len(rows) > 1:
                result.append(torch.stack(rows).sum(0))
            else:
                result.append(rows[0] if rows else nothing)
        return result


class Batch:
    """One piece of one block."""

    def __init__(self, blocks: Blocks, names: str, part: Part, numbers: list[Any]) -> None:
        self.blocks, self.part, self.numbers = blocks, part, numbers
        self.names, self.tensors = names.split(), part.piece.tensors

    def write(self, name: str, value: Tensor) -> None:
        part = self.tensors[self.names.index(name)]
        if value is not part:  # not written to in place
            self.blocks.write(self.part.block, name, part, value)

    def write_weight(self, value: Tensor, step: Tensor) -> None:
        """The new weight in its own precision."""
        _, block, piece = self.part
        if block.seed is not None:
            part, places = piece.tensors[0], block.places
            if places is None and piece.start is not None:
                places = torch.arange(piece.start, piece.start + part.numel(), device=part.device)
            elif places is None:
                memory = torch.arange(block.w.numel(), device=part.device)
                places = memory.as_strided(block.w.shape, block.w.stride())
                places = places[piece.rows] if places.dim() else places
            value = round_stochastically(value, step, block.seed, places)
        self.write("w", value)

    def add_products(self, sums: Sums, *pairs: tuple[Tensor, Tensor]) -> None:
        """⟨x, y⟩ of every pair: of the whole, or of each of its rows."""
        by_row = self.part.block.rows is not None
        sums[self.part.i].append(products(self.blocks, pairs, by_row))


class Lines(Batch):
    """Many blocks; lines are filled up with zeros."""

    def __init__(
        self,
        blocks: Blocks,
        names: str,
        parts: list[Part],
        matrix: Tensor | None,
        masks: list[bool],
    ) -> None:
        self.blocks, self.names, self.parts = blocks, names.split(), parts
        self.counts = [-(-part.numel // LINE) for part in parts]
        self.tensors = [self.gather(k) for k in range(len(self.names))]
        self.numbers = []
        if matrix is not None:
            places = [blocks.first[part.block.member] for part in parts]
            columns = [
                matrix[:, place].unsqueeze(1).expand(-1, count)
                for place, count in zip(places, self.counts, strict=True)
            ]
            lines = torch.cat(columns, dim=1).to(compute_dtype(self.tensors[0])).unsqueeze(-1)
            zipped = zip(lines.unbind(), masks, strict=True)
            self.numbers = [x.bool() if mask else x for x, mask in zipped]

    def views(self, lines: Tensor) -> list[Tensor]:
        """Each block's entries in the shape of its piece."""
        cut = lines.view(-1).split([count * LINE for count in self.counts])
        return [
            x[: part.numel].view(part.piece.tensors[0].shape)
            for x, part in zip(cut, self.parts, strict=True)
        ]

    def gather(self, k: int) -> Tensor:
        tensors = [part.piece.tensors[k] for part in self.parts]
        lines = tensors[0].new_zeros(sum(self.counts), LINE)
        torch._foreach_copy_(self.views(lines), tensors)
        return lines

    def write(self, name: str, value: Tensor) -> None:
        k = self.names.index(name)
        torch._foreach_copy_([part.piece.tensors[k] for part in self.parts], self.views(value))

    def write_weight(self, value: Tensor, step: Tensor) -> None:
        self.write("w", value)

    def add_products(self, sums: Sums, *pairs: tuple[Tensor, Tensor]) -> None:
        rows = products(self.blocks, pairs, by_row=True).split(self.counts)
        for part, lines in zip(self.parts, rows, strict=True):
            sums[part.i].append(lines.sum(0))


def products(blocks: Blocks, pairs: tuple[tuple[Tensor, Tensor], ...], by_row: bool) -> Tensor:
    """⟨x, y⟩ of every pair in ``blocks.scalar``, in which a product of two floats is exact."""
    wide: list[tuple[Tensor, Tensor]] = []  # not by id, which would have a step compiled again

    def widen(x: Tensor) -> Tensor:
        for narrow, copy in wide:
            if narrow is x:
                return copy
        wide.append((x, x.to(blocks.scalar)))
        return wide[-1][1]

    results = []
    for x, y in pairs:
        dims = tuple(range(1, x.dim())) if by_row else None
        on_cpu = x.device.type == "cpu"
        if x is y and not on_cpu and not blocks.replace:  # without a copy
            norm = torch.linalg.vector_norm(x, dim=dims, dtype=blocks.scalar)
            results.append(norm * norm)
        else:
            product = widen(y) * (widen(x) if on_cpu else x)
            results.append(product.sum(dims) if by_row else total(product))
    return torch.stack(results, dim=-1).to(blocks.scalar)
