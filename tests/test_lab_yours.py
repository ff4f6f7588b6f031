"""A user's own model: the same weights and batches for every optimizer, whatever the loader."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
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
    Sampler,
    TensorDataset,
)

from adamo_lab import compare, yours
from adamo_lab.errors import LabError
from adamo_lab.records import FAILED, FINISHED, load_all
from adamo_lab.your_task import Randomness, moved, size_of
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


def run(
    out: Path, loader: Any = CONSTANT, loss: Any = loss_fn, model: Any = make_model, **changes: Any
) -> Comparison:
    known: dict[str, Any] = {"epochs": 2, "report": False, "out": out}
    known["optimizers"] = ("adamw", "adamo")
    return compare(model, loader, loss, **{**known, **changes})


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_every_optimizer_sees_the_same_batches(tmp_path: Path, make: Any) -> None:
    spy = Spy()
    comparison = run(tmp_path, make(), spy, optimizers=("adamw", "adamo"))
    assert [r.error for r in comparison.records] == ["", ""]
    seen = spy.seen[2:]  # the first two were the rehearsal's
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
    rehearsed, steps = firsts[True][:2], firsts[True][2:]
    assert rehearsed[0] == rehearsed[1]
    assert steps[0] == steps[2] == steps[4], "weights and dropout are the same"  # two steps a run
    assert steps[1] != steps[3]


def test_adamw_adamo_and_angular_adamw_are_compared_unless_told_otherwise(tmp_path: Path) -> None:
    known: dict[str, Any] = {"epochs": 1, "report": False, "out": tmp_path}
    comparison = compare(make_model, CONSTANT, loss_fn, example_batch=CONSTANT[0], **known)
    assert [r.config.optimizer for r in comparison.records] == ["adamw", "adamo", "angular"]
    assert [r.error for r in comparison.records] == [""] * 3
    assert "AngularAdamW" in comparison.table()
    turning = comparison.records[-1].dynamics[-1]["weights"]
    assert "at_max_angle" in turning["0.weight"]
    assert "at_max_angle" not in turning["3.weight"]


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
    assert {r.id for r in comparison.records} == {*found}
    assert [(r.config.optimizer, r.config.seed) for r in comparison.records] == [
        ("adamw", 0), ("adamo", 0), ("adamw", 1), ("adamo", 1)
    ]  # fmt: skip
    record = comparison.records[0]
    assert record.status == FINISHED
    assert record.config.task == "yours"
    assert record.config.options["name"] == "your model"
    assert record.config.hyper["lr"] == 3e-4
    assert len({r.config.options["version"] for r in comparison.records}) == 1
    assert [row["epoch"] for row in record.metrics] == [1, 2]
    assert record.result["size"] == pytest.approx((32 * 32 + 18 * 18) / 50)
    assert record.result["seconds_per_epoch"] > 0
    text = comparison.table()
    assert text == str(comparison)
    lines = text.splitlines()
    assert lines[0] == "your model, 2 epochs"
    assert lines[2].split("  ")[0] == "optimizer"
    for column in ("train loss", "valid loss", "size", "error", "s/epoch", "time ratio"):
        assert lines[2].count(column) == 1
    assert lines[3].startswith("AdamW")
    assert lines[3].endswith("1.00")
    assert "±" in lines[3]
    assert "Mean ± standard deviation over 2 seeds" in text
    assert "AdamW: lr 0.0003" in text


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

    def note(config: Any, epoch: int, row: Any) -> None:
        epochs.append(config.optimizer)

    first = run(tmp_path, progress=note)
    second = run(tmp_path, progress=note)
    assert len(epochs) == 4
    assert [r.result for r in first.records] == [r.result for r in second.records]
    run(tmp_path, progress=note, hyper={"adamw": {"lr": 0.1}})
    assert epochs[4:] == ["adamw"] * 2
    run(tmp_path, progress=note, fresh=True)
    assert len(epochs) == 10


def test_a_changed_experiment_is_another_one(tmp_path: Path) -> None:
    factor = 1.0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return factor * loss_fn(model, batch)

    def version(*arguments: Any, model: Any = make_model, **options: Any) -> str:
        known: dict[str, Any] = {"epochs": 1, "report": False, "out": tmp_path}
        record = compare(model, *arguments, optimizers=("adamw",), **known, **options).records[0]
        return record.config.options["version"]

    same = version(CONSTANT, loss)
    assert same == version(CONSTANT, loss, seeds=(3,))
    factor = 2.0
    changed = {
        version(CONSTANT, loss),
        version([(X + 1, Y)], loss),
        version(CONSTANT, lambda m, b: loss_fn(m, b).sqrt()),
        version(CONSTANT, loss, valid_loader=CONSTANT),
        version(CONSTANT, loss, model=lambda: nn.Linear(4, 1)),
        version(CONSTANT, loss, model=lambda: nn.Sequential(nn.Linear(4, 1), nn.ReLU())),
    }
    assert same not in changed
    assert len(changed) == 6


class Scaled:
    """A loss with a number of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.factor * loss_fn(model, batch)


