"""The options of AdamO: defaults, legal values, and their form as vectors on a device."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .control import NORM_FLOOR, Options

PACKAGE = Path(__file__).parent
SCHEMA = 1  # of the state and the group options; raised whenever either changes its meaning

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "radial_lr_ratio": 2.0,
    "radial_lr": None,
    "radial_beta": 0.9,
    "curvature_target": "auto",
    "curvature_beta": 0.9,
    "previous_gradient": "exact",
    "decay_lr": "radial",
    "tangential": "auto",
    "angular_rms": 0.015,
    "radial": "adam",
    "second_moment": "auto",
    "low_dim": "auto",
    "low_dim_scale": 1.0,
    "low_dim_decay": None,
    "delta": None,
    "wd_ratio": 1.0,
    "guard": True,
    "rounding": "nearest",
    "maximize": False,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
    "rule": "auto",
    "rule_reason": "",
    "schema": SCHEMA,
}

# The form of the step in the paper: SGD on the norm, an additive tangential step, plain Adam for
# low-dimensional parameters.
FORM: dict[str, Any] = {
    "radial": "sgd",
    "tangential": "additive",
    "angular_rms": None,
    "second_moment": "entry",
    "low_dim_decay": 0.0,
}

# That form with numbers that are safe to start from.
RADIAL_SGD: dict[str, Any] = {**FORM, "radial_lr_ratio": 100.0, "weight_decay": 1e-3}

# AdamO on CIFAR-100, section 3.1 of the paper, to the letter. δ = 0.1 and wd_ratio = 0.5 are
# switched on at epoch 200 there; τ_target is printed nowhere, 1.0 makes Eq. 6 read η_ρ/√τ.
PAPER: dict[str, Any] = {
    **FORM,
    "lr": 8e-4,
    "radial_lr": 5e-3,
    "weight_decay": 2e-4,
    "curvature_target": 1.0,
    "guard": False,
}

CHOICES: dict[str, tuple[str, ...]] = {
    "previous_gradient": ("exact", "bfloat16", "sampled"),
    "decay_lr": ("radial", "tangential"),
    "tangential": ("additive", "angular", "auto"),
    "radial": ("sgd", "adam"),
    "second_moment": ("entry", "block", "auto"),
    "rounding": ("nearest", "stochastic"),
    "rule": ("auto", "general", "scale_invariant", "low_dim"),
}

# name: (lower bound, is it legal itself, upper bound, is it legal itself)
RANGES: dict[str, tuple[float, bool, float, bool]] = {
    "lr": (0.0, True, math.inf, False),
    "eps": (0.0, True, math.inf, False),
    "weight_decay": (0.0, True, math.inf, False),
    "radial_lr_ratio": (0.0, True, math.inf, False),
    "radial_lr": (0.0, True, math.inf, False),
    "radial_beta": (0.0, True, 1.0, False),
    "curvature_target": (0.0, False, math.inf, False),
    "curvature_beta": (0.0, True, 1.0, False),
    "low_dim_scale": (0.0, False, 1.0, True),
    "low_dim_decay": (0.0, True, math.inf, False),
    "delta": (0.0, False, math.inf, False),
    "angular_rms": (0.0, False, math.inf, False),
    "wd_ratio": (0.0, True, math.inf, False),
}
# None switches them off; radial_lr then follows radial_lr_ratio, and low_dim_decay weight_decay
OPTIONAL = ("radial_lr", "curvature_target", "delta", "angular_rms", "low_dim_decay")

WORDS = {"curvature_target": "auto", "angular_rms": "equilibrium"}  # in place of a number

COLLAPSE_DECAY = 1e-3  # decay per step above which the constructor warns


def check_options(options: dict[str, Any], reads_devices: bool = True) -> None:
    """Raise ``ValueError`` with name, value and legal range for the first bad option.

    With ``reads_devices=False``, in a step, tensors on a device are taken on trust: no waiting.
    """
    for name in RANGES:
        value = options[name]
        if value is None and name in OPTIONAL:
            continue
        if isinstance(value, str) and value == WORDS.get(name):
            continue
        check_number(name, value, RANGES[name], reads_devices)
    for i, beta in enumerate(as_pair(options["betas"])):
        check_number(f"betas[{i}]", beta, (0.0, True, 1.0, False), reads_devices)
    for name, choices in CHOICES.items():
        if options[name] not in choices:
            legal = ", ".join(repr(c) for c in choices)
            raise ValueError(f"{name} must be one of {legal}, got {options[name]!r}")
    check_low_dim(options["low_dim"])
    for name in ("guard", "maximize", "capturable", "differentiable"):
        if not isinstance(options[name], bool):
            raise ValueError(f"{name} must be True or False, got {options[name]!r}")
    check_backend(options)


def as_pair(betas: Any) -> tuple[Any, Any]:
    """Two numbers from any sequence of them, a configuration library's own kind included."""
    if isinstance(betas, (str, bytes)) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise ValueError(f"betas must be a pair of numbers, got {betas!r}")
    first, second = (
        b.item() if hasattr(b, "item") and not isinstance(b, Tensor) else b for b in betas
    )
    return first, second


