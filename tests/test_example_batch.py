"""param_groups(model, next(iter(loader))): how the model is called, and that it is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adamo_optim import AdamO, AngularAdamW, param_groups
from adamo_optim.example_batch import ways_to_call

WIDTH = 8


class Net(nn.Module):
    """Scale-invariant first, not last; remembers what it was called with."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def run(self, x: Tensor, *others: Any) -> Tensor:
        Net.calls.append((x, *others))
        return self.last(self.norm(self.first(x)))


class OneInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class TwoInputs(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.run(x + mask, mask)


class Targets(Net):
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.run(x, targets)
        return logits, None if targets is None else nn.functional.cross_entropy(logits, targets)


class AttentionMask(Net):
    """As timm's transformers: a loader's labels fit the signature and nothing else."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if attn_mask is not None and not attn_mask.is_floating_point():
            raise RuntimeError("attn_mask must be floating")
        return self.run(x, attn_mask)


class KeywordOnly(Net):
    def forward(self, *, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.run(x, mask)


class Keywords(Net):
    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return self.run(x, others)


class WholeMapping(Net):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.run(batch["x"], batch)


class WholeList(Net):
    def forward(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return self.run(x, y)


class Anything(Net):
    def forward(self, *args: Any) -> Tensor:
        (x,) = args
        return self.run(x)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    Net.calls = []


def x() -> Tensor:
    return torch.randn(6, WIDTH)


def y() -> Tensor:
    return torch.arange(6) % 3


# id: model, batch, how many arguments run() sees, what the reason says of the batch
CALLS: dict[str, tuple[type[Net], Callable[[], Any], int, str]] = {
    "tensor": (OneInput, x, 1, ""),
    "inputs, targets": (OneInput, lambda: (x(), y()), 1, "first of 2"),
    "list": (OneInput, lambda: [x(), y()], 1, "first of 2"),
    "three items": (OneInput, lambda: (x(), y(), ["a path"] * 6), 1, "first of 3"),
    "two inputs": (TwoInputs, lambda: (x(), x()), 2, ""),
    "two inputs, targets": (TwoInputs, lambda: (x(), x(), y()), 2, "first 2 of 3"),
    "forward takes targets": (Targets, lambda: (x(), y()), 2, ""),
    "fits but fails": (AttentionMask, lambda: (x(), y()), 2, "first of 2"),
    "any arguments": (Anything, lambda: (x(), y()), 1, "first of 2"),
    "list as the argument": (WholeList, lambda: [x(), y()], 2, ""),
    "tuple as the argument": (WholeList, lambda: (x(), y()), 2, ""),
    "mapping": (OneInput, lambda: {"x": x(), "labels": y()}, 1, "'labels'"),
    "mapping, all of it": (TwoInputs, lambda: {"mask": x(), "x": x()}, 2, ""),
    "mapping, keywords only": (KeywordOnly, lambda: {"x": x(), "id": 3}, 2, "'id'"),
    "mapping, any keywords": (Keywords, lambda: {"x": x(), "labels": y()}, 2, ""),
    "mapping as the argument": (WholeMapping, lambda: {"x": x(), "labels": y()}, 2, ""),
}


@pytest.mark.parametrize(("model", "batch", "arguments", "told"), CALLS.values(), ids=CALLS)
def test_a_batch_is_fitted_to_forward_and_the_reason_says_how(
    model: type[Net], batch: Callable[[], Any], arguments: int, told: str
) -> None:
    groups = param_groups(model(), batch())
    found = {name: group["found"] for group in groups for name, _ in group["params"]}
    assert found["first.weight"][0] == "scale_invariant"
    assert found["last.weight"][0] == "general"
    for name in ("first.weight", "last.weight"):
        assert told in found[name][1]
        assert ("examined with" in found[name][1]) == bool(told)
    assert "examined" not in found["last.bias"][1]  # its shape alone decides
    assert {len(call) for call in Net.calls} == {arguments}
    assert {call[0].dtype for call in Net.calls} == {torch.float64}


def test_what_forward_takes_arrives() -> None:
    param_groups(Targets(), (x(), y()))
    assert all(torch.equal(targets, y()) for _, targets in Net.calls)
    Net.calls = []
    param_groups(Keywords(), {"x": x(), "labels": y()})
    assert all(others.keys() == {"labels"} for _, others in Net.calls)
    Net.calls = []
    param_groups(WholeMapping(), {"x": x(), "labels": y()})
    assert all(batch.keys() == {"x", "labels"} for _, batch in Net.calls)


@pytest.mark.parametrize("optimizer", [AdamO, AngularAdamW])
def test_the_first_try_of_everybody(optimizer: Callable[..., Any]) -> None:
    model, loader = OneInput(), DataLoader(TensorDataset(x(), y()), batch_size=4)
    explained = optimizer(param_groups(model, next(iter(loader)))).explain()
    turning = next(p for p in explained if p.name == "first.weight")
    assert turning.rule == "scale_invariant"
    assert "first of 2" in turning.reason
    assert turning.reason in str(explained)


@pytest.mark.parametrize(
    "batch", [lambda: (x(), y()), lambda: {"x": x(), "labels": y()}], ids=["tuple", "mapping"]
)
def test_a_compiled_model_is_called_as_the_model_in_it(batch: Callable[[], Any]) -> None:
    compiled: Any = torch.compile(OneInput(), backend="eager")
    groups = param_groups(compiled, batch())
    assert {g["rule"] for g in groups} == {"scale_invariant", "general", "low_dim"}


def test_a_forward_without_a_signature_takes_anything() -> None:
    model = nn.Identity()
    vars(model)["forward"] = torch.add  # of C
    assert [len(call.args) for call in ways_to_call(model, (x(), x()))] == [2, 1, 1]
    assert ways_to_call(model, {"input": x()})[0].kwargs.keys() == {"input"}


def test_a_forward_of_the_user_gets_the_whole_batch() -> None:
    groups = param_groups(OneInput(), (x(), y()), forward=lambda model, batch: model(batch[0]))
    assert all("examined with" not in group["found"][1] for group in groups)


# Bad batches

FAILS: dict[str, tuple[type[Net], Callable[[], Any], str]] = {
    "wrong shape": (OneInput, lambda: (torch.randn(6, 3), y()), r"model\(float32\[6, 3\]\)"),
    "all ways": (Targets, lambda: (torch.randn(6, 3), y()), r"\(float32\[6, 3\], int64\[6\]\)"),
    "too few items": (TwoInputs, lambda: (x(),), rf"model\(float32\[6, {WIDTH}\]\).*'mask'"),
    "one tensor for two": (TwoInputs, x, "'mask'"),
    "no name fits": (OneInput, lambda: {"image": x()}, r"model\(dict\)"),
    "a name is missing": (TwoInputs, lambda: {"x": x(), "y": y()}, r"model\(x=float32.*'mask'"),
    "nothing": (OneInput, tuple, r"model\(tuple\)"),
    "text": (OneInput, lambda: "batch", r"model\(str\)"),
    "names that are no words": (OneInput, lambda: {0: x()}, r"model\(dict\)"),
}


@pytest.mark.parametrize(("model", "batch", "message"), FAILS.values(), ids=FAILS)
def test_a_call_that_fails_is_shown(
    model: type[Net], batch: Callable[[], Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){message}.*forward=") as caught:
        param_groups(model(), batch())
    assert caught.value.__cause__ is not None


def with_one(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    t = x().to(dtype)
    t[2, 3] = value
    return t


NOT_FINITE: dict[str, tuple[type[Net], Callable[[], Any]]] = {
    "nan": (OneInput, lambda: with_one(math.nan)),
    "infinity": (OneInput, lambda: with_one(math.inf)),
    "bfloat16": (OneInput, lambda: with_one(math.nan, torch.bfloat16)),
    "complex": (OneInput, lambda: with_one(math.nan, torch.complex64)),
    "second item": (TwoInputs, lambda: (x(), with_one(math.nan))),
    "mapping": (OneInput, lambda: {"x": with_one(math.nan), "labels": y()}),
    "nested": (WholeMapping, lambda: {"x": x(), "more": [{"deep": with_one(math.inf)}]}),
}


@pytest.mark.parametrize(("model", "batch"), NOT_FINITE.values(), ids=NOT_FINITE)
def test_a_batch_that_is_not_finite_is_refused(model: type[Net], batch: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=rf"NaN or infinity.*\(6, {WIDTH}\)"):
        param_groups(model(), batch())
    assert Net.calls == []


def test_what_is_left_out_and_masks_may_be_infinite() -> None:
    nan = torch.full((6,), math.nan)
    groups = param_groups(OneInput(), (x(), nan))
    assert groups[0]["rule"] == "scale_invariant"
    mask = torch.zeros(6, WIDTH)
    mask[0] = -math.inf
    assert param_groups(AttentionMask(), (x(), mask))[0]["rule"] == "scale_invariant"
    assert len(Net.calls[-1]) == 2


def test_a_loader_is_not_a_batch() -> None:
    loader = DataLoader(TensorDataset(x(), y()), batch_size=4)
    with pytest.raises(ValueError, match=r"DataLoader.*next\(iter\("):
        param_groups(OneInput(), loader)
