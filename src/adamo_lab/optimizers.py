"""Every optimizer of the laboratory and its hyper-parameters on every task, in one place.

``REGISTRY`` says what an optimizer is, ``SETTINGS`` with which numbers it runs. Importing this file
needs no torch, so that a report can be drawn without it; :func:`build` does.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import environment
from .errors import LabError, lookup, require
from .records import is_number

if TYPE_CHECKING:
    import torch
    from torch import nn

Hyper = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One optimizer: how it is called, drawn and made."""

    label: str
    colour: str  # of the Okabe-Ito palette, which colour-blind readers can tell apart
    line: str  # a matplotlib line style
    kind: str  # "adam", "adamw", "adamp", "sgd", "muon", "adamo", "angular" or "by"
    rules: str = "model"  # AdamO: "model" finds scale-invariant weights, "shape" does not look


REGISTRY: dict[str, Entry] = {
    "adam": Entry("Adam", "#56B4E9", ":", "adam"),
    "adamw": Entry("AdamW", "#0072B2", "--", "adamw"),
    "adamp": Entry("AdamP", "#009E73", "-.", "adamp"),
    "sgd": Entry("SGD", "#000000", ":", "sgd"),
    "muon": Entry("Muon", "#009E73", "--", "muon"),
    "angular": Entry("AngularAdamW", "#CC79A7", "-", "angular"),
    "angular_by": Entry("AngularAdamW, other second moments", "#CC79A7", ":", "by"),
    "adamo": Entry("AdamO", "#D55E00", "-", "adamo"),
    "adamo_paper": Entry("AdamO (paper)", "#E69F00", "-", "adamo", "shape"),
    "adamo_isotropic": Entry("AdamO-Isotropic", "#CC79A7", "--", "adamo", "shape"),
    "adamo_no_projection": Entry("AdamO w/o Projection", "#999999", "-", "adamo", "shape"),
    "adamo_no_dimension": Entry("AdamO w/o Dimension", "#999999", "--", "adamo", "shape"),
    "adamo_no_curvature": Entry("AdamO w/o Curvature", "#999999", "-.", "adamo", "shape"),
}

# AdamO's defaults, spelled out: a record must not change its meaning when they do. A test compares.
ADAMO = {
    "weight_decay": 1e-3,
    "radial_lr_ratio": 100.0,
    "curvature_target": "auto",
    "decay_lr": "radial",
    "guard": True,
}

# So AngularAdamW's; its lr and weight_decay are AdamW's of the task.
ANGULAR = {"angular_rms": 0.015, "max_angle": 0.05}


def common(lr: float, decay: float, adamp_decay: float = 0.01) -> dict[str, Hyper]:
    """Settings at one learning rate, SGD's apart."""
    return {
        "adam": {"lr": lr},
        "adamw": {"lr": lr, "weight_decay": decay},
        "adamp": {"lr": lr, "weight_decay": adamp_decay, "delta": 0.1, "wd_ratio": 0.1},
        "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
        "angular": {**ANGULAR, "lr": lr, "weight_decay": decay},
        "angular_by": {**ANGULAR, "second_moment": "entry", "lr": lr, "weight_decay": decay},
        "adamo": {**ADAMO, "lr": lr},
    }


# CIFAR-100: section 3.1 of the paper. τ_target is printed nowhere; 1 makes Eq. 6 read η_ρ/√τ.
# "late" takes effect when the protocol switches projection on (epoch 200 of 300).
LATE = {"late": {"delta": 0.1, "wd_ratio": 0.5}}
PAPER = {"radial_lr": 5e-3, "weight_decay": 2e-4, "curvature_target": 1.0, "guard": False}
FULL = {**PAPER, **LATE, "lr": 8e-4}
CIFAR100 = {
    **common(8e-4, 0.01),
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "swa_lr": 0.0125},
    "adamo_paper": FULL,
    "adamo_isotropic": {**FULL, "decay_lr": "tangential"},
    "adamo_no_projection": {**PAPER, "lr": 8e-4},
    "adamo_no_dimension": {**FULL, "low_dim": None},
    "adamo_no_curvature": {**FULL, "curvature_target": None},
}

