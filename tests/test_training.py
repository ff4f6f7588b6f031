"""Small networks on made data: the loss falls, all rules are exercised, nothing collapses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adamo_optim import AdamO, AngularAdamW, param_groups


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(y)))


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(stem, Residual(8), Residual(8), head)


def images(source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four classes: which quadrant is bright, in noise."""
    y = torch.randint(4, (32,), generator=source)
    x = torch.randn(32, 3, 8, 8, generator=source)
    for i, label in enumerate(y.tolist()):
        row, column = 4 * (label // 2), 4 * (label % 2)
        x[i, :, row : row + 4, column : column + 4] += 1.0
    return x, y


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(16, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))).mean(dim=1)


def sequences(source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Predict the most frequent token."""
    y = torch.randint(12, (32,), generator=source)
    x = torch.randint(12, (32, 10), generator=source)
    x[:, :5] = y[:, None]
    return x, y


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]],
    steps: int,
) -> list[float]:
    source = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = batch(source)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, Tensor]]]] = {
    "resnet": (resnet, images),
    "transformer": (Transformer, sequences),
}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AngularAdamW": (AngularAdamW, {"weight_decay": 0.1, "angular_rms": 0.1}),
    "initial_norm": (AngularAdamW, {"angular_rms": None}),
    "AdamO": (AdamO, {}),
    "rows": (AdamO, {"block": "row"}),
    "online_test": (AdamO, {"delta": 0.1, "wd_ratio": 0.5}),
    "sampled": (AdamO, {"previous_gradient": "sampled"}),
    "no_curvature": (AdamO, {"curvature_target": None}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("task", TASKS)
def test_networks_train(task: str, setting: str) -> None:
    torch.manual_seed(0)
    build, batch = TASKS[task]
    kind, options = SETTINGS[setting]
    model = build()
    example = batch(torch.Generator().manual_seed(0))[0]
    optimizer = kind(param_groups(model, example), lr=3e-3, **options)
    rules = {row.rule for row in optimizer.explain()}
    # the post-norm transformer has no weight whose scale is free: biases and residuals fix it
    assert rules >= ({"general", "low_dim"} | ({"scale_invariant"} if task == "resnet" else set()))
    norms = {row.name: p.detach().norm() for row, p in rows_of(optimizer)}
    losses = fit(model, optimizer, batch, 120)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    for row, p in rows_of(optimizer):
        if row.rule == "scale_invariant" and kind is AngularAdamW:
            assert float(p.detach().norm()) == pytest.approx(float(norms[row.name]), rel=1e-5)


def rows_of(optimizer: Any) -> list[tuple[Any, Tensor]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return list(zip(optimizer.explain(), params, strict=True))


def test_a_zero_initialised_adapter_trains_as_fast_as_under_adam() -> None:
    """LoRA: W + B·A with B = 0. Radial SGD alone would grow B far too slowly."""
    final = {}
    for name in ("adam", "adamo"):
        torch.manual_seed(0)
        down = nn.Parameter(torch.randn(4, 16) / 4)
        up = nn.Parameter(torch.zeros(16, 4))
        target = torch.randn(16, 16) / 4
        params = [("A", down), ("B", up)]
        optimizer = torch.optim.Adam([down, up], lr=1e-2) if name == "adam" else None
        optimizer = optimizer or AdamO(params, lr=1e-2)
        for _ in range(300):
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            loss = (x @ (up @ down - target).T).square().mean()
            loss.backward()
            optimizer.step()
        final[name] = loss.item()
    assert final["adamo"] < 1.1 * final["adam"]


def test_weight_decay_of_one_by_habit_gives_a_warning_and_a_living_network() -> None:
    torch.manual_seed(0)
    model = resnet()
    example = images(torch.Generator().manual_seed(0))[0]
    with pytest.warns(UserWarning, match="of every weight away per step"):
        optimizer = AdamO(param_groups(model, example), lr=3e-3, weight_decay=1.0)
    start = {name: float(p.detach().norm()) for name, p in model.named_parameters()}
    losses = fit(model, optimizer, images, 150)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    for name, p in model.named_parameters():
        if p.dim() > 1:
            assert float(p.detach().norm()) > 0.04 * start[name]


def test_the_table_rows_of_the_paper_are_one_line_each() -> None:
    rows: dict[str, Callable[[list[nn.Parameter]], AdamO]] = {
        "AdamO": lambda p: AdamO.paper(p),
        "AdamO-Isotropic": lambda p: AdamO.paper(p, decay_lr="tangential"),
        "w/o Curvature": lambda p: AdamO.paper(p, curvature_target=None),
        "w/o Dimension": lambda p: AdamO.paper(p, low_dim=None),
        "w/o Projection": lambda p: AdamO.paper([{"params": p, "rule": "general"}]),
    }
    for make in rows.values():
        model = nn.Linear(4, 3)
        optimizer = make(list(model.parameters()))
        group = optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"], group["radial_lr"]) == (8e-4, 2e-4, 5e-3)
        assert group["guard"] is False
        group.update(delta=0.1, wd_ratio=0.5)  # from epoch 200 on
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in model.parameters())
