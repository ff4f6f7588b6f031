"""The fused backend of the CPU: ``kernel.c``, and how Python calls it.

The compiled module ``_kernel`` is optional. Where it was not built :func:`unsupported` says so, and
another backend takes over. ``ADAMO_NATIVE_LIBRARY`` names another build of it, for tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib.machinery import ExtensionFileLoader
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..dtensor import as_real, local
from ..geometry import is_dense
from ..law import TurnSums

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)
REDUCE, MOMENTS, APPLY, ALL = range(4)  # kernel.c's phases


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
    except ImportError as error:
        return f"the native kernel is not available: {error}"


def unsupported(p: Tensor) -> str:
    """Why the native kernel cannot update ``p``; empty if it can."""
    if type(p) not in (Tensor, torch.nn.Parameter):
        return f"the native kernel does not take {type(p).__name__}"
    if p.dtype not in DTYPES:
        return f"the native kernel does not take {p.dtype}"
    if not is_dense(p):
        return "the native kernel takes dense tensors only, and this one is strided"
    module = kernel()
    return module if isinstance(module, str) else ""


class Plan:
    """What steps of a bucket have in common: the record, and lists with an entry per parameter."""

    def __init__(self, bucket: Any) -> None:
        shape = (len(bucket.RECORD), bucket.blocks)
        self.record = torch.zeros(shape, dtype=torch.float64, device="cpu")
        self.buffers = [[state.get(key) for state in bucket.states] for key in bucket.BUFFERS]
        self.in_place = not bucket.holds_shards and not any(p.is_complex() for p in bucket.params)
        starts = zip(accumulate([0, *bucket.sizes]), bucket.rows_here, strict=False)
        self.columns = [start + first for start, (_, first) in starts]
        self.blocks = [1 if rows is None else rows for rows, _ in bucket.rows_here]

    def real(self, tensors: list[Any]) -> list[Any]:
        """This rank's tensors, complex ones as pairs of real numbers; None stays None."""
        if self.in_place:
            return tensors
        return [None if x is None else as_real(local(x)) for x in tensors]


