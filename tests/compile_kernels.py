"""Compile the CUDA kernels for real GPUs, on a machine that need not have one.

    python tests/compile_kernels.py

Triton's interpreter runs the kernels as Python and forgives what its compiler does not. This script
makes the optimizer take steps in which every launch compiles its kernel, and launches nothing.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adamo_optim import AdamO, AngularAdamW, cuda

TARGETS = [GPUTarget("cuda", capability, 32) for capability in (80, 90)]
POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64",
    torch.bool: "*i1",
}  # fmt: skip
compiled: set[str] = set()


def compile_only(
    self: Any,
    key: Any,
    kernel: Any,
    count: int,
    *args: Any,
    num_warps: int,
    maxnreg: int | None = None,
    launch_pdl: bool = False,
    **constants: Any,
) -> None:
    """In place of ``Plan.launch``."""
    names = list(inspect.signature(kernel.fn).parameters)
    values = {n: x for n, x in zip(names, args, strict=False) if x is None} | constants
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(values, "constexpr")
    for name, x in zip(names, args, strict=False):
        if isinstance(x, Tensor):
            signature[name] = POINTERS[x.dtype]
    known = f"{kernel.fn.__name__} {signature} {values}"
    if known in compiled:
        return
    compiled.add(known)
    for target in TARGETS:
        values |= {"OVERLAP": target.arch >= 90} if "OVERLAP" in values else {}
        places = {(names.index(name),): value for name, value in values.items()}
        source = ASTSource(kernel, signature, places)
        options = {"num_warps": num_warps, "maxnreg": maxnreg, "enable_fp_fusion": True}
        result = triton.compile(source, target=target, options=options)
        assert result.asm["cubin"]


def step(optimizer: Any, scaled: bool) -> None:
    number = torch.ones(1)
    amp = {"grad_scale": number, "found_inf": number} if scaled else {}
    kind = cuda.TurnWork if isinstance(optimizer, AngularAdamW) else cuda.Work
    for _ in range(2):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape).to(p.dtype)
        for bucket in optimizer._buckets():
            work = kind(bucket, bucket.prepare(), bucket.options(), **amp)
            work.run()
            work.totals(torch.zeros(4, work.plan.short.count).double(), work.plan.short)  # sharded


SHAPES = ((48, 40), (7,))
ROWS = (*SHAPES, (512, 768), (8192, 64), (2, 9000))  # of every kind


def weights(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def adamo(options: dict[str, Any], dtype: torch.dtype, scaled: bool) -> None:
    shapes = ROWS if options.get("block") == "row" else SHAPES
    step(AdamO(weights(dtype, shapes), foreach=False, **options), scaled)


def turning(dtype: torch.dtype, scaled: bool, second_moment: str = "tensor") -> None:
    groups = [{"params": weights(dtype), "rule": "scale_invariant"}]
    step(AngularAdamW(groups, foreach=False, second_moment=second_moment), scaled)


def main() -> None:
    cuda.Plan.launch = compile_only
    adamo({}, torch.float32, scaled=False)
    adamo({"previous_gradient": "sampled"}, torch.float32, scaled=True)
    adamo({"previous_gradient": "bfloat16"}, torch.float16, scaled=False)
    adamo({"curvature_target": None, "rounding": "stochastic"}, torch.bfloat16, scaled=False)
    adamo({}, torch.complex64, scaled=False)  # as float32: compiles nothing
    adamo({"previous_gradient": "bfloat16"}, torch.float64, scaled=True)
    adamo({"block": "row"}, torch.float32, scaled=True)
    adamo({"block": "row", "rounding": "stochastic"}, torch.bfloat16, scaled=False)
    turning(torch.float32, scaled=True)
    turning(torch.complex128, scaled=False)
    turning(torch.bfloat16, scaled=False)
    turning(torch.float32, scaled=True, second_moment="row")
    turning(torch.bfloat16, scaled=False, second_moment="row")
    kernels = sorted({name.split()[0] for name in compiled})
    print(f"{len(compiled)} kernels for {len(TARGETS)} targets: {', '.join(kernels)}")


if __name__ == "__main__":
    main()
