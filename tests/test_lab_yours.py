"""A user's own model: the same weights and batches for every optimizer, whatever the loader."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from adamo_lab import compare, yours
from adamo_lab.engines import View
from adamo_lab.errors import LabError
from adamo_lab.records import FAILED, FINISHED, Record, RunConfig, load_all
from adamo_lab.train import new_model
from adamo_lab.your_task import Randomness, Recipe, Yours, moved, size_of
from adamo_lab.yours import Comparison

ROOT = Path(__file__).parents[1]
X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, :1] > 0).float()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


class Spy:
    """A loss that remembers the batches it was given in training, by optimizer run."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.seen.append(batch[0].clone())
        return loss_fn(model, batch)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augmentation from all three libraries' global random numbers."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + torch.randn(4) + random.random() + float(np.random.rand()), Y[i]


DATA = TensorDataset(X, Y)
LOADERS = {
    "shuffled": lambda: DataLoader(DATA, batch_size=16, shuffle=True),
    "its own generator": lambda: DataLoader(
        DATA, batch_size=16, shuffle=True, generator=torch.Generator()
    ),
    "a sampler with a generator": lambda: DataLoader(
        DATA, batch_size=16, sampler=RandomSampler(DATA, generator=torch.Generator())
    ),
    "augmented": lambda: DataLoader(Noisy(), batch_size=16, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=1),
    "a function of the epoch": lambda: lambda epoch: [(X + epoch + torch.rand(1), Y)] * 3,
}
CONSTANT = [(X[:32], Y[:32]), (X[32:], Y[32:])]


