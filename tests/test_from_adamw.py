"""A running AdamW or Adam goes on as AdamO."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO
from adamo_optim.options import FORM

RADIAL_SGD = {**FORM, "radial_lr_ratio": 100.0}  # and the translated decay


def trained(cls: type[torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = cls(model.named_parameters(), **options)  # type: ignore[arg-type]
    for _ in range(25):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x, y = torch.randn(16, 6).double(), torch.randn(16, 3).double()
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("radial", ["adam", "sgd"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_groups_steps_and_moments_are_taken_over(
    cls: type[torch.optim.Optimizer], radial: str
) -> None:
    model, old = trained(cls, lr=2e-3, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.05)
    before = [p.detach().clone() for p in model.parameters()]
    options = {} if radial == "adam" else RADIAL_SGD
    coupled = (
        pytest.warns(UserWarning, match="L2 term") if cls is torch.optim.Adam else nullcontext()
    )
    with coupled:
        new = AdamO.from_adamw(old, **options)
    group = new.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.99), 1e-7)
    assert group["weight_decay"] == pytest.approx(0.05 if radial == "adam" else 0.05 / 100)
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert "amsgrad" not in group
    for p, w in zip(model.parameters(), before, strict=True):
        state, m = new.state[p], old.state[p]["exp_avg"]
        assert torch.equal(p, w)
        assert int(state["step"]) == 25
        assert torch.equal(state["exp_avg_sq"], old.state[p]["exp_avg_sq"])
        torch.testing.assert_close(state["mean_square"], old.state[p]["exp_avg_sq"].mean())
        if p.dim() == 1 or radial == "adam":
            assert torch.equal(state["exp_avg"], m)
            continue
        torch.testing.assert_close(
            (state["exp_avg"] * w).sum(), m.new_zeros(()), atol=1e-12, rtol=0
        )
        # the two parts make up the old moment, bias corrections included
        radial = state["radial_momentum"] / (1 - 0.9**25) * (1 - 0.8**25)
        torch.testing.assert_close(state["exp_avg"] + radial * w / w.norm(), m)
    step(model, new)
    assert not torch.equal(before[0], next(model.parameters()))


def test_the_old_optimizer_is_left_alone() -> None:
    model, old = trained(torch.optim.AdamW)
    kept = {k: v.clone() for k, v in old.state[next(model.parameters())].items()}
    new = AdamO.from_adamw(old)
    for _ in range(3):
        step(model, new)
    now = old.state[next(model.parameters())]
    assert all(torch.equal(kept[k], now[k]) for k in kept)
    assert "radial_lr_ratio" not in old.param_groups[0]


def test_a_tensor_as_learning_rate_is_not_shared_with_the_old_optimizer() -> None:
    old = torch.optim.AdamW(nn.Linear(3, 2).parameters(), lr=torch.tensor(1e-3))
    scheduler = torch.optim.lr_scheduler.StepLR(old, 1, gamma=0.5)
    new = AdamO.from_adamw(old, scheduler=scheduler)
    new.step()
    scheduler.step()
    assert [float(o.param_groups[0]["lr"]) for o in (old, new)] == pytest.approx([1e-3, 5e-4])


def test_a_tensor_as_weight_decay_is_not_shared_either() -> None:
    old = torch.optim.AdamW(nn.Linear(3, 2).parameters(), weight_decay=torch.tensor(0.1))
    new = AdamO.from_adamw(old, decay_lr="tangential")
    old.param_groups[0]["weight_decay"].zero_()
    assert float(new.param_groups[0]["weight_decay"]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "decay"),
    [
        ({}, 0.2),
        ({"radial_lr_ratio": 0.5}, 0.2),
        ({"radial_lr": 5e-4}, 0.2),
        (RADIAL_SGD, 2e-3),
        ({**RADIAL_SGD, "radial_lr_ratio": 10.0}, 0.02),
        ({**RADIAL_SGD, "radial_lr": 5e-3}, 0.04),
        ({**RADIAL_SGD, "radial_lr_ratio": 0.0}, 0.2),
        ({**RADIAL_SGD, "decay_lr": "tangential"}, 0.2),
    ],
)
def test_the_decay_is_translated(options: dict[str, Any], decay: float) -> None:
    for lr in (1e-3, torch.tensor(1e-3)):
        old = torch.optim.AdamW([nn.Parameter(torch.randn(6, 5))], lr=lr, weight_decay=0.2)
        found = AdamO.from_adamw(old, **options).param_groups[0]["weight_decay"]
        assert isinstance(found, float)
        assert found == pytest.approx(decay)


@pytest.mark.parametrize(
    ("options", "decay"),
    [({}, 0.2), (RADIAL_SGD, 2e-3), ({**RADIAL_SGD, "radial_lr": 5e-3}, 0.04)],
)
def test_the_decay_is_translated_at_the_start_of_a_warm_up(
    options: dict[str, Any], decay: float
) -> None:
    old = torch.optim.AdamW([nn.Parameter(torch.randn(6, 5))], lr=1e-3, weight_decay=0.2)
    torch.optim.lr_scheduler.LambdaLR(old, lambda step: step / 10)
    assert old.param_groups[0]["lr"] == 0.0
    new = AdamO.from_adamw(old, **options)
    assert new.param_groups[0]["weight_decay"] == pytest.approx(decay)


def test_vectors_decay_as_under_adamw() -> None:
    """With radial SGD, too, where matrices have another number."""
    for options in ({}, {"radial": "sgd", "radial_lr_ratio": 100.0}):
        p = nn.Parameter(torch.ones(4, dtype=torch.float64))
        old = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.2)
        new = AdamO.from_adamw(old, **options)
        p.grad = torch.zeros_like(p)
        new.step()
        assert float(p.detach()[0]) == pytest.approx(1 - 2e-4, rel=1e-12)


def test_with_radial_sgd_the_decay_per_step_stays_equal() -> None:
    for options in ({}, {"radial_lr_ratio": 10.0}, {"radial_lr": 0.3}, {"decay_lr": "tangential"}):
        p = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
        start = float(p.detach().norm())
        old = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.2)
        new = AdamO.from_adamw(old, radial="sgd", curvature_target=None, **options)
        p.grad = torch.zeros_like(p)
        new.step()
        assert float(p.detach().norm()) == pytest.approx(start * (1 - 2e-4), rel=1e-12), options


def test_the_first_steps_go_on_where_adamw_was_going() -> None:
    model, old = trained(torch.optim.AdamW, lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    copies = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(5)
    new = AdamO.from_adamw(old)
    step(model, new)
    ours = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    with torch.no_grad():
        for p, c in zip(model.parameters(), copies, strict=True):
            p.copy_(c)
    torch.manual_seed(5)
    step(model, old)
    for p, w, change in zip(model.parameters(), before, ours, strict=True):
        theirs = p.detach() - w
        if p.dim() > 1:  # along w the two differ by design
            theirs, change = (x - (x * w).sum() / w.square().sum() * w for x in (theirs, change))
        assert float((theirs * change).sum() / (theirs.norm() * change.norm())) > 0.95


def test_with_adams_radial_part_nothing_changes() -> None:
    """Moments whole, ratio 1, no curvature: the next steps are those AdamW would have taken."""
    p = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    old = torch.optim.AdamW([p], lr=1e-2, weight_decay=0.2)
    gradients = torch.randn(20, 6, 5, dtype=torch.float64)
    for g in gradients[:10]:
        p.grad = g
        old.step()
    q = nn.Parameter(p.detach().clone())
    goes_on = torch.optim.AdamW([q], lr=1e-2, weight_decay=0.2)
    goes_on.load_state_dict(old.state_dict())
    new = AdamO.from_adamw(old, radial_lr_ratio=1.0, curvature_target=None)
    for g in gradients[10:]:
        p.grad, q.grad = g, g
        new.step()
        goes_on.step()
    torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_options_and_groups() -> None:
    a, b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(4, 3))
    groups = [{"params": [a], "lr": 1e-2, "initial_lr": 0.1}, {"params": [b]}]
    old = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01, maximize=True)
    new = AdamO.from_adamw(old, weight_decay=1e-4, tangential="angular")
    assert [g["lr"] for g in new.param_groups] == [1e-2, 1e-3]
    assert new.param_groups[0]["initial_lr"] == 0.1
    assert all(g["weight_decay"] == 1e-4 and g["maximize"] for g in new.param_groups)
    assert all(g["tangential"] == "angular" for g in new.param_groups)


def test_what_cannot_be_continued() -> None:
    p = nn.Parameter(torch.randn(3, 3))
    with pytest.raises(ValueError, match="amsgrad"):
        AdamO.from_adamw(torch.optim.AdamW([p], amsgrad=True))
    with pytest.raises(TypeError, match=r"AdamW or torch.optim.Adam, got SGD"):
        AdamO.from_adamw(torch.optim.SGD([p], lr=0.1))


def test_an_unused_optimizer_and_low_precision_state() -> None:
    p = nn.Parameter(torch.randn(3, 3, dtype=torch.bfloat16))
    new = AdamO.from_adamw(torch.optim.AdamW([p]))
    assert int(new.state[p]["step"]) == 0
    old = torch.optim.AdamW([p])
    p.grad = torch.randn_like(p)
    old.step()
    new = AdamO.from_adamw(old)
    assert new.state[p]["exp_avg"].dtype == torch.float32
    new.step()
    assert torch.isfinite(p).all()


schedulers = torch.optim.lr_scheduler
SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=40),
    "sequential": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 16)],
        milestones=[4],
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.9), schedulers.StepLR(o, 3)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("change", [2, 8])
def test_a_scheduler_goes_on(name: str, change: int) -> None:
    rates = []
    for changes in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = SCHEDULES[name](optimizer)
        seen = []
        for t in range(16):
            if changes and t == change:
                optimizer = AdamO.from_adamw(optimizer, scheduler=scheduler)
            step(model, optimizer)
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        rates.append(seen)
    assert rates[0] == pytest.approx(rates[1], rel=1e-12)
    assert len(set(rates[1][change:])) > 3


def test_several_schedulers_and_a_foreign_one() -> None:
    _, adamw = trained(torch.optim.AdamW)
    _, other = trained(torch.optim.AdamW)
    first, second = SCHEDULES["cosine"](adamw), schedulers.ReduceLROnPlateau(adamw)
    optimizer = AdamO.from_adamw(adamw, scheduler=[first, second])
    assert first.optimizer is optimizer
    assert second.optimizer is optimizer
    with pytest.raises(ValueError, match="StepLR is no scheduler of this optimizer"):
        AdamO.from_adamw(adamw, scheduler=schedulers.StepLR(other, 3))


def test_a_layer_that_was_frozen_since_keeps_its_moments() -> None:
    model, adamw = trained(torch.optim.AdamW)
    adamw.zero_grad()
    weight = model[0].weight.requires_grad_(False)
    optimizer = AdamO.from_adamw(adamw)
    assert torch.equal(optimizer.state[weight]["exp_avg"], adamw.state[weight]["exp_avg"])
    before = weight.clone()
    step(model, optimizer)
    assert torch.equal(weight, before)


def test_a_group_that_is_added_later_has_adamws_settings() -> None:
    p, late = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    settings = {"lr": 3e-5, "betas": (0.9, 0.95), "eps": 1e-6, "maximize": True}
    old = torch.optim.AdamW([{"params": [p], "lr": 1.0}], weight_decay=0.01, **settings)
    optimizer = AdamO.from_adamw(old, eps=1e-7)
    optimizer.add_param_group({"params": [late]})
    group = optimizer.param_groups[1]
    assert {name: group[name] for name in settings} == {**settings, "eps": 1e-7}
    assert group["weight_decay"] == pytest.approx(0.01)


def test_moments_of_low_precision_weights_are_split_in_full_precision() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, 6).bfloat16())
    old = torch.optim.AdamW([p])
    p.grad = p.detach().clone()  # nearly all of it radial
    p.grad[0, 0] += 0.5
    old.step()
    optimizer = AdamO.from_adamw(old, **RADIAL_SGD)
    m, w = old.state[p]["exp_avg"].double(), p.detach().double()
    expected = m - w * (m * w).sum() / (w * w).sum()
    torch.testing.assert_close(
        optimizer.state[p]["exp_avg"].double(), expected, rtol=1e-4, atol=1e-6 * float(m.norm())
    )