def check_number(
    name: str, value: Any, bounds: tuple[float, bool, float, bool], reads_devices: bool = True
) -> None:
    """One numeric option: a real number or a tensor with one element, inside its bounds."""
    low, low_legal, high, high_legal = bounds
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        if value.device.type != "cpu" and not reads_devices:
            return
        value = value.item()
    above = ">=" if low_legal else ">"
    legal = f"{above} {low:g}"
    if math.isfinite(high):
        legal += f" and {'<=' if high_legal else '<'} {high:g}"
    alternatives = " (or None)" if name in OPTIONAL else ""
    if name in WORDS:
        alternatives = f' (or "{WORDS[name]}", or None)'
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number {legal}{alternatives}, got {value!r}")
    value = float(value)
    inside = (value >= low if low_legal else value > low) and (
        value <= high if high_legal else value < high
    )
    if not inside:
        finite = "" if math.isfinite(value) or math.isfinite(high) else "finite and "
        raise ValueError(f"{name} must be {finite}{legal}{alternatives}, got {value}")


def check_low_dim(value: Any) -> None:
    is_threshold = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is not None and value != "auto" and not is_threshold:
        raise ValueError(f'low_dim must be "auto", None or an integer >= 0, got {value!r}')


def check_backend(options: dict[str, Any]) -> None:
    for name in ("foreach", "fused"):
        if options[name] not in (None, True, False):
            raise ValueError(f"{name} must be True, False or None, got {options[name]!r}")
    if options["fused"] and options["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`")
    if options["fused"] and options["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if options["foreach"] and options["differentiable"]:
        raise RuntimeError("`foreach` does not support `differentiable`")


def low_dim_decay(options: dict[str, Any]) -> Any:
    """λ of low-dimensional parameters: their own, or that of the others."""
    own = options["low_dim_decay"]
    return options["weight_decay"] if own is None else own


def decay_per_step(options: dict[str, Any]) -> float:
    """How much of a weight decay takes away in one step, before curvature scales it."""
    lr, ratio, absolute = (options[k] for k in ("lr", "radial_lr_ratio", "radial_lr"))
    if options["decay_lr"] == "radial":
        lr = ratio * lr if absolute is None else absolute
    decay = lr * options["weight_decay"]
    return decay.item() if isinstance(decay, Tensor) else float(decay)


def warn_of_collapse(groups: Sequence[dict[str, Any]]) -> None:
    """Someone used to AdamW's weight_decay = 0.1 is told what it means here.

    Not under ``radial="adam"``: Adam's radial part pushes back, as it does in AdamW.
    """
    groups = [group for group in groups if group["radial"] == "sgd"]
    worst = max(groups, key=decay_per_step, default=None)
    decay = decay_per_step(worst) if worst else 0.0
    if worst is None or decay <= COLLAPSE_DECAY * (1 + 1e-6):
        return
    steps = math.log(2) / -math.log1p(-min(decay, 0.5))
    if worst["guard"]:
        fate = f"The guard will stop the decay at {NORM_FLOOR:g} of the initial norm, but the fit"
    else:
        fate = "Nothing will stop it with guard=False; the fit"
    warnings.warn(
        f"weight_decay={worst['weight_decay']} takes {decay:.2g} of every weight away per "
        f"step (half of it in about {max(1, round(steps))} steps): with radial='sgd' the weight "
        f"decay is SGD's, around 1e-3 with radial_lr_ratio=100. {fate} will suffer. Coming from "
        "AdamW, divide weight_decay by radial_lr_ratio (AdamO.from_adamw does), or take "
        "radial='adam'.",
        UserWarning,
        stacklevel=users_level(),
    )


def users_level() -> int:
    """The ``stacklevel`` of the first line outside this package, for the caller's warning."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == PACKAGE:
        frame, level = frame.f_back, level + 1
    return level


class OptionTable:
    """The groups' options as vectors over the blocks of one device.

    The numbers travel to the device only when one has changed; options that are tensors on that
    device are read there in every step, so that a replayed CUDA graph sees their new values.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.sizes = device, dtype, sizes
        index = [i for i, size in enumerate(sizes) for _ in range(size)]
        self.index = torch.tensor(index, dtype=torch.long, device=device)
        self.rows: list[tuple[float, ...]] = []
        self.small = self.matrix = torch.empty(0)
        self.vectors: Options | None = None

    def __call__(self, groups: Sequence[dict[str, Any]], differentiable: bool = False) -> Options:
        tensors: list[tuple[int, int, Tensor]] = []
        rows = []
        for i, group in enumerate(groups):
            try:
                row = list(as_numbers(group))
            except (KeyError, TypeError, ValueError):
                check_options(group)  # says which option is wrong
                raise
            for j, value in enumerate(row):
                if isinstance(value, Tensor):
                    if differentiable or value.device.type != "cpu":
                        tensors.append((j, i, value))
                        row[j] = 0.0
                    else:
                        row[j] = value.item()
            rows.append(tuple(row))
        if rows != self.rows or self.vectors is None:
            for i, (group, row) in enumerate(zip(groups, rows, strict=True)):
                if self.vectors is None or row[1:] != self.rows[i][1:]:
                    check_options(group, reads_devices=False)
                elif row != self.rows[i]:  # a scheduler has moved lr, which comes first
                    check_number("lr", group["lr"], RANGES["lr"], reads_devices=False)
            self.small = torch.tensor(rows, dtype=self.dtype, device="cpu").T.contiguous()
            self.matrix = self.small.to(self.device, non_blocking=True)[:, self.index]
            self.rows, self.vectors = rows, Options(*self.matrix.unbind())
        return self.with_tensors(tensors) if tensors else self.vectors

    def tensors(self) -> tuple[Tensor, ...]:
        """What a step reads, on the host and on the device."""
        return self.small, self.matrix, self.index

    def matrix_of(self, options: Options) -> Tensor:
        """The vectors as one matrix, one row per option."""
        return self.matrix if options is self.vectors else torch.stack(list(options))

    def with_tensors(self, tensors: list[tuple[int, int, Tensor]]) -> Options:
        """The vectors with device tensors filled in at (option, group)."""
        columns = list(self.matrix.unbind())
        for row, group, value in tensors:
            value = value.to(self.device, self.dtype).reshape(())
            columns[row] = torch.where(self.index == group, value, columns[row])
        return Options(*columns)


def as_numbers(group: dict[str, Any]) -> Iterator[float | Tensor]:
    """A group's options as numbers, in the order of :class:`~adamo_optim.control.Options`."""
    target = group["curvature_target"]
    yield group["lr"]
    yield from group["betas"]
    yield group["eps"]
    yield group["weight_decay"]
    yield group["radial_lr_ratio"]
    yield _or_nan(group["radial_lr"])
    yield group["radial_beta"]
    yield float(target == "auto")
    yield _or_nan(None if target == "auto" else target)
    yield group["curvature_beta"]
    yield float(group["decay_lr"] == "tangential")
    yield {"additive": 0.0, "auto": 0.5, "angular": 1.0}[group["tangential"]]
    yield group["low_dim_scale"]
    yield _or_nan(group["delta"])
    yield group["wd_ratio"]
    yield float(group["guard"])
    yield -1.0 if group["maximize"] else 1.0
    rms = group["angular_rms"]
    yield 0.0 if isinstance(rms, str) else _or_nan(rms)
    yield float(group["radial"] == "adam")
    yield {"entry": 0.0, "auto": 0.5, "block": 1.0}[group["second_moment"]]
    yield low_dim_decay(group)


def _or_nan(value: float | Tensor | None) -> float | Tensor:
    return math.nan if value is None else value
