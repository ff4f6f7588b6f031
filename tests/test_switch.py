"""A running AdamW goes on as AngularAdamW: by loading its checkpoint."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adamo_optim import AdamO, AngularAdamW, param_groups
from adamo_optim.integrations import with_rules

schedulers = torch.optim.lr_scheduler


class Residual(nn.Module):
    """torchvision's BasicBlock."""

    def __init__(self, inside: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Identity()
        if stride != 1:
            conv = nn.Conv2d(inside, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(self.downsample(x) + y)


def resnet(width: int, blocks: int, classes: int, stages: int = 4) -> nn.Module:
    """ResNet-18 for small images: ``resnet(64, 2, 100)``."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)]
    inside = width
    for stage in range(stages):
        for block in range(blocks):
            outside = width * 2**stage
            layers.append(Residual(inside, outside, 2 if stage and not block else 1))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


def small(seed: int = 0) -> nn.Module:
    """Scale-invariant, low-dimensional and general parameters, none first or last in its kind."""
    torch.manual_seed(seed)
    hidden = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *hidden, nn.ReLU(), nn.Linear(8, 3))


BATCH = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    x, y = (torch.randn(16, n, generator=source).to(dtype) for n in (6, 3))
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def trained(make: Any, model: nn.Module, steps: int = 5) -> Any:
    optimizer = make(model)
    for seed in range(steps):
        step(model, optimizer, seed)
    return optimizer


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 2e-3, "weight_decay": 0.05, **options})


def check_taken_over(model: nn.Module, new: AngularAdamW, old: torch.optim.Optimizer) -> None:
    """After the sixth step every parameter has gone on with its own state."""
    kept = {p: {k: x.clone() for k, x in state.items()} for p, state in old.state.items()}
    new.load_state_dict(old.state_dict())
    step(model, new, 5)
    seen = 0
    rules = {row.name: row.rule for row in new.explain()}
    for group in new.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            now, before = new.state[p], kept.get(p, {})
            if not before:
                continue
            seen += 1
            assert int(now["step"]) == 6, name
            g, m = p.grad.double(), before["exp_avg"].double()
            torch.testing.assert_close(now["exp_avg"].double(), 0.9 * m + 0.1 * g)
            square = 0.999 * before["exp_avg_sq"].double() + 0.001 * g.square()
            if rules[name] == "scale_invariant":
                assert now.keys() == {"step", "exp_avg", "mean_square", "initial_norm"}
                means = square.flatten(1).mean(1) if now["mean_square"].dim() else square.mean()
                torch.testing.assert_close(now["mean_square"], means, rtol=1e-6, atol=0)
            else:
                torch.testing.assert_close(now["exp_avg_sq"].double(), square)
    assert seen == len(kept)


# ---- the ways in which AdamW may have had its parameters --------------------------------------


def test_one_group_in_the_order_of_the_model() -> None:
    model = small()
    old = trained(adamw, model)
    new = AngularAdamW(param_groups(model, BATCH), angular_rms=0.02, max_angle=0.04)
    assert len(new.param_groups) == 3  # in another order than AdamW's
    new.load_state_dict(old.state_dict())
    for group in new.param_groups:
        found = tuple(map(group.get, ("lr", "weight_decay", "angular_rms", "max_angle")))
        assert found == (2e-3, 0.05, 0.02, 0.04)
        assert group.get("decoupled_weight_decay", True)
    turns = {row.name for row in new.explain() if row.rule == "scale_invariant"}
    assert turns == {"2.weight"}
    check_taken_over(model, new, old)


def test_a_second_moment_for_each_row() -> None:
    model = small()
    new = AngularAdamW(param_groups(model, BATCH), second_moment="row")
    check_taken_over(model, new, trained(adamw, model))
    assert new.state[model[2].weight]["mean_square"].shape == (8,)


def test_several_groups() -> None:
    """Trainers' habit: matrices decay, vectors do not; the head learns faster."""
    model = small()
    matrices = [p for p in model[:5].parameters() if p.dim() > 1]
    vectors = [p for p in model[:5].parameters() if p.dim() == 1]
    theirs = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
        {"params": list(model[5].parameters()), "lr": 1e-2},
    ]
    old = trained(lambda _: torch.optim.AdamW(copy.copy(theirs)), model)
    new = AngularAdamW(with_rules(theirs, model, BATCH))
    new.load_state_dict(old.state_dict())
    columns = ("param_names", "rule", "lr", "weight_decay")
    assert [tuple(map(group.get, columns)) for group in new.param_groups] == [
        (["0.weight"], "general", 1e-3, 0.1),
        (["2.weight"], "scale_invariant", 1e-3, 0.1),
        (["0.bias", "3.weight", "3.bias"], "low_dim", 1e-3, 0.0),
        (["5.weight"], "general", 1e-2, 0.01),
        (["5.bias"], "low_dim", 1e-2, 0.01),
    ]
    check_taken_over(model, new, old)
    other = AngularAdamW(param_groups(model, BATCH))  # the model's order is not AdamW's
    refused(other, old.state_dict(), r"were in different ones.*with_rules\(groups, model,")


def test_named_parameters_in_any_order() -> None:
    model = small()
    pairs = list(model.named_parameters())[::-1]
    theirs = [{"params": pairs[:3]}, {"params": pairs[3:]}]
    old = trained(lambda _: torch.optim.AdamW(theirs), model)
    new = AngularAdamW(param_groups(model, BATCH))
    check_taken_over(model, new, old)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_of_a_wrapped_model_in_any_order(prefix: str) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    pairs = [(f"{prefix}{name}", p) for name, p in model.named_parameters()][::-1]
    old = torch.optim.AdamW(pairs)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, i + 1.0)
    old.step()
    new = AngularAdamW(param_groups(model, overrides={"*": "general"}))
    new.load_state_dict(old.state_dict())
    for p in model.parameters():
        assert torch.equal(new.state[p]["exp_avg"], old.state[p]["exp_avg"])


