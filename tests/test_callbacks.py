"""Diagnostics in loggers, and rules for groups that a trainer made."""

from __future__ import annotations

import doctest
import json
import logging
import math
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adamo_optim import AdamO, AngularAdamW, param_groups
from adamo_optim.callbacks import (
    add_panel,
    find_optimizer,
    log_diagnostics,
    print_diagnostics,
)
from adamo_optim.integrations import with_rules
from adamo_optim.panels import spark

BOTH = pytest.mark.parametrize("kind", [AdamO, AngularAdamW])


def stepped(kind: Any = AdamO) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = kind(param_groups(model, torch.randn(8, 4)))
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    return optimizer


class Counter(TorchDispatchMode):
    """Counts tensor operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


@BOTH
def test_steps_that_do_not_log_touch_no_tensor(kind: Any) -> None:
    optimizer, calls = stepped(kind), []
    with Counter() as counter:
        for step in range(1, 100):
            assert not log_diagnostics(optimizer, calls.append, step, every=100)
    assert counter.count == 0
    assert log_diagnostics(optimizer, lambda *call: calls.append(call), 100, every=100)
    assert [step for _, step in calls] == [100]


def test_values() -> None:
    calls = []
    log_diagnostics(stepped(), lambda *call: calls.append(call), 7, every=7, prefix="run")
    values, _ = calls[0]
    assert {name for name in values if "/norm/" in name} == {
        f"run/norm/{name}" for name in ("0.weight", "1.weight", "1.bias", "2.weight", "2.bias")
    }
    # low-dim parameters have no radial step size, and no line in the log
    assert {"run/eta_radial/0.weight", "run/eta_radial/2.weight"} == {
        name for name in values if "/eta_radial/" in name
    }
    assert values["run/guard_skipped/total"] == 0
    assert all(isinstance(value, float) for value in values.values())


def test_values_of_the_weights_that_turn() -> None:
    calls = []
    log_diagnostics(stepped(AngularAdamW), lambda *call: calls.append(call), 100)
    quantities = ("norm", "gradient_norm", "angle", "at_max_angle")
    assert set(calls[0][0]) == {f"adamo/{name}/0.weight" for name in quantities}
    assert calls[0][0]["adamo/at_max_angle/0.weight"] == 1.0  # lr/angular_rms is 0.067
    log_diagnostics(
        stepped(AngularAdamW), lambda *call: calls.append(call), 100, quantities=["angle"]
    )
    assert set(calls[1][0]) == {"adamo/angle/0.weight"}


def test_guard_totals_and_nan_norms_are_shown() -> None:
    optimizer, calls = stepped(), []
    for p in optimizer.param_groups[0]["params"]:
        p.grad.fill_(torch.nan)
    optimizer.step()
    log_diagnostics(optimizer, lambda *call: calls.append(call), 0)
    assert calls[0][0]["adamo/guard_skipped/total"] == len(optimizer.param_groups[0]["params"])


@BOTH
def test_an_optimizer_that_has_not_stepped_logs_nothing(kind: Any) -> None:
    optimizer = kind([{"params": nn.Linear(2, 2).parameters(), "rule": "general"}])
    assert not log_diagnostics(optimizer, pytest.fail, 0)


def test_where_nothing_turns_nothing_is_logged() -> None:
    model = nn.Linear(2, 2)
    optimizer = AngularAdamW(param_groups(model, torch.randn(4, 2)))
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    assert not log_diagnostics(optimizer, pytest.fail, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"every": 2.5}, "every must be an integer >= 1, got 2.5"),
        ({"step": "7"}, "step must be an integer, got '7'"),
        ({"quantities": "angle"}, "quantities must be a list of names, got 'angle'"),
        ({"quantities": ["rho"]}, "quantities must be among norm, .*; got 'rho'"),
        ({"log": logging.getLogger("x")}, "a logging.Logger takes text: pass a function"),
        ({"log": 3}, "log must be a SummaryWriter, .*; got int"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)])},
            "there is no AdamO and no AngularAdamW in this SGD",
        ),
    ],
    ids=["every", "half", "step", "one name", "quantity", "text logger", "logger", "optimizer"],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        log_diagnostics(**{"optimizer": stepped(), "log": print, "step": 0, **arguments})


@BOTH
def test_the_optimizer_is_found_in_wrappers(kind: Any) -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    optimizer = stepped(kind)
    assert find_optimizer(Wrapper(Wrapper(optimizer))) is optimizer


@BOTH
def test_tensorboard(tmp_path: Any, kind: Any) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    optimizer = stepped(kind)
    with SummaryWriter(tmp_path) as writer:
        log_diagnostics(optimizer, writer, 200)
    (event,) = scalars(tmp_path)["adamo/norm/0.weight"]
    norm = optimizer.diagnostics(synchronize=True)["0.weight"]["norm"]
    assert event.step == 200
    assert event.value == pytest.approx(norm)


def scalars(folder: Any) -> dict[str, list[Any]]:
    """What TensorBoard reads from the event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}


