"""The optimizers as entries of PyTorch's own optimizer test kit, and the problems the suite runs.

``torch.testing._internal.common_optimizers`` describes an optimizer by an ``OptimizerInfo``: what
it can be built with, what it must refuse, which backends it has. ``ENTRIES`` is the table of what
is tested: AdamO; AngularAdamW without a rule, which is AdamW; AngularAdamW whose matrices turn.
The ``test_torch_suite*.py`` files go over the ground of PyTorch's ``test/test_optim.py``.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau, StepLR

from adamo_optim import AdamO, AngularAdamW
from adamo_optim.options import PAPER

# torch's test modules, when loaded, use what NumPy has deprecated, and forbid setting cuDNN's flags
# in this process, which the laboratory's engine does.
with warnings.catch_warnings(), mock.patch.object(torch.backends, "disable_global_flags"):
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_optimizers import (
        ErrorOptimizerInput,
        OptimizerErrorEnum,
        OptimizerInfo,
        OptimizerInput,
        _get_optim_inputs_including_global_cliquey_kwargs,
        get_error_inputs_for_all_optims,
    )

Options = dict[str, Any]

# What the optimizers may be built with; every option occurs (a test counts them).
COMMON: dict[str, Options] = {
    "default": {},
    "lr": {"lr": 0.01},
    "tensor lr": {"lr": torch.tensor(0.001)},
    "betas and eps": {"betas": (0.5, 0.9), "eps": 1e-4},
    "tensor betas": {
        "lr": torch.tensor(0.001),
        "betas": (torch.tensor([[0.9]]), torch.tensor(0.99)),
    },
    "no weight decay": {"weight_decay": 0.0},
    "capturable": {"capturable": True},
    "capturable tensor lr": {"capturable": True, "lr": torch.tensor(0.001), "maximize": True},
}
ADAMO: dict[str, Options] = {
    **COMMON,
    "eps zero": {"eps": 0.0},
    "weight decay": {"weight_decay": 5e-3},
    "tensor weight decay": {"weight_decay": torch.tensor(5e-3)},
    "maximize": {"maximize": True, "weight_decay": 5e-3},
    "radial lr ratio": {"radial_lr_ratio": 10.0},
    "radial lr": {"radial_lr": 5e-3},
    "tensor radial lr": {"radial_lr": torch.tensor(5e-3), "weight_decay": 0.0},
    "radial beta": {"radial_beta": 0.0},
    "no curvature": {"curvature_target": None},
    "curvature number": {"curvature_target": 1.0, "curvature_beta": 0.5},
    "bfloat16 previous": {"previous_gradient": "bfloat16"},
    "sampled previous": {"previous_gradient": "sampled"},
    "isotropic": {"decay_lr": "tangential", "weight_decay": 0.1},
    "all general": {"low_dim": None},
    "low dim below 64": {"low_dim": 64},
    "low dim scale": {"low_dim_scale": 0.3},
    "online test": {"delta": 0.5, "wd_ratio": 0.5},
    "rows": {"block": "row"},
    "no guard": {**PAPER, "lr": 1e-3},
    "stochastic rounding": {"rounding": "stochastic"},
}
ANGULAR: dict[str, Options] = {
    **COMMON,
    "weight decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "angular rms": {"angular_rms": 0.1},
    "max angle": {"max_angle": 0.5, "angular_rms": None},
    "rows": {"second_moment": "row"},
}


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    name: str
    cls: type[AdamO] | type[AngularAdamW]
    inputs: dict[str, Options]
    turns: bool = False  # every matrix is declared scale-invariant

    def make(self, params: Any, **options: Any) -> Any:
        """An optimizer of these parameters or groups."""
        if self.turns and not isinstance(params, Tensor):
            params = list(params)
            groups = params if params and isinstance(params[0], dict) else [{"params": params}]
            params = [{**DECLARED, **group} for group in groups]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no group says which weights are scale-invariant")
            return self.cls(params, **options)

    def is_legal(self, options: Options, device: str) -> bool:
        """AdamO's fused kernels know no rows; AngularAdamW refuses what torch's AdamW refuses."""
        if self.cls is AdamO:
            return not (options.get("fused") and options.get("block") == "row")
        capturable = options.get("capturable", False)
        if capturable and device == "cpu":
            return False
        if torch.__version__ < (2, 10) and isinstance(options.get("betas", (0,))[0], Tensor):
            return False
        has_tensors = isinstance(options.get("lr"), Tensor)
        return not (options.get("foreach") and has_tensors and not capturable)


# as ``param_groups`` declares them: vectors in such a group keep the rule of their shape
DECLARED = {"rule": "scale_invariant", "found": ("scale_invariant", "declared by the test")}

ENTRIES = [
    Entry("AdamO", AdamO, ADAMO),
    Entry("AngularAdamW", AngularAdamW, ANGULAR),
    Entry("turning", AngularAdamW, ANGULAR, turns=True),
]
ADAMO_ENTRY, ANGULAR_ENTRY, TURNING_ENTRY = ENTRIES


class Case(OptimizerInput):
    """An entry with one of its inputs and, in most tests, a backend."""

    def __init__(self, entry: Entry, kwargs: Options, desc: str) -> None:
        super().__init__(None, kwargs, desc)
        self.entry = entry

    @property
    def id(self) -> str:
        return slug(f"{self.entry.name} & {self.desc}")

    @property
    def backend(self) -> str:
        return next((flag for flag in CLIQUEY if self.kwargs.get(flag)), "for-loop")


# ---- what must be refused -------------------------------------------------------------------


def finite(value: float, legal: str) -> str:
    """What the message says first where infinity is not out of a stated range."""
    return "" if math.isfinite(value) or "<" in legal else "finite and "


RANGES: list[tuple[str, tuple[float, ...], str]] = [
    ("lr", (-1e-3, math.inf, math.nan), ">= 0"),
    ("eps", (-1e-8, math.inf, math.nan), ">= 0"),
    ("weight_decay", (-0.1, math.inf, math.nan), ">= 0"),
    ("radial_lr_ratio", (-1.0, math.inf, math.nan), ">= 0"),
    ("radial_lr", (-1.0, math.inf, math.nan), ">= 0 (or None)"),
    ("radial_beta", (-0.1, 1.0, math.nan), ">= 0 and < 1"),
    ("curvature_target", (0.0, -1.0, math.nan), '> 0 (or "auto", or None)'),
    ("curvature_beta", (-0.1, 1.0, math.nan), ">= 0 and < 1"),
    ("low_dim_scale", (0.0, 1.5, math.nan), "> 0 and <= 1"),
    ("delta", (0.0, -0.1, math.nan), "> 0 (or None)"),
    ("wd_ratio", (-0.5, math.inf, math.nan), ">= 0"),
    ("angular_rms", (0.0, -0.1, math.inf, math.nan), "> 0 (or None)"),
    ("max_angle", (0.0, 1.6, math.nan), "> 0 and <= 1.5708"),
]
# Every option out of range: (options, how the message starts, the value it must name).
BAD_OPTIONS: list[tuple[Options, str, str]] = [
    *(
        ({name: value}, f"{name} must be {finite(value, legal)}{legal}", repr(value))
        for name, values, legal in RANGES
        for value in values
    ),
    *(
        ({name: value}, f"{name} must be a number", repr(value))
        for name, _, _ in RANGES
        for value in ("fast", True, 1j)
    ),
    *(
        ({name: value}, f"{name} must be True or False", repr(value))
        for name in ("guard", "maximize", "capturable", "differentiable")
        for value in (None, 1, "yes")
    ),
    *(
        ({name: value}, f"{name} must be True, False or None", repr(value))
        for name in ("foreach", "fused")
        for value in ("yes", 2)
    ),
    *(
        ({"low_dim": value}, 'low_dim must be "auto", None or an integer >= 0', repr(value))
        for value in (-1, 1.5, "never", True)
    ),
    *(
        ({name: "other"}, f"{name} must be one of {legal}", "'other'")
        for name, legal in [
            ("previous_gradient", "'exact', 'bfloat16', 'sampled'"),
            ("decay_lr", "'radial', 'tangential'"),
            ("block", "'tensor', 'row'"),
            ("second_moment", "'tensor', 'row'"),
            ("rounding", "'nearest', 'stochastic'"),
        ]
    ),
    ({"betas": (1.0, 0.9)}, "betas[0] must be >= 0 and < 1", "1.0"),
    ({"betas": (0.9, -0.1)}, "betas[1] must be >= 0 and < 1", "-0.1"),
    ({"betas": (0.9, "slow")}, "betas[1] must be a number >= 0 and < 1", "'slow'"),
    ({"betas": 0.9}, "betas must be a pair of numbers", "0.9"),
    ({"betas": (0.9,)}, "betas must be a pair of numbers", "(0.9,)"),
    ({"betas": (0.9, 0.99, 0.999)}, "betas must be a pair of numbers", "(0.9, 0.99, 0.999)"),
    ({"lr": torch.tensor(-0.5)}, "lr must be >= 0", "-0.5"),
    ({"betas": (torch.tensor(1.5), 0.9)}, "betas[0] must be >= 0 and < 1", "1.5"),
    ({"weight_decay": torch.ones(2)}, "Tensor weight_decay must be 1-element", "shape (2,)"),
]

# Backends that exclude each other, or that the device does not have.
BAD_BACKENDS: list[tuple[Options, str]] = [
    ({"foreach": True, "fused": True}, "`fused` and `foreach` cannot be `True` together"),
    ({"fused": True, "differentiable": True}, "`fused` does not support `differentiable`"),
    ({"foreach": True, "differentiable": True}, "`foreach` does not support `differentiable`"),
]
# What torch's AdamW refuses in its own words.
BAD_FOR_ADAMW: list[tuple[Options, str]] = [
    ({"lr": torch.tensor(1e-3), "foreach": True}, "lr as a Tensor is not supported for"),
    ({"betas": (0.9, torch.tensor(0.99))}, "betas must be either both floats or both Tensors"),
    (
        {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": True},
        "betas[0] as a Tensor is not supported for capturable=False and foreach=True",
    ),
]
FUSED_ON = ("cuda", "cpu")  # device types that have a fused kernel
NO_FUSED = "fused=True cannot be honoured for group0.param0: no fused kernel for {}"


def error_inputs(entry: Entry, device: Any, dtype: Any) -> list[ErrorOptimizerInput]:
    """What every optimizer refuses, each option out of range, and what this one cannot train."""
    kind, backends = torch.device(device).type, list(BAD_BACKENDS)
    if kind not in FUSED_ON and entry.cls is AdamO:
        backends.append(({"fused": True}, NO_FUSED.format(kind)))
    known = option_names(entry)
    sample = nn.Parameter(torch.randn(2, 2, device=device, dtype=dtype))
    sparse = nn.Parameter(torch.randn(2, 2, device=device, dtype=dtype))
    sparse.grad = torch.eye(2, device=device, dtype=dtype).to_sparse()
    result = [
        *get_error_inputs_for_all_optims(device, dtype),
        *(
            ErrorOptimizerInput(
                OptimizerInput(None, options, _option_text(options)),
                error_type=ValueError,
                error_regex=f"^{re.escape(start)}.*, got {re.escape(value)}",
            )
            for options, start, value in BAD_OPTIONS
            if options.keys() <= known
        ),
        *(
            ErrorOptimizerInput(
                OptimizerInput([sample], options, " and ".join(options)),
                error_regex=re.escape(message),
            )
            for options, message in backends
        ),
        ErrorOptimizerInput(
            OptimizerInput([{"params": [sample], "rule": "other"}], {}, "rule of a group"),
            error_type=ValueError,
            error_regex="^rule must be one of 'auto', 'general', 'scale_invariant', 'low_dim'"
            ", got 'other'",
        ),
        ErrorOptimizerInput(
            OptimizerInput([{"params": [sample], "lr": -1.0}], {}, "lr of a group"),
            error_type=ValueError,
            error_regex=r"^lr must be >= 0, got -1\.0",
        ),
        ErrorOptimizerInput(
            OptimizerInput(
                [{"params": [sample], "fused": True, "foreach": True}], {}, "backends of a group"
            ),
            error_regex="`fused` and `foreach` cannot be `True` together",
        ),
        ErrorOptimizerInput(
            OptimizerInput([{"params": [sample], "differentiable": True}], {}, "one group differs"),
            error_type=ValueError,
            error_regex="differentiable must be the same for all groups",
        ),
        ErrorOptimizerInput(
            OptimizerInput([sparse], {}, "sparse gradient"),
            error_on=OptimizerErrorEnum.STEP_ERROR,
            error_regex="Adam does not support sparse gradients"
            if entry is ANGULAR_ENTRY
            else "sparse gradients are not supported, and the gradient of group0.param0 is one",
        ),
    ]
    if entry.cls is AngularAdamW:
        result += [
            ErrorOptimizerInput(
                OptimizerInput([sample], options, " and ".join(options) + " as tensors"),
                error_type=ValueError,
                error_regex=re.escape(message),
            )
            for options, message in BAD_FOR_ADAMW
        ]
    if entry is not ANGULAR_ENTRY:  # AdamW takes integers, and they never have a gradient
        integers = torch.arange(4, device=device).view(2, 2)
        result.append(
            ErrorOptimizerInput(
                OptimizerInput([integers], {}, "integer parameter"),
                error_type=TypeError,
                error_regex="must be a floating or complex tensor, got torch.int64",
            )
        )
    return result


def option_names(entry: Entry) -> set[str]:
    """The options of the constructor."""
    return set(inspect.signature(entry.cls).parameters) - {"params"}


def _option_text(options: Options) -> str:
    ((name, value),) = options.items()
    return f"{name}={value.tolist() if isinstance(value, Tensor) else value!r}"


SCHEDULES = (
    [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
    [lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4)],
    [lambda opt: StepLR(opt, gamma=0.9, step_size=10), lambda opt: ReduceLROnPlateau(opt)],
    [lambda opt: ExponentialLR(opt, gamma=0.99), lambda opt: ReduceLROnPlateau(opt)],
)
# Options that came later than a checkpoint may lack them.
LATER_FLAGS = ("foreach", "fused", "differentiable", "maximize", "capturable", "rule", "found")


def info(entry: Entry) -> OptimizerInfo:
    """The entry in the words of torch's kit; tensor options are copies: schedulers write there."""
    return OptimizerInfo(
        entry.cls,
        optim_inputs_func=lambda device, dtype=None: [
            OptimizerInput(None, deepcopy(options), desc) for desc, options in entry.inputs.items()
        ],
        optim_error_inputs_func=lambda device, dtype: error_inputs(entry, device, dtype),
        scheduler_inputs=SCHEDULES,
        supported_impls=("foreach", "differentiable", "fused"),
        not_og_supported_flags=LATER_FLAGS,
        has_capturable_arg=True,
        supports_sparse=False,
        supports_complex=True,
        supports_fused_on=FUSED_ON,
    )


