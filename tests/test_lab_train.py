"""The training loop: the same result whatever happens on the way."""

from __future__ import annotations

import hashlib
import io
import math
import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch

from adamo_lab.errors import LabError
from adamo_lab.optimizers import ADAMO, ANGULAR, SETTINGS, build, legal_arguments, settings
from adamo_lab.records import Record, RunConfig
from adamo_lab.tasks import TASKS, all_options
from adamo_lab.tasks.base import Phase
from adamo_lab.tasks.grokking import EmbeddingMLP, OneHotMLP, grokking_epoch
from adamo_lab.train import CHECKPOINT, Run, Stopped, make_task, threads, train, train_epoch
from adamo_optim import AdamO, AngularAdamW

KILLS = 20


def config(task: str = "toy2d", optimizer: str = "adamo", epochs: int = 12, **options: Any) -> Any:
    return RunConfig(task, optimizer, 0, epochs, settings(task, optimizer), options)


def outcome(record: Record) -> dict[str, Any]:
    """All of a record that must not depend on interruptions."""
    return {key: getattr(record, key) for key in ("result", "metrics", "arrays")}


def state_of(folder: Path) -> dict[str, Any]:
    data = (folder / CHECKPOINT).read_bytes()
    return torch.load(io.BytesIO(data[32:]), weights_only=True)