class Watch(View):
    """Calls a function after every epoch."""

    def __init__(self, see: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.see = see

    def progressed(self, config: Any, epoch: int, row: Any) -> None:
        self.see(config, epoch)


def run(
    out: Path, loader: Any = CONSTANT, loss: Any = loss_fn, model: Any = make_model, **changes: Any
) -> Comparison:
    known: dict[str, Any] = {"epochs": 2, "report": False, "out": out, "progress": False}
    known |= {"optimizers": ("adamw", "adamo"), "name": "mine"}
    return compare(model, loader, loss, **{**known, **changes})


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_every_optimizer_sees_the_same_batches(tmp_path: Path, make: Any) -> None:
    spy = Spy()
    comparison = run(tmp_path, make(), spy, optimizers=("adamw", "adamo"))
    assert [r.error for r in comparison.records] == ["", ""]
    seen = spy.seen[1:]  # the first was the rehearsal's
    half = len(seen) // 2
    first, second = seen[:half], seen[half:]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    epochs = torch.cat(first[: half // 2]), torch.cat(first[half // 2 :])
    assert not torch.equal(*epochs), "both epochs had the same order"


def test_complex_weights_train_under_every_optimizer(tmp_path: Path) -> None:
    class Complex(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1, dtype=torch.complex64)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(torch.complex64)).abs()

    names = ("adam", "adamw", "sgd", "adamo", "angular")
    comparison = run(tmp_path, model=Complex, optimizers=names)
    assert [r.error for r in comparison.records] == [""] * 5


def test_a_loader_without_randomness_and_equal_first_losses(tmp_path: Path) -> None:
    firsts: dict[bool, list[float]] = {}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = loss_fn(model, batch)
        firsts.setdefault(model.training, []).append(value.item())
        return value

    run(tmp_path, loss=loss, optimizers=("adamw", "adam", "adamo"), epochs=1)
    steps = firsts[True][1:]  # the first was the rehearsal's
    assert steps[0] == steps[2] == steps[4], "weights and dropout are the same"  # two steps a run
    assert steps[1] != steps[3]


def first_norm(make: Callable[[], nn.Module]) -> float:
    task = Yours(
        RunConfig("yours", "adamw", 0, 1, {}), torch.device("cpu"), Recipe(make, [], loss_fn)
    )
    return next(new_model(task).parameters()).norm().item()


def test_adamw_adamo_and_angular_adamw_are_compared_unless_told_otherwise(tmp_path: Path) -> None:
    known: dict[str, Any] = {"epochs": 1, "report": False, "out": tmp_path}
    models: list[nn.Module] = []

    def make() -> nn.Module:
        models.append(make_model())
        return models[-1]

    comparison = compare(make, CONSTANT, loss_fn, example_batch=CONSTANT[0], **known)
    assert [r.config.optimizer for r in comparison.records] == ["adamw", "adamo", "angular"]
    assert [r.error for r in comparison.records] == [""] * 3
    assert "AngularAdamW" in comparison.table()
    adamw, _, angular = (next(model.parameters()).norm().item() for model in models[-3:])
    start = first_norm(make_model)
    assert angular == pytest.approx(start, rel=1e-4)  # it turned
    assert adamw != pytest.approx(start, rel=1e-4)


def test_records_results_and_table(tmp_path: Path) -> None:
    def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"size": float(len(batch[0])), "error": (model(batch[0]) - batch[1]).abs().mean()}

    comparison = run(
        tmp_path,
        valid_loader=CONSTANT,
        metrics=metrics,
        seeds=(0, 1),
        example_batch=X,
        hyper={"adamw": {"lr": 3e-4}},
    )
    found, problems = load_all(tmp_path)
    assert not problems
    assert {r.id for r in comparison.records} == {r.id for r in found}
    assert [(r.config.optimizer, r.config.seed) for r in comparison.records] == [
        ("adamw", 0), ("adamo", 0), ("adamw", 1), ("adamo", 1)
    ]  # fmt: skip
    record = comparison.records[0]
    assert record.status == FINISHED
    assert record.config.task == "yours"
    assert record.config.options == {
        "name": "mine", "schedule": "cosine", "warmup": 0.0, "clip": None, "autocast": None
    }  # fmt: skip
    assert record.config.hyper["lr"] == 3e-4
    assert [row["epoch"] for row in record.metrics] == [1, 2]
    assert record.result["size"] == pytest.approx((32 * 32 + 18 * 18) / 50)
    assert record.environment["seconds"] > 0
    text = comparison.table()
    assert str(comparison) == f"{comparison.verdict}\n\n{text}"
    lines = text.splitlines()
    assert lines[0] == "mine, 2 epochs"
    assert lines[2].split("  ")[0] == "optimizer"
    for column in ("train loss", "validation loss", "size", "error"):
        assert lines[2].count(column) == 1
    assert lines[3].startswith("AdamW")
    assert re.search(r"Seconds an epoch: AdamW [\d.e-]+, AdamO [\d.e-]+\.", text)
    assert "±" in lines[3]
    assert "Mean ± standard deviation over 2 seeds" in text
    assert "The learning rate falls along a cosine to zero." in text
    assert "AdamW: weight_decay 0.1" in text


def test_validation_is_weighted_by_size_and_changes_nothing(tmp_path: Path) -> None:
    whole = run(tmp_path / "a", valid_loader=[(X, Y)]).records[0]
    parts = run(tmp_path / "b", valid_loader=CONSTANT).records[0]
    without = run(tmp_path / "c").records[0]
    assert whole.result["valid_loss"] == pytest.approx(parts.result["valid_loss"], rel=1e-5)
    assert whole.result["weight_norm"] == without.result["weight_norm"]
    assert "valid_loss" not in without.result


class Named(NamedTuple):
    x: Tensor
    y: Tensor


STRUCTURES = {
    "dict": ({"in": {"x": X}, "y": Y, "name": "text"}, lambda b: (b["in"]["x"], b["y"])),
    "named tuple": (Named(X, Y), lambda b: (b.x, b.y)),
    "nested": (([X], (Y, None)), lambda b: (b[0][0], b[1][0])),
}


@pytest.mark.parametrize(("batch", "unpack"), STRUCTURES.values(), ids=STRUCTURES.keys())
def test_batches_of_any_structure(tmp_path: Path, batch: Any, unpack: Any) -> None:
    comparison = run(
        tmp_path, [batch], lambda m, b: loss_fn(m, unpack(b)), valid_loader=[batch], epochs=1
    )
    assert [r.status for r in comparison.records] == [FINISHED] * 2
    assert size_of(batch) == 50
    there = moved(batch, torch.device("meta"))
    assert type(there) is type(batch)
    assert unpack(there)[0].is_meta


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    epochs: list[str] = []

    def see(config: Any, epoch: int) -> None:
        epochs.append(config.optimizer)

    note = Watch(see)
    first = run(tmp_path, progress=note)
    second = run(tmp_path, progress=note)
    assert len(epochs) == 4
    assert [r.result for r in first.records] == [r.result for r in second.records]
    run(tmp_path, progress=note, hyper={"adamw": {"lr": 0.1}})
    assert epochs[4:] == ["adamw"] * 2
    run(tmp_path, progress=note, fresh=True)
    assert len(epochs) == 10


def test_without_a_name_everything_is_trained_anew(tmp_path: Path) -> None:
    epochs: list[int] = []
    for _ in range(2):
        found = run(tmp_path, name=None, progress=Watch(lambda _, epoch: epochs.append(epoch)))
        assert found.known == []
    assert epochs == [1, 2] * 4
    assert len(load_all(tmp_path)[0]) == 2


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_a_loss_may_draw_random_numbers_that_are_seeded(tmp_path: Path, factor: float) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.rand(()) + np.random.rand() + random.random()
        return loss_fn(model, batch) * noise * factor

    assert [r.error for r in run(tmp_path, loss=loss).records] == ["", ""]


def test_a_record_that_was_there_is_named(tmp_path: Path) -> None:
    assert run(tmp_path, seeds=(0,)).known == []
    again = run(tmp_path, seeds=(0, 1))
    assert [r.config.seed for r in again.records if r.id in again.known] == [0, 0]
    last = str(again).splitlines()[-1]
    assert last == "A record was there, and fresh=True trains again: AdamW, seed 0; AdamO, seed 0"
    assert run(tmp_path, fresh=True).known == []


def test_frozen_unused_and_strided_parameters_have_their_own_diagnostics(tmp_path: Path) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.strided = nn.Parameter(torch.randn(4, 8)[:, ::2])
            self.unused = nn.Linear(4, 4)
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.frozen(x) @ self.strided)

    known: dict[str, Any] = {"epochs": 1, "report": False, "out": tmp_path}
    comparison = compare(Partly, CONSTANT, loss_fn, **known)
    assert [r.status for r in comparison.records] == [FINISHED] * 3