@pytest.mark.slow
def test_wandb_offline(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="adamo") as run:
        log_diagnostics(stepped(), run, 100)
        log_diagnostics(stepped(), run, 200)  # W&B closes a row when the next step begins
        summary = dict(run.summary)
    assert summary["_step"] == 100
    assert summary["adamo/norm/0.weight"] > 0
    assert summary["adamo/guard_skipped/total"] == 0
    assert list(tmp_path.rglob("*.wandb"))


@BOTH
def test_tensorboard_panel(tmp_path: Any, kind: Any) -> None:
    """The text is there, and the charts of the layout find the curves that are logged."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from torch.utils.tensorboard import SummaryWriter

    optimizer = stepped(kind)
    with SummaryWriter(tmp_path) as writer:
        add_panel(optimizer, writer)
        log_diagnostics(optimizer, writer, 100)
    reader = EventAccumulator(str(tmp_path)).Reload()
    (text,) = reader.Tensors("adamo/rules/text_summary")
    assert "| 0.weight | 8×4 | scale_invariant |" in text.tensor_proto.string_val[0].decode()
    (event,) = reader.Tensors("custom_scalars__config__")
    (category,) = Layout.FromString(event.tensor_proto.string_val[0]).category
    charts = {chart.title: chart.multiline.tag[0] for chart in category.chart}
    for title in ("angle", "norm"):
        found = {tag for tag in scalars(tmp_path) if re.match(charts[title], tag)}
        rows = optimizer.diagnostics(synchronize=True)  # a bias of 0 has no angle
        known = {name for name, row in rows.items() if not math.isnan(row[title])}
        assert found == {f"adamo/{title}/{name}" for name in known}


@pytest.mark.slow
def test_wandb_panel(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="adamo") as run:
        add_panel(stepped(AngularAdamW), run)
        log_diagnostics(stepped(AngularAdamW), run, 100)
        log_diagnostics(stepped(AngularAdamW), run, 200)
        assert dict(run.summary)["adamo/angle/0.weight"] > 0
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
    first = {table["columns"][0]: table["data"] for table in tables}
    assert first["parameter"][0][:3] == ["0.weight", "8×4", "scale_invariant"]
    assert ["gradient_norm", "‖g‖"] in first["curve"]


def test_a_panel_needs_a_place() -> None:
    with pytest.raises(ValueError, match="log must be a SummaryWriter, wandb or a run of it; got"):
        add_panel(stepped(), print)


def test_the_table_has_a_curve_for_every_layer(capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    p = nn.Parameter(torch.randn(6, 5))
    optimizer = AngularAdamW([{"params": [("[w]", p)], "rule": "scale_invariant"}], lr=0.0)
    assert not print_diagnostics(optimizer, 0)  # it has not stepped
    for step in range(8):
        optimizer.param_groups[0]["lr"] = step * 1e-4
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert print_diagnostics(optimizer, step, every=7) == (step % 7 == 0)
    said = capsys.readouterr().out
    assert said.count("[w]") == 2
    assert "AngularAdamW, step 7" in said
    angle, norm = (optimizer.diagnostics(synchronize=True)["[w]"][x] for x in ("angle", "norm"))
    last = next(line for line in reversed(said.splitlines()) if "[w]" in line).split()
    assert last == ["[w]", f"{angle:.4g}", "▁█", f"{norm:.4g}", "▄▄"]


def test_the_table_shows_what_the_last_step_moved(capsys: Any) -> None:
    pytest.importorskip("rich")
    a, b = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(6, 5))
    groups = [{"params": [("a", a), ("b", b)], "rule": "scale_invariant"}]
    optimizer = AngularAdamW(groups)
    shown = []
    for moved in ((a, b), (a,), ()):
        a.grad = b.grad = None
        for p in moved:
            p.grad = torch.ones_like(p)
        optimizer.step()
        printed = print_diagnostics(optimizer, 0)
        words = capsys.readouterr().out.split()
        shown.append((printed, [name for name in "ab" if name in words]))
    assert shown == [(True, ["a", "b"]), (True, ["a"]), (False, [])]


def test_curves() -> None:
    assert spark([0.0, 1.0, 7.0]) == "▁▂█"
    assert spark([5.0, 5.001]) == "▄▄"  # rounding is no news
    assert spark([1.0, float("nan"), 2.0, float("inf")]) == "▁!█!"
    assert spark([]) == ""


def test_without_rich_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ModuleNotFoundError, match="print_diagnostics needs rich: pip install rich"):
        print_diagnostics(stepped(), 0)


@pytest.mark.parametrize("kind", [nn.Module, type("Own", (), {"optimizer": property(lambda s: s)})])
def test_a_wrapper_without_an_optimizer_of_ours_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="there is no AdamO and no AngularAdamW in this"):
        log_diagnostics(kind(), print, 0)


# ---- groups that somebody else made ---------------------------------------------------------


def test_with_rules_example() -> None:
    names = {"nn": nn, "torch": torch, "with_rules": with_rules}
    (example,) = doctest.DocTestFinder(recurse=False).find(with_rules, globs=names)
    assert doctest.DocTestRunner().run(example).failed == 0


@BOTH
def test_with_rules_keeps_options_and_order(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
    first, *rest = model.parameters()
    given = [{"params": rest, "weight_decay": 0.0}, {"params": [("old", first)], "lr_scale": 0.5}]
    groups = with_rules(given, model, torch.randn(8, 4), overrides={"2.bias": {"lr": 0.25}})
    optimizer = kind(groups, lr=0.01, weight_decay=1e-3)
    columns = ("rule", "lr_scale", "lr", "weight_decay", "param_names")
    assert [tuple(map(g.get, columns)) for g in optimizer.param_groups] == [
        ("low_dim", None, 0.01, 0.0, ["1.weight", "1.bias"]),
        ("general", None, 0.01, 0.0, ["2.weight"]),
        ("low_dim", None, 0.25, 0.0, ["2.bias"]),
        ("scale_invariant", 0.5, 0.01, 1e-3, ["0.weight"]),
    ]


def test_with_rules_takes_a_single_tensor_for_a_group() -> None:
    model = nn.Linear(4, 2)
    groups = with_rules([{"params": model.weight, "lr": 0.5}], model, torch.randn(8, 4))
    assert [(g["rule"], g["lr"], g["params"][0][0]) for g in groups] == [("general", 0.5, "weight")]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (torch.optim.SGD([torch.zeros(1)]), "got SGD: of an optimizer pass its param_groups"),
        (
            [{"params": nn.Sequential(nn.Linear(4, 2))}],
            "of group 0 must be parameters .* got Linear",
        ),
        ([{"params": ["weight"]}], "of group 0 must be parameters .* got str"),
        (nn.Linear(4, 2).parameters(), 'groups must be dictionaries with "params", got Parameter'),
    ],
    ids=["optimizer", "module", "names", "parameters"],
)
def test_with_rules_mistakes(groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_rules(groups, nn.Linear(4, 2), torch.randn(8, 4))


def test_with_rules_refuses_parameters_of_another_model() -> None:
    stranger = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"shape \(3, 2\) in group 0 is none of the model's"):
        with_rules([{"params": [stranger]}], nn.Linear(4, 2), torch.randn(8, 4))
