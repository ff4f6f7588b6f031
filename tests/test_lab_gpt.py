"""The tasks gpt and vit: which weights turn, texts, schedule, evaluation; muon and faster turns."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adamo_lab import data
from adamo_lab.engines import Setup, run_all
from adamo_lab.errors import LabError
from adamo_lab.optimizers import build, settings
from adamo_lab.records import RunConfig
from adamo_lab.tasks import all_options
from adamo_lab.tasks.base import Phase, Task
from adamo_lab.tasks.gpt import GPT, Text
from adamo_lab.tasks.transformer import rotary, rotated
from adamo_lab.train import Run, Stopped, make_task, new_model, train
from adamo_optim import param_groups

CPU = torch.device("cpu")
REAL = Path(os.environ.get("ADAMO_DATA") or Path(__file__).parents[2] / "shared" / "data")
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "heads": 2, "width": 32, "context": 32, "batch": 8},
    "vit": {"layers": 2, "heads": 2, "width": 16, "patch": 8, "batch": 50},
}
BOTH = pytest.mark.parametrize("name", SIZES)


def config(
    name: str, optimizer: str = "adamw", epochs: int = 4, hyper: Any = None, **options: Any
) -> RunConfig:
    changes = {"lr": 1e-2, **(hyper or {})}
    chosen = all_options(name, {"precision": "float32", **SIZES[name], **options})
    return RunConfig(
        name, optimizer, 0, epochs, settings(name, optimizer, changes), chosen, 1.0, True
    )


def task(name: str, **arguments: Any) -> Task:
    return make_task(config(name, **arguments), CPU, None)


def rules(it: Task, model: nn.Module) -> dict[str, str]:
    groups = param_groups(model, it.example())
    return {name: group["rule"] for group in groups for name, _ in group["params"]}


# --- models


@BOTH
def test_queries_and_keys_turn_and_nothing_else(name: str) -> None:
    it = task(name)
    found = rules(it, new_model(it))
    turning = {weight for weight, rule in found.items() if rule == "scale_invariant"}
    assert turning == {f"layers.{i}.{part}.weight" for i in range(2) for part in "qk"}


def test_with_norms_after_each_part_all_matrices_of_the_layers_turn() -> None:
    it = task("gpt", norms="after")
    found = rules(it, new_model(it))
    turning = {weight for weight, rule in found.items() if rule == "scale_invariant"}
    assert turning == {weight for weight in found if weight.startswith("layers.")}
    assert it.config.id != task("gpt").config.id


def test_the_usual_size() -> None:
    sizes = all_options("gpt", {})
    model = GPT(**{k: sizes[k] for k in ("layers", "heads", "width", "context")})
    assert sum(p.numel() for p in model.parameters()) == 12 * 12 * 512**2 + 2 * 256 * 512


@torch.no_grad()
def test_the_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = GPT(**{k: SIZES["gpt"][k] for k in ("layers", "heads", "width", "context")})
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] += 1
    changed %= 256
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])
    assert not torch.allclose(model(tokens)[:, 10:], model(changed)[:, 10:])


def test_rotary_positions_are_relative() -> None:
    """The product of a query at i and a key at j depends on i - j alone."""
    q, k = torch.randn(2, 8)
    turns = rotary(12, 8)
    at_q, at_k = rotated(q.expand(12, 8), turns), rotated(k.expand(12, 8), turns)
    products = at_q @ at_k.T
    torch.testing.assert_close(products[3:, 3:], products[:-3, :-3])
    torch.testing.assert_close(at_q.norm(dim=1), q.norm().expand(12))
    assert not torch.allclose(products[0], products[0, :1])


# --- texts


def test_windows_come_from_the_text() -> None:
    it = task("gpt")
    assert isinstance(it, Text)
    ((found,),) = it.batches(0)
    assert (found.shape, found.dtype) == ((10, 8, 33), torch.uint8)
    text = bytes(it.train.tolist())
    assert all(bytes(window.tolist()) in text for window in found.flatten(0, 1))
    assert not torch.equal(found, it.batches(1)[0][0])
    assert torch.equal(found, it.batches(0)[0][0])


def test_the_text_of_every_python() -> None:
    it = make_task(
        RunConfig("gpt", "adamw", 0, 2, {}, {**SIZES["gpt"], "text": "topics"}), CPU, None
    )
    assert isinstance(it, Text)
    assert len(it.train) > 300_000
    assert b"statement" in bytes(it.train[:100_000].tolist())


PACKED = {
    "enwik8": lambda path, text: path.write_bytes(text),
    "enwik8.gz": lambda path, text: path.write_bytes(gzip.compress(text)),
    "enwik8.zip": lambda path, text: zipfile.ZipFile(path, "w").writestr("enwik8", text),
}


@pytest.mark.parametrize("name", PACKED)
def test_enwik8_whole_or_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = b"some bytes " * 50
    PACKED[name](tmp_path / name, text)
    with pytest.raises(LabError, match=f"the text in .*{name} has the md5 checksum"):
        data.enwik8(tmp_path)
    monkeypatch.setattr(data, "ENWIK8_MD5", hashlib.md5(text).hexdigest())
    assert data.enwik8(tmp_path) == text
    data.check("enwik8", tmp_path)


def test_enwik8_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"enwik8 is not in .*; run `adamo-lab data enwik8`"):
        data.enwik8(tmp_path)


def test_the_real_enwik8() -> None:
    try:
        it = make_task(RunConfig("gpt", "adamw", 0, 2, {}, SIZES["gpt"]), CPU, REAL)
    except LabError as error:
        pytest.skip(f"no real data: {error}")
    assert isinstance(it, Text)
    assert len(it.train) == 90_000_000
    assert bytes(it.train[:10].tolist()) == b"<mediawiki"
    assert it.valid.shape == ((1 << 20) // 32, 33)


REFUSED = {
    "half a head": ("gpt", {"heads": 3}, r"width must be a multiple of 2 · heads, got 32 and 3"),
    "a long context": ("gpt", {"context": 4000}, "context 4000 is longer than the text"),
    "another text": ("gpt", {"text": "bible"}, "text must be enwik8 or topics, got 'bible'"),
    "heads": ("vit", {"heads": 3}, "width must be a multiple of heads, got 16 and 3"),
    "patches": ("vit", {"patch": 5}, "patch must divide 32, got 5"),
}


@pytest.mark.parametrize(("name", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_cannot_be(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        task(name, **options)


# --- schedules

LEFT = {  # of the learning rate, in the rounds 2, 12, 22 and 39 of 40; 2 of them warm up
    "constant": [1.0, 1.0, 1.0, 1.0],
    "linear": [1 - (at + 0.5) / 38 for at in (0, 10, 20, 37)],
    "cosine": [(1 + math.cos(math.pi * (at + 0.5) / 38)) / 2 for at in (0, 10, 20, 37)],
    "step": [1.0, 0.2, 0.2**3, 0.2**5],
}


@BOTH
@pytest.mark.parametrize("schedule", LEFT)
def test_warmup_and_schedule(name: str, schedule: str) -> None:
    it = task(name, epochs=40, schedule=schedule)
    factors = [it.phase(epoch).lr_factor for epoch in range(40)]
    assert factors[:2] == pytest.approx([0.25, 0.75])
    assert [factors[epoch] for epoch in (2, 12, 22, 39)] == pytest.approx(LEFT[schedule])


@pytest.mark.parametrize("name", ["digits", "grokking", "toy2d", "language", "cifar100"])
def test_every_task_has_schedules(name: str) -> None:
    usual, options = all_options(name, {}), all_options(name, {"schedule": "linear"})
    assert options == {**usual, "schedule": "linear"}
    run = RunConfig(name, "adamw", 0, 30, {"lr": 1.0}, options, 1.0, True)
    it = make_task(run, CPU, None)
    factors = [it.phase(epoch).lr_factor for epoch in range(5, 30)]
    assert factors == sorted(factors, reverse=True)
    assert len({*factors}) == 25


# --- evaluation and whole runs


@torch.no_grad()
def test_evaluation_equals_a_naive_one() -> None:
    it = task("gpt")
    assert isinstance(it, Text)
    model = new_model(it).eval()
    losses = [
        F.cross_entropy(model(window[None, :-1].long())[0], window[1:].long())
        for window in it.valid
    ]
    found = it.evaluate(model)
    torch.testing.assert_close(found["valid_loss"], torch.stack(losses).mean())


def test_the_test_text_is_another_one() -> None:
    """A trial is judged by the validation text, a verdict by the test text."""
    trial, verdict = task("gpt"), task("gpt", judge="test")
    assert trial.config.id != verdict.config.id
    assert "judge" not in trial.config.options
    assert not torch.equal(trial.valid, verdict.valid)
    torch.manual_seed(0)
    assert [*verdict.evaluate(verdict.model())] == ["test_loss"]
    assert [*trial.evaluate(trial.model())] == ["valid_loss"]


@BOTH
def test_a_run_learns_what_was_made_up(tmp_path: Path, name: str) -> None:
    options = {"gpt": {"epochs": 10}, "vit": {"epochs": 6}}[name]
    record = train(config(name, **options), tmp_path)
    if name == "gpt":
        assert record.result["valid_loss"] < 0.8 * math.log(26)
        assert len(record.metrics) == 10
    else:
        assert record.result["test_accuracy"] > 0.5  # one of ten classes


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@BOTH
def test_precision(name: str, precision: str) -> None:
    it = task(name, precision=precision)
    model = new_model(it)
    seen: list[torch.dtype] = []
    model.get_submodule("layers.0.q").register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    batch = tuple(stack[0] for stack in it.batches(0)[0])
    it.loss(model, batch, Phase()).backward()
    assert seen == [getattr(torch, precision)]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


# --- muon, and AdamW with a faster rate for what turns

CONTROLS = {"muon": {}, "adamw": {"turning_lr": 4.0}}
HAS_MUON = hasattr(torch.optim, "Muon")  # torch 2.9


@pytest.mark.parametrize("optimizer", CONTROLS if HAS_MUON else ["adamw"])
def test_a_stopped_run_ends_the_same(tmp_path: Path, optimizer: str) -> None:
    run = config("gpt", optimizer, hyper=CONTROLS[optimizer])
    whole = train(run, tmp_path / "whole")
    left = [2]

    def stop() -> bool:
        left[0] -= 1
        return left[0] == 0

    with pytest.raises(Stopped):
        train(run, tmp_path / "halves", stop=stop)
    assert train(run, tmp_path / "halves").result == whole.result


def test_faster_turns_are_those_of_queries_and_keys(tmp_path: Path) -> None:
    it = task("gpt", epochs=8)
    run = Run(config("gpt", epochs=8, hyper={"turning_lr": 4.0}), it, tmp_path)
    for _ in run.train(it.batches(0)):
        pass
    names = {id(p): name for name, p in run.model.named_parameters()}
    rates = {names[id(p)]: g["lr"] for g in run.optimizer.param_groups for p in g["params"]}
    usual = 1e-2 * it.phase(0).lr_factor
    turning = {name for name, rule in rules(it, run.model).items() if rule == "scale_invariant"}
    assert rates == {
        name: pytest.approx(4 * usual if name in turning else usual) for name in names.values()
    }


def test_captured_steps_read_a_faster_rate_of_their_own() -> None:
    """A CUDA graph reads learning rates from tensors: one a group, filled in place."""
    it = task("gpt")
    hyper = settings("gpt", "adamw", {"turning_lr": 4.0})
    optimizer, _ = build("adamw", hyper, new_model(it), it.example(), graph=True)
    usual, turning = (group["lr"] for group in optimizer.param_groups)
    assert usual is not turning
    assert turning.item() == pytest.approx(4 * usual.item())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@BOTH
def test_runs_side_by_side_on_a_gpu(tmp_path: Path, name: str) -> None:
    setup = Setup(tmp_path, "mine", device="cuda", workers=3)
    runs = [config(name, o, precision="bfloat16") for o in ("adamw", "angular")]
    runs.append(config(name, "adamw", hyper={"turning_lr": 4.0}, precision="bfloat16"))
    assert [(o.status, o.error) for o in run_all(runs, setup, "cuda")] == [("finished", "")] * 3


def test_muon_has_the_hidden_matrices() -> None:
    it = task("gpt")
    model = new_model(it)
    if not HAS_MUON:
        with pytest.raises(LabError, match=r"muon needs torch 2\.9 or newer"):
            build("muon", settings("gpt", "muon"), model, it.example())
        return
    optimizer, _ = build("muon", settings("gpt", "muon"), model, it.example())
    adamw, muon = ({id(p) for p in g["params"]} for g in optimizer.param_groups)
    hidden = {id(p) for n, p in model.named_parameters() if n.startswith("layers.")}
    assert muon == hidden
    assert adamw == {id(p) for p in model.parameters()} - hidden


def test_turning_weights_can_be_declared() -> None:
    it = task("gpt")
    model = new_model(it)
    hyper = settings("gpt", "angular", {"overrides": {"layers.*": "scale_invariant"}})
    optimizer, _ = build("angular", hyper, model, it.example())
    turning = [g for g in optimizer.param_groups if g["rule"] == "scale_invariant"]
    hidden = {id(p) for n, p in model.named_parameters() if n.startswith("layers.")}
    assert {id(p) for g in turning for p in g["params"]} == hidden


WRONG = {
    "nothing hidden": ("muon", {}, "muon needs (hidden linear layers|torch 2.9)"),
    "nothing turns": ("adamw", {"turning_lr": 2.0}, "turning_lr needs scale-invariant weights"),
    "no such weight": ("angular", {"overrides": {"x": "general"}}, "matches no parameter"),
    "no names": ("angular", {"overrides": 3}, "overrides must be a dictionary, got 3"),
    "by shape alone": ("adamo_paper", {"overrides": {"*": "general"}}, "overrides"),
    "no number": ("adamw", {"turning_lr": 0.0}, "turning_lr must be a number above 0, got 0"),
}


@pytest.mark.parametrize(("name", "hyper", "message"), WRONG.values(), ids=WRONG)
def test_models_that_have_none(name: str, hyper: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(LabError, match=message):
        build(name, {"lr": 1e-3, **hyper}, model, torch.randn(8, 4))


def test_what_an_optimizer_says_is_in_the_record(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        run = config("gpt", "adamo", epochs=1, layers=1, hyper={"weight_decay": 0.1})
        record = train(run, tmp_path)
    (said,) = record.environment["warnings"]
    assert "of every weight away per step" in said