def test_a_model_without_a_matrix(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.factors).sum(1, keepdim=True)

    known: dict[str, Any] = {"epochs": 1, "report": False, "out": tmp_path}
    comparison = compare(Scaled, CONSTANT, loss_fn, **known)
    assert [r.status for r in comparison.records] == [FINISHED] * 3
    assert "matrix_norm" not in comparison.records[0].result


def test_a_mean_of_fewer_runs_says_so(tmp_path: Path) -> None:
    hyper = {"sgd": {"lr": 1e-3}}
    comparison = run(tmp_path, optimizers=("sgd",), hyper=hyper, seeds=(0, 1, 2))
    for record in comparison.records[1:]:
        record.result["train_loss"] = None
    assert "(1 of 3)" in comparison.table().splitlines()[3]


def kill(number: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("end", "left"), [(kill, [3, 4]), (signal.raise_signal, [4])], ids=["killed", "asked to stop"]
)
def test_an_interrupted_run_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any, left: list[int]
) -> None:
    """In the third epoch of the second run: before its checkpoint, or with it."""
    loader = LOADERS["augmented"]()
    whole = run(tmp_path / "whole", loader, epochs=4)
    monkeypatch.setattr(yours, "CHECKPOINT_SECONDS", 0.0)

    def interrupt(config: Any, epoch: int) -> None:
        if config.optimizer == "adamo" and epoch == 3:
            end(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", loader, epochs=4, progress=Watch(interrupt))
    seen: list[int] = []
    view = Watch(lambda _, epoch: seen.append(epoch))
    parts = run(tmp_path / "parts", loader, epochs=4, progress=view)
    assert seen == left
    assert [r.metrics for r in parts.records] == [r.metrics for r in whole.records]


@pytest.mark.parametrize("last", [1, 4], ids=["first run", "last run"])
def test_a_signal_in_the_last_epoch_of_a_run_is_heard(tmp_path: Path, last: int) -> None:
    seen: list[str] = []

    def interrupt(config: Any, epoch: int) -> None:
        seen.append(config.optimizer)
        if len(seen) == last:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(
        KeyboardInterrupt, match="the same call, without fresh=True, goes on from here"
    ):
        run(tmp_path, epochs=1, seeds=2, progress=Watch(interrupt))
    assert len(seen) == last
    assert len(run(tmp_path, epochs=1, seeds=2).known) == last


def test_a_fresh_comparison_that_was_interrupted_goes_on_without_fresh(tmp_path: Path) -> None:
    """What was there before is gone for all runs, also for those that had not begun again."""
    run(tmp_path, epochs=3)

    def interrupt(config: Any, epoch: int) -> None:
        if epoch == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="the same call, without fresh=True, goes on"):
        run(tmp_path, epochs=3, fresh=True, progress=Watch(interrupt))
    seen: list[tuple[str, int]] = []

    view = Watch(lambda config, epoch: seen.append((config.optimizer, epoch)))
    run(tmp_path, epochs=3, progress=view)
    assert seen == [("adamw", 2), ("adamw", 3), ("adamo", 1), ("adamo", 2), ("adamo", 3)]


