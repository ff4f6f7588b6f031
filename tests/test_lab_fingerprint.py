"""What makes two experiments different: one pair of values a type."""

from __future__ import annotations

import argparse
import enum
import functools
import importlib
import logging
import os
import subprocess
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from adamo_lab import fingerprint as described
from adamo_lab.fingerprint import ENTRIES, KINDS, LONGEST, fingerprint, kind_of

SCALE: Any = 1.0


def digests(value: Any) -> dict[str, str]:
    return fingerprint({"value": value})


def with_global(value: Any, text: str = "lambda: SETTING") -> Any:
    return eval(text, {"SETTING": value})


def with_closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def with_default(value: Any) -> Any:
    def function(a: int, b: Any = value, *, c: Any = value) -> Any:
        return a, b, c

    return function


def with_attribute(value: Any) -> Any:
    function = with_closure(0)
    function.scale = value  # type: ignore[attr-defined]
    return function


def class_with(value: Any, **members: Any) -> type:
    return type("Own", (), {"__module__": __name__, "scale": value, **members})


def method_reading(value: Any) -> type:
    return class_with(0, read=with_global(value, "lambda self: SETTING"))


@dataclass
class Settings:
    scale: Any
    other: int = 0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: Any) -> None:
        self.scale = scale


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Net(nn.Module):
    def __init__(self, scale: float = 1.0, frozen: bool = False) -> None:
        super().__init__()
        self._scale = scale
        self.weight = nn.Parameter(torch.ones(2), requires_grad=not frozen)
        self.register_buffer("mean", torch.zeros(1), persistent=False)


def edited(module: nn.Module, **tensors: torch.Tensor) -> nn.Module:
    for name, value in tensors.items():
        getattr(module, name).data = value
    return module


def module(value: Any) -> types.ModuleType:
    made = types.ModuleType("config")
    made.__file__, made.scale = __file__, value  # type: ignore[attr-defined]
    return made


class Numbers(Dataset[float]):
    def __init__(self, scale: float) -> None:
        self.scale = scale


def one_of_two(chosen: int) -> list[Any]:
    both = [Settings(1.0), Settings(2.0)]
    return [both, both[chosen]]


def shared(*order: int) -> nn.Module:
    layers = [Net(), Net(scale=2.0)]
    return nn.Sequential(*(layers[i] for i in order))