def test_adam_without_decay() -> None:
    model = small()
    old = trained(lambda model: torch.optim.Adam(model.parameters()), model)
    new = AngularAdamW(param_groups(model, BATCH), weight_decay=0.3)
    new.load_state_dict(old.state_dict())
    assert {group["weight_decay"] for group in new.param_groups} == {0.0}
    assert all(group.get("decoupled_weight_decay", True) for group in new.param_groups)
    check_taken_over(model, new, old)


class WithIntegers(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        if first:
            self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.net = small()
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("theirs", ["all", "floating", "named"])
def test_integers_in_the_model(first: bool, theirs: str) -> None:
    """AdamW may hold them, and steps over them; AngularAdamW's groups have none."""
    model = WithIntegers(first)
    params: Any = list(model.named_parameters() if theirs == "named" else model.parameters())
    if theirs == "floating":
        params = [p for p in params if p.is_floating_point()]
    old = trained(lambda _: torch.optim.AdamW(params), model)
    new = AngularAdamW(param_groups(model, BATCH))
    check_taken_over(model, new, old)


def test_trainable_parameters_only() -> None:
    model = small()
    model[0].requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    old = trained(lambda _: torch.optim.AdamW(trainable), model)
    new = AngularAdamW(param_groups(model, BATCH))
    refused(new, old.state_dict(), r"has 5 parameters, .* has 7, frozen ones.*with_rules\(groups,")
    new = AngularAdamW(with_rules([{"params": trainable}], model, BATCH))
    check_taken_over(model, new, old)


def test_a_layer_that_was_frozen_since_keeps_its_moments() -> None:
    model = small()
    old = trained(adamw, model)
    old.zero_grad()
    weight = model[2].weight.requires_grad_(False)
    new = AngularAdamW(param_groups(model, BATCH))
    new.load_state_dict(old.state_dict())
    before = weight.clone()
    step(model, new, 5)
    assert torch.equal(weight, before)
    assert torch.equal(new.state[weight]["exp_avg"], old.state[weight]["exp_avg"])
    assert int(new.state[weight]["step"]) == 5


def test_an_unused_optimizer() -> None:
    model = small()
    new = AngularAdamW(param_groups(model, BATCH))
    new.load_state_dict(adamw(model).state_dict())
    step(model, new, 0)
    assert {int(state["step"]) for state in new.state.values()} == {1}
    assert new.param_groups[0]["lr"] == 2e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = small().to(dtype)
    old = trained(adamw, model)
    mean = old.state[model[2].weight]["exp_avg_sq"].double().mean()
    new = AngularAdamW(param_groups(model, BATCH.to(dtype)))
    new.load_state_dict(old.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    new.step()
    state = new.state[model[2].weight]
    assert float(state["mean_square"]) == pytest.approx(0.999 * float(mean), rel=1e-12)
    assert state["exp_avg"].dtype == dtype  # AdamW's


# ---- what is refused --------------------------------------------------------------------------


def refused(optimizer: AngularAdamW, state_dict: dict[str, Any], match: str) -> None:
    """With a sentence, and nothing has changed."""
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(state_dict)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for key, state in after["state"].items():
        assert all(torch.equal(x, before["state"][key][name]) for name, x in state.items())


def test_what_cannot_be_continued() -> None:
    model = small()
    new = trained(lambda model: AngularAdamW(param_groups(model, BATCH)), model)
    amsgrad = trained(lambda model: adamw(model, amsgrad=True), model).state_dict()
    refused(new, amsgrad, "amsgrad=True.* no maximum of second moments")
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1).state_dict()
    if "decoupled_weight_decay" in adam["param_groups"][0]:  # not in torch 2.6
        refused(new, adam, r"Adam's with weight_decay=0.1, an L2 term.*to 0, load it, and then")
    refused(new, torch.optim.SGD(model.parameters()).state_dict(), "neither AdamW's, Adam's nor")
    reversed_order = trained(lambda model: torch.optim.AdamW([*model.parameters()][::-1]), model)
    refused(new, reversed_order.state_dict(), "needs a dense exp_avg of that shape")
    more = nn.ModuleList([model, nn.Linear(2, 2)])
    larger = torch.optim.AdamW(more.parameters())
    more[1](torch.ones(1, 2)).sum().backward()
    larger.step()
    refused(new, larger.state_dict(), r"has 9 parameters, and the optimizer 7: number 7 has state")
    differentiable = adamw(model, differentiable=True).state_dict()
    refused(new, differentiable, "illegal option: differentiable must be the same")
    step(model, new, 9)  # and it goes on

    adam["param_groups"][0]["weight_decay"] = 0  # as the sentence says
    new.load_state_dict(adam)
    amsgrad["param_groups"][0]["amsgrad"] = False
    new.load_state_dict(amsgrad)
    step(model, new, 10)
    assert "max_exp_avg_sq" not in new.state[model[2].weight]
    with pytest.raises(ValueError, match=r"not written by AdamO.*take AngularAdamW"):
        AdamO(model.parameters()).load_state_dict(adamw(model).state_dict())


# ---- the training goes on -----------------------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_where_nothing_turns_it_is_adamw_bit_for_bit(form: dict[str, Any]) -> None:
    ends = []
    for switches in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer: Any = trained(lambda model: adamw(model, **form), model)
        if switches:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = AngularAdamW(param_groups(model, BATCH))
            optimizer.load_state_dict(saved)
            if not form:  # AdamW's default is the for-loop on a CPU, ours torch's fused form
                for group in optimizer.param_groups:
                    group["fused"] = False
        for seed in range(5, 10):
            step(model, optimizer, seed)
        ends.append(list(model.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def pictures(seed: int) -> tuple[Tensor, Tensor]:
    """Four classes: which quarter is brighter, in noise."""
    source = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (32,), generator=source)
    x = torch.randn(32, 3, 8, 8, generator=source)
    for image, label in zip(x, y.tolist(), strict=True):
        image[:, label // 2 * 4 :, label % 2 * 4 :][:, :4, :4] += 0.5
    return x, y


def losses(switch: bool, at: int, steps: int) -> list[float]:
    """A ResNet with a cosine schedule; at step ``at`` AngularAdamW takes over, schedule and all."""
    torch.manual_seed(0)
    model = resnet(8, 1, 4, stages=2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = schedulers.CosineAnnealingLR(optimizer, steps)
    result = []
    for t in range(steps):
        if switch and t == at:
            saved = optimizer.state_dict(), scheduler.state_dict()
            optimizer = AngularAdamW(param_groups(model, pictures(0)))
            scheduler = schedulers.CosineAnnealingLR(optimizer, steps)
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        x, y = pictures(1000 + t)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        result.append(loss.item())
    return result


def test_the_loss_of_a_resnet_has_no_jump() -> None:
    steps = 120
    stays = losses(False, 0, steps)
    for at in (40, 80):
        switches = losses(True, at, steps)
        assert switches[: at + 1] == stays[: at + 1]
        before = stays[at - 20 : at]
        assert max(switches[at : at + 20]) < max(before)
        assert sum(switches[-20:]) < 1.1 * sum(stays[-20:])


SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=40),
    "sequential": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 16)],
        milestones=[4],
    ),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda t: min(1.0, t / 5)),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("change", [2, 8])