def times(model: nn.Module, batch: Any, factor: float) -> Tensor:
    return factor * loss_fn(model, batch)


def smoothed(smoothing: float) -> Any:
    criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
    return partial(cross_entropy, criterion)


def cross_entropy(criterion: nn.Module, model: nn.Module, batch: Any) -> Tensor:
    return criterion(model(batch[0]).expand(-1, 2), (batch[1].flatten() > 0).long())


def function_of(n: int) -> Any:
    return lambda epoch: (CONSTANT * 3)[:n]


class Late(Dataset[tuple[Tensor, Tensor]]):
    """Its examples after the first batch are scaled."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] * (self.scale if i >= 16 else 1), Y[i]


class Order(Sampler[int]):
    """Another one after the first batch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[int]:
        return iter([*range(16), *range(16, len(X))[:: self.step]])


class Own:
    """An iterable of one's own."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __iter__(self) -> Iterator[Any]:
        return iter([CONSTANT[0], (X[32:] * self.scale, Y[32:])])


def flipped(flip: bool) -> Any:
    """The labels after the first batch."""
    late = torch.arange(len(X))[:, None] >= 16
    return DataLoader(TensorDataset(X, torch.where(late & flip, 1 - Y, Y)), batch_size=16)


def late(scale: float, **options: Any) -> Any:
    return DataLoader(Late(scale), batch_size=16, **options)


def every_epoch(loader: Any) -> Any:
    return lambda epoch: loader


PAIRS: dict[str, Any] = {
    "later labels": [{"loader": flipped(False)}, {"loader": flipped(True)}],
    "later labels of validation": [
        {"valid_loader": flipped(False)},
        {"valid_loader": flipped(True)},
    ],
    "later labels in a function": [
        {"loader": every_epoch(flipped(False))},
        {"loader": every_epoch(flipped(True))},
    ],
    "a data set of one's own": [{"loader": late(1.0)}, {"loader": late(2.0)}],
    "a sampler of one's own": [
        {"loader": late(1.0, sampler=Order(1))},
        {"loader": late(1.0, sampler=Order(-1))},
    ],
    "an iterable of one's own": [{"loader": Own(1.0)}, {"loader": Own(2.0)}],
    "an object": [{"loss": Scaled(1.0)}, {"loss": Scaled(3.0)}],
    "a partial": [{"loss": partial(times, factor=1.0)}, {"loss": partial(times, factor=3.0)}],
    "a module in a partial": [{"loss": smoothed(0.0)}, {"loss": smoothed(0.5)}],
    "an example batch": [{}, {"example_batch": X[:8]}],
    "the number of batches": [{}, {"loader": CONSTANT[:1]}],
    "a later batch": [{}, {"loader": [CONSTANT[0], (X[32:], 1 - Y[32:])]}],
    "a function for a loader": [{"loader": function_of(2)}, {"loader": function_of(6)}],
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_change_that_shows_outside_the_code_is_seen(tmp_path: Path, name: str) -> None:
    versions = [
        run(tmp_path, epochs=1, optimizers=("adamw",), **options).records[0].config.id
        for options in (*PAIRS[name], PAIRS[name][0])
    ]
    assert versions[0] != versions[1]
    assert versions[0] == versions[2]


def test_an_example_counts_by_what_it_decides(tmp_path: Path) -> None:
    """It may be the first batch of a shuffled loader."""
    examples = [X[:8], X[8:24] + 1]
    ids = [run(tmp_path, example_batch=example).records[1].id for example in examples]
    assert ids[0] == ids[1]


def test_what_differs_from_model_to_model_is_no_setting(tmp_path: Path) -> None:
    """As the number does that torch.compile gives to each."""

    class Stamped(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.made = time.perf_counter()

    ids = [run(tmp_path, model=Stamped).records[0].id for _ in range(2)]
    assert ids[0] == ids[1]


def test_a_loader_without_a_length(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(X, Y, strict=True))

    loader = DataLoader(Stream(), batch_size=16)
    first, second = (run(tmp_path, loader, valid_loader=loader).records for _ in range(2))
    assert [r.status for r in first] == [FINISHED] * 2
    assert [r.id for r in first] == [r.id for r in second]


CFG: dict[str, Any] = {"scale": 1.0, "weights": torch.ones(1)}
FACTOR = 1.0
HISTORY: list[float] = []


def scaled_loss(model: nn.Module, batch: Any) -> Tensor:
    return (CFG["scale"] * CFG["weights"] * loss_fn(model, batch)).mean()


class Factor(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(FACTOR * input)


GLOBALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an entry of a dict": lambda patch: patch.setitem(CFG, "scale", 100.0),
    "a tensor": lambda patch: patch.setitem(CFG, "weights", torch.full((1,), 1.00001)),
    "in forward": lambda patch: patch.setattr(sys.modules[__name__], "FACTOR", 2.0),
}


@pytest.mark.parametrize("change", GLOBALS.values(), ids=GLOBALS.keys())
def test_a_changed_global_is_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    def trained() -> Any:
        known: dict[str, Any] = {"epochs": 1, "report": False, "out": tmp_path}
        (record,) = compare(
            lambda: Factor(nn.Linear(4, 1)), CONSTANT, scaled_loss, optimizers=("adamw",), **known
        ).records
        return record

    first, same = trained(), trained()
    change(monkeypatch)
    changed = trained()
    assert first.id == same.id != changed.id
    assert first.result["train_loss"] != changed.result["train_loss"]


def test_what_a_loss_collects_is_no_setting(tmp_path: Path) -> None:
    """A log, a counter, and what is computed once."""
    calls, cache = 0, {}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        cache.setdefault("mean", batch[1].mean())
        value = loss_fn(model, batch)
        HISTORY.append(value.item())
        return value

    first, second = run(tmp_path, loss=loss), run(tmp_path, loss=loss)
    assert [r.id for r in first.records] == [r.id for r in second.records]


def test_what_no_description_tells_shows_in_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return float(os.environ["SCALE"]) * loss_fn(model, batch)

    ids = []
    for scale in ("1", "2", "1"):
        monkeypatch.setenv("SCALE", scale)
        ids.append(run(tmp_path, loss=loss).records[0].id)
    assert ids[0] == ids[2] != ids[1]


def test_a_loss_that_changes_from_call_to_call_is_refused(tmp_path: Path) -> None:
    """A counter would go on from one run to the next, and so would a generator."""
    calls, noise = [0], np.random.default_rng(0)

    def warming_up(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return loss_fn(model, batch) * min(1, 0.5 + calls[0] / 10_000)

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * noise.random()

    for loss in (warming_up, noisy):
        with pytest.raises(LabError, match=r"loss_fn gave .* and then .* keep what it counts"):
            run(tmp_path, loss=loss)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_a_loss_may_draw_random_numbers_that_are_seeded(tmp_path: Path, factor: float) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.rand(()) + np.random.rand() + random.random()
        return loss_fn(model, batch) * noise * factor

    assert [r.error for r in run(tmp_path, loss=loss).records] == ["", ""]


def test_the_rehearsal_does_not_depend_on_threads(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4000), nn.Tanh(), nn.Linear(4000, 1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        threads.append(torch.get_num_threads())
        return loss_fn(model, batch)

    before, ids = torch.get_num_threads(), []
    threads: list[int] = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            known: dict[str, Any] = {"epochs": 1, "report": False, "out": tmp_path}
            ids.append(compare(model, CONSTANT, loss, **known, fresh=True).records[0].id)
            assert threads[0] == 1
            assert threads[-1] == torch.get_num_threads() == count
            threads.clear()
    finally:
        torch.set_num_threads(before)
    assert ids[0] == ids[1]


def test_a_record_that_was_there_is_named(tmp_path: Path) -> None:
    assert run(tmp_path, seeds=(0,)).known == []
    again = run(tmp_path, seeds=(0, 1))
    assert [r.config.seed for r in again.records if r.id in again.known] == [0, 0]
    last = again.table().splitlines()[-1]
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
    seen = comparison.records[1].dynamics[-1]["weights"]
    moved = {"frozen.weight": False, "strided": True, "unused.weight": False, "head.weight": True}
    assert {n: "eta_radial" in values for n, values in seen.items()} == moved
    assert {n: values["angle"] > 0 for n, values in seen.items()} == moved


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
    assert comparison.records[0].dynamics == [{"epoch": 1, "weights": {}}]


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

    def interrupt(config: Any, epoch: int, row: Any) -> None:
        if config.optimizer == "adamo" and epoch == 3:
            end(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", loader, epochs=4, progress=interrupt)
    seen: list[int] = []
    parts = run(
        tmp_path / "parts", loader, epochs=4, progress=lambda config, epoch, row: seen.append(epoch)
    )
    assert seen == left
    assert [r.metrics for r in parts.records] == [r.metrics for r in whole.records]


@pytest.mark.parametrize("last", [1, 4], ids=["first run", "last run"])
def test_a_signal_in_the_last_epoch_of_a_run_is_heard(tmp_path: Path, last: int) -> None:
    seen: list[str] = []

    def interrupt(config: Any, epoch: int, row: Any) -> None:
        seen.append(config.optimizer)
        if len(seen) == last:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="the same call goes on from here"):
        run(tmp_path, epochs=1, seeds=2, progress=interrupt)
    assert len(seen) == last
    assert len(run(tmp_path, epochs=1, seeds=2).known) == last


def test_a_fresh_comparison_that_was_interrupted_goes_on_without_fresh(tmp_path: Path) -> None:
    """What was there before is gone for all runs, also for those that had not begun again."""
    run(tmp_path, epochs=3)

    def interrupt(config: Any, epoch: int, row: Any) -> None:
        if epoch == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="the same call without fresh=True goes on"):
        run(tmp_path, epochs=3, fresh=True, progress=interrupt)
    seen: list[tuple[str, int]] = []

    def note(config: Any, epoch: int, row: Any) -> None:
        seen.append((config.optimizer, epoch))

    run(tmp_path, epochs=3, progress=note)
    assert seen == [("adamw", 2), ("adamw", 3), ("adamo", 1), ("adamo", 2), ("adamo", 3)]


def test_one_failure_leaves_the_others_alone(tmp_path: Path) -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 5:  # after the rehearsal and one epoch
            raise RuntimeError("no luck")
        return loss_fn(model, batch)

    comparison = run(tmp_path, loss=loss)
    assert [r.status for r in comparison.records] == [FAILED, FINISHED]
    assert comparison.records[0].error == "RuntimeError: no luck"
    text = comparison.table()
    assert "AdamW, seed 0 failed: RuntimeError: no luck" in text
    assert text.splitlines()[3].split()[:3] == ["AdamW", "0", "-"]
    again = run(tmp_path, loss=loss)
    assert [r.status for r in again.records] == [FINISHED] * 2


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    comparison = run(tmp_path, optimizers=("sgd",), hyper={"sgd": {"lr": 1e30}}, epochs=5)
    assert "SGD, seed 0 diverged in epoch 1" in comparison.table()


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
    "part of an epoch": ({"epochs": 1.5}, "epochs must be a whole number of at least 1, got 1.5"),
    "vector": (
        {"metrics": lambda m, b: {"error": b[0][0]}, "valid_loader": CONSTANT},
        r"error must be one number a batch, got shape \(\d+,\)",
    ),
    "seeds": ({"seeds": ()}, r"seeds must be different and at least one, got \(\)"),
    "no seed": ({"seeds": 0}, "seeds must be different and at least one, got 0"),
    "part of a seed": ({"seeds": (0.5,)}, r"seeds must be whole numbers, or how many, got \(0.5,"),
    "no number": ({"seeds": "3"}, "seeds must be whole numbers, or how many, got '3'"),
    "negative seed": ({"seeds": (-1,)}, "seeds must be >= 0, got -1"),
    "twice": ({"optimizers": ("adam", "adam")}, "optimizers must be different"),
    "word": ({"optimizers": "adamw"}, "optimizers must be different and at least one, got 'adamw'"),
    "unknown": ({"optimizers": ("adamx",)}, "unknown optimizer 'adamx'; known are adam, adamw"),
    "argument": (
        {"hyper": {"adamw": {"momentum": 0.9}}},
        "adamw has no argument 'momentum'; it has amsgrad, betas, .*weight_decay",
    ),
    "the lab's own": ({"hyper": {"adamo": {"late": {}}}}, "adamo has no argument 'late'"),
    "a number for settings": ({"hyper": {"adamw": 1e-3}}, 'hyper must be like .*"lr": 3e-4'),
    "a list of settings": ({"hyper": [("adamw", 1e-3)]}, "hyper must be like"),
    "elsewhere": ({"hyper": {"sgd": {"lr": 1}}}, "hyper names 'sgd', which is not among adamw"),
    "value": ({"hyper": {"adamw": {"lr": -1}}}, "adamw refused its hyper-parameters: .*-1"),
    "tensor": ({"hyper": {"adamw": {"lr": X}}}, "hyper of adamw must be numbers, words or lists"),
    "metrics": ({"metrics": lambda m, b: {}}, "metrics are taken on valid_loader"),
    "no metrics": (
        {"metrics": lambda m, b: None, "valid_loader": CONSTANT},
        "metrics must return numbers by name, .*, got None",
    ),
    "no number in metrics": (
        {"metrics": lambda m, b: {"error": None}, "valid_loader": CONSTANT},
        "error must be one number a batch, got None",
    ),
    "taken": (
        {"metrics": lambda m, b: {"lr": 1.0}, "valid_loader": CONSTANT},
        "metrics may not be called lr; choose another name",
    ),
    "taken by a result": (
        {"metrics": lambda m, b: {"diverged_at": 1.0}, "valid_loader": CONSTANT},
        "metrics may not be called diverged_at; choose another name",
    ),
    "by class": (
        {"metrics": lambda m, b: {0: 0.5, 1: 0.3}, "valid_loader": CONSTANT},
        "metrics must return numbers by name",
    ),
    "iterator": ({"loader": endless()}, "train_loader is an iterator and can be read only once"),
    "data set": ({"loader": DATA}, "train_loader must be .* TensorDataset; wrap a data set in a D"),
    "data set for validation": ({"valid_loader": DATA}, "valid_loader must be .*; wrap a data set"),
    "example of another width": (
        {"example_batch": X[:, :3]},
        r"example_batch must be what the model takes, .*\(x, y\).* shapes cannot be multiplied",
    ),
    "example without a gradient": (
        {"model": lambda: Detached(4, 1), "example_batch": X},
        "example_batch must be what the model takes.*no tensor that requires grad$",
    ),
    "batch in place": (
        {"loader": [(X.clone(), Y)], "loss": lambda m, b: m(b[0].mul_(2)).mean()},
        "train_loader gave two different first batches .* change no batch in place",
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
        run(tmp_path / "file" / "yours", progress=lambda *told: seen.append(told))
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
    "no model": (lambda: [nn.Linear(4, 1)], "model_fn must return a model, got list"),  # type: ignore
    "lazy": (lambda: nn.LazyLinear(1), "lazy layers, whose weights have no shape yet"),
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


def test_persistent_workers_are_refused(tmp_path: Path) -> None:
    loader = DataLoader(DATA, num_workers=1, persistent_workers=True)
    with pytest.raises(LabError, match="persistent_workers=False"):
        run(tmp_path, loader)


def test_metrics_with_changing_names(tmp_path: Path) -> None:
    def metrics(model: nn.Module, batch: Any) -> dict[str, float]:
        return {f"of {len(batch[0])}": 1.0}

    comparison = run(tmp_path, valid_loader=CONSTANT, metrics=metrics, epochs=1)
    assert "same names on every batch" in comparison.records[0].error


def test_the_report_is_made_from_all_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def write(results: Path, out: Path) -> Path:
        calls.extend((results, out))
        return out / "index.html"

    monkeypatch.setattr(yours, "report_writer", lambda: write)
    comparison = run(tmp_path, report=True)
    assert calls == [tmp_path, tmp_path / "report"]
    assert comparison.report == tmp_path / "report" / "index.html"


def test_a_report_that_cannot_be_made_is_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "adamo_lab.report", None)
    with pytest.raises(LabError, match="or say report=False"):
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
    assert "valid accuracy" in ended.stdout
    assert "digits, two layers" in (tmp_path / "report" / "index.html").read_text()