def table(last_column: int) -> torch.Tensor:
    made = torch.zeros(3 * ENTRIES // 4, 2, dtype=torch.uint8)
    made[:, 1] = last_column
    return made


CHAIN = "lambda: SETTING.scale"
NESTED = "lambda: [SETTING for _ in range(3)]"
LONG = list(range(3 * LONGEST))
DATA = TensorDataset(torch.arange(4.0))

PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "int": (lambda: 1, lambda: 2),
    "int and float": (lambda: 1, lambda: 1.0),
    "int and bool": (lambda: 1, lambda: True),
    "float": (lambda: 1.0, lambda: 1.0000001),
    "text": (lambda: "a", lambda: "b"),
    "bytes": (lambda: b"a", lambda: b"b"),
    "nothing": (lambda: None, lambda: 0),
    "path": (lambda: Path("a"), lambda: Path("b")),
    "numpy number": (lambda: np.float32(1), lambda: np.float32(2)),
    "dtype": (lambda: torch.float32, lambda: torch.bfloat16),
    "enum": (lambda: Level.LOW, lambda: Level.HIGH),
    "tensor": (lambda: torch.zeros(3), lambda: torch.tensor([0.0, 0.0, 1e-9])),
    "shape": (lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2)),
    "dtype of a tensor": (lambda: torch.zeros(2), lambda: torch.zeros(2, dtype=torch.int32)),
    "complex tensor": (lambda: torch.ones(2) * 1j, lambda: (torch.ones(2) * 1j).conj()),
    "empty tensor": (lambda: torch.zeros(0, 2), lambda: torch.zeros(0, 3)),
    "large tensor": (
        lambda: torch.zeros(2 * ENTRIES, dtype=torch.bool),
        lambda: torch.ones(2 * ENTRIES, dtype=torch.bool),
    ),
    "meta tensor": (lambda: torch.ones(2, device="meta"), lambda: torch.ones(3, device="meta")),
    "column of a large tensor": (lambda: table(0), lambda: table(1)),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), lambda: 2 * torch.eye(2).to_sparse()),
    "column of a large array": (lambda: table(0).numpy(), lambda: table(1).numpy()),
    "array": (lambda: np.zeros(3), lambda: np.array([0, 0, 1e-9])),
    "array of objects": (lambda: np.array(["a", None]), lambda: np.array(["b", None])),
    "dict": (lambda: {"scale": 1.0}, lambda: {"scale": 2.0}),
    "key of a dict": (lambda: {"a": 1.0}, lambda: {"b": 1.0}),
    "ordered dict": (lambda: OrderedDict(a=1), lambda: OrderedDict(a=2)),
    "list": (lambda: [1, [2, 3]], lambda: [1, [2, 4]]),
    "nesting": (lambda: [1, [2, 3]], lambda: [[1, 2], 3]),
    "long list": (lambda: LONG, lambda: LONG[:-1]),
    "list that is just not too long": (
        lambda: LONG[:LONGEST],
        lambda: [0, -1, *LONG[2:LONGEST]],
    ),
    "tuple": (lambda: (1, 2), lambda: (1, 3)),
    "deque": (lambda: deque([1]), lambda: deque([2])),
    "set": (lambda: {"a", "b", "c"}, lambda: {"a", "b", "d"}),
    "namespace": (lambda: argparse.Namespace(lr=1), lambda: argparse.Namespace(lr=2)),
    "simple namespace": (
        lambda: types.SimpleNamespace(lr=1),
        lambda: types.SimpleNamespace(lr=2),
    ),
    "dataclass": (lambda: Settings(1.0), lambda: Settings(2.0)),
    "one of two objects": (lambda: one_of_two(0), lambda: one_of_two(1)),
    "slots": (lambda: Slotted(1.0), lambda: Slotted(2.0)),
    "partial": (lambda: functools.partial(F.relu, 1), lambda: functools.partial(F.relu, 2)),
    "function of a partial": (lambda: functools.partial(F.relu), lambda: functools.partial(F.elu)),
    "bound method": (lambda: Settings(1.0).__repr__, lambda: Settings(2.0).__repr__),
    "property": (
        lambda: property(with_global(1, "lambda self: SETTING")),
        lambda: property(with_global(2, "lambda self: SETTING")),
    ),
    "cached property": (
        lambda: functools.cached_property(with_global(1)),
        lambda: functools.cached_property(with_global(2)),
    ),
    "static method": (lambda: staticmethod(with_global(1)), lambda: staticmethod(with_global(2))),
    "cached function": (
        lambda: functools.cache(with_global(1)),
        lambda: functools.cache(with_global(2)),
    ),
    "decorated function": (
        lambda: torch.no_grad()(with_global(1)),
        lambda: torch.no_grad()(with_global(2)),
    ),
    "code": (lambda: eval("lambda x: x + 1"), lambda: eval("lambda x: x - 1")),
    "constant": (lambda: eval("lambda x: x + 1"), lambda: eval("lambda x: x + 2")),
    "method that is called": (lambda: eval("lambda x: x.a()"), lambda: eval("lambda x: x.b()")),
    "global": (lambda: with_global([1.0]), lambda: with_global([2.0])),
    "global in a comprehension": (
        lambda: with_global(1, NESTED),
        lambda: with_global(2, NESTED),
    ),
    "global of another module": (
        lambda: with_global(module(1), CHAIN),
        lambda: with_global(module(2), CHAIN),
    ),
    "global of a global": (
        lambda: with_global(with_global({"a": torch.ones(1)})),
        lambda: with_global(with_global({"a": torch.zeros(1)})),
    ),
    "torch's function": (lambda: with_global(F.relu), lambda: with_global(F.elu)),
    "built-in function": (lambda: with_global(torch.sin), lambda: with_global(torch.cos)),
    "closure": (lambda: with_closure({"a": 1}), lambda: with_closure({"a": 2})),
    "default": (lambda: with_default((1,)), lambda: with_default((2,))),
    "global that is called defaults": (
        lambda: eval("lambda: defaults", {"defaults": 1}),
        lambda: eval("lambda: defaults", {"defaults": 2}),
    ),
    "attribute of a function": (lambda: with_attribute(1), lambda: with_attribute(2)),
    "class attribute": (lambda: class_with(1), lambda: class_with(2)),
    "method": (lambda: method_reading(1), lambda: method_reading(2)),
    "base class": (
        lambda: type("A", (class_with(1),), {"__module__": __name__}),
        lambda: type("A", (class_with(2),), {"__module__": __name__}),
    ),
    "object of a class": (lambda: method_reading(1)(), lambda: method_reading(2)()),
    "module": (nn.ReLU, nn.ELU),
    "weight": (Net, lambda: edited(Net(), weight=torch.zeros(2))),
    "buffer": (Net, lambda: edited(Net(), mean=torch.ones(1))),
    "frozen weight": (Net, lambda: Net(frozen=True)),
    "number of a module": (Net, lambda: Net(scale=2.0)),
    "number of torch's module": (
        lambda: nn.Sequential(nn.CrossEntropyLoss()),
        lambda: nn.Sequential(nn.CrossEntropyLoss(label_smoothing=0.1)),
    ),
    "module that comes again": (lambda: shared(0, 1, 0), lambda: shared(0, 1, 1)),
    "data set": (lambda: Numbers(1.0), lambda: Numbers(2.0)),
    "torch's data set": (lambda: DATA, lambda: TensorDataset(torch.ones(4))),
    "sampler": (
        lambda: WeightedRandomSampler([1.0, 2.0], 2),
        lambda: WeightedRandomSampler([1.0, 3.0], 2),
    ),
    "loader": (lambda: DataLoader(DATA), lambda: DataLoader(DATA, drop_last=True)),
    "lazy module": (lambda: nn.LazyLinear(2), lambda: nn.LazyLinear(3)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_value_has_one_digest_and_another_one_another(name: str) -> None:
    torch.manual_seed(0)
    one, other = PAIRS[name]
    first = digests(one())
    assert first == digests(one())
    assert first != digests(other())


def test_every_kind_has_a_pair() -> None:
    values = [make() for pair in PAIRS.values() for make in pair]
    values += [types.ModuleType("a"), with_global(0).__code__]
    assert {kind_of(type(value)) for value in values} == {*KINDS}


def test_a_global_is_a_part_of_its_own() -> None:
    before, after = digests(with_global([])), digests(with_global([1.0]))
    assert {name for name in before if before[name] != after[name]} == {"value.SETTING"}


def test_parts_that_change_leave_their_like_alone() -> None:
    """Two objects of a class, the parts of a partial, and of a module in training."""

    def loss(teacher: nn.Module, factor: float, counter: Settings) -> Any:
        counter.other += 1
        return teacher(torch.rand(8, 2)) * factor * still.scale

    still, counter = Settings(1.0), Settings(2.0)
    value = functools.partial(loss, nn.Sequential(nn.BatchNorm1d(2)), 0.5, counter=counter)
    before = digests(value)
    value()
    after = digests(value)
    changed = {name.removeprefix("value.") for name in before if before[name] != after[name]}
    teacher = {f"0.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert changed == teacher | {"counter.other"}
    assert {"value.", "value.1", "value.0.0.weight", "value..still.scale"} <= {*before}


def test_a_large_value_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(described, "VALUES", 100)
    function = "lambda: (large, small)"
    large = [
        *range(200)
    ]  # with it ends a description, not what later ones know about small numbers
    first, other = (digests(eval(function, {"large": large, "small": [n]})) for n in (198, 199))
    assert {name for name in first if first[name] != other[name]} == {"value.small"}


def test_a_package_without_init_is_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_package").mkdir()
    (tmp_path / "bare_package" / "settings.py").write_text("scale = 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("bare_package.settings") and sys.modules["bare_package"]
    function = with_global(package, "lambda: SETTING.settings.scale")
    before = digests(function)
    package.settings.scale = 2.0
    assert digests(function) != before


def test_values_that_hold_themselves_and_deep_ones() -> None:
    around: list[Any] = [1]
    around.append(around)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    chain = Settings(0)
    for _ in range(10_000):
        chain = Settings(chain)
    assert digests(around) == digests(around)
    assert sum(map(len, digests(chain))) < 100_000
    assert digests(deep) == digests(deep)

    def recursive(n: int) -> int:
        return recursive(n - 1)

    assert digests(recursive) == digests(recursive)


def test_a_function_may_use_what_has_no_value_yet() -> None:
    if SCALE is None:
        later = 1
    assert digests(lambda: later)
    assert digests(eval("lambda: nowhere"))


def test_a_call_changes_nothing() -> None:
    """Python rewrites the code of functions that are called often."""
    function = with_global(3, "lambda x: x + SETTING")
    before = digests(function)
    for _ in range(10_000):
        function(1)
    assert digests(function) == before


def test_installed_objects_count_by_their_type() -> None:
    used, unused = np.random.default_rng(0), np.random.default_rng(1)
    used.random()
    assert digests(used) == digests(unused)
    assert digests(logging.getLogger("a")) == digests(logging.getLogger("b"))
    assert digests(os.getenv).keys() == {"value"}, "nor the environment that it reads"


PROGRAM = """
from adamo_lab.fingerprint import fingerprint
WEIGHTS = {"a": {"x", "y", "z"}}
class Own:
    def method(self): return WEIGHTS
class Other:
    def method(self): return 0
CLASSES = {Own, Other}
def function(): return Own(), CLASSES, {"u", "v", "w"}, object
print(sorted(fingerprint({"": function}).items()))
"""


def test_another_process_finds_the_same() -> None:
    command = [sys.executable, "-c", PROGRAM]
    said = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    assert said[0] == said[1]
    assert b"WEIGHTS" in said[0]