def test_a_schedule_goes_on(name: str, change: int) -> None:
    """A new scheduler of the same kind, made before anything is loaded, loads the old one's."""
    rates = []
    for switches in (False, True):
        model = small()
        optimizer: Any = adamw(model)
        scheduler = SCHEDULES[name](optimizer)
        seen = []
        for t in range(16):
            if switches and t == change:
                saved = optimizer.state_dict(), scheduler.state_dict()
                optimizer = AngularAdamW(param_groups(model, BATCH), lr=2e-3)
                scheduler = SCHEDULES[name](optimizer)
                optimizer.load_state_dict(saved[0])
                for part in [saved[1], *saved[1].get("_schedulers", [])]:
                    part.pop("base_lrs", None)  # one a group, and there are more groups now
                scheduler.load_state_dict(saved[1])
            step(model, optimizer, t)
            scheduler.step()
            seen.append([group["lr"] for group in optimizer.param_groups])
        rates.append(seen)
    assert [row[0] for row in rates[0]] == pytest.approx([row[0] for row in rates[1]], rel=1e-12)
    assert all(len(set(row)) == 1 for row in rates[1])
    assert len({row[0] for row in rates[1][change:]}) > 3 or name == "lambda"


# ---- memory -------------------------------------------------------------------------------------


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    tensors = (x for state in optimizer.state.values() for x in state.values())
    return sum(x.numel() * x.element_size() for x in tensors)


