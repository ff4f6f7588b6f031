"""What trainers do to an optimizer that its documentation does not mention, one test each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from adamo_optim import AdamO, AngularAdamW, param_groups
from adamo_optim.integrations import with_rules
from test_trainers import example, run_main

BOTH = pytest.mark.parametrize("kind", [AdamO, AngularAdamW])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)
    )


def batch(seed: int) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: range, *optimizers: Any) -> None:
    for seed in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(seed)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


def rules(optimizer: Any) -> dict[str, str]:
    return {row.name: row.rule for row in optimizer.explain()}


# ---- groups ---------------------------------------------------------------------------------


@BOTH
def test_biases_first_and_the_weights_later(kind: Any) -> None:
    """Ultralytics' older order: the constructor sees the biases, add_param_group the rest."""
    model, twin = network(), network()
    groups = param_groups(model, batch(0))
    groups.sort(key=lambda group: group["rule"] != "low_dim")
    optimizer = kind(groups[:1], lr=1e-3)
    for group in groups[1:]:
        optimizer.add_param_group(group)
    whole = kind(param_groups(twin, batch(0)), lr=1e-3)
    assert rules(optimizer) == rules(whole)
    train(model, range(4), optimizer)
    train(twin, range(4), whole)
    assert_equal(model, twin)


@BOTH
def test_groups_that_come_in_the_middle_of_a_training(kind: Any) -> None:
    """As where layers thaw: those that train already go on, the others begin."""
    model, twin = network(), network()
    head, *late = param_groups(model, batch(0))[::-1]
    optimizer = kind([head], lr=1e-3)
    train(model, range(3), optimizer)
    for group in late:
        optimizer.add_param_group(group)
    train(model, range(3, 6), optimizer)

    head, *late = param_groups(twin, batch(0))[::-1]
    first, second = kind([head], lr=1e-3), kind(late, lr=1e-3)
    train(twin, range(3), first)
    train(twin, range(3, 6), first, second)
    assert_equal(model, twin)
    assert sorted(int(state["step"]) for state in optimizer.state.values()) == [3, 3, 3, 3, 6]