def test_one_failure_leaves_the_others_alone(tmp_path: Path) -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 4:  # after the rehearsal and one epoch
            raise RuntimeError("no luck")
        return loss_fn(model, batch)

    comparison = run(tmp_path, loss=loss)
    assert [r.status for r in comparison.records] == [FAILED, FINISHED]
    assert comparison.records[0].error == "RuntimeError: no luck"
    text = comparison.table()
    assert "AdamW, lr 0.001, seed 0 failed: RuntimeError: no luck" in text
    row = text.splitlines()[3].split()
    assert (row[:4], row[-1]) == (["AdamW", "–", "(0", "of"], "1")
    assert comparison.verdict == "No verdict: AdamW failed or diverged in every setting."
    again = run(tmp_path, loss=loss)
    assert [r.status for r in again.records] == [FINISHED] * 2


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    comparison = run(tmp_path, optimizers=("sgd",), hyper={"sgd": {"lr": 1e30}}, epochs=5)
    assert "SGD, lr 1e+30, seed 0 diverged in epoch 1" in comparison.table()


def test_the_callers_random_numbers_are_left_alone(tmp_path: Path) -> None:
    def numbers() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def seed() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)

    seed()
    expected = numbers()
    seed()
    run(tmp_path, epochs=1)
    assert numbers() == expected


def test_two_streams_of_random_numbers() -> None:
    def draws(between: int) -> list[float]:
        numbers, found = Randomness(3), []
        for _ in range(3):
            with numbers:
                found.append(torch.rand(()).item())
            torch.rand(between)
        return found

    assert draws(0) == draws(7)
    assert len({*draws(0)}) == 3


def endless() -> Iterator[Any]:
    yield from CONSTANT


