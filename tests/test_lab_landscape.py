"""The plane of the paths: against the closed form on a quadratic, and on a task of the lab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adamo_lab import landscape as subject
from adamo_lab import train
from adamo_lab.engines import Setup, run_all
from adamo_lab.errors import LabError
from adamo_lab.landscape import draw_for
from adamo_lab.measures import gradient_norm_variation
from adamo_lab.records import Record, RunConfig, forget, shape
from adamo_lab.tasks.base import Batch, Phase, Task

CURVATURE = torch.tensor([1.0, 3.0, 10.0, 30.0, 0.3, 0.1])
CENTRE = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, -2.0])


class Bowl(nn.Module):
    """Six weights in two parameters, a frozen one between them, and dropout that must not act."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 2))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.b = nn.Parameter(torch.randn(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self) -> Tensor:
        return self.dropout(torch.cat((self.a.flatten(), self.b)))


class Quadratic(Task):
    """½ Σ h (w - c - s)², where s is the batch's mean; two batches of different sizes."""

    name, title = "quadratic", "Quadratic"

    def all_options(self, config: RunConfig) -> dict[str, Any]:
        return dict(config.options)

    def load(self) -> None:
        self.shifts = torch.linspace(-0.2, 0.4, 6)

    def model(self) -> nn.Module:
        return Bowl()

    def example(self) -> Any:
        return None

    def batches(self, epoch: int) -> list[Batch]:
        return [(self.shifts[:4].view(1, 4),), (self.shifts[4:].view(1, 2),)]

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Tensor:
        return 0.5 * (CURVATURE * (model() - CENTRE - batch[0].mean()) ** 2).sum()

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        return {}


def analytic(weights: Tensor) -> Tensor:
    """The mean loss over the six examples at weights [..., 6]."""
    shifts = torch.linspace(-0.2, 0.4, 6, dtype=torch.float64)
    means = torch.stack((shifts[:4].mean(), shifts[4:].mean()))
    errors = weights.unsqueeze(-2) - CENTRE.double() - means.unsqueeze(-1)  # [..., 2, 6]
    each = 0.5 * (CURVATURE.double() * errors**2).sum(-1)
    return (4 * each[..., 0] + 2 * each[..., 1]) / 6


@pytest.fixture
def quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "task_class", lambda name: Quadratic)


Runs = dict[Path, RunConfig]


def run(folder: Path, optimizer: str, **changes: Any) -> Runs:
    """A trained run by its folder."""
    hyper = {"sgd": {"lr": 0.02, "momentum": 0.5}}.get(optimizer, {"lr": 0.1})
    known: dict[str, Any] = {"task": "quadratic", "options": {"snapshots": True}, "epochs": 12}
    config = RunConfig(optimizer=optimizer, hyper=hyper, **{"seed": 0, **known, **changes})
    train.train(config, folder / config.id)
    return {folder / config.id: config}


def both(folder: Path, *names: str, **changes: Any) -> Runs:
    return {k: v for name in names for k, v in run(folder, name, **changes).items()}


def landscape(runs: Runs, points: int, progress: Any = lambda *_: None) -> Record:
    ordered = dict(sorted(runs.items(), key=lambda item: item[1].id))
    return subject.landscape(ordered, None, torch.device("cpu"), points, progress)


def stacked(folders: list[Path]) -> Tensor:
    files = (f for folder in folders for f in sorted((folder / "snapshots").glob("*.pt")))
    return torch.stack([torch.load(file, weights_only=True) for file in files]).double()


@pytest.mark.usefixtures("quadratic")
def test_plane_and_losses_equal_the_closed_form(tmp_path: Path) -> None:
    runs = both(tmp_path, "sgd", "adam")
    folders = sorted(runs, key=lambda f: f.name)
    seen: list[tuple[int, int]] = []
    record = landscape(runs, points=9, progress=lambda *n: seen.append(n))
    arrays = {name: torch.tensor(x, dtype=torch.float64) for name, x in record.arrays.items()}
    paths = stacked(folders)
    mean = paths.mean(0)
    _, values, directions = torch.linalg.svd(paths - mean, full_matrices=False)

    variance = values.square() / values.square().sum()
    assert record.result["explained_variance"] == pytest.approx(variance[:2].tolist(), rel=1e-5)
    order = [f.name.split("-")[1] for f in folders]
    found = torch.cat([arrays[f"path_{name}"] for name in order])
    expected = (paths - mean) @ directions[:2].T
    for axis in (0, 1):  # up to the sign of a direction
        sign = torch.sign((found[:, axis] * expected[:, axis]).sum())
        directions[axis] *= sign
        torch.testing.assert_close(found[:, axis], sign * expected[:, axis], rtol=1e-4, atol=1e-4)

    xs, ys = arrays["xs"], arrays["ys"]
    points = mean + xs.view(1, -1, 1) * directions[0] + ys.view(-1, 1, 1) * directions[1]
    torch.testing.assert_close(arrays["loss"], analytic(points), rtol=1e-3, atol=1e-3)
    assert arrays["loss"].shape == (9, 9)
    for axis, grid in ((0, xs), (1, ys)):
        width = found[:, axis].max() - found[:, axis].min()
        assert grid[0].item() == pytest.approx(
            (found[:, axis].min() - 0.15 * width).item(), rel=1e-4
        )
        assert grid[-1].item() == pytest.approx(
            (found[:, axis].max() + 0.15 * width).item(), rel=1e-4
        )
    assert seen[0] == (1, 81)
    assert seen[-1] == (81, 81)


