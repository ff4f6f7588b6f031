"""The options of both optimizers: defaults, legal values, and sentences for those that are not."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .law import NORM_FLOOR
from .ranges import CHOICES, OPTIONAL, RANGES, SHARE, Bounds, check_inside

PACKAGE = Path(__file__).parent

# AdamO on CIFAR-100, section 3.1 of the paper, to the letter. δ = 0.1 and wd_ratio = 0.5 are
# switched on at epoch 200 there; τ_target is printed nowhere, 1.0 makes Eq. 6 read η_ρ/√τ.
PAPER: dict[str, Any] = {
    "lr": 8e-4,
    "radial_lr": 5e-3,
    "weight_decay": 2e-4,
    "curvature_target": 1.0,
    "guard": False,
}

FLAGS = ("guard", "maximize", "capturable", "differentiable")
OTHERS = ("betas", "low_dim", "foreach", "fused")
NAMES = (*RANGES, *CHOICES, *FLAGS, *OTHERS)

# What people write who come from elsewhere.
MEANT = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "beta": "betas",
    "epsilon": "eps",
}
FOREIGN = {
    "amsgrad": "amsgrad=True keeps a maximum of second moments, which {} does not have; leave it "
    "out, or stay with torch.optim.AdamW",
}
COLLAPSE_DECAY = 1e-3  # decay per step above which AdamO's constructor warns


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` with name, value and legal range for the first bad option.

    Only the options that are there are looked at: the two optimizers have different ones.
    """
    check_numbers(options)
    for name in CHOICES.keys() & options.keys():
        if options[name] not in CHOICES[name]:
            legal = ", ".join(map(repr, CHOICES[name]))
            raise ValueError(f"{name} must be one of {legal}, got {options[name]!r}")
    check_low_dim(options.get("low_dim", "auto"))
    check_backend(options)
    if options.get("block") == "row" and options["previous_gradient"] == "sampled":
        raise ValueError(
            "previous_gradient='sampled' keeps the gradient of some rows only, and block='row' "
            "needs every row's: take 'bfloat16' or 'exact'"
        )


def check_numbers(options: Mapping[str, Any], reads_devices: bool = True) -> None:
    """What a law reads: numbers and flags.

    With ``reads_devices=False``, in a step, tensors on a device are taken on trust: no waiting.
    """
    for name in RANGES.keys() & options.keys():
        value = options[name]
        optional = value is None and name in OPTIONAL
        automatic = name == "curvature_target" and isinstance(value, str) and value == "auto"
        if not optional and not automatic:
            check_number(name, value, RANGES[name], reads_devices)
    for i, beta in enumerate(as_pair(options["betas"])):
        check_number(f"betas[{i}]", beta, SHARE, reads_devices)
    for name in options.keys() & set(FLAGS):
        if not isinstance(options[name], bool):
            raise ValueError(f"{name} must be True or False, got {options[name]!r}")


def refuse_foreign(group: Mapping[str, Any], name: str) -> None:
    """What torch's AdamW has and an optimizer of this name has not."""
    for option, reason in FOREIGN.items():
        if group.get(option):
            raise ValueError(reason.format(name))


def as_pair(betas: Any) -> tuple[Any, Any]:
    """Two numbers from any sequence of them, a configuration library's own kind included."""
    if isinstance(betas, (str, bytes)) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise ValueError(f"betas must be a pair of numbers, got {betas!r}")
    first, second = (
        b.item() if hasattr(b, "item") and not isinstance(b, Tensor) else b for b in betas
    )
    return first, second


def check_number(name: str, value: Any, bounds: Bounds, reads_devices: bool = True) -> None:
    """One numeric option: a real number or a tensor with one element, inside its bounds."""
    low, _, high, _ = bounds
    if type(value) is float and low < value < high:  # nearly always: a scheduler's, in every step
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        if value.device.type != "cpu" and not reads_devices:
            return
        value = value.item()
    check_inside(name, value, bounds)


def check_low_dim(value: Any) -> None:
    is_threshold = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is not None and value != "auto" and not is_threshold:
        raise ValueError(f'low_dim must be "auto", None or an integer >= 0, got {value!r}')


def check_backend(options: Mapping[str, Any]) -> None:
    for name in ("foreach", "fused"):
        if options[name] not in (None, True, False):
            raise ValueError(f"{name} must be True, False or None, got {options[name]!r}")
    if options["fused"] and options["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`")
    if options["fused"] and options["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if options["foreach"] and options["differentiable"]:
        raise RuntimeError("`foreach` does not support `differentiable`")


# ---- names that are none -----------------------------------------------------------------------


def refuse_misspelt(names: Iterable[str], where: str) -> None:
    """Raise for a name that is no option of either optimizer, but close to one.

    A group may carry keys of others, such as timm's ``lr_scale``: these pass.
    """
    for name in names:
        meant = MEANT.get(name)
        # such as no_weight_decay
        whole = [n for n in NAMES if "_" in n and str(name).endswith(f"_{n}")]
        if name not in NAMES and meant is None and not whole:
            meant = next(iter(difflib.get_close_matches(str(name), NAMES, n=1, cutoff=0.85)), None)
        if meant is not None:
            raise ValueError(f"{where} has {name!r}: did you mean {meant!r}?")


def explain_mistakes(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that answers an unknown argument, or a model, with a sentence."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        name = type(self).__name__
        params = args[0] if args else options.get("params")
        if isinstance(params, nn.Module):
            raise TypeError(
                f"{name} takes parameters, not a model: write {name}(param_groups(model, "
                "example_batch), ...) or model.parameters()"
            )
        for option in options.keys() - known.keys():
            if option in FOREIGN:
                raise TypeError(FOREIGN[option].format(name))
            close = difflib.get_close_matches(option, known, n=1)
            meant = MEANT.get(option) or (close[0] if close else None)
            hint = (
                f": did you mean {meant!r}?" if meant else f"; it has {', '.join(list(known)[2:])}"
            )
            raise TypeError(f"{name} has no option {option!r}{hint}")
        init(self, *args, **options)

    return checked


# ---- weight decay of another kind --------------------------------------------------------------


def decay_per_step(options: Mapping[str, Any]) -> float:
    """How much of a weight decay takes away in one step, before curvature scales it."""
    lr, ratio, absolute = (options[k] for k in ("lr", "radial_lr_ratio", "radial_lr"))
    if options["decay_lr"] == "radial":
        lr = ratio * lr if absolute is None else absolute
    decay = lr * options["weight_decay"]
    return decay.item() if isinstance(decay, Tensor) else float(decay)


def warn_of_collapse(groups: Sequence[Mapping[str, Any]]) -> None:
    """Someone used to AdamW's weight_decay = 0.1 is told what it means to AdamO."""
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
        f"step (half of it in about {max(1, round(steps))} steps): AdamO's weight decay is SGD's, "
        f"around 1e-3 with radial_lr_ratio=100. {fate} will suffer. Coming from AdamW, divide "
        "weight_decay by radial_lr_ratio.",
        UserWarning,
        stacklevel=users_level(),
    )


def users_level() -> int:
    """The ``stacklevel`` of the first line outside this package and torch, for a warning."""
    frame, level, ours = sys._getframe(1), 1, {PACKAGE, Path(torch.__file__).parent}
    while frame.f_back is not None and ours & set(Path(frame.f_code.co_filename).parents):
        frame, level = frame.f_back, level + 1
    return level
