"""Groups: what they hold, overrides, which rule a parameter gets of them, rebind, with_rules."""

from __future__ import annotations

import doctest
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adamo_optim import AdamO, AngularAdamW, param_groups, rebind
from adamo_optim.explain import Explanation, Parameter
from adamo_optim.integrations import with_rules
from adamo_optim.rules import needs_previous_gradient, rule_of

WIDTH = 16
both = pytest.mark.parametrize("optimizer", [AdamO, AngularAdamW])


class Net(nn.Module):
    """Every kind of parameter: one of integers before the end, a tied head, an unused matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1, 1))
        self.codes = nn.Parameter(torch.ones(2, 2, dtype=torch.long), requires_grad=False)
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.ones_(self.norm.bias)  # AdamO has a rule of its own for what is zero
        self.body, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.first(x * self.scale))).relu())


def batch() -> Tensor:
    return torch.randn(8, WIDTH)


def rules(groups: list[dict[str, Any]]) -> dict[str, str]:
    return {name: group["rule"] for group in groups for name, _ in group["params"]}


FOUND = {
    "scale": "low_dim",
    "first.weight": "scale_invariant",
    "norm.weight": "low_dim",
    "norm.bias": "low_dim",
    "body.weight": "general",
    "body.bias": "low_dim",
    "unused.weight": "general",
}


# What a group holds


def test_every_parameter_of_floats_is_in_one_group() -> None:
    model = Net()
    groups = param_groups(model, batch())
    assert rules(groups) == FOUND
    assert all(g.keys() == {"params", "rule", "found", "order"} for g in groups)
    assert all(g["found"][0] == g["rule"] and len(g["found"][1]) > 3 for g in groups)
    assert len({g["found"] for g in groups}) == len(groups) == 5  # two reasons to be low_dim
    listed = [(name, p) for g in groups for name, p in g["params"]]
    assert len(listed) == len(FOUND)
    assert all(p is model.get_parameter(name) for name, p in listed)


def test_without_a_batch_nothing_is_guessed() -> None:
    model = Net()
    (group,) = param_groups(model)
    assert (group["rule"], group["found"][0]) == ("auto", "auto")
    assert [name for name, _ in group["params"]] == list(FOUND)
    assert param_groups(nn.ReLU(), batch()) == []


@pytest.mark.parametrize("example", [None, batch], ids=["no-batch", "batch"])
def test_order_is_the_position_in_the_parameters_of_the_model(example: Any) -> None:
    model = Net()
    groups = param_groups(model, example and example(), overrides={"body.bias": {"lr": 0.1}})
    in_order = list(model.parameters())
    for group in groups:
        assert [in_order[i] for i in group["order"]] == [p for _, p in group["params"]]


def test_order_finds_the_state_of_plain_adamw() -> None:
    model = Net()
    adamw = torch.optim.AdamW(model.parameters())  # takes the integers, and steps over them
    model(batch()).sum().backward()
    adamw.step()
    saved = adamw.state_dict()["state"]
    for group in param_groups(model, batch()):
        for (_, p), position in zip(group["params"], group["order"], strict=True):
            expected = adamw.state[p].get("exp_avg")
            assert saved.get(position, {}).get("exp_avg") is expected


def test_with_rules_counts_in_the_groups_it_is_given() -> None:
    model = Net()
    given = [
        {"params": [("a name", model.norm.bias), model.unused.weight], "lr": 0.1},
        {"params": model.codes},
        {"params": [model.body.weight, model.first.weight, model.norm.weight], "lr": 0.2},
    ]
    body, first, norm = model.body.weight, model.first.weight, model.norm
    flat = [norm.bias, model.unused.weight, model.codes, body, first, norm.weight]
    groups = with_rules(given, model, batch())
    for group in groups:
        assert [flat[i] for i in group["order"]] == [p for _, p in group["params"]]
        assert all(model.get_parameter(name) is p for name, p in group["params"])
    assert [(g["lr"], g["rule"]) for g in groups] == [
        (0.1, "low_dim"),
        (0.1, "general"),
        *((0.2, "general"), (0.2, "scale_invariant"), (0.2, "low_dim")),
    ]


def test_groups_survive_a_checkpoint_that_allows_no_code() -> None:
    groups = param_groups(Net(), batch())
    made = [(g["rule"], g["found"], g["order"]) for g in groups]
    file = io.BytesIO()
    torch.save(torch.optim.AdamW(groups).state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["param_groups"]
    assert [(g["rule"], g["found"], g["order"]) for g in loaded] == made


@both
def test_the_same_groups_serve_several_optimizers(optimizer: Callable[..., Any]) -> None:
    model = Net()
    groups = param_groups(model, batch())
    first = optimizer(groups, lr=1e-2, weight_decay=3e-5)
    second = optimizer(groups, lr=1e-3)
    assert {g["lr"] for g in first.param_groups} == {1e-2}
    assert {g["lr"] for g in second.param_groups} == {1e-3}
    assert 3e-5 not in {g["weight_decay"] for g in second.param_groups}
    first.param_groups[0]["lr"] = 0.5
    assert second.param_groups[0]["lr"] == 1e-3
    assert all(g.keys() == {"params", "rule", "found", "order"} for g in groups)
    assert {p.name: p.rule for p in second.explain()} == FOUND


# Overrides


def overridden(overrides: dict[str, Any], example: Any = None) -> dict[str, dict[str, Any]]:
    """Options of each parameter, without what every group has."""
    groups = param_groups(Net(), example, overrides=overrides)
    kept = [{k: v for k, v in g.items() if k not in ("params", "order")} for g in groups]
    return {n: k for g, k in zip(groups, kept, strict=True) for n, _ in g["params"]}


def test_an_override_sets_rule_and_options_of_what_it_matches() -> None:
    declared = {"rule": "general", "weight_decay": 0.0, "lr_scale": 0.5}
    found = overridden({"norm.*": "scale_invariant", "first.weight": declared}, batch())
    assert found["norm.weight"] == found["norm.bias"] == {"rule": "scale_invariant"}
    assert found["first.weight"] == declared  # with a key of somebody else, and without "found"
    assert found["body.weight"]["found"][0] == "general"


def test_options_without_a_rule_keep_what_was_found() -> None:
    found = overridden({"first.weight": {"lr": 0.1}}, batch())["first.weight"]
    assert (found["rule"], found["found"][0], found["lr"]) == (*["scale_invariant"] * 2, 0.1)


def test_exact_names_win_over_patterns_and_later_patterns_over_earlier() -> None:
    found = overridden(
        {
            "norm.bias": "low_dim",
            "*": {"rule": "general", "lr": 1.0, "eps": 0.5},
            "[fn]*.weight": {"rule": "scale_invariant", "lr": 2.0},
        }
    )
    assert found["norm.bias"] == {"rule": "low_dim", "lr": 1.0, "eps": 0.5}
    assert found["norm.weight"] == {"rule": "scale_invariant", "lr": 2.0, "eps": 0.5}
    assert found["body.weight"] == {"rule": "general", "lr": 1.0, "eps": 0.5}


@pytest.mark.parametrize("pattern", ["head.weight", "head.*", "body.weight"])
def test_tied_weights_answer_to_each_of_their_names(pattern: str) -> None:
    assert overridden({pattern: "general"})["body.weight"]["rule"] == "general"


def test_groups_are_split_by_options_and_only_by_them() -> None:
    rate, other_rate = torch.tensor(0.1), torch.tensor(0.1)
    overrides = {
        "0.weight": {"lr": rate, "betas": [0.9, 0.99]},
        "0.bias": {"betas": [0.9, 0.99], "lr": rate},
        "1.weight": {"lr": other_rate, "betas": [0.9, 0.99]},
    }
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = param_groups(model, overrides=overrides)
    members = [[name for name, _ in g["params"]] for g in groups]
    assert members == [["0.weight", "0.bias"], ["1.weight"], ["1.bias"]]
    assert groups[1]["lr"] is other_rate


# id: overrides, what the error names
BAD_OVERRIDES: dict[str, tuple[dict[str, Any], str]] = {
    "no such name": ({"neck.*": "general"}, r"'neck\.\*'.*'first.weight'"),
    "no such rule": ({"first.weight": "radial"}, "'first.weight'.*'scale_invariant'.*'radial'"),
    "no such rule in a dict": ({"first.weight": {"rule": None}}, "None"),
    "neither rule nor dict": ({"first.weight": 0.1}, "'first.weight'.*0.1"),
    "params": ({"first.weight": {"params": []}}, "'params'"),
    "found": ({"first.weight": {"found": ("general", "I say so")}}, "'found'"),
    "order": ({"first.weight": {"order": [0]}}, "'order'"),
    "misspelt": ({"norm.*": {"weight_decy": 0.0}}, r"'norm\.\*'.*'weight_decy'.*'weight_decay'"),
    "a name that is no word": ({"norm.*": {"rules": "general"}}, "'rules'.*'rule'"),
}


@pytest.mark.parametrize(("overrides", "message"), BAD_OVERRIDES.values(), ids=BAD_OVERRIDES)
def test_bad_overrides_are_refused_before_the_model_runs(
    overrides: dict[str, Any], message: str
) -> None:
    ran: list[Any] = []
    with pytest.raises(ValueError, match=message):
        param_groups(Net(), batch(), overrides=overrides, forward=lambda m, b: ran.append(b))
    assert ran == []


# The rule of a parameter

MATRIX, VECTOR, ENTRY = (4, 4), (4,), (1, 1)
TURNS, DEPENDS = ("scale_invariant", "by Euler"), ("general", "depends")
LOW = ("low_dim", "a vector")
USER, SHAPE = "set by the user", "by shape"

# id: shape, group, rule, how the reason starts (None: the rule's own)
RULE_OF: dict[str, tuple[tuple[int, ...], dict[str, Any], str, str | None]] = {
    "matrix": (MATRIX, {}, "general", SHAPE),
    "vector": (VECTOR, {}, "low_dim", None),
    "one entry": (ENTRY, {}, "low_dim", None),
    "scalar": ((), {}, "low_dim", None),
    "vector, ablation": (VECTOR, {"low_dim": None}, "general", SHAPE),
    "matrix below the threshold": (MATRIX, {"low_dim": 17}, "low_dim", None),
    "matrix at the threshold": (MATRIX, {"low_dim": 16}, "general", SHAPE),
    "not examined": (MATRIX, {"rule": "auto", "found": ("auto", "no batch")}, "general", "no b"),
    "found": (MATRIX, {"rule": TURNS[0], "found": TURNS}, *TURNS),
    "found, read from JSON": (MATRIX, {"rule": TURNS[0], "found": list(TURNS)}, *TURNS),
    "found general": (MATRIX, {"rule": "general", "found": DEPENDS}, *DEPENDS),
    "found, small": (MATRIX, {"rule": TURNS[0], "found": TURNS, "low_dim": 17}, "low_dim", None),
    "found, ablation": (MATRIX, {"rule": TURNS[0], "found": TURNS, "low_dim": None}, *TURNS),
    "found low_dim": (VECTOR, {"rule": "low_dim", "found": LOW}, "low_dim", None),
    "found low_dim, ablation": (
        VECTOR,
        {"rule": "low_dim", "found": LOW, "low_dim": None},
        "general",
        SHAPE,
    ),
    "declared": (MATRIX, {"rule": "low_dim"}, "low_dim", USER),
    "declared vector": (VECTOR, {"rule": "scale_invariant"}, "scale_invariant", USER),
    "declared entry": (ENTRY, {"rule": "general", "low_dim": 17}, "general", USER),
    "declared, ablation": (VECTOR, {"rule": "low_dim", "low_dim": None}, "low_dim", USER),
    "changed since": (MATRIX, {"rule": "general", "found": TURNS}, "general", USER),
    "changed to auto": (MATRIX, {"rule": "auto", "found": TURNS}, "general", SHAPE),
    "examined no more": (MATRIX, {"rule": "auto", "found": None}, "general", SHAPE),
}


@pytest.mark.parametrize(("shape", "group", "rule", "reason"), RULE_OF.values(), ids=RULE_OF)
def test_the_rule_of_a_parameter(
    shape: tuple[int, ...], group: dict[str, Any], rule: str, reason: str | None
) -> None:
    found = rule_of(torch.ones(shape), group)
    assert found.name == rule
    assert found.reason.startswith(reason) if reason else found.reason not in (USER, SHAPE, LOW[1])


def test_one_complex_entry_has_a_direction() -> None:
    assert rule_of(torch.ones(1, 1, dtype=torch.complex64), {}).name == "general"


@pytest.mark.parametrize(
    ("low_dim", "expected"),
    [
        ("auto", FOUND),
        (None, FOUND | {n: "general" for n, rule in FOUND.items() if rule == "low_dim"}),
        (WIDTH * WIDTH, FOUND),
        (WIDTH * WIDTH + 1, dict.fromkeys(FOUND, "low_dim")),
    ],
    ids=["auto", "None", "256", "257"],
)
def test_low_dim_of_adamo_reaches_groups_that_were_examined(
    low_dim: Any, expected: dict[str, str]
) -> None:
    optimizer = AdamO(param_groups(Net(), batch()), low_dim=low_dim)
    assert {p.name: p.rule for p in optimizer.explain()} == expected


def test_low_dim_does_not_reach_a_rule_that_the_user_has_set() -> None:
    groups = param_groups(Net(), batch(), overrides={"norm.*": "low_dim"})
    found = {p.name: p.rule for p in AdamO(groups, low_dim=None).explain()}
    assert (found["norm.bias"], found["body.bias"]) == ("low_dim", "general")


def test_only_curvature_needs_the_previous_gradient() -> None:
    asked = {
        (rule, target): needs_previous_gradient(rule, {"curvature_target": target})
        for rule in ("general", "scale_invariant", "low_dim")
        for target in ("auto", 1.0, None)
    }
    assert {key for key, needed in asked.items() if needed} == {
        (rule, target) for rule in ("general", "scale_invariant") for target in ("auto", 1.0)
    }


def test_an_explanation_prints_a_line_for_each_parameter() -> None:
    rows = [
        Parameter("first.weight", (16, 3), "scale_invariant", "by Euler", "fused"),
        Parameter("b", (), "low_dim", "dim <= 1", "for-loop", note="no gradient"),
    ]
    header, _, *lines = str(Explanation(rows)).splitlines()
    assert len(lines) == 2
    assert header.index("rule") == lines[0].index("scale_invariant") == lines[1].index("low_dim")
    assert "16×3" in lines[0]
    assert "for-loop (no gradient)" in lines[1]


# rebind


def test_rebind_keeps_rules_order_and_options() -> None:
    model = Net()
    groups = param_groups(model, batch(), overrides={"norm.*": {"weight_decay": 0.0}})
    other = Net()
    again = rebind(groups, other)
    assert [{**g, "params": 0} for g in again] == [{**g, "params": 0} for g in groups]
    assert all(p is other.get_parameter(name) for g in again for name, p in g["params"])


def test_rebind_takes_groups_that_an_optimizer_has_used() -> None:
    model = Net()
    groups = param_groups(model, batch())
    torch.optim.AdamW(groups, lr=1e-2)  # puts its own options and param_names into them
    assert rules(rebind(groups, model)) == FOUND
    with pytest.raises(ValueError, match="param_groups"):
        rebind([{"params": list(model.parameters())}], model)


@pytest.mark.parametrize("compiled", [False, True])
def test_rebind_looks_into_replicas(compiled: bool) -> None:
    model = Net()
    groups = param_groups(model, batch())
    wrapped: Any = nn.DataParallel(model)
    if compiled:
        wrapped = torch.compile(wrapped)
    assert rebind(groups, wrapped) == groups


def test_rebind_leaves_frozen_parameters_out() -> None:
    model = Net()
    groups = with_rules([{"params": model.body.parameters()}], model, batch())
    with pytest.raises(ValueError, match=r"first.weight.*requires_grad_"):
        rebind(groups, model)
    model.requires_grad_(False)
    model.body.requires_grad_(True)
    assert rules(rebind(groups, model)) == {"body.weight": "general", "body.bias": "low_dim"}


def test_rebind_names_what_the_model_lacks() -> None:
    with pytest.raises(ValueError, match=r"'scale'.*'weight'"):
        rebind(param_groups(Net()), nn.Linear(2, 2))


# with_rules


def test_a_rule_of_overrides_wins_over_the_groups_which_wins_over_what_is_found() -> None:
    model = Net()
    declared = [{"params": list(model.body.parameters()), "rule": "low_dim"}]
    (group,) = with_rules(declared, model, batch(), overrides={"body.*": {"lr": 0.1}})[:1]
    assert (group["rule"], group["lr"], "found" in group) == ("low_dim", 0.1, False)
    found = with_rules(declared, model, batch(), overrides={"body.weight": "scale_invariant"})
    assert rules(found) == {"body.weight": "scale_invariant", "body.bias": "low_dim"}
    assert all("found" not in group for group in found)
    again = with_rules(param_groups(model, batch()), model, batch())
    assert rules(again) == FOUND
    assert all(group["found"][0] == group["rule"] for group in again)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda: [{"params": nn.Linear(3, 2).parameters()}], r"\(2, 3\) in group 0"),
        (lambda: nn.Linear(3, 2).parameters(), "Parameter.*params"),
        (lambda: [{"lr": 0.1}], "dict.*params"),
    ],
    ids=["of another model", "no groups", "no params"],
)
def test_with_rules_refuses(groups: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_rules(groups(), Net(), batch())


@pytest.mark.parametrize("function", [param_groups, with_rules])
def test_the_docstrings_tell_the_truth(function: Callable[..., Any]) -> None:
    names = {"torch": torch, "nn": nn, "param_groups": param_groups, "with_rules": with_rules}
    (example,) = doctest.DocTestFinder(recurse=False).find(function, globs=names)
    failed, tried = doctest.DocTestRunner().run(example)
    assert failed == 0 < tried
