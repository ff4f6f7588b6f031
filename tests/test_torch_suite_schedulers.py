"""PyTorch's scheduler and weight-averaging suites: every class of ``lr_scheduler``."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.testing import assert_close

from adamo_optim import AdamO
from torch_kit import (
    ADAMO_ENTRY,
    ANGULAR_ENTRY,
    TURNING_ENTRY,
    Entry,
    Regression,
    assert_same,
    clones,
    normed_net,
    over_entries,
    step_schedulers,
    train_net,
)

STEPS = 12
LR = 0.004

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda opt: schedulers.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda opt: schedulers.MultiplicativeLR(opt, lambda epoch: 0.95),
    "StepLR": lambda opt: schedulers.StepLR(opt, step_size=3, gamma=0.5),
    "MultiStepLR": lambda opt: schedulers.MultiStepLR(opt, milestones=[2, 5], gamma=0.5),
    "ConstantLR": lambda opt: schedulers.ConstantLR(opt, factor=0.5, total_iters=4),
    "LinearLR": lambda opt: schedulers.LinearLR(opt, start_factor=0.3, total_iters=6),
    "ExponentialLR": lambda opt: schedulers.ExponentialLR(opt, gamma=0.9),
    "PolynomialLR": lambda opt: schedulers.PolynomialLR(opt, total_iters=STEPS, power=2.0),
    "CosineAnnealingLR": lambda opt: schedulers.CosineAnnealingLR(opt, T_max=STEPS),
    "CosineAnnealingWarmRestarts": lambda opt: schedulers.CosineAnnealingWarmRestarts(opt, T_0=4),
    "ReduceLROnPlateau": lambda opt: schedulers.ReduceLROnPlateau(opt, threshold=0.9, patience=1),
    "SequentialLR": lambda opt: schedulers.SequentialLR(
        opt,
        [schedulers.LinearLR(opt, 0.1, total_iters=3), schedulers.ExponentialLR(opt, 0.8)],
        milestones=[3],
    ),
    "ChainedScheduler": lambda opt: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(opt, 0.5, total_iters=4), schedulers.ExponentialLR(opt, 0.9)],
        optimizer=opt,
    ),
    "CyclicLR": lambda opt: schedulers.CyclicLR(opt, 0.001, 0.01, step_size_up=3),
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, max_lr=0.01, total_steps=STEPS + 1),
    "SWALR": lambda opt: SWALR(opt, swa_lr=0.001, anneal_epochs=5),
}

every_scheduler = pytest.mark.parametrize("name", SCHEDULERS)
both = over_entries([ADAMO_ENTRY, TURNING_ENTRY])  # without a rule the steps are AdamW's own


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What schedulers move, as numbers."""
    return [
        {"lr": float(group["lr"]), "betas": tuple(float(beta) for beta in group["betas"])}
        for group in optimizer.param_groups
    ]


def groups(problem: Regression) -> list[dict[str, Any]]:
    return [{"params": [problem.weight]}, {"params": [problem.bias], "lr": LR / 2}]


def run(
    problem: Regression, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = STEPS
) -> list[list[dict[str, Any]]]:
    """The options each step was taken with."""
    history = []
    for _ in range(steps):
        loss = problem.backward()
        history.append(options(optimizer))
        optimizer.step()
        step_schedulers([scheduler], loss)
    return history


def test_every_scheduler_is_here() -> None:
    known = set(schedulers.__all__) - {"LRScheduler"}  # the base class
    assert set(SCHEDULERS) == known | {"SWALR"}


@both
@every_scheduler
def test_a_schedule_moves_only_what_the_groups_say(entry: Entry, name: str) -> None:
    """Setting the scheduled values by hand gives the same steps, to the last bit."""
    scheduled, by_hand = Regression(), Regression()
    before = scheduled.loss().item()
    optimizer = entry.make(groups(scheduled), lr=LR)
    history = run(scheduled, optimizer, SCHEDULERS[name](optimizer))
    assert len({str(entry) for entry in history}) > 1  # the schedule did something
    other = entry.make(groups(by_hand), lr=LR)
    for entry in history:
        by_hand.backward()
        for group, values in zip(other.param_groups, entry, strict=True):
            group.update(values)
        other.step()
    assert_same(clones(scheduled.params), clones(by_hand.params))
    assert scheduled.loss().item() < before


@every_scheduler
def test_a_scheduled_run_without_a_rule_is_that_of_adamw(name: str) -> None:
    """The groups' lr and betas over time, and what the steps made of them, to the last bit."""
    histories, ends = [], []
    for make in (ANGULAR_ENTRY.make, torch.optim.AdamW):
        problem = Regression()
        optimizer = make(groups(problem), lr=LR, foreach=False)
        histories.append(run(problem, optimizer, SCHEDULERS[name](optimizer)))
        ends.append(clones(problem.params))
    assert histories[0] == histories[1]
    assert_same(*ends)


@every_scheduler
def test_a_scheduled_low_dim_run_of_adamo_is_that_of_adam(name: str) -> None:
    histories, ends = [], []
    for kind in (AdamO, torch.optim.Adam):
        problem = Regression(dtype=torch.float64)
        rule = {"rule": "low_dim"} if kind is AdamO else {}
        optimizer = kind([{**group, **rule} for group in groups(problem)], lr=LR)
        histories.append(run(problem, optimizer, SCHEDULERS[name](optimizer)))
        ends.append(clones(problem.params))
    assert histories[0] == histories[1]
    assert_close(*ends, rtol=1e-10, atol=0)