class Detached(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).detach()


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
    "seeds": ({"seeds": ()}, "nothing to compare: give an optimizer, a seed and a learning rate"),
    "no seed": ({"seeds": 0}, "nothing to compare: give an optimizer, a seed and a learning rate"),
    "word": ({"optimizers": "adamw"}, "optimizers must be a list of names, got 'adamw'"),
    "unknown": ({"optimizers": ("adamx",)}, "unknown optimizer 'adamx'; known are adam, adamw"),
    "argument": (
        {"hyper": {"adamw": {"momentum": 0.9}}},
        "adamw has no argument 'momentum'; it has amsgrad, betas, .*weight_decay",
    ),
    "the lab's own": ({"hyper": {"adamo": {"late": {}}}}, "adamo has no argument 'late'"),
    "elsewhere": ({"hyper": {"sgd": {"lr": 1}}}, "hyper names 'sgd', which is not among adamw"),
    "value": ({"hyper": {"adamw": {"lr": -1}}}, "adamw refused its hyper-parameters: .*-1"),
    "metrics": ({"metrics": lambda m, b: {}}, "metrics are taken on valid_loader"),
    "taken": (
        {"metrics": lambda m, b: {"lr": 1.0}, "valid_loader": CONSTANT},
        "metrics may not be called lr; choose another name",
    ),
    "taken by a result": (
        {"metrics": lambda m, b: {"diverged_at": 1.0}, "valid_loader": CONSTANT},
        "metrics may not be called diverged_at; choose another name",
    ),
    "data set": ({"loader": DATA}, "train_loader must be .* TensorDataset; wrap a data set in a D"),
    "data set for validation": ({"valid_loader": DATA}, "valid_loader must be .*; wrap a data set"),
    "iterator": ({"loader": endless()}, "train_loader gave two different .* be read only once"),
    "example of another width": (
        {"example_batch": X[:, :3]},
        r"example_batch must be what the model takes, .*\(x, y\).* shapes cannot be multiplied",
    ),
    "example without a gradient": (
        {"model": lambda: Detached(4, 1), "example_batch": X},
        "example_batch must be what the model takes.*no tensor that requires grad$",
    ),
    "schedule": ({"schedule": "slow"}, "schedule must be constant, .* or step, got 'slow'"),
    "warmup": ({"warmup": 1}, "warmup must be >= 0 and below 1, got 1"),
    "clip": ({"clip": 0}, "clip must be a number above 0 or None, got 0"),
    "half": ({"autocast": torch.float16}, "autocast must be torch.bfloat16 or None, got torch.fl"),
    "no rate": ({"lrs": ()}, "nothing to compare: give an optimizer, a seed and a learning rate"),
    "rates here and there": (
        {"lrs": (1e-3,), "hyper": {"adamw": {"lr": 1e-2}}},
        "hyper gives an lr for adamw, and lrs gives some for all; leave one",
    ),
    "empty": ({"loader": []}, "train_loader gave no batch"),
    "empty validation": ({"valid_loader": []}, "valid_loader gave no batch"),
    "loss": ({"loss": lambda m, b: 1.0}, "loss_fn must return one number .*, got float"),
    "losses": ({"loss": lambda m, b: m(b[0])}, r"loss_fn must return one number .*\(32, 1\)"),
    "device": ({"device": "abacus"}, "unknown device 'abacus'"),
}


@pytest.mark.parametrize("changes", ERRORS.values(), ids=ERRORS.keys())
def test_mistakes_are_named_before_anything_is_trained(
    tmp_path: Path, changes: tuple[dict[str, Any], str]
) -> None:
    arguments, message = changes
    with pytest.raises(LabError, match=message):
        run(tmp_path, **arguments)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_named_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    seen: list[Any] = []
    with pytest.raises(LabError, match=r"cannot write .*yours: Not a directory"):
        run(tmp_path / "file" / "yours", progress=Watch(lambda *told: seen.append(told)))
    assert not seen


class Unseeded(nn.Linear):
    """Draws from a generator that no seed reaches."""

    generator = torch.Generator().manual_seed(0)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, generator=self.generator)