def test_resnet18_has_half_of_adamws_state() -> None:
    model = resnet(64, 2, 100)
    count = sum(p.numel() for p in model.parameters())
    assert 11.1e6 < count < 11.3e6
    x = torch.randn(4, 3, 8, 8)
    new = AngularAdamW(param_groups(model, x, trials=1))
    model(x).square().sum().backward()
    new.step()
    assert bytes_of_state(new) / count <= 4.1
    assert bytes_of_state(new) * 1.9 < 8 * count


# ---- AngularAdamW's own checkpoints -------------------------------------------------------------


def angular(model: nn.Module, **options: Any) -> AngularAdamW:
    return AngularAdamW(param_groups(model, BATCH, **options), lr=2e-3, weight_decay=0.05)


def same_end(model: nn.Module, optimizer: Any, other: nn.Module, another: Any) -> None:
    for seed in range(5, 10):
        step(model, optimizer, seed)
        step(other, another, seed)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        old, new = optimizer.state[p], another.state[q]
        assert old.keys() == new.keys()
        assert all(torch.equal(old[key], new[key]) for key in old)


def test_its_own_checkpoint() -> None:
    model, other = small(), small(1)
    optimizer = trained(angular, model)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    resumed = angular(other)
    resumed.load_state_dict(saved["optimizer"])
    same_end(model, optimizer, other, resumed)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied: Any) -> None:
    model = small()
    optimizer = trained(angular, model)
    other, another = copied((model, optimizer))
    assert {id(p) for group in another.param_groups for p in group["params"]} == {
        id(p) for p in other.parameters()
    }
    same_end(model, optimizer, other, another)
    another.add_param_group({"params": [("late", nn.Parameter(torch.ones(2, 2)))]})
    another.step()


