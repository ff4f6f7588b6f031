"""Sums over tensors in pieces give what they give in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adamo_optim import AdamO, AngularAdamW
from adamo_optim.blocks import PIECE, Block
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