@BOTH
def test_the_groups_of_ultralytics_get_rules(kind: Any) -> None:
    """Its three groups carry a name and every option; ``with_rules`` splits them."""
    model = network()
    options = {"lr": 1e-3, "betas": (0.9, 0.999)}
    weight, norm = [model[0].weight, model[3].weight], [model[1].weight]
    bias = [model[1].bias, model[3].bias]
    theirs = [
        {"params": bias, **options, "weight_decay": 0.0, "param_group": "bias"},
        {"params": weight, **options, "weight_decay": 5e-4, "param_group": "weight"},
        {"params": norm, **options, "weight_decay": 0.0, "param_group": "bn"},
    ]
    optimizer = kind(with_rules(theirs, model, batch(0)))
    found = [(g["param_group"], g["rule"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [
        ("bias", "low_dim", 0.0),
        ("weight", "scale_invariant", 5e-4),
        ("weight", "general", 5e-4),
        ("bn", "low_dim", 0.0),
    ]
    for group in optimizer.param_groups:  # its warm-up treats biases apart, by that name
        group["lr"] = 0.1 if group["param_group"] == "bias" else 0.0
    before = weights(model)
    train(model, range(1), optimizer)
    moved = {
        name: not torch.equal(p, old)
        for (name, p), old in zip(model.named_parameters(), before, strict=True)
    }
    assert moved == {
        "0.weight": False, "1.weight": False, "1.bias": True, "3.weight": False, "3.bias": True,
    }  # fmt: skip


def test_keys_of_others_pass_and_what_cannot_be_done_is_refused() -> None:
    p = nn.Parameter(torch.randn(4, 3))
    foreign = {"no_weight_decay": True, "use_weight_decay": False, "lr_scale": 0.5, "kind": "muon"}
    group = AngularAdamW([{"params": [p], "rule": "general", **foreign}]).param_groups[0]
    assert foreign.items() <= group.items()
    theirs = torch.optim.AdamW([p], amsgrad=True).param_groups
    for cls in (AngularAdamW, AdamO):
        with pytest.raises(ValueError, match=f"amsgrad=True keeps.*which {cls.__name__} does not"):
            cls([{**theirs[0], "rule": "general"}])


def test_a_kind_in_every_group_and_two_optimizers_in_one_training() -> None:
    """nanochat's groups say which optimizer they are for; each takes its own."""
    model, twin = network(), network()
    groups = param_groups(model, batch(0))
    for group in groups:
        group["kind"] = "angular" if group["rule"] == "scale_invariant" else "adamo"
    classes = {"angular": AngularAdamW, "adamo": AdamO}
    ours = [
        classes[kind]([group for group in groups if group["kind"] == kind], lr=1e-3)
        for kind in classes
    ]
    assert {g["kind"] for g in ours[0].state_dict()["param_groups"]} == {"angular"}
    train(model, range(4), *ours)

    # one after the other on the same gradients: neither sees the other's parameters
    apart = param_groups(twin, batch(0))
    first = AngularAdamW([g for g in apart if g["rule"] == "scale_invariant"], lr=1e-3)
    second = AdamO([g for g in apart if g["rule"] != "scale_invariant"], lr=1e-3)
    train(twin, range(4), second, first)
    assert_equal(model, twin)
    owned = [{id(p) for p in optimizer.state} for optimizer in ours]
    assert not owned[0] & owned[1]
    assert len(owned[0] | owned[1]) == 5


def test_nanochat_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("nanochat_groups")
    run_main(module, monkeypatch)
    ours, theirs, losses = capsys.readouterr().out.splitlines()
    assert ours == "AngularAdamW: q.weight, k.weight"
    assert theirs == "AdamW: embed.weight, v.weight, head.weight, head.bias"
    first, last = map(float, losses.removeprefix("loss ").split(" -> "))
    assert last < 0.7 * first


@BOTH
def test_beside_an_optimizer_of_torch(kind: Any) -> None:
    """One scheduler each, and a step of one leaves the other's parameters alone."""
    model = network()
    groups = param_groups(model[:2], batch(0))
    ours, theirs = kind(groups, lr=1e-3), torch.optim.SGD(model[3].parameters(), lr=1e-2)
    schedulers = [LambdaLR(o, lambda step: 0.5**step) for o in (ours, theirs)]
    train(model, range(2), ours, theirs)
    head = weights(model[3])
    model(batch(2)).square().mean().backward()
    ours.step()
    assert all(map(torch.equal, weights(model[3]), head))
    for scheduler in schedulers:
        scheduler.step()
    assert {g["lr"] for g in ours.param_groups} == {5e-4}


# ---- checkpoints ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_the_state_dicts_of_distributed_checkpoints(kind: Any, flat: bool) -> None:
    """As torchtitan's: one flat dictionary by parameter names, into an untrained optimizer."""
    model, other = network(), network()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer = kind(param_groups(model, batch(0)), lr=1e-3)
    train(model, range(4), optimizer)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert ("state.0.weight.step" in saved) == flat
    other.load_state_dict(model.state_dict())
    resumed = kind(param_groups(other, batch(0)), lr=7e-4)
    before = weights(other)
    set_optimizer_state_dict(other, resumed, saved, options=options)
    assert all(map(torch.equal, weights(other), before))
    assert {g["lr"] for g in resumed.param_groups} == {1e-3}
    train(model, range(4, 8), optimizer)
    train(other, range(4, 8), resumed)
    assert_equal(model, other)


@BOTH
def test_loading_by_keyword(kind: Any) -> None:
    model, other = network(), network()
    optimizer = kind(param_groups(model, batch(0)))
    train(model, range(2), optimizer)
    resumed = kind(param_groups(other, batch(0)))
    resumed.load_state_dict(state_dict=optimizer.state_dict())
    assert {int(state["step"]) for state in resumed.state.values()} == {2}


@BOTH
def test_initial_lr_stays_through_loading_and_late_groups(kind: Any) -> None:
    model, other = network(), network()
    groups = param_groups(model, batch(0))
    optimizer = kind(groups[:-1], lr=1e-3)
    optimizer.add_param_group({**groups[-1], "lr": 2e-3, "initial_lr": 4e-3})
    LambdaLR(optimizer, lambda step: 0.5)
    assert [g["initial_lr"] for g in optimizer.param_groups] == [1e-3, 1e-3, 4e-3]
    train(model, range(2), optimizer)
    resumed = kind(param_groups(other, batch(0)), lr=7e-4)
    resumed.load_state_dict(optimizer.state_dict())
    assert [g["initial_lr"] for g in resumed.param_groups] == [1e-3, 1e-3, 4e-3]
    # a scheduler that goes on needs it, and says so where it is missing
    LambdaLR(resumed, lambda step: 0.25, last_epoch=3)
    assert [g["lr"] for g in resumed.param_groups] == [2.5e-4, 2.5e-4, 1e-3]


# ---- learning rates -------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@BOTH
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:.*LeafSpec.*:FutureWarning"
)
def test_a_schedule_compiles_nothing_again(kind: Any, tensor: bool) -> None:
    """Both rules in one optimizer, its step traced by Dynamo, and eager steps to compare."""
    model, twin = network(), network()
    lr = torch.tensor(1e-3) if tensor else 1e-3
    ours = kind(param_groups(model, batch(0)), lr=lr, foreach=False)
    eager = kind(param_groups(twin, batch(0)), lr=1e-3, foreach=False)
    schedulers = [LambdaLR(o, lambda step: 0.8**step) for o in (ours, eager)]
    step = torch.compile(ours.step, backend="eager")
    compiled = 0
    for seed in range(8):
        for net, optimizer, take in ((model, ours, step), (twin, eager, eager.step)):
            optimizer.zero_grad()
            net(batch(seed)).square().mean().backward()
            take()
        for scheduler in schedulers:
            scheduler.step()
        if seed == 2:  # the first step makes the state, the second sees a changed float
            compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@BOTH
def test_a_tensor_lr_changed_in_place_takes_effect(kind: Any) -> None:
    model = network()
    lr = torch.tensor(1e-3)
    optimizer = kind(param_groups(model, batch(0)), lr=lr)
    train(model, range(2), optimizer)
    lr.zero_()
    before = weights(model)
    train(model, range(2, 3), optimizer)
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old, rtol=1e-6, atol=1e-7)
    lr.fill_(1e-3)
    train(model, range(3, 4), optimizer)
    assert not any(map(torch.equal, weights(model), before))


@pytest.mark.gpu
@BOTH
def test_numbers_of_a_captured_graph_may_change(kind: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("captured graphs need a GPU")
    ends = []
    for captured in (False, True):
        model = network().cuda()
        numbers = {
            "lr": torch.tensor(1e-3, device="cuda"),
            "weight_decay": torch.tensor(1e-3, device="cuda"),
        }
        if kind is AngularAdamW:
            numbers.pop("weight_decay")  # a number in torch's AdamW
        optimizer = kind(param_groups(model, batch(0).cuda()), capturable=True, **numbers)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        graph = torch.cuda.CUDAGraph()
        for seed in range(8):
            source = torch.Generator("cuda").manual_seed(seed)
            for p in model.parameters():
                assert p.grad is not None
                p.grad.copy_(torch.randn(p.shape, device="cuda", generator=source))
            for number in numbers.values():
                number.mul_(0.8)
            if captured and seed == 3:
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay() if captured and seed >= 3 else optimizer.step()
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
