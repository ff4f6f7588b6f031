"""Reductions piece by piece give what they give in one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from adamo_optim import AdamO
from adamo_optim.geometry import PIECE, is_dense, pieces


def images(layout: torch.memory_format) -> Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randn(40, 64, 12, 11, generator=source).contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_pieces_cover_every_entry_once_and_pair_them_rightly(layout: torch.memory_format) -> None:
    x = images(layout)
    y = 2 * x
    found = list(pieces(torch.float64, x, y))
    assert len(found) == -(-x.numel() // PIECE) > 1
    assert all(torch.equal(2 * a, b) for a, b in found)
    assert torch.equal(torch.cat([a for a, _ in found]).sort()[0], x.flatten().double().sort()[0])


def test_tensors_of_different_layouts_or_with_gaps_stay_whole() -> None:
    x, y = images(torch.contiguous_format), images(torch.channels_last)
    gaps = torch.randn(4, PIECE)[:, ::2]
    small = torch.randn(7, 5)
    for together in ((x, y), (gaps, gaps), (small, small)):
        ((a, b),) = pieces(torch.float32, *together)
        assert a is together[0]
        assert b is together[1]
    assert is_dense(y)
    assert is_dense(torch.randn(3, 1, 4).transpose(0, 2))
    assert not is_dense(gaps)


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
def test_a_step_in_pieces_is_a_step(foreach: bool) -> None:
    """The gradient's layout decides whether there are pieces, and nothing else."""
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(images(torch.contiguous_format))
        optimizer = AdamO.radial_sgd([p], foreach=foreach)
        for seed in range(3):
            torch.manual_seed(seed)
            p.grad = torch.randn(p.shape).contiguous(memory_format=layout)
            optimizer.step()
        ends.append((p.detach(), optimizer.state[p]["tau"], optimizer.state[p]["radial_momentum"]))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