ONE_MODEL = nn.Linear(8, 1)
STARTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one model": (lambda: ONE_MODEL, "the same parameters twice"),
    "one part": (lambda: nn.Sequential(ONE_MODEL), "the same parameters twice"),
    "own generator": (lambda: Unseeded(8, 1, bias=False), "different weights under the same seed"),
    "empty": (nn.Identity, "a model without parameters"),
    "a model": (nn.Linear(4, 1), "model_fn must be a function that makes .* and is a Linear"),
}


@pytest.mark.parametrize(("make", "message"), STARTS.values(), ids=STARTS.keys())
def test_every_optimizer_has_the_same_start(
    tmp_path: Path, make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(LabError, match=message):
        compare(make, CONSTANT, loss_fn, epochs=1, report=False, out=tmp_path)
    assert not [*tmp_path.iterdir()]


class Augmented(Noisy):
    """Random numbers of its own, which go on from one run to the next."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + self.rng.random(), Y[i]


@pytest.mark.parametrize("name", ["train_loader", "valid_loader"])
def test_data_with_a_generator_of_their_own_are_refused(tmp_path: Path, name: str) -> None:
    loaders = {"train_loader": CONSTANT, name: DataLoader(Augmented(), batch_size=16)}
    message = f"{name} gave two different first batches under the same seed; .* no generator"
    with pytest.raises(LabError, match=message):
        run(tmp_path, loaders.pop("train_loader"), **loaders)
    assert not [*tmp_path.iterdir()]


def test_a_validation_loader_with_a_generator_is_seeded(tmp_path: Path) -> None:
    sampler = RandomSampler(DATA, num_samples=16, generator=torch.Generator())
    loader = DataLoader(DATA, batch_size=16, sampler=sampler)
    still = {"sgd": {"lr": 1e-30}}
    known: dict[str, Any] = {"optimizers": ("sgd",), "hyper": still, "valid_loader": loader}
    (record,) = run(tmp_path, loss=lambda m, b: loss_fn(m.eval(), b), **known).records
    first, second = (row["valid_loss"] for row in record.metrics)
    assert first == second


@pytest.mark.parametrize(
    ("seeds", "meant"),
    [(2, [0, 1]), (np.arange(2), [0, 1]), ((np.int64(3),), [3]), (np.int64(1), [0])],
    ids=["a count", "an array", "a numpy integer", "a count in numpy"],
)
def test_seeds_may_be_a_count_or_numpy_s(tmp_path: Path, seeds: Any, meant: list[int]) -> None:
    comparison = run(tmp_path, seeds=seeds, epochs=np.int64(1), optimizers=("adamw",))
    assert [r.config.seed for r in comparison.records] == meant
    assert load_all(tmp_path)[1] == []


def test_a_loss_of_shape_one_is_a_number(tmp_path: Path) -> None:
    comparison = run(tmp_path, loss=lambda m, b: loss_fn(m, b).reshape(1))
    assert [r.status for r in comparison.records] == [FINISHED] * 2


def test_persistent_workers_that_carry_random_numbers_on_are_refused(tmp_path: Path) -> None:
    loader = DataLoader(Noisy(), batch_size=16, num_workers=1, persistent_workers=True)
    with pytest.raises(LabError, match="persistent_workers carry their random numbers on"):
        run(tmp_path, loader)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"seeds": (-1,)}, "non-negative"),
        ({"metrics": lambda m, b: {"error": b[0][0]}, "valid_loader": CONSTANT}, "shape '..' is"),
    ],
    ids=["negative seed", "vector"],
)
def test_what_python_and_torch_refuse_clearly(tmp_path: Path, changes: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=error):
        run(tmp_path, **changes)
    assert not [*tmp_path.iterdir()]


def test_what_is_named_twice_is_trained_once(tmp_path: Path) -> None:
    known: dict[str, Any] = {"seeds": (0, 0), "lrs": (1e-3, 1e-3), "optimizers": ("adamw",) * 2}
    assert len(run(tmp_path, **known).records) == 1


def test_metrics_with_changing_names(tmp_path: Path) -> None:
    def metrics(model: nn.Module, batch: Any) -> dict[str, float]:
        return {f"of {len(batch[0])}": 1.0}

    comparison = run(tmp_path, valid_loader=CONSTANT, metrics=metrics, epochs=1)
    assert comparison.records[0].error == "KeyError: 'of 32'"


def test_the_report_opens_with_the_verdict(tmp_path: Path) -> None:
    comparison = run(tmp_path, report=True, epochs=1)
    assert comparison.report == tmp_path / "report" / "index.html"
    page = comparison.report.read_text()
    head = page[page.index("<header>") : page.index("</header>")]
    assert "Optimizers on mine" in head
    assert comparison.verdict in head


def test_a_report_that_cannot_be_made_is_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "adamo_lab.report", None)
    with pytest.raises(ImportError, match=r"adamo_lab\.report"):
        run(tmp_path, report=True)


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("adamo_lab.report")
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "your_model.py")]
    ended = subprocess.run(
        [*command, "--epochs", "2", "--seeds", "1", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "held-out accuracy" in ended.stdout
    assert "digits, two layers" in (tmp_path / "report" / "index.html").read_text()


# --- how it is trained


def test_the_learning_rate_falls_step_by_step(tmp_path: Path) -> None:
    """Two epochs of two batches: the cosine at 1/8, 3/8, 5/8 and 7/8."""
    seen: list[float] = []

    def schedule(done: float) -> float:
        seen.append(done)
        return 1 - done

    own = run(tmp_path, schedule=schedule, optimizers=("adamw",)).records[0]
    steps = [1 / 8, 3 / 8, 5 / 8, 7 / 8]
    assert [x for x in seen if x not in (0.0, 0.5)] == steps  # an epoch's begin sets it, too
    assert own.config.options["schedule"] == "schedule"
    assert [row["lr"] for row in own.metrics] == pytest.approx([1e-3 * 5 / 8, 1e-3 / 8])
    cosine = run(tmp_path, optimizers=("adamw",)).records[0]
    expected = [1e-3 * (1 + np.cos(np.pi * x)) / 2 for x in (3 / 8, 7 / 8)]
    assert [row["lr"] for row in cosine.metrics] == pytest.approx(expected)
    warm = run(tmp_path, optimizers=("adamw",), warmup=0.5).records[0]
    assert warm.metrics[0]["lr"] == pytest.approx(1e-3 * 3 / 4)


def test_a_loader_without_a_length(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(X, Y, strict=True))

    loader = DataLoader(Stream(), batch_size=16)
    record = run(tmp_path, loader, valid_loader=loader).records[0]
    expected = [1e-3 * (1 + np.cos(np.pi * x)) / 2 for x in (1 / 4, 3 / 4)]  # once an epoch
    assert [row["lr"] for row in record.metrics] == pytest.approx(expected)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    """SGD without decay moves by lr times the gradient: at most by lr times the bound."""
    settings = {"sgd": {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}}
    known: dict[str, Any] = {"optimizers": ("sgd",), "hyper": settings, "schedule": "constant"}
    start: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        start.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return 100 * loss_fn(model, batch)

    ways = []
    for clip in (None, 0.5):
        start.clear()
        run(tmp_path, [(X, Y)], loss, clip=clip, **known)
        ways.append((start[-1] - start[-2]).norm().item())
    assert ways[0] > 1
    assert ways[1] == pytest.approx(0.5, rel=1e-4)


def test_autocast(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        seen.append(out.dtype)
        return nn.functional.mse_loss(out.float(), batch[1])

    comparison = run(tmp_path, loss=loss, autocast=torch.bfloat16, valid_loader=CONSTANT)
    assert {*seen} == {torch.bfloat16}
    assert "autocast to bfloat16" in comparison.table()


# --- the verdict


def made(losses: dict[tuple[str, float], list[float | None]]) -> Comparison:
    """Runs with these validation losses, by optimizer and learning rate."""
    options = {"name": "mine", "schedule": "cosine"}
    records = [
        Record(
            RunConfig("yours", name, seed, 2, {"lr": lr}, options),
            FINISHED,
            result={"valid_loss": value, "train_loss": 1.0},
            metrics=[{"valid_loss": value}],
        )
        for (name, lr), values in losses.items()
        for seed, value in enumerate(values)
    ]
    return Comparison("mine", records)


VERDICTS: dict[str, tuple[dict[tuple[str, float], list[float | None]], str]] = {
    "better": (
        {("adamw", 1e-3): [1.0, 1.01, 1.02], ("angular", 1e-3): [0.9, 0.91, 0.92]},
        r"AngularAdamW is better than AdamW \(valid loss 0.91 at lr 0.001 and 1.01 at lr 0.001: a "
        r"difference of -0.1, 95 % interval -0.12 to -0.077, n = 3 and 3\)\.",
    ),
    "worse": (
        {("adamw", 1e-3): [1.0, 1.01, 1.02], ("angular", 1e-3): [1.9, 1.91, 1.92]},
        "AngularAdamW is worse than AdamW .* difference of \\+0.9",
    ),
    "none": (
        {("adamw", 1e-3): [1.0, 1.1, 1.2], ("angular", 1e-3): [1.0, 1.11, 1.2]},
        "No difference found between AngularAdamW and AdamW .* -0.22 to \\+0.23, n = 3 and 3",
    ),
    "nothing varies": (
        {("adamw", 1e-3): [1.0, 1.0], ("angular", 1e-3): [1.0, 1.0]},
        "No difference found",
    ),
    "one seed": (
        {("adamw", 1e-3): [1.0], ("angular", 1e-3): [0.9]},
        "AngularAdamW ended 0.1 lower than AdamW .* whether that is chance: give seeds=3 or more",
    ),
    "each at its best": (
        {
            ("adamw", 1e-3): [1.0, 1.01],
            ("adamw", 1e-2): [0.5, 0.51],
            ("angular", 1e-3): [0.6, 0.61],
            ("angular", 1e-2): [0.1, None],  # a run that diverged rules a rate out
        },
        "AngularAdamW is worse than AdamW .*0.605 at lr 0.001 and 0.505 at lr 0.01",
    ),
    "all diverged": (
        {("adamw", 1e-3): [1.0, 1.01], ("angular", 1e-3): [None, 1.0]},
        "No verdict: AngularAdamW failed or diverged in every setting",
    ),
}


@pytest.mark.parametrize(("losses", "sentence"), VERDICTS.values(), ids=VERDICTS)
@pytest.mark.filterwarnings("ignore:Precision loss")
def test_the_verdict_in_a_sentence(losses: Any, sentence: str) -> None:
    assert re.fullmatch(f"(?s)(?=.*{sentence}).*", made(losses).verdict)


def test_several_learning_rates(tmp_path: Path) -> None:
    comparison = run(tmp_path, lrs=(1e-3, 1e-2), seeds=2, valid_loader=CONSTANT)
    assert [(r.config.optimizer, r.config.hyper["lr"]) for r in comparison.records[:4]] == [
        ("adamw", 1e-3), ("adamw", 1e-2), ("adamo", 1e-3), ("adamo", 1e-2)
    ]  # fmt: skip
    lines = comparison.table().splitlines()
    assert [[*line.split()[:3], line.split()[-1]] for line in lines[3:7]] == [
        [f"{name},", "lr", lr, "2"] for name in ("AdamW", "AdamO") for lr in ("0.001", "0.01")
    ]
    assert "AdamO" in comparison.verdict
