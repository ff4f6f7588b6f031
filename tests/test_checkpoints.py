"""A save that was interrupted or damaged never loads as if it were good."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from adamo_optim import AdamO, AngularAdamW, param_groups

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


BOTH = pytest.mark.parametrize("kind", [AdamO, AngularAdamW])


def trained(steps: int, kind: Any = AdamO) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8))
    model = nn.Sequential(*hidden, nn.ReLU(), nn.Linear(8, 3))
    optimizer = kind(param_groups(model, torch.randn(4, 6)), lr=5e-3)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def save(folder: Path, kind: Any = AdamO) -> None:
    model_state, optimizer_state = get_state_dict(*trained(5, kind))
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(folder: Path, kind: Any = AdamO) -> tuple[nn.Module, Any]:
    model, optimizer = trained(0, kind)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return model, optimizer


@BOTH
def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path, kind: Any) -> None:
    save(tmp_path / "good", kind)
    model, optimizer = load(tmp_path / "good", kind)
    train(model, optimizer, range(5, 9))
    straight, _ = trained(9, kind)
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


@BOTH
def test_saving_a_fresh_optimizer_changes_nothing(kind: Any) -> None:
    """get_state_dict takes a step of length 0 where there is no state yet, as for AdamW."""
    model, optimizer = trained(0, kind)
    before = [p.detach().clone() for p in model.parameters()]
    get_state_dict(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert {group["lr"] for group in optimizer.param_groups} == {5e-3}


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state.pop(key)


def with_(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state.update({key: value})


# 0.weight, 8×6, turns under AngularAdamW
DAMAGES: list[tuple[Any, Callable[[dict[str, Any]], Any], str]] = [
    (kind, damage, message)
    for kind in (AdamO, AngularAdamW)
    for damage, message in (
        (without("exp_avg"), r"0\.weight of shape \(8, 6\) needs a dense exp_avg .* has none"),
        (with_("exp_avg", torch.zeros(7, 7)), r"exp_avg of that shape.*one of shape \(7, 7\)"),
        (with_("exp_avg", torch.eye(8)[:, :6].to_sparse()), "a torch.sparse_coo one"),
        (without("step"), r"the state of 0\.weight has no step"),
        (with_("step", torch.zeros(3)), r"step of 0\.weight must be a number, got shape \(3,\)"),
        (with_("step", "five"), r"step of 0\.weight must be a number, got 'five'"),
        (with_("initial_norm", torch.tensor(torch.nan)), r"initial_norm of 0\.weight .* finite"),
    )
] + [
    (AdamO, with_("tau", torch.tensor(torch.inf)), r"tau of 0\.weight must be finite"),
    (AdamO, with_("radial_momentum", torch.tensor(torch.nan)), "radial_momentum .* finite"),
    (AngularAdamW, with_("mean_square", torch.tensor(torch.nan)), "mean_square .* finite"),
    (AngularAdamW, without("mean_square"), "needs a dense exp_avg_sq of that shape"),
]


@pytest.mark.parametrize(
    ("kind", "damage", "message"), DAMAGES, ids=[f"{k.__name__}-{m[:24]}" for k, _, m in DAMAGES]
)
def test_a_damaged_state_is_loaded_not_at_all(kind: Any, damage: Any, message: str) -> None:
    model, optimizer = trained(5, kind)
    damaged = copy.deepcopy(optimizer.state_dict())
    number = next(
        key
        for group, old in zip(optimizer.param_groups, damaged["param_groups"], strict=True)
        for key, name in zip(old["params"], group["param_names"], strict=True)
        if name == "0.weight"
    )
    damage(damaged["state"][number])
    damaged["param_groups"][0]["lr"] = 0.5
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damaged)
    assert optimizer.state_dict()["param_groups"] == before[1]["param_groups"]
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(x, before[1]["state"][key][name]) for name, x in state.items())
    train(model, optimizer, range(5, 9))  # and it goes on
    straight, _ = trained(9, kind)
    for a, b in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(a, b)


@BOTH
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"lr": -1.0}, "illegal option: lr must be"),
        ({"betas": (0.9, 1.0)}, r"illegal option: betas\[1\]"),
        ({"rule": "round"}, "illegal option: rule must be one of"),
        ({"params": []}, r"has groups of \[0, 3, 1\] parameters, and the optimizer of \[1, 3, 1\]"),
        ({"params": None}, "a dictionary with a list 'params'"),
    ],
)
def test_damaged_groups_are_loaded_not_at_all(
    kind: Any, damage: dict[str, Any], message: str
) -> None:
    _, optimizer = trained(2, kind)
    if "rule" in damage:  # one that was found here wins over what a checkpoint says
        for group in optimizer.param_groups:
            group["rule"] = "auto"
    damaged = copy.deepcopy(optimizer.state_dict())
    damaged["param_groups"][0].update(damage)
    if "params" in damage:
        damaged["param_groups"][0].pop("param_names")
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damaged)
    assert optimizer.state_dict()["param_groups"] == before
    with pytest.raises(ValueError, match="a list 'param_groups' and a dictionary 'state'"):
        optimizer.load_state_dict({"state": {}})


def test_the_numbers_of_rows_lie_in_one_piece() -> None:
    """torch.distributed broadcasts what lies in memory, whatever the strides."""
    model, _ = trained(0)
    optimizer = AdamO(model.named_parameters(), block="row")
    train(model, optimizer, range(2))
    states = optimizer.state_dict()["state"].values()
    assert any(state["tau"].shape == (8,) for state in states)
    assert all(x.is_contiguous() for state in states for x in state.values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_lays_out_the_state_of_a_new_group_at_once(copied: Any) -> None:
    optimizer = copied(AdamO([nn.Parameter(torch.ones(2, 2))]))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))]})
    assert len(optimizer.state_dict()["state"]) == 2


@BOTH
def test_numbers_keep_their_digits(kind: Any) -> None:
    """Whatever the default dtype is; bfloat16 knows no 1006."""
    model, optimizer = trained(3, kind)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = torch.tensor([1006]) if "mean_square" in state else 1006
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer.load_state_dict(saved)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {int(optimizer.state[p]["step"]) for p in model.parameters()} == {1007}
