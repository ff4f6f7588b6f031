"""The fused backend of the CPU: ``kernel.c``, and how Python calls it.

The compiled module ``_kernel`` is optional. Where it was not built :func:`unsupported` says so, and
another backend takes over. ``ADAMO_NATIVE_LIBRARY`` names another build of it, for tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache, partial
from importlib.machinery import ExtensionFileLoader
from operator import itemgetter
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import geometry
from ..control import First, Second, Sums

if TYPE_CHECKING:
    from ..state import Record, Work

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.complex64, torch.complex128),
)

# The fields of `Row` in law.h: float64 numbers, then flags of one byte each.
NUMBERS = (
    *("ww", "gw", "gg", "kappa", "mw", "uw", "uu", "sign", "p", "q", "beta1", "beta2"),
    *("debias1", "debias2", "eps", "eta_radial", "a1", "b", "tau"),
)
FLAGS = (
    *("live", "use_gradient", "keep_gradient", "low_dim", "scale_invariant", "guarded_scale"),
    *("guarded_factor", "guarded_decay", "guarded_update", "guarded_turn"),
)


@cache
def kernel() -> ModuleType | str:
    """The compiled module, or the reason why there is none."""
    name, path = f"{__name__}._kernel", os.environ.get("ADAMO_NATIVE_LIBRARY")
    try:
        if path is None:
            return importlib.import_module(name)
        loader = ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    except (ImportError, AttributeError) as error:  # AttributeError: torch without DLPack's table
        return f"the native kernel is not available: {error}"


def unsupported(p: Tensor) -> str:
    """Why the native kernel cannot update ``p``; empty if it can."""
    if p.device.type != "cpu":
        return f"the native kernel does not run on {p.device.type}"
    if type(p) not in (Tensor, torch.nn.Parameter):
        return f"the native kernel does not take {type(p).__name__}"
    if p.dtype not in DTYPES:
        return f"the native kernel does not take {p.dtype}"
    if not geometry.is_dense(p):
        return "the native kernel takes dense tensors only, and this one is strided"
    module = kernel()
    return module if isinstance(module, str) else ""


@torch._disable_dynamo
@torch.no_grad()
def step(work: Work, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
    """One step of a bucket.

    ``grad_scale`` divides the gradients and a nonzero ``found_inf`` skips the step: what a
    ``GradScaler`` hands to optimizers whose kernels unscale by themselves.
    """
    if found_inf is not None and found_inf.item():
        return
    inverse = 1.0  # of the loss scale, rounded as GradScaler.unscale_ does
    if grad_scale is not None:
        inverse = float(grad_scale.double().reciprocal().float())
    call_in_layout(work, inverse)
    torch.autograd.graph.increment_version(work.blocks.w)
    work.bucket.last = partial(record, work.bucket.plan, work.bucket.active)


# ---- one pass at a time, for sharded blocks ----------------------------------------------------

REDUCE, MOMENTS, APPLY, ALL = range(4)  # kernel.c's phases
SUMS, PRODUCTS = slice(0, 5), slice(5, 7)  # the columns of `rows` that passes 1 and 2 fill


def reduce(work: Work) -> Tensor:
    """Pass 1: the five sums of every block, one row each."""
    call_in_layout(work, phase=REDUCE)
    return work.bucket.plan[:, SUMS]


def moments(work: Work, rows: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Law 1 and pass 2; also returns ⟨u,w⟩ and ‖u‖², one row per block."""
    plan = work.bucket.plan
    plan[:, SUMS] = rows
    call(work, phase=MOMENTS, active=active.tolist())
    return active, plan[:, PRODUCTS]


def apply(work: Work, active: Tensor, products: Tensor) -> None:
    """Law 2 and pass 3."""
    plan = work.bucket.plan
    plan[:, PRODUCTS] = products
    call(work, phase=APPLY)
    torch.autograd.graph.increment_version(work.blocks.w)
    work.bucket.last = partial(record, plan, active)


# ---- the call ----------------------------------------------------------------------------------


def call_in_layout(work: Work, inverse_scale: float = 1.0, phase: int = ALL) -> None:
    """Run the kernel, after bringing tensors that differ in layout into that of their parameter."""
    bucket, blocks, *_ = work
    odd = call(work, inverse_scale, phase)
    if odd:
        for i in odd:
            lay_out_alike(work, i)
        odd = call(work, inverse_scale, phase)
    if odd:
        names = ", ".join(bucket.names[blocks.slots[i]] for i in odd)
        raise RuntimeError(f"the state of {names} no longer has the layout it was made with")


def call(
    work: Work, inverse_scale: float = 1.0, phase: int = ALL, active: list[bool] | None = None
) -> list[int]:
    """Run the kernel; or nothing, if it names blocks whose tensors differ in layout."""
    module = kernel()
    assert isinstance(module, ModuleType), module
    bucket, blocks, options, _ = work
    if bucket.plan is None:  # one row per block, with room for the flags
        width = len(NUMBERS) + -(-len(FLAGS) // 8)
        shape = (len(bucket.params), width)
        bucket.plan = torch.zeros(shape, dtype=torch.float64, device="cpu")
    return module.step(
        blocks.w,
        blocks.g,
        blocks.m,
        blocks.v,
        blocks.previous,
        blocks.sampled,
        blocks.slots,
        blocks.seeds,
        blocks.ratios,
        options,
        bucket.traits,
        bucket.memory,
        bucket.plan,
        inverse_scale,
        torch.get_num_threads(),
        phase,
        active or [],
    )


def lay_out_alike(work: Work, i: int) -> None:
    """Give the gradient of block ``i`` the memory layout of its parameter, for this step."""
    blocks, previous = work.blocks, work.blocks.previous[i]
    blocks.g[i] = copy_like(blocks.g[i], blocks.w[i])
    if previous is not None:
        blocks.sampled[i] = copy_like(blocks.sampled[i], previous)


def copy_like(x: Tensor, like: Tensor) -> Tensor:
    """The values of ``x`` in the layout of ``like``."""
    return torch.empty_like(like, dtype=x.dtype, requires_grad=False).copy_(x)


def record(rows: Tensor, active: Tensor) -> Record:
    """The scalars of the last step, for diagnostics."""
    from ..state import Record  # state imports the backends

    rows = rows.clone()
    flags = rows.view(torch.bool)[:, 8 * len(NUMBERS) :]
    columns = dict(zip(NUMBERS, rows.unbind(1), strict=False))  # what is left holds the flags
    columns.update(zip(FLAGS, flags.unbind(1), strict=False))  # what is left is padding
    sums, first, second = (itemgetter(*kind._fields) for kind in (Sums, First, Second))
    return Record(
        Sums(*sums(columns)),
        columns["uw"],
        columns["uu"],
        First(*first(columns)),
        Second(*second(columns)),
        columns["tau"],
        active,
    )
