"""The parameters that do not turn: torch's own AdamW, in the fastest of its forms."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Adam, AdamW
from torch.optim.adamw import adamw
from torch.utils._foreach_utils import (
    _get_foreach_kernels_supported_devices,
    _get_fused_kernels_supported_devices,
)

from .buckets import same
from .checkpoint import check_shape
from .dtensor import local, mesh_of
from .geometry import is_dense
from .options import check_numbers, refuse_foreign

NATIVE = (Tensor, torch.nn.Parameter)
ADAM: Any = Adam  # its lists are AdamW's since torch 2.7, and the same in 2.6
CHECKED = ("lr", "weight_decay", "eps", "maximize", "amsgrad")
GRADIENT, IS_SPARSE = attrgetter("grad"), attrgetter("is_sparse")


class Following:
    """The parameters of a group that follow AdamW; ``fused``: by torch's fused form.

    Most of the host's time in torch's own step is spent on collecting lists of tensors. While
    nothing but the gradients is new, a step here is torch's kernel on the lists of the last one.
    """

    def __init__(self, params: list[Tensor], names: list[str], fused: bool | None) -> None:
        self.params, self.names, self.fused = params, names, fused
        self.numbers: list[Any] = []  # the options of the last step
        self.lists: list[list[Tensor]] = []  # moments and steps; empty: to be collected
        self.strides: list[tuple[int, ...]] = []
        self.sizes: list[int] = []
        self.states: list[dict[str, Any]] = []
        self.entries: list[Any] = []

    def check(self, group: dict[str, Any], name: str) -> None:
        """Options that somebody has changed since the last step."""
        new = [*group["betas"], *map(group.get, CHECKED)]
        if not same_numbers(new, self.numbers):
            check_numbers(group, reads_devices=False)
            refuse_foreign(group, name)
            self.numbers = new

    def step(self, group: dict[str, Any], optimizer: AdamW, **amp: Tensor | None) -> None:
        """One step of AdamW; torch makes the lists and the state."""
        # As Dynamo does with torch's own optimizers: a count on the host would be a constant.
        compiling = torch.compiler.is_compiling()
        capturable = group["capturable"] or compiling
        numbers: dict[str, Any] = dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        numbers |= {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
        if self.lists and not compiling and self.repeat(numbers, amp):
            return
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        fused = self.fused
        those = {**group, "params": self.params, "fused": fused, "capturable": capturable}
        has_complex = ADAM._init_group(optimizer, those, *lists)
        if not compiling:
            names = dict(zip(map(id, self.params), self.names, strict=True))
            for p, moment in zip(lists[0], lists[2], strict=True):
                check_shape(moment, p, names[id(p)])
        if fused and group["fused"] is None and not laid_out_alike(*lists[:4]):
            fused = None  # torch's own default, which takes any layout
        adamw(
            *lists,
            foreach=group["foreach"],
            capturable=capturable,
            differentiable=group["differentiable"],
            fused=fused,
            has_complex=has_complex,
            amsgrad=False,
            **numbers,
            **amp,
        )
        if self.fused and not compiling:
            self.keep(lists, optimizer.state)

    def keep(self, lists: list[list[Tensor]], state: Mapping[Tensor, dict[str, Any]]) -> None:
        """The lists for the next steps, if they are of all parameters and of one kind."""
        params, _, *self.lists = lists  # the gradients are not ours to keep
        kinds = {(type(p), p.device, p.dtype) for p in params}
        odd = len(kinds) != 1 or mesh_of(params[0]) is not None
        if odd or len(params) != len(self.params) or not laid_out_alike(params, *self.lists[:2]):
            self.lists = []
            return
        self.strides, self.sizes = list(map(Tensor.stride, params)), list(map(Tensor.numel, params))
        self.states = [state[p] for p in params]
        self.entries = entries_of(self.states)

    def repeat(self, numbers: dict[str, Any], amp: Mapping[str, Tensor | None]) -> bool:
        """The step on the lists of the last one; False if anything but gradients is new."""
        grads: list[Any] = list(map(GRADIENT, self.params))
        if (
            any(map(is_, grads, repeat(None)))
            or any(map(IS_SPARSE, grads))
            or any(isinstance(x, Tensor) for x in (*numbers.values(), *amp.values()))
            or not same(entries_of(self.states), self.entries)
            or list(map(Tensor.stride, self.params)) != self.strides
            or list(map(Tensor.stride, grads)) != self.strides
            # strides of a dense tensor say nothing about its first dimension; gradients that do
            # not have the size of their parameter are refused by torch
            or list(map(Tensor.numel, self.params)) != self.sizes
        ):
            return False
        torch._foreach_add_(self.lists[-1], 1)
        torch._fused_adamw_(self.params, grads, *self.lists, amsgrad=False, **numbers)
        return True


def entries_of(states: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))


def fuses(group: dict[str, Any], params: list[Tensor]) -> bool | None:
    """Whether torch's fused form updates these: where nothing else is asked for and it exists."""
    if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
        return group["fused"]
    devices = _get_fused_kernels_supported_devices()
    able = all(
        not is_lazy(p)
        and p.device.type in devices
        and p.is_floating_point()
        and type(local(p)) in NATIVE
        and is_dense(local(p))
        for p in params
    )
    # torch's fused and foreach forms take no lists of both kinds, or of several meshes
    return True if params and able and len({mesh_of(p) for p in params}) == 1 else None


def form(group: dict[str, Any], params: list[Tensor]) -> str:
    """Which of its forms torch takes, for ``explain()``."""
    if fuses(group, params):
        return "torch fused"
    devices = _get_foreach_kernels_supported_devices()
    foreach = group["foreach"]
    if foreach is None and group["fused"] is None:
        foreach = all(type(p) in NATIVE and p.device.type in devices for p in params)
    return "torch foreach" if foreach and not group["differentiable"] else "torch for-loop"


def laid_out_alike(params: list[Tensor], *others: list[Tensor]) -> bool:
    """Whether gradients and moments have the strides of their parameters.

    torch's fused kernels go over memory without looking: on CUDA they raise, on a CPU they are
    wrong in silence.
    """
    strides, sizes = list(map(Tensor.stride, params)), list(map(Tensor.numel, params))
    return all(
        list(map(Tensor.stride, tensors)) == strides and list(map(Tensor.numel, tensors)) == sizes
        for tensors in others
    )


def same_numbers(new: list[Any], old: list[Any]) -> bool:
    """Equal, or for tensors the very same: no waiting for a device."""
    return len(new) == len(old) and all(
        a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
        for a, b in zip(new, old, strict=True)
    )