# Modular addition, appendix A.5: "learning rate 10⁻³ and weight decay 1.0" for every optimizer.
# That is AdamW's decay; the literal AdamO with λ = 1 destroys its weights, and is kept to show it.
GROKKING = {
    **common(1e-3, 1.0, adamp_decay=1.0),
    "adamo_paper": {**PAPER, "lr": 1e-3, "radial_lr": 1e-3, "weight_decay": 1.0},
    "adamo_isotropic": {**ADAMO, "lr": 1e-3, "weight_decay": 1.0, "decay_lr": "tangential"},
}

SMALL = {**common(1e-3, 0.1), "adamo_paper": FULL}  # digits, and the start for your model
TOY2D = {**common(1e-2, 0.1), "adamo_paper": {**PAPER, "lr": 1e-2}}
LANGUAGE = {
    **common(2e-3, 0.1),
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    "adamo_paper": {**PAPER, "lr": 2e-3},
}
VIT = {
    **{name: hyper for name, hyper in common(1e-3, 0.1).items() if name != "sgd"},
    "muon": {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95},
    "adamo_paper": {**PAPER, "lr": 1e-3},
}
GPT = {name: {**hyper, "betas": (0.9, 0.95)} for name, hyper in VIT.items()}

SETTINGS: dict[str, dict[str, Hyper]] = {
    "cifar100": CIFAR100,
    "digits": SMALL,
    "gpt": GPT,
    "grokking": GROKKING,
    "language": LANGUAGE,
    "toy2d": TOY2D,
    "vit": VIT,
    "yours": SMALL,
}

# Arguments of the lab's own, beside those of the optimizer's class: of the loop, and of AdamW here.
OWN = ("late", "swa_lr")
DECAY_VECTORS = "decay_vectors"
TURNING_LR = "turning_lr"  # of the weights that AngularAdamW turns, times lr: a control
OVERRIDES = "overrides"  # of param_groups, for AdamO and AngularAdamW: rules declared by hand
LR_FACTOR = "lr_factor"  # of a group, times what a schedule sets
WHOLE = ("low_dim",)  # a number of entries


def entry(name: str) -> Entry:
    return lookup("optimizer", name, REGISTRY)


def settings(task: str, name: str, changes: Mapping[str, Any] | None = None) -> Hyper:
    """The hyper-parameters of an optimizer on a task, with a user's changes."""
    entry(name)
    known = ", ".join(SETTINGS[task])
    there = name in SETTINGS[task]
    require(there, f"{name!r} has no settings of its own on {task}; those with some: {known}")
    return {**SETTINGS[task][name], **{k: as_usual(k, v) for k, v in (changes or {}).items()}}


def as_usual(key: str, value: Any) -> Any:
    """1 as 1.0, but where whole numbers are usual: they are one setting and must be one run."""
    return float(value) if type(value) is int and key not in WHOLE else value


