"""Sums over tensors in pieces give what they give in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adamo_optim import AdamO, AngularAdamW
from adamo_optim.batches import Lines, Sums, batches
from adamo_optim.blocks import PIECE, Block, Blocks
from adamo_optim.geometry import CHUNK, is_dense, same_strides, total

LIMIT = PIECE["cpu"]
LAYOUTS = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"]
)


def images(layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randn(40, 64, 12, 11, generator=source).contiguous(memory_format=layout)


def block(x: Tensor, rows: int | None = None) -> Block:
    return Block(0, x, x, x, rows=rows)


@LAYOUTS
def test_pieces_cover_every_entry_once_and_pair_them_rightly(layout: torch.memory_format) -> None:
    x = images(layout)
    y = 2 * x
    found = [piece.tensors for piece in block(x).pieces(x, y)]
    assert len(found) == -(-x.numel() // LIMIT) > 1
    assert all(torch.equal(2 * a, b) for a, b in found)
    assert torch.equal(torch.cat([a for a, _ in found]).sort()[0], x.flatten().sort()[0])


def test_a_piece_of_rows_is_whole_rows() -> None:
    x = torch.randn(50, 8000)
    found = list(block(x, rows=50).pieces(x))
    assert len(found) > 1
    assert torch.equal(torch.cat([piece.tensors[0] for piece in found]), x)
    numbers = torch.arange(50.0).view(50, 1)
    assert torch.equal(torch.cat([piece.of(numbers) for piece in found]), numbers)


def test_tensors_of_different_layouts_or_with_gaps_stay_whole() -> None:
    x, y = images(), images(torch.channels_last)
    gaps = torch.randn(4, LIMIT)[:, ::2]
    small = torch.randn(7, 5)
    for together in ((x, y), (gaps, gaps), (small, small)):
        (piece,) = block(together[0]).pieces(*together)
        assert piece.tensors[0] is together[0]
        assert piece.tensors[1] is together[1]


def test_blocks_side_by_side_are_what_they_are_alone() -> None:
    """Odd sizes, an empty and a 0-D one, layouts, two dtypes, and rows, which stay alone."""
    shapes = [(7, 5), (), (0, 3), (30, 20, 3, 3), (513,), (9, 4), (6, 10)]
    factors = torch.linspace(0.5, 2.5, 12, dtype=torch.float64)  # six and the rows of the last
    ends = []
    for together in (False, True):
        source = torch.Generator().manual_seed(1)
        blocks = Blocks(torch.float64, [1] * 6 + [6], together=together)
        for i, shape in enumerate(shapes):
            w, g = (torch.randn(shape, generator=source) for _ in range(2))
            w = w.bfloat16() if i == 5 else w
            w = w.contiguous(memory_format=torch.channels_last) if i == 3 else w
            blocks.append(Block(i, w, g, g, rows=6 if i == 6 else None))
        sums, kinds = Sums(blocks), []
        for batch in batches(blocks, "w g", factors, factors > 1):
            w, g = batch.tensors
            factor, large = batch.numbers
            batch.add_products(sums, (w, g), (g, g))
            batch.write("w", torch.where(large, w, g.to(w.dtype)) * factor.to(w.dtype))
            kinds.append(type(batch))
        assert kinds.count(Lines) == (2 if together else 0)
        ends.append(([block.w for block in blocks], sums.add_up(2)))
    (alone, one), (lined, many) = ends
    for a, b in zip(alone, lined, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert [tuple(x.shape) for x in many] == [(2,)] * 6 + [(6, 2)]


def test_dense_is_one_piece_of_memory_in_any_order() -> None:
    assert is_dense(images(torch.channels_last))
    assert is_dense(torch.randn(3, 1, 4).transpose(0, 2))
    assert is_dense(torch.randn(0, 3))
    assert not is_dense(torch.randn(4, 6)[:, ::2])
    assert not is_dense(torch.randn(3).expand(4, 3))


def test_the_stride_of_a_dimension_with_one_place_means_nothing() -> None:
    assert same_strides((3, 3, 1), (3, 7, 1), (4, 1, 3))
    assert not same_strides((3, 3, 1), (3, 7, 1), (4, 2, 3))


@LAYOUTS
def test_a_sum_does_not_depend_on_the_number_of_threads(layout: torch.memory_format) -> None:
    x = images(layout).double()
    assert x.numel() > 20 * CHUNK
    sums = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sums.append(float(total(x * x)))
    torch.set_num_threads(1)
    assert len(set(sums)) == 1
    assert sums[0] == pytest.approx(float(x.square().sum()), rel=1e-13)


@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("cls", [AdamO, AngularAdamW])
def test_a_step_in_pieces_is_a_step(cls: Any, flags: dict[str, bool]) -> None:
    """The gradient's layout decides whether there are pieces, and nothing else."""
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(images())
        optimizer = cls([{"params": [p], "rule": "scale_invariant"}], **flags)
        for seed in range(3):
            torch.manual_seed(seed)
            p.grad = torch.randn(p.shape).contiguous(memory_format=layout)
            optimizer.step()
        state = optimizer.state[p]
        numbers = [state[key] for key in ("tau", "radial_momentum", "mean_square") if key in state]
        ends.append([p.detach(), *numbers])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