@pytest.mark.usefixtures("quadratic")
def test_a_study_has_one_landscape_and_then_no_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path, "fig2")
    hyper = {"sgd": {"lr": 0.02}, "adam": {"lr": 0.1}}
    configs = [
        RunConfig("quadratic", name, seed, 12, hyper[name], {"snapshots": True})
        for seed in (0, 1)
        for name in hyper
    ]
    run_all(configs, setup, "serial")
    assert len([*tmp_path.rglob("*.pt")]) == 4 * 13
    first = draw_for(configs, setup, lambda *_: None)
    assert (first.config.task, first.config.optimizer) == ("landscape", "all")
    assert first.result["runs"] == sorted(c.id for c in configs if c.seed == 0)
    assert [path.name for path in tmp_path.iterdir()] == ["fig2.jsonl.gz"]
    monkeypatch.setattr(subject, "landscape", lambda *_: pytest.fail("computed again"))
    assert draw_for(configs[::-1], setup, lambda *_: None).arrays == first.arrays
    forget(setup.file, {first.id})
    with pytest.raises(LabError, match=r"the snapshots of .* are gone; delete .*fig2"):
        draw_for(configs, setup, lambda *_: None)


def test_a_task_of_the_lab(tmp_path: Path) -> None:
    options = {"p": 7, "width": 8, "batch": 8, "snapshots": True, "watch": True}
    record = landscape(
        both(tmp_path, "adamw", "adamo", task="grokking", epochs=6, options=options), points=5
    )
    assert shape(record.arrays["loss"]) == (5, 5)
    assert np.isfinite(np.array(record.arrays["loss"], dtype=float)).all()
    assert shape(record.arrays["path_adamo"]) == (7, 2)  # and where it started
    np.testing.assert_allclose(record.arrays["path_adamw"][0], record.arrays["path_adamo"][0])
    a, b = record.result["explained_variance"]
    assert 1 >= a + b > a >= b > 0


def test_batchnorm_uses_the_statistics_of_the_batch() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.9))
    subject.freeze(model)
    x = torch.randn(64, 2) * 5 + 3
    torch.testing.assert_close(model(x).mean(0), torch.zeros(2), rtol=0, atol=1e-5)
    assert not model[1].training


@pytest.mark.usefixtures("quadratic")
def test_a_path_ends_where_it_ceases_to_be_finite(tmp_path: Path) -> None:
    runs = both(tmp_path, "sgd", "adam")
    file = sorted((next(iter(runs)) / "snapshots").glob("*.pt"))[7]
    torch.save(torch.full((6,), torch.nan), file)
    assert shape(landscape(runs, points=3).arrays["path_sgd"]) == (7, 2)


@pytest.mark.usefixtures("quadratic")
def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    cases = {"no finite snapshots": {"options": {}}, "lie on one line": {"epochs": 1}}
    for message, changes in cases.items():
        with pytest.raises(LabError, match=message):
            landscape(run(tmp_path, "adam", **changes), points=3)


def test_gradient_norm_variation() -> None:
    rows = [
        {"gradient_norm": 2.0, "gradient_norm_sd": 1.0},
        {"gradient_norm": 0.1, "gradient_norm_sd": 0.01},
        {"gradient_norm": None, "gradient_norm_sd": None},
        {"gradient_norm": 0.0, "gradient_norm_sd": 0.0},
        {"train_loss": 1.0},
    ]
    assert gradient_norm_variation(rows) == pytest.approx(0.3)
    assert gradient_norm_variation(rows[2:]) is None
    assert gradient_norm_variation([]) is None
