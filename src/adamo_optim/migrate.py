"""Continue a running AdamW or Adam as AdamO."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from . import geometry
from .options import DEFAULTS, users_level
from .rules import rule_of
from .state import initialize, set_mean_square

if TYPE_CHECKING:
    from .optimizer import AdamO

FOREIGN = ("amsgrad", "decoupled_weight_decay", "foreach", "fused", "differentiable")


def from_adamw(
    cls: type[AdamO], optimizer: Optimizer, scheduler: Any, options: dict[str, Any]
) -> AdamO:
    """What :meth:`AdamO.from_adamw` does; its docstring has the arguments.

    lr, betas, eps and maximize are taken over, and the weight decay is translated: see
    :func:`translated_decay`. The moments are kept; with ``radial="sgd"`` the first one is split
    into its tangential part and the radial scalar ⟨m, w⟩/‖w‖.
    """
    if not isinstance(optimizer, Adam):  # AdamW is a subclass
        raise TypeError(
            f"from_adamw needs a torch.optim.AdamW or torch.optim.Adam, "
            f"got {type(optimizer).__name__}"
        )
    if scheduler is not None and "lr" in options and not isinstance(options["lr"], Tensor):
        raise ValueError(
            f"lr={options['lr']} and a scheduler: some schedulers go on from it, others from the "
            "rate they began with. Leave lr out, or make a new scheduler for the new optimizer."
        )
    groups = [_group(group, options) for group in optimizer.param_groups]
    defaults = _taken_over(optimizer.defaults, options)  # for groups that are added later
    new = cls(groups, **{k: v for k, v in defaults.items() if k in DEFAULTS}, **options)
    with torch.no_grad():
        for p, _, group, number in new._parameters():
            old = optimizer.state.get(p)
            if old:
                initialize(new.state[p], p, group, number)  # also if it has been frozen since
                _take_over(new.state[p], old, p, group)
    new._layout = None
    if scheduler is not None:
        _Unchanged(new)
        for one in scheduler if isinstance(scheduler, list | tuple) else [scheduler]:
            _move_scheduler(one, optimizer, new)
    return new


class _Unchanged(LRScheduler):
    """Leaves the learning rate alone: schedulers ask that one was built on their optimizer."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _move_scheduler(scheduler: Any, old: Optimizer, new: AdamO) -> None:
    if getattr(scheduler, "optimizer", None) not in (old, new):
        raise ValueError(f"{type(scheduler).__name__} is no scheduler of this optimizer")
    scheduler.optimizer = new
    for part in getattr(scheduler, "_schedulers", ()):
        _move_scheduler(part, old, new)


def _group(old: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    if old.get("amsgrad"):
        raise ValueError("from_adamw cannot continue amsgrad=True: AdamO has no maximum of v")
    group = _taken_over(old, options)
    group["params"] = list(old["params"])
    if "param_names" in old:
        group["params"] = list(zip(old["param_names"], old["params"], strict=True))
        del group["param_names"]
    if group.get("weight_decay") and not old.get("decoupled_weight_decay"):
        warnings.warn(
            "weight_decay of torch.optim.Adam is an L2 term in the gradient. AdamO's is "
            "decoupled, as AdamW's is, and takes it over as if it were that.",
            UserWarning,
            stacklevel=users_level(),
        )
    return group


def _taken_over(old: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What AdamO keeps of a group of AdamW, or of its defaults, in its own terms."""
    kept = {
        k: v.clone() if isinstance(v, Tensor) else v  # a learning rate that schedulers write into
        for k, v in old.items()
        if k not in FOREIGN and k not in options
    }
    if "weight_decay" in kept:
        decay = kept["weight_decay"]
        kept["weight_decay"] = translated_decay(old, {**DEFAULTS, **kept, **options})
        if kept["weight_decay"] is not decay and "low_dim_decay" not in options:
            kept["low_dim_decay"] = decay  # these have no radial step
    return kept


def translated_decay(old: dict[str, Any], options: dict[str, Any]) -> Any:
    """AdamO's λ for the weight decay of an AdamW group; ρ is ``radial_lr_ratio``.

    With ``radial="adam"`` it is AdamW's: ρ scales a norm's own steps and its decay alike. With
    ``radial="sgd"`` the decay per step stays what it was: λ = weight_decay/ρ.
    """
    decay, ratio, absolute = (options[k] for k in ("weight_decay", "radial_lr_ratio", "radial_lr"))
    if options["radial"] == "adam" or options["decay_lr"] == "tangential":
        return decay
    if absolute is not None:
        # in a warm-up that begins at 0, initial_lr is the rate it leads to
        lr = float(options["lr"]) or float(old.get("initial_lr", 0.0))
        ratio = float(absolute) / lr if lr > 0 else 0.0
    return decay / ratio if float(ratio) > 0 else decay


def _take_over(
    state: dict[str, Any], old: dict[str, Any], p: Tensor, group: dict[str, Any]
) -> None:
    step = torch.as_tensor(old["step"])
    m = old["exp_avg"].to(state["exp_avg"].dtype)
    state["step"].copy_(step)
    state["exp_avg_sq"].copy_(old["exp_avg_sq"])
    state["exp_avg"].copy_(m)
    set_mean_square(state)
    if rule_of(p, group)[0] == "low_dim":
        return
    scalar = state["radial_momentum"].dtype
    w = geometry.as_real(p).to(scalar)
    mw, ww = geometry.whole_dot(geometry.as_real(m).to(scalar), w), geometry.whole_dot(w, w)
    if float(ww) == 0 or float(step) == 0:
        return
    if group["radial"] == "sgd":
        across = geometry.as_real(m) - w * (mw / ww)
        geometry.as_real(state["exp_avg"]).copy_(across)
    # the two momenta may forget at different rates: keep the bias-corrected value
    beta1, radial_beta, t = float(group["betas"][0]), float(group["radial_beta"]), float(step)
    state["radial_momentum"].copy_(mw / ww.sqrt() * (1 - radial_beta**t) / (1 - beta1**t))
