"""AngularAdamW with other second moments: where it has them, too, it is AngularAdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adamo_lab.errors import LabError
from adamo_lab.second_moments import SQUARES, AngularBy
from adamo_optim import AngularAdamW, param_groups


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    return nn.Sequential(*layers).double(), torch.randn(16, 2, 8, 8, dtype=torch.float64)


def trained(cls: Any, steps: int = 30, lr: float = 5e-4, **options: Any) -> list[torch.Tensor]:
    model, x = model_and_batch()
    optimizer = cls(param_groups(model, x), lr=lr, weight_decay=0.1, betas=(0.9, 0.99), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).logsumexp(1).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("lr", [5e-4, 5e-3])  # below and above the bound
def test_it_is_angular_adamw(lr: float, kind: str) -> None:
    ours, theirs = (trained(cls, second_moment=kind, lr=lr) for cls in (AngularBy, AngularAdamW))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", ["row", "entry"])
def test_others_turn_elsewhere_and_keep_the_norm(kind: str) -> None:
    weight, *rest = trained(AngularBy, second_moment=kind)
    other, *same = trained(AngularBy, second_moment="tensor")
    start = next(model_and_batch()[0].parameters())
    assert weight.norm() == pytest.approx(float(start.detach().norm()), rel=1e-12)
    assert not torch.allclose(weight, other, rtol=1e-3)
    assert not torch.allclose(rest[-1], same[-1], rtol=1e-12)  # they follow AdamW elsewhere


def test_what_a_second_moment_is_of() -> None:
    g = torch.tensor([[1.0, 3.0], [0.0, 2.0]])
    assert {kind: square(g).flatten().tolist() for kind, square in SQUARES.items()} == {
        "tensor": [3.5],
        "row": [5.0, 2.0],
        "entry": [1.0, 9.0, 0.0, 4.0],
    }


def test_another_kind_is_refused() -> None:
    with pytest.raises(LabError, match="second_moment must be tensor, row, entry, got 'column'"):
        AngularBy([{"params": []}], 1e-3, 0.1, second_moment="column")
