"""The plane of the paths: against the closed form on a quadratic, and on a task of the lab."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adamo_lab import landscape as subject
from adamo_lab import train
from adamo_lab.errors import LabError
from adamo_lab.landscape import gradient_norm_variation, landscape
from adamo_lab.records import FINISHED, RunConfig, load
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


def run(folder: Path, optimizer: str, **changes: Any) -> Path:
    hyper = {"sgd": {"lr": 0.02, "momentum": 0.5}}.get(optimizer, {"lr": 0.1})
    known: dict[str, Any] = {"task": "quadratic", "options": {"snapshots": True}, "epochs": 12}
    config = RunConfig(optimizer=optimizer, hyper=hyper, **{"seed": 0, **known, **changes})
    train.train(config, folder / config.id)
    return folder / config.id


def stacked(folders: list[Path]) -> Tensor:
    files = (f for folder in folders for f in sorted((folder / "snapshots").glob("*.pt")))
    return torch.stack([torch.load(file, weights_only=True) for file in files]).double()


@pytest.mark.usefixtures("quadratic")
def test_plane_and_losses_equal_the_closed_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "SLICE", 4)  # two slices of six weights
    folders = sorted((run(tmp_path, name) for name in ("sgd", "adam")), key=lambda f: f.name)
    seen: list[tuple[int, int]] = []
    record = landscape(folders, tmp_path / "out", points=9, progress=lambda *n: seen.append(n))
    arrays = record.arrays
    paths = stacked(folders)
    mean = paths.mean(0)
    _, values, directions = torch.linalg.svd(paths - mean, full_matrices=False)

    variance = values.square() / values.square().sum()
    assert record.result["explained_variance"] == pytest.approx(variance[:2].tolist(), rel=1e-5)
    order = [f.name.split("-")[1] for f in folders]
    found = torch.cat([torch.from_numpy(arrays[f"path_{name}"]) for name in order])
    expected = (paths - mean) @ directions[:2].T
    for axis in (0, 1):  # up to the sign of a direction
        sign = torch.sign((found[:, axis] * expected[:, axis]).sum())
        directions[axis] *= sign
        torch.testing.assert_close(found[:, axis], sign * expected[:, axis], rtol=0, atol=1e-5)
        assert found[:, axis].abs().max() == found[:, axis].max()

    xs, ys = torch.from_numpy(arrays["xs"]), torch.from_numpy(arrays["ys"])
    points = mean + xs.view(1, -1, 1) * directions[0] + ys.view(-1, 1, 1) * directions[1]
    torch.testing.assert_close(
        torch.from_numpy(arrays["loss"]), analytic(points), rtol=1e-4, atol=1e-4
    )
    assert arrays["loss"].shape == (9, 9)
    for axis, grid in ((0, xs), (1, ys)):
        width = found[:, axis].max() - found[:, axis].min()
        assert grid[0].item() == pytest.approx((found[:, axis].min() - 0.15 * width).item())
        assert grid[-1].item() == pytest.approx((found[:, axis].max() + 0.15 * width).item())
    assert seen[0] == (1, 81)
    assert seen[-1] == (81, 81)


@pytest.mark.usefixtures("quadratic")
def test_a_finished_record_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [run(tmp_path, name) for name in ("sgd", "adam")]
    first = landscape(folders, tmp_path / "out", points=3)
    assert first.folder is not None
    again = load(first.folder)
    assert again.config == first.config
    assert again.status == FINISHED
    assert again.config.task == "landscape"
    assert again.config.optimizer == "all"
    assert again.result["runs"] == sorted(f.name for f in folders)
    monkeypatch.setattr(subject, "evaluate", lambda *_: pytest.fail("computed again"))
    for folder in folders:  # which a clone has not got
        shutil.rmtree(folder / "snapshots")
    second = landscape(folders[::-1], tmp_path / "out", points=3)
    np.testing.assert_array_equal(first.arrays["loss"], second.arrays["loss"])


@pytest.mark.parametrize("model", ["embedding", "one-hot"])
def test_a_task_of_the_lab(tmp_path: Path, model: str) -> None:
    options = {"p": 7, "width": 8, "batch": 8, "snapshots": True, "watch": True, "model": model}
    folders = [
        run(tmp_path, name, task="grokking", epochs=6, options=options)
        for name in ("adamw", "adamo")
    ]
    record = landscape(folders, tmp_path / "out", points=5)
    assert record.arrays["loss"].shape == (5, 5)
    assert np.isfinite(record.arrays["loss"]).all()
    assert record.arrays["path_adamo"].shape == (7, 2)  # and where it started
    np.testing.assert_allclose(record.arrays["path_adamw"][0], record.arrays["path_adamo"][0])
    a, b = record.result["explained_variance"]
    assert 1 >= a + b > a >= b > 0
    variation = gradient_norm_variation(load(folders[0]).metrics)
    assert variation is not None
    assert 0 < variation < 2


def test_batchnorm_uses_the_statistics_of_the_batch() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.9))
    subject.freeze(model)
    x = torch.randn(64, 2) * 5 + 3
    torch.testing.assert_close(model(x).mean(0), torch.zeros(2), rtol=0, atol=1e-5)
    assert not model[1].training


@pytest.mark.usefixtures("quadratic")
def test_a_path_ends_where_it_ceases_to_be_finite(tmp_path: Path) -> None:
    folders = [run(tmp_path, name) for name in ("sgd", "adam")]
    file = sorted((folders[0] / "snapshots").glob("*.pt"))[7]
    torch.save(torch.full((6,), torch.nan), file)
    record = landscape(folders, tmp_path / "out", points=3)
    assert record.arrays["path_sgd"].shape == (7, 2)


@pytest.mark.usefixtures("quadratic")
def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    sgd, other_seed = run(tmp_path, "sgd"), run(tmp_path, "adam", seed=1)
    cases = {
        "at least one run": [],
        "holds no finished run": [tmp_path / "nowhere"],
        "in more than its optimizer": [sgd, other_seed],
        "no finite snapshots": [run(tmp_path, "adam", options={})],
        "lie on one line": [run(tmp_path, "adam", epochs=1)],
    }
    for message, folders in cases.items():
        with pytest.raises(LabError, match=message):
            landscape(folders, tmp_path / "out", points=3)
    with pytest.raises(LabError, match="points must be at least 2, got 1"):
        landscape([sgd], tmp_path / "out", points=1)
    copy = tmp_path / "copy"
    copy.mkdir()
    with pytest.raises(LabError, match="one run of each optimizer, got sgd, sgd"):
        landscape([sgd, run(copy, "sgd")], tmp_path / "out")
    (sgd / "snapshots" / "000003.pt").write_bytes(b"nothing")
    with pytest.raises(LabError, match=r"000003.pt cannot be read"):
        landscape([sgd], tmp_path / "out", points=3)


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


def test_importing_needs_no_torch() -> None:
    code = "import sys, adamo_lab.landscape; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
