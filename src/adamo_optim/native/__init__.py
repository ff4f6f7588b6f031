"""The three passes and the two laws on the CPU: ``kernel.c``, and how Python calls it.

The extension ``_kernel`` is optional: where it was not built, :func:`unsupported` says so and
another backend takes over. ``ADAMO_NATIVE_LIBRARY`` names another build of it, for tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import geometry
from ..control import First, Second, Sums

if TYPE_CHECKING:
    from ..state import Bucket, Record, Work

# The fields of `Row` in law.h, in their order.
NUMBERS = (*Sums._fields, "uw", "uu", "sign", "p", "q", "beta1", "beta2", "debias1", "debias2")
NUMBERS += ("eps", "eta_radial", "a1", "b", "tau")
FLAGS = ("live", "use_gradient", "keep_gradient", "low_dim", "scale_invariant", "guarded_scale")
FLAGS += ("guarded_factor", "guarded_decay", "guarded_update")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)

_records: WeakKeyDictionary[Bucket, tuple[Tensor, Record]] = WeakKeyDictionary()


@cache
def kernel() -> ModuleType | str:
    """The compiled module, or why there is none."""
    path = os.environ.get("ADAMO_NATIVE_LIBRARY")
    name = f"{__name__}._kernel"
    try:
        if path is None:
            return importlib.import_module(name)
        loader = ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    except (ImportError, AttributeError) as error:  # AttributeError: a torch without DLPack's table
        return f"the native kernel is not available ({error})"


def unsupported(p: Tensor) -> str:
    """Why this backend cannot update ``p``; empty if it can."""
    if p.device.type != "cpu":
        return f"the native kernel runs on the CPU, not on {p.device.type}"
    if type(p) not in (Tensor, torch.nn.Parameter):
        return f"the native kernel does not know {type(p).__name__}"
    if p.dtype not in (*DTYPES, *COMPLEX):
        return f"the native kernel has no code for {p.dtype}"
    if not torch.ops.aten.is_non_overlapping_and_dense(p.detach()):
        return "the native kernel needs a dense memory layout"
    module = kernel()
    return module if isinstance(module, str) else ""


@torch._disable_dynamo
def step(work: Work, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
    """One step of a bucket, in place; the same for any number of threads.

    ``grad_scale`` divides the gradients, a nonzero ``found_inf`` skips the step: what a
    ``GradScaler`` hands to optimizers with fused kernels.
    """
    if found_inf is not None and found_inf.item():
        return
    bucket, blocks, _ = work
    if any(map(Tensor.is_neg, blocks.g)):  # a lazy minus sign is not in the memory
        blocks.g = [g.resolve_neg() for g in blocks.g]
        blocks.sampled = [None if g is None else g.resolve_neg() for g in blocks.sampled]
    odd = _call(work, grad_scale)
    if odd:
        for i in odd:
            _lay_out_alike(work, i)
        odd = _call(work, grad_scale)
    if odd:
        names = ", ".join(bucket.names[blocks.slots[i]] for i in odd)
        raise RuntimeError(
            f"the native kernel needs dense parameters, and {names} changed its memory layout. "
            "Make it contiguous, or pass foreach=True to AdamO."
        )
    torch.autograd.graph.increment_version(blocks.w)
    bucket.last = _records[bucket][1]


def _call(work: Work, grad_scale: Tensor | None) -> list[int]:
    """Run the kernel, unless it names blocks whose tensors differ in layout."""
    module = kernel()
    assert isinstance(module, ModuleType), module
    bucket, blocks, options = work
    rows, _ = _record(bucket)
    # as GradScaler.unscale_ does it
    inverse = 1.0 if grad_scale is None else float(grad_scale.double().reciprocal().float())
    return module.step(
        blocks.w,
        blocks.g,
        blocks.m,
        blocks.v,
        blocks.previous,
        blocks.sampled,
        blocks.slots,
        options,
        bucket.traits,
        bucket.memory,
        rows,
        inverse,
        torch.get_num_threads(),
    )


def _record(bucket: Bucket) -> tuple[Tensor, Record]:
    """Memory for a bucket's rows, and the views of it that make a :class:`Record`."""
    if bucket not in _records:
        _records[bucket] = _new_record(bucket)
    rows, record = _records[bucket]
    if record.active is not bucket.active:
        record = record._replace(active=bucket.active)
        _records[bucket] = rows, record
    return rows, record


def _new_record(bucket: Bucket) -> tuple[Tensor, Record]:
    from ..state import Record

    numbers = 8 * len(NUMBERS)  # bytes; the flags follow, one byte each
    rows = torch.zeros(len(bucket.params), -(-(numbers + len(FLAGS)) // 8), dtype=torch.float64)
    flags = rows.view(torch.bool)[:, numbers : numbers + len(FLAGS)]
    views = dict(zip(NUMBERS, rows[:, : len(NUMBERS)].unbind(1), strict=True))
    views.update(zip(FLAGS, flags.unbind(1), strict=True))
    sums, first, second = (
        kind(*(views[name] for name in kind._fields)) for kind in (Sums, First, Second)
    )
    record = Record(sums, views["uw"], views["uu"], first, second, views["tau"], bucket.active)
    return rows, record


def _lay_out_alike(work: Work, i: int) -> None:
    """Give block ``i``'s state and gradient the memory layout of its parameter.

    The state for good: it was loaded, or the parameter's layout has changed. The gradient for
    this step only.
    """
    bucket, blocks, _ = work
    p, state = bucket.params[blocks.slots[i]], bucket.states[blocks.slots[i]]
    for key, column in (("exp_avg", blocks.m), ("exp_avg_sq", blocks.v)):
        if state[key].stride() != p.stride():
            state[key] = _copy(state[key], p)
            column[i] = geometry.as_real(state[key])
    previous, sampled = blocks.previous[i], blocks.sampled[i]
    blocks.g[i] = _copy(blocks.g[i], blocks.w[i])
    if previous is not None:
        like = blocks.w[i] if previous.shape == blocks.w[i].shape else previous.contiguous()
        if previous.stride() != like.stride():
            previous = blocks.previous[i] = state["previous_grad"] = _copy(previous, like)
        blocks.sampled[i] = _copy(sampled, previous)


def _copy(x: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like, dtype=x.dtype, requires_grad=False).copy_(x)