class Native(ABC):
    """A step of a bucket in the native kernel; all of it at once or, sharded, pass by pass.

    ``grad_scale`` divides the gradients and a nonzero ``found_inf`` skips the step: what a
    ``GradScaler`` hands to optimizers whose kernels unscale by themselves.
    """

    PHASES: tuple[int, ...]  # of a step, pass by pass
    SUMS: tuple[slice, ...]  # the rows of the record that each pass but the last one fills

    def __init__(
        self,
        bucket: Any,
        grads: list[Tensor | None],
        options: Any,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        self.bucket = bucket
        if bucket.plan is None:
            bucket.plan = Plan(bucket)
        self.plan: Plan = bucket.plan
        self.lists = self.lists_of(self.plan.real(bucket.params), self.plan.real(grads))
        pairs = zip(bucket.takes_part, self.plan.blocks, strict=True)
        takes_part = [takes and blocks > 0 for takes, blocks in pairs]
        if not all(takes_part):
            here = [i for i, takes in enumerate(takes_part) if takes]
            self.lists = {name: [x[i] for i in here] for name, x in self.lists.items()}
        self.options, self.settings = options, bucket.table.matrix_of(options).contiguous()
        self.skipped = found_inf is not None and bool(found_inf.item())
        self.inverse_scale = 1.0  # rounded as GradScaler.unscale_ does
        if grad_scale is not None:
            self.inverse_scale = float(grad_scale.double().reciprocal().float())
        self.passed = 0

    @abstractmethod
    def lists_of(self, w: list[Tensor], g: list[Tensor | None]) -> dict[str, list[Any]]:
        """What the kernel takes of every parameter, in its order."""

    @abstractmethod
    def function(self, module: Any) -> Callable[..., list[int]]: ...

    @torch._disable_dynamo
    @torch.no_grad()
    def run(self) -> None:
        self.call_in_layout(ALL)
        self.finish()

    def begin(self) -> Tensor:
        self.call_in_layout(REDUCE)
        return self.plan.record[self.SUMS[0]].T.clone()

    def proceed(self, rows: Tensor, active: Tensor) -> Tensor | None:
        record, flags = self.plan.record, active.tolist()
        record[self.SUMS[self.passed]] = rows.T
        self.passed += 1
        self.call(self.PHASES[self.passed], [flags[column] for column in self.lists["columns"]])
        if self.passed < len(self.SUMS):
            return record[self.SUMS[self.passed]].T.clone()
        self.finish()
        return None

    def finish(self) -> None:
        if not self.skipped:
            torch.autograd.graph.increment_version(self.lists["w"])
            self.bucket.last = self.plan.record.clone

    def call_in_layout(self, phase: int) -> None:
        """Run the kernel, after bringing gradients that differ in layout into their parameter's."""
        odd = self.call(phase)
        for i in odd:
            self.lay_out(i)
        if odd and (odd := self.call(phase)):
            here = [
                self.bucket.names[self.plan.columns.index(self.lists["columns"][i])] for i in odd
            ]
            names = ", ".join(here)
            raise RuntimeError(f"the state of {names} no longer has the layout it was made with")

    def lay_out(self, i: int) -> None:
        self.lists["g"][i] = copy_like(self.lists["g"][i], self.lists["w"][i])

    def call(self, phase: int, active: list[bool] | None = None) -> list[int]:
        """Run the kernel; or nothing, if it names parameters whose tensors differ in layout."""
        if self.skipped:
            return []
        matrices = (self.settings, self.bucket.traits, self.bucket.memory, self.plan.record)
        how = (self.inverse_scale, torch.get_num_threads(), phase)
        return self.function(kernel())(*self.lists.values(), active or [], *matrices, *how)


class Work(Native):
    """A step of AdamO."""

    PHASES = (REDUCE, MOMENTS, APPLY)
    SUMS = (slice(0, 5), slice(5, 7))

    def lists_of(self, w: list[Tensor], g: list[Tensor | None]) -> dict[str, list[Any]]:
        bucket, plan = self.bucket, self.plan
        m, v, previous = map(plan.real, plan.buffers)
        pairs = zip(bucket.seeds, bucket.stochastic, strict=True)
        seeds = [seed if drawn else None for seed, drawn in pairs]
        slices = list(map(slice_of, g, bucket.rows)) if any(bucket.rows) else list(g)
        tensors = {"w": w, "g": g, "m": m, "v": v, "previous": previous, "slices": slices}
        numbers = {"columns": plan.columns, "blocks": plan.blocks, "seeds": seeds}
        return {**tensors, **numbers, "ratios": bucket.ratios}

    def lay_out(self, i: int) -> None:
        g, like = self.lists["g"][i], self.lists["previous"][i]
        super().lay_out(i)
        if self.lists["slices"][i] is g:
            self.lists["slices"][i] = self.lists["g"][i]
        elif like is not None:
            self.lists["slices"][i] = copy_like(self.lists["slices"][i], like)

    def function(self, module: Any) -> Callable[..., list[int]]:
        return module.step


class TurnWork(Native):
    """A step of weights that turn."""

    PHASES = (REDUCE, APPLY)
    SUMS = (slice(0, 4),)

    def lists_of(self, w: list[Tensor], g: list[Tensor | None]) -> dict[str, list[Any]]:
        (m,) = map(self.plan.real, self.plan.buffers)
        return {"w": w, "g": g, "m": m, "columns": self.plan.columns, "blocks": self.plan.blocks}

    def proceed(self, rows: Tensor, active: Tensor) -> None:
        if not self.skipped:
            sums = TurnSums(*rows.unbind(1))
            _, memory, record = self.bucket.laws(self.options, sums, active)
            self.bucket.write(memory)
            self.plan.record.copy_(torch.stack([x.double() for x in record]))
            flags = active.tolist()
            self.call(APPLY, [flags[column] for column in self.lists["columns"]])
        self.finish()

    def function(self, module: Any) -> Callable[..., list[int]]:
        return module.turn


def slice_of(g: Tensor | None, rows: tuple[int, int] | None) -> Tensor | None:
    """The part of a gradient that its g⁻ is of."""
    return g if g is None or rows is None else g.narrow(0, *rows)


def copy_like(x: Tensor, like: Tensor) -> Tensor:
    """The values of ``x`` in the layout of ``like``."""
    return torch.empty_like(like, dtype=x.dtype, requires_grad=False).copy_(x)