def build(
    name: str, hyper: Mapping[str, Any], model: nn.Module, example: Any, *, graph: bool = False
) -> tuple[torch.optim.Optimizer, list[str]]:
    """Make the optimizer, and collect the warnings it gave.

    With ``graph``, the step can be captured into a CUDA graph: the learning rate is a tensor, and
    nothing reads the device.
    """
    import torch

    what = entry(name)
    check_own(name, hyper)
    device = next(model.parameters()).device
    arguments = {k: v for k, v in hyper.items() if k not in OWN}
    if graph:
        arguments["lr"] = torch.tensor(float(hyper["lr"]), device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer = make(what, model, example, arguments, graph)
        except (TypeError, ValueError) as error:
            raise LabError(f"{name} refused its hyper-parameters: {error}") from error
    return optimizer, [str(w.message) for w in caught]


def make(
    what: Entry, model: nn.Module, example: Any, arguments: Hyper, graph: bool
) -> torch.optim.Optimizer:
    """AngularAdamW without an example batch, or without norm layers, is AdamW."""
    from adamo_optim import param_groups

    cls: Any = class_of(what.kind)
    # torch's fused kernels know no complex numbers
    fused = {"fused": not any(p.is_complex() for p in model.parameters())}
    captured = {"capturable": graph}
    if what.kind in ("muon", "by"):
        said = f"{what.label} cannot be captured into a CUDA graph; use --engine serial"
        require(not graph, said)
    if what.kind == "muon":
        return cls(model, **fused, **arguments)
    if what.kind == "adamw":
        return cls(adamw_groups(model, example, arguments), **fused, **captured, **arguments)
    plain = {"sgd": fused, "adam": {**fused, **captured}, "adamp": {"compiled": graph}}
    if what.kind in plain:  # Adam without decay, unless ``weight_decay`` asks for coupled L2
        return cls(model.parameters(), **plain[what.kind], **arguments)
    if what.kind == "adamo" and (slow := environment.slow_backend(next(model.parameters()).device)):
        warnings.warn(slow, stacklevel=1)
    found: Any = model.named_parameters()
    if what.rules == "model":
        found = param_groups(model, example, overrides=arguments.pop(OVERRIDES, None))
    return cls(found, **({} if what.kind == "by" else captured), **arguments)


def adamw_groups(model: nn.Module, example: Any, arguments: Hyper) -> list[Hyper]:
    """``decay_vectors=False`` takes biases and norm layers out of AdamW's decay.

    ``turning_lr=4`` gives scale-invariant weights four times the learning rate.
    """
    from adamo_optim import param_groups

    groups: list[Hyper] = [{"params": list(model.parameters())}]
    if not arguments.pop(DECAY_VECTORS, True):
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        matrices = [p for p in model.parameters() if p.dim() > 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if factor := arguments.pop(TURNING_LR, None):
        found = [g for g in param_groups(model, example) if g["rule"] == "scale_invariant"]
        turning = [p for group in found for _, p in group["params"]]
        require(turning, f"{TURNING_LR} needs scale-invariant weights, and this model has none")
        ids = {*map(id, turning)}
        groups = [{**g, "params": [p for p in g["params"] if id(p) not in ids]} for g in groups]
        groups.append({"params": turning, "lr": arguments["lr"] * factor, LR_FACTOR: factor})
    return groups


def check_own(name: str, hyper: Mapping[str, Any]) -> None:
    """What no optimizer's class checks; the late phase alone reads some of it, hours later."""
    vectors, late = hyper.get(DECAY_VECTORS, True), hyper.get("late", {})
    require(isinstance(vectors, bool), f"{DECAY_VECTORS} must be true or false, got {vectors!r}")
    rate, turning = hyper.get("swa_lr", 0.0), hyper.get(TURNING_LR, 1.0)
    require(is_number(rate) and rate >= 0, f"swa_lr must be a number >= 0, got {rate!r}")
    above = is_number(turning) and turning > 0
    require(above, f"{TURNING_LR} must be a number above 0, got {turning!r}")
    for key, value in (("late", late), (OVERRIDES, hyper.get(OVERRIDES, {}))):
        require(isinstance(value, Mapping), f"{key} must be a dictionary, got {value!r}")
    fixed = {*OWN, DECAY_VECTORS, TURNING_LR, OVERRIDES}  # from the beginning
    for key in sorted(set(late) - (legal_arguments(name) - fixed)):
        raise LabError(f"{name} has no hyper-parameter {key!r} for its late phase")


def legal_arguments(name: str) -> set[str]:
    """The hyper-parameters that an optimizer takes."""
    kind = entry(name).kind
    legal = {*inspect.signature(class_of(kind).__init__).parameters} | {*OWN}
    legal -= {"self", "params", "model", "capturable", "compiled", "differentiable"}
    legal -= {"fused", "foreach"} if kind != "adamo" else set()
    own = {"adamw": {DECAY_VECTORS, TURNING_LR}}
    return legal | own.get(kind, {OVERRIDES} if kind in ("angular", "adamo", "by") else set())


def class_of(kind: str) -> type:
    import torch

    from adamo_optim import AdamO, AngularAdamW

    from .adamp import AdamP
    from .muon import MuonAdamW
    from .second_moments import AngularBy

    ours = {"adamp": AdamP, "muon": MuonAdamW, "adamo": AdamO, "angular": AngularAdamW}
    ours["by"] = AngularBy
    theirs = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return {**ours, **theirs}[kind]
