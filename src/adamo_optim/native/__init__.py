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
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..blocks import Blocks, block_of
from ..buckets import Bucket
from ..dtensor import local
from ..geometry import is_dense

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.complex64, torch.complex128),
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
    except (ImportError, AttributeError) as error:  # AttributeError: torch without DLPack's table
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
        self.blocks = self.blocks_of(bucket, grads)
        self.settings = bucket.table.matrix_of(options).contiguous()
        self.skipped = found_inf is not None and bool(found_inf.item())
        self.inverse_scale = 1.0  # rounded as GradScaler.unscale_ does
        if grad_scale is not None:
            self.inverse_scale = float(grad_scale.double().reciprocal().float())
        self.passed = 0
        if bucket.plan is None:
            shape = (len(bucket.RECORD), bucket.blocks)
            bucket.plan = torch.zeros(shape, dtype=torch.float64, device="cpu")

    @abstractmethod
    def blocks_of(self, bucket: Any, grads: list[Tensor | None]) -> Blocks: ...

    @abstractmethod
    def function(self, module: Any) -> Callable[..., list[int]]: ...

    @abstractmethod
    def lists(self) -> list[list[Any]]:
        """What the kernel takes of every block."""

    @torch._disable_dynamo
    @torch.no_grad()
    def run(self) -> None:
        if not self.skipped:
            self.call_in_layout(ALL)
            self.finish()

    def begin(self) -> Tensor:
        self.call_in_layout(REDUCE)
        return self.bucket.plan[self.SUMS[0]].T.clone()

    def proceed(self, rows: Tensor, active: Tensor) -> Tensor | None:
        bucket, flags = self.bucket, active.tolist()
        bucket.plan[self.SUMS[self.passed]] = rows.T
        self.passed += 1
        self.call(self.PHASES[self.passed], [flags[block.member] for block in self.blocks])
        if self.passed < len(self.SUMS):
            return bucket.plan[self.SUMS[self.passed]].T.clone()
        self.finish()
        return None

    def finish(self) -> None:
        torch.autograd.graph.increment_version([block.w for block in self.blocks])
        self.bucket.last = self.bucket.plan.clone

    def call_in_layout(self, phase: int) -> None:
        """Run the kernel, after bringing gradients that differ in layout into their parameter's."""
        odd = self.call(phase)
        if odd:
            for i in odd:
                block = self.blocks[i]
                block.g = copy_like(block.g, block.w)
                if block.previous is not None and block.sampled is not None:
                    block.sampled = copy_like(block.sampled, block.previous)
            odd = self.call(phase)
        if odd:
            names = ", ".join(self.bucket.names[self.blocks[i].member] for i in odd)
            raise RuntimeError(f"the state of {names} no longer has the layout it was made with")

    def call(self, phase: int, active: list[bool] | None = None) -> list[int]:
        """Run the kernel; or nothing, if it names blocks whose tensors differ in layout."""
        bucket, threads = self.bucket, torch.get_num_threads()
        matrices = (self.settings, bucket.traits, bucket.memory, bucket.plan)
        how = (self.inverse_scale, threads, phase, active or [])
        return self.function(kernel())(*self.lists(), *matrices, *how)


class Work(Native):
    """A step of AdamO."""

    PHASES = (REDUCE, MOMENTS, APPLY)
    SUMS = (slice(0, 5), slice(5, 7))

    def blocks_of(self, bucket: Any, grads: list[Tensor | None]) -> Blocks:
        return bucket.blocks_of(grads)

    def function(self, module: Any) -> Callable[..., list[int]]:
        return module.step

    def lists(self) -> list[list[Any]]:
        names = ("w", "g", "m", "v", "previous", "sampled", "member", "seed", "ratio")
        return [[getattr(block, name) for block in self.blocks] for name in names]


class TurnWork(Native):
    """A step of weights that turn."""

    PHASES = (REDUCE, APPLY)
    SUMS = (slice(0, 4),)

    def blocks_of(self, bucket: Bucket, grads: list[Tensor | None]) -> Blocks:
        blocks = Blocks(bucket.dtype, bucket.sizes)
        for i, (member, g) in enumerate(zip(bucket.members, grads, strict=True)):
            if g is not None:
                blocks.append(block_of(i, local(member.p), g, bucket.local_state(member)))
        return blocks

    def function(self, module: Any) -> Callable[..., list[int]]:
        return module.turn

    def lists(self) -> list[list[Any]]:
        names = ("w", "g", "m", "member")
        return [[getattr(block, name) for block in self.blocks] for name in names]


def copy_like(x: Tensor, like: Tensor) -> Tensor:
    """The values of ``x`` in the layout of ``like``."""
    return torch.empty_like(like, dtype=x.dtype, requires_grad=False).copy_(x)
