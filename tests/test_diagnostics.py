"""explain() and diagnostics(): what a user reads and logs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO, AngularAdamW, flatten_diagnostics, param_groups

BACKENDS = pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])


BOTH = pytest.mark.parametrize("kind", [AdamO, AngularAdamW])


def turning(p: nn.Parameter, **options: Any) -> AngularAdamW:
    return AngularAdamW([{"params": [("w", p)], "rule": "scale_invariant"}], **options)


@BACKENDS
def test_diagnostics_are_what_the_step_did(foreach: bool) -> None:
    p = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    optimizer = AdamO([("w", p)], lr=0.05, foreach=foreach, radial_lr=0.1)
    for _ in range(5):
        w = p.detach().clone()
        g = p.grad = torch.randn_like(p)
        optimizer.step()
    found = optimizer.diagnostics(synchronize=True)["w"]
    change = p.detach() - w
    radial = (change * w).sum() / w.norm()
    cosine = (p.detach() * w).sum() / (p.detach().norm() * w.norm())
    expected = {
        "norm": w.norm(),
        "gradient_norm": g.norm(),
        "radial_share_gradient": ((g * w).sum() / (g.norm() * w.norm())) ** 2,
        "radial_share_update": (radial / change.norm()) ** 2,
        "angle": torch.arccos(cosine),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-7), name
    assert found["tau"] == pytest.approx(float(optimizer.state[p]["tau"]))
    assert not any(found[name] for name in found if name.startswith("guard_"))


@pytest.mark.parametrize("second_moment", ["tensor", "row"])
@pytest.mark.parametrize("foreach", [False, None], ids=["for-loop", "fused"])
@pytest.mark.parametrize("lr", [5e-4, 5e-3])
def test_diagnostics_of_a_turn(foreach: bool | None, lr: float, second_moment: str) -> None:
    """Of the whole weight, also where its rows have second moments of their own."""
    p = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    optimizer = turning(p, lr=lr, foreach=foreach, second_moment=second_moment)
    assert ("6 second moments, one a row" in str(optimizer.explain())) == (second_moment == "row")
    for _ in range(5):
        w = p.detach().clone()
        g = p.grad = torch.randn_like(p)
        optimizer.step()
    found = optimizer.diagnostics(synchronize=True)["w"]
    change = (p.detach() - w).norm() / w.norm()  # a chord
    assert found.keys() == {"norm", "gradient_norm", "angle", "at_max_angle"}
    assert found["norm"] == pytest.approx(float(w.norm()), rel=1e-12)
    assert found["gradient_norm"] == pytest.approx(float(g.norm()), rel=1e-12)
    assert found["angle"] == pytest.approx(2 * math.asin(float(change) / 2), rel=1e-9)
    assert found["at_max_angle"] == (lr > 0.05 * 0.015)


def test_rows_are_averaged() -> None:
    p = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    optimizer = AdamO([("w", p)], block="row")
    w = p.detach().clone()
    p.grad = torch.randn_like(p)
    optimizer.step()
    found = optimizer.diagnostics(synchronize=True)["w"]
    assert found["norm"] == pytest.approx(float(w.norm(dim=1).mean()))
    assert found["gradient_norm"] == pytest.approx(float(p.grad.norm(dim=1).mean()))
    assert "6 blocks, one a row" in optimizer.explain()[0].reason


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_was_skipped_shows_up(bad: float) -> None:
    p = nn.Parameter(torch.randn(6, 5))
    optimizer = AdamO([("w", p)])
    for value, expected in ((1.0, 0.0), (bad, 1.0)):
        p.grad = torch.randn_like(p)
        p.grad[0, 0] *= value
        optimizer.step()
        assert optimizer.diagnostics(synchronize=True)["w"]["guard_skipped"] == expected


def test_diagnostics_stay_on_the_device_until_asked() -> None:
    p, late = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3))
    optimizer = AdamO([("w", p), ("late", late)])
    assert optimizer.diagnostics() == {}
    p.grad = torch.randn_like(p)
    optimizer.step()
    found = optimizer.diagnostics()
    assert list(found) == ["w"]  # the other one had no gradient
    assert isinstance(found["w"]["norm"], torch.Tensor)
    assert found["w"]["norm"].dim() == 0
    assert math.isnan(found["w"]["tau"])  # no second gradient yet
    flat = flatten_diagnostics(found)
    assert flat["adamo/norm/w"] == pytest.approx(float(found["w"]["norm"]))
    assert all(isinstance(value, float) for value in flat.values())


def test_reading_diagnostics_changes_nothing() -> None:
    p, late = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3, 2))
    optimizer = AdamO([("w", p)])
    p.grad = torch.randn_like(p)
    optimizer.step()
    found = flatten_diagnostics(optimizer.diagnostics())
    optimizer.param_groups[0]["curvature_target"] = None
    assert flatten_diagnostics(optimizer.diagnostics()) == pytest.approx(found, nan_ok=True)
    assert "previous_grad" in optimizer.state[p]  # until the next step
    optimizer.add_param_group({"params": [("late", late)]})
    assert flatten_diagnostics(optimizer.diagnostics()) == pytest.approx(found, nan_ok=True)


@BOTH
def test_diagnostics_of_several_backends_are_of_the_last_step(kind: Any) -> None:
    first, second = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3, 2))
    rule = {"rule": "scale_invariant"}
    optimizer = kind(
        [
            {"params": [("first", first)], "foreach": True, **rule},
            {"params": [("second", second)], **rule},
        ]
    )
    for p in (first, second):
        p.grad = torch.randn_like(p)
        optimizer.step()
        p.grad = None
    assert list(optimizer.diagnostics()) == ["second"]


def test_the_online_test_shows_up() -> None:
    p = nn.Parameter(torch.randn(6, 5))
    optimizer = AdamO([("w", p)], delta=0.1)
    for along, expected in ((0.0, 1.0), (5.0, 0.0)):
        g = torch.randn(6, 5)
        w = p.detach()
        p.grad = g - (g * w).sum() / w.square().sum() * w + along * w
        optimizer.step()
        assert optimizer.diagnostics(synchronize=True)["w"]["scale_invariant"] == expected


def test_explain_names_rules_reasons_and_backends() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    nn.init.zeros_(model[3].weight)
    optimizer = AdamO(param_groups(model, torch.randn(4, 2, 4, 4)), foreach=True)
    rows = {row.name: row for row in optimizer.explain()}
    assert rows["0.weight"].rule == "scale_invariant"
    assert "Euler" in rows["0.weight"].reason
    assert rows["1.bias"].rule == "low_dim"
    assert rows["3.weight"].rule == "low_dim"
    assert "norm is 0" in rows["3.weight"].reason
    assert {row.backend for row in rows.values()} == {"foreach"}
    text = str(optimizer.explain()).splitlines()
    assert text[0].split() == ["parameter", "shape", "rule", "backend", "why"]
    assert len(text) == 2 + len(rows)


def test_explain_says_what_turns_and_what_is_adamw() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    optimizer = AngularAdamW(param_groups(model, torch.randn(4, 2, 4, 4)))
    optimizer.add_param_group(
        {"params": [("one", nn.Parameter(torch.ones(1, 1)))], "rule": "scale_invariant"}
    )
    optimizer.add_param_group(
        {"params": [("zero", nn.Parameter(torch.zeros(2, 2)))], "rule": "scale_invariant"}
    )
    rows = {row.name: row for row in optimizer.explain()}
    assert rows["0.weight"].rule == "scale_invariant"
    assert rows["0.weight"].reason.startswith("turns: ")
    for name, rule in (("0.bias", "low_dim"), ("1.weight", "low_dim"), ("3.weight", "general")):
        assert rows[name].rule == rule
        assert rows[name].reason.startswith("AdamW: ")
        assert rows[name].backend == "torch fused"
    assert (rows["one"].rule, rows["zero"].rule) == ("general", "general")
    assert "one entry: no direction to turn" in rows["one"].reason
    assert "its norm is 0: no direction to turn" in rows["zero"].reason
    zero = optimizer.param_groups[-1]["params"][0]
    zero.grad = torch.ones_like(zero)
    optimizer.step()
    assert "its norm was 0 at its first step" in optimizer.explain()[-1].reason


def test_explain_says_what_was_not_examined() -> None:
    model = nn.Linear(4, 3)
    by_shape = AdamO(model.parameters()).explain()
    assert by_shape[0].name == "group0.param0"
    assert "not examined" in by_shape[0].reason
    grouped = AdamO(param_groups(model)).explain()
    assert [row.name for row in grouped] == ["weight", "bias"]
    assert "not examined" in grouped[0].reason
    declared = AdamO([{"params": model.parameters(), "rule": "scale_invariant"}]).explain()
    assert declared[0].reason == "set by the user"


@BOTH
def test_parameters_of_one_name_in_two_groups_are_told_apart(kind: Any) -> None:
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizer = kind(
        [{"params": list(model.named_parameters()), "rule": "scale_invariant"} for model in models]
    )
    for model in models:
        model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    names = ["group0.weight", "group0.bias", "group1.weight", "group1.bias"]
    assert sorted(optimizer.diagnostics()) == sorted(names)
    assert [row.name for row in optimizer.explain()] == names


@BOTH
def test_every_parameter_has_a_name_of_its_own(kind: Any) -> None:
    encoder, decoder = nn.Linear(3, 2), nn.Linear(3, 2)
    merged = [*encoder.named_parameters(), *decoder.named_parameters()]
    groups = [{"params": merged}, {"params": [("weight", nn.Parameter(torch.ones(2, 2)))]}]
    optimizer = kind([{**group, "rule": "scale_invariant"} for group in groups])
    names = [row.name for row in optimizer.explain()]
    assert names == ["group0.weight", "bias", "group0.weight#2", "bias#2", "group1.weight"]
    for _, p in merged:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert list(optimizer.diagnostics()) == names[:4]
