"""What may be done with groups once they are made: several optimizers, rebind, another rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO, param_groups, rebind
from adamo_optim.integrations import with_rules

WIDTH = 16


def hidden_layers() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        nn.Linear(WIDTH, 3),
    )


def rules(groups: list[dict[str, Any]]) -> dict[str, str]:
    return {name: group["rule"] for group in groups for name, _ in group["params"]}


def test_the_same_groups_serve_several_optimizers() -> None:
    model = hidden_layers()
    groups = param_groups(model, torch.randn(8, WIDTH))
    first = AdamO(groups, lr=1e-2, weight_decay=0.3)
    second = AdamO(groups, lr=1e-3)
    assert {g["lr"] for g in first.param_groups} == {1e-2}
    assert {(g["lr"], g["weight_decay"]) for g in second.param_groups} == {(1e-3, 0.01)}
    first.param_groups[0]["lr"] = 0.5
    assert second.param_groups[0]["lr"] == 1e-3
    assert all(g.keys() == {"params", "rule", "rule_reason"} for g in groups)
    assert rebind(groups, model) == groups


def test_rebind_takes_groups_that_another_optimizer_has_used() -> None:
    model = hidden_layers()
    groups = param_groups(model, torch.randn(8, WIDTH))
    made = rules(groups)
    torch.optim.AdamW(groups, lr=1e-2)
    again = rebind(groups, model)
    assert rules(again) == made
    AdamO(again)
    with pytest.raises(ValueError, match="groups with names"):
        rebind([{"params": list(model.parameters())}], model)


@pytest.mark.parametrize("compiled", [False, True])
def test_rebind_looks_into_replicas(compiled: bool) -> None:
    model = hidden_layers()
    groups = param_groups(model, torch.randn(8, WIDTH))
    wrapped: Any = nn.DataParallel(model)
    if compiled:
        wrapped = torch.compile(wrapped)
    assert rebind(groups, wrapped) == groups


def test_rebind_leaves_frozen_parameters_out() -> None:
    model = hidden_layers()
    groups = with_rules([{"params": model[6].parameters()}], model, torch.randn(8, WIDTH))
    with pytest.raises(ValueError, match=r"no group has.*0.weight.*requires_grad_"):
        rebind(groups, model)
    model.requires_grad_(False)
    model[6].requires_grad_(True)
    assert rules(rebind(groups, model)) == {"6.weight": "general", "6.bias": "low_dim"}


@pytest.mark.parametrize(
    ("rule", "reason"), [("general", "declared by its group"), ("auto", "by shape; scale")]
)
def test_a_rule_that_was_changed_loses_its_reason(rule: str, reason: str) -> None:
    optimizer = AdamO(param_groups(hidden_layers(), torch.randn(8, WIDTH)))
    for group in optimizer.param_groups:
        if group["rule"] == "scale_invariant":
            group["rule"] = rule
    row = next(row for row in optimizer.explain() if row.name == "0.weight")
    assert row.rule == "general"
    assert row.reason.startswith(reason)
