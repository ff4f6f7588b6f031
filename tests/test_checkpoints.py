"""A save that was interrupted never loads as if it were good."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from adamo_optim import AdamO

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def trained(steps: int) -> tuple[nn.Module, AdamO]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = AdamO(model.named_parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: AdamO, steps: range) -> None:
    for step in steps:
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def save(folder: Path, steps: int = 5) -> None:
    model_state, optimizer_state = get_state_dict(*trained(steps))
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(folder: Path) -> tuple[nn.Module, AdamO]:
    model, optimizer = trained(0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return model, optimizer


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    save(tmp_path / "good")
    model, optimizer = load(tmp_path / "good")
    train(model, optimizer, range(5, 9))
    straight, _ = trained(9)
    for a, b in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(a, b)


def die_before_the_end(folder: Path) -> None:
    """The data are on disk, the file that makes a checkpoint of them is not."""

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    dcp.FileSystemWriter.finish = killed  # type: ignore[method-assign]
    save(folder)


def test_a_killed_save_does_not_load(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=die_before_the_end, args=(tmp_path / "killed",))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert any((tmp_path / "killed").iterdir())  # it had got as far as the data
    with pytest.raises((CheckpointException, FileNotFoundError)):
        load(tmp_path / "killed")


def test_a_cut_file_does_not_load(tmp_path: Path) -> None:
    save(tmp_path / "cut")
    data = max((tmp_path / "cut").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises((CheckpointException, RuntimeError, OSError)):
        load(tmp_path / "cut")


@pytest.mark.parametrize("damage", ["missing", "another shape"])
def test_moments_do_not_turn_into_zeros_unnoticed(damage: str) -> None:
    model, optimizer = trained(5)
    state = copy.deepcopy(optimizer.state_dict())
    if damage == "missing":
        del state["state"][2]["exp_avg"]
    else:
        state["state"][2]["exp_avg"] = torch.zeros(7, 7)
    before = {name: p.clone() for name, p in model.named_parameters()}
    moments = {p: optimizer.state[p]["exp_avg"].clone() for p in model.parameters()}
    with pytest.raises(
        ValueError, match=r"2\.weight of shape \(3, 8\) needs exp_avg of that shape"
    ):
        optimizer.load_state_dict(state)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(optimizer.state[p]["exp_avg"], m) for p, m in moments.items())
    train(model, optimizer, range(5, 7))  # and it goes on