def test_a_rule_that_changed_since() -> None:
    """The weight moves to another group; its state is found by name and made to fit."""
    model = small()
    weight = model[2].weight
    optimizer = trained(angular, model)
    mean, m = optimizer.state[weight]["mean_square"].clone(), optimizer.state[weight]["exp_avg"]
    other = angular(model, overrides={"2.weight": "general"})
    other.load_state_dict(optimizer.state_dict())
    assert next(row for row in other.explain() if row.name == "2.weight").rule == "general"
    before = m.clone()
    weight.grad = None
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    other.step()
    state = other.state[weight]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert int(state["step"]) == 6
    torch.testing.assert_close(state["exp_avg"], 0.9 * before)
    torch.testing.assert_close(
        state["exp_avg_sq"], torch.full_like(before, 0.999 * float(mean)), rtol=1e-5, atol=0
    )
    back = angular(model)  # and turns again
    back.load_state_dict(other.state_dict())
    step(model, back, 6)
    state = back.state[weight]
    assert state.keys() == {"step", "exp_avg", "mean_square", "initial_norm"}
    assert int(state["step"]) == 7


def test_second_moments_of_rows_that_come_and_go() -> None:
    """One for each row begins with the whole's, the whole with their mean; AdamW gets them all."""
    model = small()
    optimizer = trained(angular, model)
    weight = model[2].weight
    (group,) = (g for g in optimizer.param_groups if g["rule"] == "scale_invariant")
    old = optimizer.state[weight]["mean_square"].clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def state_after(**changes: str) -> dict[str, Any]:
        group.update(changes)
        optimizer.step()
        return optimizer.state[weight]

    rows = state_after(second_moment="row")["mean_square"]
    torch.testing.assert_close(rows, (0.999 * old).expand(8))
    step(model, optimizer, 7)
    rows = optimizer.state[weight]["mean_square"].clone()
    assert rows.unique().numel() == 8
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    mean = state_after(second_moment="tensor")["mean_square"]
    torch.testing.assert_close(mean, 0.999 * rows.mean())
    rows = state_after(second_moment="row")["mean_square"].clone()
    state = state_after(rule="general")
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert int(state["step"]) == 10
    square = 0.999 * rows.float()[:, None].expand(8, 8)
    torch.testing.assert_close(state["exp_avg_sq"], square)


def test_a_rule_that_changes_in_training() -> None:
    model = small()
    optimizer = trained(angular, model)
    (group,) = (g for g in optimizer.param_groups if g["rule"] == "scale_invariant")
    norm = float(model[2].weight.detach().norm())
    for rule in ("general", "scale_invariant"):
        group["rule"] = rule
        step(model, optimizer, 7)
        assert ("mean_square" in optimizer.state[model[2].weight]) == (rule == "scale_invariant")
    assert {int(state["step"]) for state in optimizer.state.values()} == {7}
    assert float(model[2].weight.detach().norm()) != pytest.approx(norm, rel=1e-6)