# A few inputs of different kinds, for properties that do not depend on the options.
FEW = ("default", "tensor betas", "sampled previous", "max angle", "capturable tensor lr")

CLIQUEY = ("foreach", "fused", "differentiable")  # flags that exclude each other, in torch's words


# ---- parametrisation ------------------------------------------------------------------------


def slug(text: str) -> str:
    """A description as a test id: ``default & foreach`` → ``default-foreach``."""
    return re.sub(r"[^\w.=+-]+", "_", text.replace(" & ", "-")).strip("_")


def _over(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(cases), ids=lambda case: case.id)


def _wanted(desc: str, only: tuple[str, ...], skip: tuple[str, ...]) -> bool:
    return (not only or desc in only) and desc not in skip


def over_inputs(
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    entries: Iterable[Entry] = ENTRIES,
    device: str = "cpu",
) -> pytest.MarkDecorator:
    """Parametrise ``case`` over optimizers × inputs, without a backend flag."""
    return _over(
        Case(entry, options, desc)
        for entry in entries
        for desc, options in entry.inputs.items()
        if _wanted(desc, only, skip) and entry.is_legal(options, device)
    )


def over_backends(
    skip: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    entries: Iterable[Entry] = ENTRIES,
    device: str = "cpu",
) -> pytest.MarkDecorator:
    """Parametrise ``case`` over optimizers × inputs × (for-loop, foreach, differentiable, fused).

    The kit is always asked for "cuda" (a name, no tensor is made): for "cpu" it leaves foreach out,
    because torch never chooses it there by itself.
    """
    return _over(
        Case(entry, found.kwargs, found.desc)
        for entry in entries
        for found in _get_optim_inputs_including_global_cliquey_kwargs(
            "cuda", torch.float32, info(entry), skip=skip
        )
        if _wanted(found.desc.split(" & ")[0], only, ()) and entry.is_legal(found.kwargs, device)
    )


