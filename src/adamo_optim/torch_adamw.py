"""The parameters that do not turn: torch's own AdamW, in the fastest of its forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.adamw import adamw
from torch.utils._foreach_utils import (
    _get_foreach_kernels_supported_devices,
    _get_fused_kernels_supported_devices,
)

from .dtensor import local, mesh_of
from .geometry import is_dense

NATIVE = (Tensor, torch.nn.Parameter)


def step(
    group: dict[str, Any],
    params: list[Tensor],
    fused: bool | None,
    init_group: Callable[..., bool],
    **amp: Tensor | None,
) -> None:
    """One step of AdamW for the parameters of a group; ``init_group`` is torch's own."""
    lists: list[list[Tensor]] = [[] for _ in range(6)]
    # As Dynamo does with torch's own optimizers: a count on the host would be a constant.
    capturable = group["capturable"] or torch.compiler.is_compiling()
    those = {**group, "params": params, "fused": fused, "capturable": capturable}
    has_complex = init_group(those, *lists)
    if fused and group["fused"] is None and not laid_out_alike(*lists[:2]):
        fused = None  # torch's own default, which takes any layout
    beta1, beta2 = group["betas"]
    adamw(
        *lists,
        foreach=group["foreach"],
        capturable=capturable,
        differentiable=group["differentiable"],
        fused=fused,
        has_complex=has_complex,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        **amp,
    )


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


def laid_out_alike(params: list[Tensor], others: list[Tensor]) -> bool:
    """Whether they have the same strides.

    torch's fused kernels go over memory without looking: on CUDA they raise, on a CPU they are
    wrong in silence.
    """
    return list(map(Tensor.stride, params)) == list(map(Tensor.stride, others))