@both
@every_scheduler
def test_a_tensor_lr_is_scheduled_in_place(entry: Entry, name: str) -> None:
    if name in ("ReduceLROnPlateau", "SequentialLR") and torch.__version__ < (2, 10):
        pytest.skip("this scheduler replaces the tensor by a number")
    ends = []
    for lr in (LR, torch.tensor(LR, dtype=torch.float64)):
        problem = Regression()
        optimizer = entry.make(problem.params, lr=lr)
        run(problem, optimizer, SCHEDULERS[name](optimizer), steps=6)
        if isinstance(lr, Tensor):
            assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
        ends.append(clones(problem.params))
    assert_close(*ends)


@both
@every_scheduler
def test_a_run_can_be_stopped_and_continued(entry: Entry, name: str) -> None:
    """Optimizer and scheduler are loaded into new ones, in a program started anew."""
    whole, first = Regression(), Regression()
    optimizer = entry.make(whole.params, lr=LR)
    run(whole, optimizer, SCHEDULERS[name](optimizer), steps=8)
    optimizer = entry.make(first.params, lr=LR)
    scheduler = SCHEDULERS[name](optimizer)
    run(first, optimizer, scheduler, steps=4)
    saved = deepcopy((optimizer.state_dict(), scheduler.state_dict()))

    second = Regression()
    with torch.no_grad():
        for p, q in zip(second.params, first.params, strict=True):
            p.copy_(q)
    optimizer = entry.make(second.params, lr=LR)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    run(second, optimizer, scheduler, steps=4)
    assert_same(clones(second.params), clones(whole.params))


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_cycling_the_momentum_moves_the_first_beta_alone(name: str) -> None:
    problem = Regression()
    optimizer = AdamO(problem.params, lr=LR, betas=(0.9, 0.98), radial_beta=0.7)
    history = run(problem, optimizer, SCHEDULERS[name](optimizer))
    firsts = [entry[0]["betas"][0] for entry in history]
    assert min(firsts) < 0.87 < 0.9 <= max(firsts)
    assert {entry[0]["betas"][1] for entry in history} == {0.98}
    assert optimizer.param_groups[0]["radial_beta"] == 0.7


def test_a_scheduler_moves_the_radial_step_through_the_ratio_alone() -> None:
    """η_ρ = ratio·lr follows the schedule; an absolute radial_lr stays what it is."""
    for absolute in (None, 0.05):
        problem = Regression()
        optimizer = AdamO(problem.named, lr=LR, radial_lr=absolute, curvature_target=None)
        scheduler = schedulers.ExponentialLR(optimizer, gamma=0.5)
        seen = []
        for _ in range(3):
            problem.train(optimizer, 1)
            seen.append(optimizer.diagnostics(synchronize=True)["weight"]["eta_radial"])
            scheduler.step()
        expected = [0.05] * 3 if absolute else [100 * LR, 50 * LR, 25 * LR]
        assert seen == pytest.approx(expected, rel=1e-12)


@over_entries()
def test_a_scheduler_notices_the_step_of_a_copied_optimizer(entry: Entry) -> None:
    """Schedulers wrap ``step``; neither copying nor stepping the copy may call the original."""
    problem = Regression()
    optimizer = entry.make(problem.params)
    schedulers.StepLR(optimizer, step_size=1)
    problem.train(optimizer, 1)
    copy = deepcopy(optimizer)
    before = clones(problem.params)
    for p in copy.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    copy.step()
    assert_same(clones(problem.params), before)
    assert not torch.equal(copy.param_groups[0]["params"][0], before[0])


# ---- averaged weights -----------------------------------------------------------------------


@both
def test_averaged_weights_are_the_mean_of_the_steps(entry: Entry) -> None:
    net = normed_net()
    optimizer = entry.make(net.named_parameters())
    average, seen = AveragedModel(net), []
    for _ in range(4):
        train_net(net, optimizer, 1)
        average.update_parameters(net)
        seen.append(clones(net.parameters()))
    means = [torch.stack(steps).mean(dim=0) for steps in zip(*seen, strict=True)]
    assert_close([p.detach() for p in average.module.parameters()], means)


@both
def test_exponential_averages_follow_the_weights(entry: Entry) -> None:
    net = normed_net()
    optimizer = entry.make(net.parameters(), lr=0.01)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected: list[Tensor] = []
    for _ in range(4):
        train_net(net, optimizer, 1)
        average.update_parameters(net)
        now = clones(net.parameters())
        pairs = zip(expected, now, strict=True) if expected else ()
        expected = [torch.lerp(old, new, 0.5) for old, new in pairs] or now
    assert_close([p.detach() for p in average.module.parameters()], expected)


@both
def test_swa_with_its_schedule_and_new_batch_statistics(entry: Entry) -> None:
    """The whole recipe: train, average with SWALR, then recompute BatchNorm's statistics."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    data, target = torch.randn(64, 6), torch.randn(64, 1)
    optimizer = entry.make(net.parameters(), lr=0.01)
    average, scheduler = AveragedModel(net), SWALR(optimizer, swa_lr=0.002, anneal_epochs=4)
    first = nn.functional.mse_loss(net(data), target).item()
    for step in range(30):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(data), target).backward()
        optimizer.step()
        if step >= 20:
            average.update_parameters(net)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
    update_bn([data], average)
    assert_close(average.module[1].running_mean, average.module[0](data).mean(dim=0))
    assert nn.functional.mse_loss(average(data), target).item() < first