def over_entries(entries: Iterable[Entry] = ENTRIES) -> pytest.MarkDecorator:
    """Parametrise ``entry`` over the optimizers."""
    return pytest.mark.parametrize("entry", list(entries), ids=lambda entry: entry.name)


FOREACH = pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])


def build(params: Any, case: Case, **more: Any) -> Any:
    """The case's optimizer; ``more`` wins. Nothing is shared with other tests of the case."""
    return case.entry.make(params, **{**deepcopy(case.kwargs), **more})


def steps_of(optimizer: Optimizer, p: Tensor) -> int:
    """The steps a parameter has taken; AdamW, unlike AdamO, has no state before the first."""
    return int(optimizer.state[p]["step"].max()) if optimizer.state.get(p) else 0


# ---- problems -------------------------------------------------------------------------------


class Regression:
    """‖Wx + b‖² in W (10×5) and b (10), the loss of torch's suite; two of a seed are equal."""

    def __init__(
        self, *, contiguous: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        source = torch.Generator().manual_seed(seed)
        weight = torch.randn(10, 5, 2, generator=source, dtype=torch.float64).to(dtype)[..., 0]
        bias = torch.randn(10, 2, generator=source, dtype=torch.float64).to(dtype)[..., 0]
        if contiguous:
            weight, bias = weight.contiguous(), bias.contiguous()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.params = [self.weight, self.bias]
        self.named = [("weight", self.weight), ("bias", self.bias)]
        self.input = torch.randn(5, generator=source, dtype=torch.float64).to(dtype)

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).pow(2).sum()

    def backward(self) -> Tensor:
        for p in self.params:
            p.grad = None
        loss = self.loss()
        loss.backward()
        return loss

    def train(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            optimizer.step()


def normed_net() -> nn.Sequential:
    """Conv and BatchNorm: names, a zero bias and a scale-invariant weight."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))


def train_net(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    batch = torch.rand(3, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    for _ in range(steps):
        optimizer.zero_grad()
        net(batch).pow(3).sum().backward()
        optimizer.step()


def gradients(params: Iterable[Tensor], seed: int) -> list[Tensor]:
    """Random gradients in the parameters' shapes, dtypes and layouts."""
    source = torch.Generator().manual_seed(seed)
    real = (torch.randn(p.shape, generator=source, dtype=_wide(p)) for p in params)
    return [g.to(p.device, p.dtype) for g, p in zip(real, params, strict=True)]


def _wide(p: Tensor) -> torch.dtype:
    return torch.complex128 if p.is_complex() else torch.float64


def set_gradients(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone()


# ---- comparisons ----------------------------------------------------------------------------


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to the last bit, dtypes included."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_dict(actual: dict[str, Any], expected: dict[str, Any], ignore: str = "") -> None:
    """Two state dictionaries: the same keys, and values equal to the last bit."""
    assert actual["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert actual["state"][key].keys() == state.keys()
        assert_same(actual["state"][key], state)
    for ours, theirs in zip(actual["param_groups"], expected["param_groups"], strict=True):
        assert ours.keys() - {ignore} == theirs.keys() - {ignore}
        for name in ours.keys() - {ignore}:
            assert ours[name] == theirs[name], name


def flat(values: Iterable[Tensor]) -> Tensor:
    """All entries in one float64 vector: one comparison instead of hundreds."""
    reals = (torch.view_as_real(x) if x.is_complex() else x for x in values)
    return torch.cat([x.detach().reshape(-1).double() for x in reals])


def clones(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def step_schedulers(schedulers: Iterable[Any], loss: Tensor) -> None:
    for scheduler in schedulers:
        scheduler.step(*((loss.detach(),) if isinstance(scheduler, ReduceLROnPlateau) else ()))
