"""A state is loaded whole, or not at all and with a sentence that says what is wrong with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adamo_optim import AdamO, AngularAdamW

Damage = Callable[[dict[str, Any]], Any]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def make(cls: Any, net: nn.Sequential, **options: Any) -> Any:
    """The first layer's weight is declared scale-invariant, so both kinds of state occur."""
    named = dict(net.named_parameters())
    first = {"params": [("0.weight", named.pop("0.weight"))], "rule": "scale_invariant"}
    return cls([first, {"params": list(named.items())}], lr=1e-3, **options)


def train(net: nn.Sequential, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def put(number: int, key: str, value: Any) -> Damage:
    """A damage: this entry of a parameter's state is another."""

    def damage(saved: dict[str, Any]) -> None:
        saved["state"][number][key] = value

    return damage


def without(number: int, key: str) -> Damage:
    return lambda saved: saved["state"][number].pop(key)


def option(name: str, value: Any, group: int = 0) -> Damage:
    return lambda saved: saved["param_groups"][group].update({name: value})


NAN, INF = torch.tensor(math.nan), torch.tensor(math.inf)
SPARSE = torch.eye(6, 4).to_sparse()

# what is wrong: (damage, what the sentence says); parameter 0 is 0.weight, 1 is 0.bias
COMMON: dict[str, tuple[Damage, str]] = {
    "moment of another shape": (
        put(0, "exp_avg", torch.zeros(4, 6)),
        r"0\.weight of shape \(6, 4\) needs a dense exp_avg .* has one of shape \(4, 6\)",
    ),
    "no moment": (without(1, "exp_avg"), r"0\.bias of shape \(6,\) needs .* has none"),
    "moment that is a number": (put(1, "exp_avg", 0.5), "needs a dense exp_avg .* has none"),
    "sparse moment": (put(0, "exp_avg", SPARSE), "dense exp_avg .* has a torch.sparse_coo one"),
    "no step": (without(0, "step"), r"the state of 0\.weight has no step"),
    "no step of a bias": (without(1, "step"), r"the state of 0\.bias has no step"),
    "step of another shape": (put(0, "step", torch.zeros(2, 2)), "step of 0.weight .* shape"),
    "step of a bias of another shape": (put(1, "step", torch.ones(3)), "step of 0.bias .* shape"),
    "step that is no number": (put(0, "step", "three"), "step of 0.weight must be a number"),
    "step that is NaN": (put(0, "step", NAN), "step of 0.weight must be finite"),
    "negative step": (put(0, "step", torch.tensor(-3.0)), "step of 0.weight must be >= 0"),
    "infinite norm": (put(0, "initial_norm", INF), "initial_norm of 0.weight must be finite"),
    "norm of another shape": (put(0, "initial_norm", torch.ones(2)), "initial_norm .* shape"),
    "state that is no dictionary": (lambda saved: saved["state"].update({0: [1, 2]}), "state of"),
    "negative lr": (option("lr", -1.0), "illegal option: lr must be >= 0"),
    "betas": (option("betas", 0.9), "illegal option: betas must be a pair"),
    "fused and foreach": (
        lambda saved: saved["param_groups"][1].update(fused=True, foreach=True),
        "illegal option: `fused` and `foreach` cannot be `True` together",
    ),
    "rule": (option("rule", "other", group=1), "illegal option: rule must be one of"),
    "another number of groups": (lambda saved: saved["param_groups"].pop(), "has "),
    "another number of parameters": (
        lambda saved: saved["param_groups"][1]["params"].pop(),
        "this state_dict has ",
    ),
    "no groups": (lambda saved: saved.pop("param_groups"), "a state_dict has a list"),
    "no state": (lambda saved: saved.pop("state"), "a state_dict has a list"),
    "group that is no dictionary": (
        lambda saved: saved["param_groups"].__setitem__(0, [0]),
        "every group of a state_dict is a dictionary",
    ),
}
ADAMO: dict[str, tuple[Damage, str]] = {
    **COMMON,
    "schema as text": (option("schema", "1"), "schema '1', and this version of .* reads 2"),
    "older schema": (option("schema", 1), "schema 1, and this version"),
    "later schema": (option("schema", 99), "schema 99, and this version"),
    "schema of one group": (option("schema", 3, group=1), "schema 3, and this version"),
    "no schema": (lambda saved: saved["param_groups"][0].pop("schema"), "not written by AdamO"),
    "no second moment": (without(1, "exp_avg_sq"), "needs a dense exp_avg_sq"),
    "NaN in tau": (put(0, "tau", NAN), "tau of 0.weight must be finite, got"),
    "infinite momentum": (put(0, "radial_momentum", -INF), "radial_momentum .* must be finite"),
    "tau of another shape": (put(0, "tau", torch.ones(2, 2)), "tau of 0.weight .* shape"),
    "sparse previous gradient": (put(0, "previous_grad", SPARSE), "dense previous_grad"),
    "previous gradient of another shape": (
        put(0, "previous_grad", torch.zeros(5, 4)),
        "0.weight .* needs a dense previous_grad",
    ),
    "guard": (option("guard", None), "illegal option: guard must be True or False"),
    "curvature": (option("curvature_target", -1.0), "illegal option: curvature_target must be"),
}
ANGULAR: dict[str, tuple[Damage, str]] = {
    **COMMON,
    "NaN in the second moment": (put(0, "mean_square", NAN), "mean_square .* must be finite"),
    "negative second moment": (
        put(0, "mean_square", torch.tensor(-1.0)),
        "mean_square of 0.weight must be >= 0",
    ),
    "second moments of other rows": (put(0, "mean_square", torch.ones(5)), "mean_square .* shape"),
    "a norm for each row": (put(0, "initial_norm", torch.ones(6)), "initial_norm .* shape"),
    "no second moment of a bias": (without(1, "exp_avg_sq"), "needs a dense exp_avg_sq"),
    "max_angle": (option("max_angle", 4.0), "illegal option: max_angle must be"),
}
CASES = [
    pytest.param(cls, *case, id=f"{cls.__name__}-{name}")
    for cls, cases in ((AdamO, ADAMO), (AngularAdamW, ANGULAR))
    for name, case in cases.items()
]


def assert_unchanged(optimizer: Any, before: dict[str, Any]) -> None:
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    assert now["state"].keys() == before["state"].keys()
    for number, state in before["state"].items():
        assert now["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(now["state"][number][key], value)


@pytest.mark.parametrize(("cls", "damage", "sentence"), CASES)
def test_a_damaged_state_is_refused_and_changes_nothing(
    cls: Any, damage: Damage, sentence: str
) -> None:
    net, twin = model(), model()
    optimizer, other = make(cls, net), make(cls, twin)
    train(net, optimizer, range(3))
    train(twin, other, range(3))
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    # what is whole in it differs, so that a part of it that was loaded would show
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] + 1
    for group in saved["param_groups"]:
        group["lr"] = 0.5
    damage(saved)
    with pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)
    train(net, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert all(map(torch.equal, net.parameters(), twin.parameters()))


@pytest.mark.parametrize("cls", [AdamO, AngularAdamW])
def test_a_state_that_is_not_damaged_is_loaded_whole(cls: Any) -> None:
    net, twin = model(), model()
    optimizer, other = make(cls, net), make(cls, twin)
    train(net, optimizer, range(3))
    twin.load_state_dict(net.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_unchanged(other, optimizer.state_dict())
    train(net, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert all(map(torch.equal, net.parameters(), twin.parameters()))


FOREIGN: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "AdamW for AdamO": (torch.optim.AdamW, AdamO, "not written by AdamO.*take AngularAdamW"),
    "SGD for AdamO": (torch.optim.SGD, AdamO, "not written by AdamO"),
    "SGD for AngularAdamW": (torch.optim.SGD, AngularAdamW, "neither AdamW's, Adam's nor"),
    "Adam with L2 for AngularAdamW": (
        lambda params: torch.optim.Adam(params, weight_decay=0.1),
        AngularAdamW,
        "an L2 term in the gradient, which AngularAdamW does not have",
    ),
    "AdamW with amsgrad for AngularAdamW": (
        lambda params: torch.optim.AdamW(params, amsgrad=True),
        AngularAdamW,
        "amsgrad=True",
    ),
    "AdamO for AngularAdamW": (
        lambda params: AdamO(params),
        AngularAdamW,
        "was written by AdamO",
    ),
    "AngularAdamW for AdamO": (
        lambda params: AngularAdamW([{"params": list(params), "rule": "general"}]),
        AdamO,
        "not written by AdamO",
    ),
}


@pytest.mark.parametrize(("theirs", "ours", "sentence"), FOREIGN.values(), ids=FOREIGN)
def test_a_state_of_another_kind_is_refused(theirs: Any, ours: Any, sentence: str) -> None:
    net, twin = model(), model()
    foreign, optimizer = theirs(twin.parameters()), make(ours, net)
    train(twin, foreign, range(2))
    train(net, optimizer, range(2))
    before, saved = copy.deepcopy(optimizer.state_dict()), foreign.state_dict()
    if "L2" in sentence and "decoupled_weight_decay" not in saved["param_groups"][0]:
        pytest.skip("torch 2.6 does not write what tells Adam's L2 term from AdamW's decay")
    with pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)


# ---- parameters without storage ----------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.optim.AdamW, AdamO, AngularAdamW])
def test_fused_is_refused_for_the_meta_device_at_the_step(cls: Any) -> None:
    """As torch does: a model may be laid out before it has storage."""
    with torch.device("meta"):
        net = nn.Linear(4, 3)
    groups: list[dict[str, Any]] = [{"params": list(net.parameters())}]
    if cls is not torch.optim.AdamW:
        groups[0]["rule"] = "general"
    optimizer = cls(groups, fused=True)
    for p in net.parameters():
        p.grad = torch.empty_like(p)
    with pytest.raises(RuntimeError, match="fused"):
        optimizer.step()


def test_a_model_laid_out_on_the_meta_device_trains_fused_once_it_has_storage() -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 3)
    optimizer = AdamO(net.parameters(), fused=True)
    ends: list[Tensor] = []
    for p in net.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(torch.ones(p.shape)))
        p.grad = torch.rand(p.shape)
        ends.append(p.detach().clone())
    optimizer.step()
    assert not any(map(torch.equal, ends, net.parameters()))
    assert {row.backend for row in optimizer.explain()} == {"fused"}