@pytest.mark.parametrize("optimizer", SETTINGS["digits"])
def test_a_stopped_run_ends_like_one_that_was_not(tmp_path: Path, optimizer: str) -> None:
    what = config("digits", optimizer, 3, width=4)
    whole = train(what, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(what, tmp_path / "parts", stop=lambda: True)
    assert (tmp_path / "parts" / CHECKPOINT).exists()
    parts = train(what, tmp_path / "parts")
    assert outcome(parts) == outcome(whole)


def test_a_run_that_is_asked_to_stop_leaves_a_checkpoint_at_any_moment(tmp_path: Path) -> None:
    """Also between two looks at whether it was asked."""
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(len(asked) % 2 == 1)
        return asked[-1]

    with pytest.raises(Stopped):
        train(config(), tmp_path, stop=stop)
    assert asked == [False, True]
    assert state_of(tmp_path)["epoch"] == 2


def test_a_run_goes_on_with_the_threads_it_began_with(tmp_path: Path) -> None:
    what = config("digits", "adamo", 3)
    with threads(2):
        whole = train(what, tmp_path / "whole")
        with pytest.raises(Stopped):
            train(what, tmp_path / "parts", stop=lambda: True)
    with threads(1):
        parts = train(what, tmp_path / "parts")
        assert torch.get_num_threads() == 1
    assert parts.environment["threads"] == whole.environment["threads"] == 2
    assert outcome(parts) == outcome(whole)


def written(path: Path) -> int:
    """When a file was written last; 0 if never."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def train_in_child(what: RunConfig, folder: Path) -> None:
    torch.set_num_threads(1)
    train(what, folder, checkpoint_seconds=0.0)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(tmp_path: Path) -> None:
    """Checkpoints after every epoch, so that many kills fall into one being written."""
    what = config("toy2d", "adamo", 400, resolution=10)
    whole = train(what, tmp_path / "whole")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adamo_lab.train", "adamo_optim", __name__])
    folder, chance = tmp_path / "killed", random.Random(0)
    kills, progress = 0, set()
    while kills < KILLS:
        before = written(folder / CHECKPOINT)
        child = context.Process(target=train_in_child, args=(what, folder))
        child.start()
        if kills % 4:  # else: kill it while it starts
            while child.is_alive() and written(folder / CHECKPOINT) == before:
                time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.1))
        child.kill()
        child.join()
        assert child.exitcode != 0, "it ended before the last kill: give it more epochs"
        kills += 1
        progress.add(written(folder / CHECKPOINT))
    assert len(progress) > KILLS / 2  # it did get on between the kills
    assert outcome(train(what, folder)) == outcome(whole)


HARM: dict[str, Callable[[bytearray], Any]] = {
    "cut": lambda data: data[:1000],
    "bit flipped": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_damaged_checkpoint_is_named_and_the_run_starts_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[bytearray], Any]
) -> None:
    what = config()
    with pytest.raises(Stopped):
        train(what, tmp_path, stop=lambda: True)
    path = tmp_path / CHECKPOINT
    path.write_bytes(harm(bytearray(path.read_bytes())))
    epochs: list[int] = []
    again = train(what, tmp_path, progress=lambda _, epoch, row: epochs.append(epoch))
    assert f"{path} is damaged: {what.id} starts from its beginning" in caplog.text
    assert epochs[0] == 1
    assert outcome(again) == outcome(train(what, tmp_path / "whole"))


def test_a_checkpoint_of_another_run_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, what = config(optimizer="adamw"), config(optimizer="adam")  # whose states are alike
    with pytest.raises(Stopped):
        train(other, tmp_path, stop=lambda: True)
    again = train(what, tmp_path)
    assert f"is one of {other.id}: {what.id} starts from its beginning" in caplog.text
    assert outcome(again) == outcome(train(what, tmp_path / "whole"))


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    buffer = io.BytesIO()
    torch.save({"id": Trap()}, buffer)
    data = buffer.getvalue()
    (tmp_path / CHECKPOINT).write_bytes(hashlib.sha256(data).digest() + data)
    with pytest.raises(UnpicklingError):
        train(config(), tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_optimizers_of_a_seed_start_alike_and_see_the_same_batches(tmp_path: Path) -> None:
    runs = []
    for name in ("adamw", "adamo"):
        what = config("digits", name)
        task = make_task(what, torch.device("cpu"), None)
        runs.append((Run(what, task, tmp_path / name), task.batches(3)))
    (first, left), (second, right) = runs
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )
    for x, y in zip(left, right, strict=True):
        assert all(map(torch.equal, x, y))


def test_a_run_that_diverges_ends_and_says_when(tmp_path: Path) -> None:
    what = RunConfig("toy2d", "sgd", 0, 50, {"lr": 1e6}, {})
    record = train(what, tmp_path)
    assert record.status == "finished"
    assert record.result["diverged_at"] < 50
    assert record.result["train_loss"] is None


def test_rows_tell_the_norm_of_all_weights_and_of_matrices(tmp_path: Path) -> None:
    what = config(epochs=3)
    run = Run(what, make_task(what, torch.device("cpu"), None), tmp_path)
    while not run.over:
        train_epoch(run)
    row = run.finish().metrics[-1]
    squares = {name: p.square().sum().item() for name, p in run.model.named_parameters()}
    assert row["weight_norm"] == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-5)
    matrices = sum(x for name, x in squares.items() if name.endswith("weight"))
    assert row["matrix_norm"] == pytest.approx(math.sqrt(matrices), rel=1e-5)


def test_a_watched_run_records_the_spread_of_the_gradient_norm(tmp_path: Path) -> None:
    record = train(config("digits", "adamw", 2, width=4, watch=True), tmp_path)
    assert record.metrics[-1]["gradient_norm"] > 0
    assert record.metrics[-1]["gradient_norm_sd"] > 0
    assert record.result["gradient_norm_variation"] > 0


def test_averaged_weights_are_the_mean_over_the_epochs(tmp_path: Path) -> None:
    what = config("digits", "adamw", 5, width=4)
    task = make_task(what, torch.device("cpu"), None)
    task.phase = lambda epoch: Phase(swa=epoch >= 2)  # type: ignore[method-assign]
    run, ends = Run(what, task, tmp_path), []
    while not run.over:
        for _ in run.train(task.batches(run.epoch)):
            pass
        run.collect()
        ends.append([p.detach().clone() for p in run.parameters()])
    for mean, *weights in zip(run.average, *ends[2:], strict=True):
        torch.testing.assert_close(mean, torch.stack(weights).mean(0))
    assert "swa_test_accuracy" in run.finish().result


def test_a_group_may_have_a_multiple_of_the_learning_rate(tmp_path: Path) -> None:
    hyper = {**settings("digits", "adamw"), "turning_lr": 4.0}
    what = RunConfig("digits", "adamw", 0, 2, hyper, {"width": 4})
    run = Run(what, make_task(what, torch.device("cpu"), None), tmp_path)
    run.begin(Phase(lr_factor=0.5))
    assert [group["lr"] for group in run.optimizer.param_groups] == [5e-4, 2e-3]


def test_label_smoothing_and_late_options_reach_the_optimizer(tmp_path: Path) -> None:
    hyper = {**settings("digits", "adamo"), "late": {"delta": 0.1, "wd_ratio": 0.5}}
    what = RunConfig("digits", "adamo", 0, 2, hyper, {"width": 4})
    task = make_task(what, torch.device("cpu"), None)
    run = Run(what, task, tmp_path)
    run.begin(Phase())
    assert run.optimizer.param_groups[0]["delta"] is None
    run.begin(Phase(late=True))
    assert {g["delta"] for g in run.optimizer.param_groups} == {0.1}
    assert {g["wd_ratio"] for g in run.optimizer.param_groups} == {0.5}


# --- settings


@pytest.mark.parametrize(("make", "ours"), [(AdamO, ADAMO), (AngularAdamW, ANGULAR)])
def test_our_settings_are_the_class_s_own(make: Any, ours: dict[str, Any]) -> None:
    group = {"params": [torch.nn.Parameter(torch.ones(2, 2))], "rule": "general"}
    defaults = make([group]).defaults
    assert {name: defaults[name] for name in ours} == ours


@pytest.mark.parametrize("task", SETTINGS)
def test_angular_adamw_has_adamw_s_numbers(task: str) -> None:
    assert SETTINGS[task]["angular"] == {**ANGULAR, **SETTINGS[task]["adamw"]}


def test_what_a_record_of_the_paper_does_not_say_is_a_default_of_the_class() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer, _ = build("adamo_paper", {"lr": 1e-3, "guard": False}, model, torch.randn(4, 4))
    defaults = {**AdamO(model.parameters()).defaults, "lr": 1e-3, "guard": False}
    given = {"capturable"}
    assert {k: v for k, v in optimizer.defaults.items() if k not in given} == {
        k: v for k, v in defaults.items() if k not in given
    }


@pytest.mark.parametrize("task", SETTINGS)
def test_every_setting_is_a_legal_argument(task: str) -> None:
    for name, hyper in SETTINGS[task].items():
        assert set(hyper) <= legal_arguments(name), name
        if name == "muon" and not hasattr(torch.optim, "Muon"):  # torch 2.9
            continue
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        build(name, hyper, model, torch.randn(4, 4))


def test_warnings_of_an_optimizer_are_recorded(tmp_path: Path) -> None:
    what = RunConfig("toy2d", "adamo", 0, 1, {"lr": 1e-2, "weight_decay": 1.0}, {})
    record = train(what, tmp_path)
    (warning,) = record.environment["warnings"]
    assert "weight_decay" in warning


# --- grokking


@pytest.mark.parametrize("kind", [EmbeddingMLP, OneHotMLP])
def test_looking_up_rows_is_the_same_network(kind: type) -> None:
    torch.manual_seed(0)
    p, width = 11, 6
    model = kind(p, width).double()
    pairs = torch.randint(p, (40, 2))
    if kind is EmbeddingMLP:
        inputs = model.embedding(pairs).flatten(1)
    else:
        inputs = torch.nn.functional.one_hot(pairs, p).flatten(1).double()
    expected = model.output(model.hidden(inputs).relu())
    torch.testing.assert_close(model(pairs), expected, rtol=1e-12, atol=1e-12)


def test_the_grokking_epoch_is_the_first_above_the_threshold() -> None:
    accuracies = {10: 0.2, 20: 0.95, 21: 0.951, 30: 0.9}
    rows = [{"epoch": e, "test_accuracy": a} for e, a in accuracies.items()]
    assert grokking_epoch(rows) == 21
    assert grokking_epoch(rows[:2]) is None


def test_a_third_of_the_pairs_is_trained_on_and_the_rest_tested() -> None:
    task = make_task(config("grokking", "adamw", 1), torch.device("cpu"), None)
    (whole, rest) = task.batches(0)
    assert whole[0].shape == (5, 512, 2)
    assert rest[0].shape == (1, 2823 - 5 * 512, 2)
    seen = {tuple(pair) for stack in (whole, rest) for pair in stack[0].view(-1, 2).tolist()}
    tested = {tuple(pair) for pair in task.test[0].tolist()}  # type: ignore[attr-defined]
    assert len(seen) == 2823
    assert not seen & tested
    assert len(seen | tested) == 97 * 97


def test_every_task_is_in_the_table_with_its_options() -> None:
    for name in TASKS:
        with pytest.raises(LabError, match="has no option 'bacth'"):
            make_task(
                RunConfig(name, "adamw", 0, 1, {"lr": 1.0}, {"bacth": 3}), torch.device("cpu"), None
            )


def test_an_option_that_came_later_leaves_the_ids_of_older_runs_alone() -> None:
    plain = all_options("digits", {})
    assert all_options("digits", {"schedule": "constant"}) == plain
    assert all_options("digits", {"schedule": "cosine"}) == {**plain, "schedule": "cosine"}


def test_the_learning_rate_of_digits_falls_along_a_cosine_where_asked(tmp_path: Path) -> None:
    record = train(config("digits", "adamw", 4, width=4, schedule="cosine"), tmp_path)
    first = settings("digits", "adamw")["lr"]
    expected = [1.0, 0.8536, 0.5, 0.1464]
    assert [row["lr"] / first for row in record.metrics] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(LabError, match="schedule must be constant, cosine, linear or step"):
        train(config("digits", "adamw", 1, schedule="slow"), tmp_path)
