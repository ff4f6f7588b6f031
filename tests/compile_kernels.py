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

from adamo_optim import AdamO, cuda

TARGETS = [GPUTarget("cuda", capability, 32) for capability in (80, 90)]
POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64",
    torch.bool: "*i1",
}  # fmt: skip
compiled: set[str] = set()


def compile_only(
    self: Any, key: Any, kernel: Any, count: int, *args: Any, num_warps: int, **constants: Any
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
    places = {(names.index(name),): value for name, value in values.items()}
    for target in TARGETS:
        source = ASTSource(kernel, signature, places)
        options = {"num_warps": num_warps, "enable_fp_fusion": True}
        result = triton.compile(source, target=target, options=options)
        assert result.asm["cubin"]


def step(options: dict[str, Any], dtype: torch.dtype, scaled: bool) -> None:
    weights = [nn.Parameter(torch.randn(48, 40).to(dtype)), nn.Parameter(torch.randn(7).to(dtype))]
    optimizer = AdamO(weights, foreach=False, fused=False, **options)
    number = torch.ones(1)
    for _ in range(2):
        for p in weights:
            p.grad = torch.ones_like(p)
        for work in optimizer._prepare():
            cuda.step(work, **({"grad_scale": number, "found_inf": number} if scaled else {}))
            plan = work.bucket.plan
            plan.add_up(plan.partial_reduce, plan.coarse, plan.partial_reduce, 5)  # sharded only


def main() -> None:
    cuda.Plan.launch = compile_only
    step({}, torch.float32, scaled=False)
    step({"radial": "sgd", "weight_decay": 0.0}, torch.float32, scaled=False)
    step({"previous_gradient": "sampled"}, torch.float32, scaled=True)
    step({"previous_gradient": "bfloat16"}, torch.float16, scaled=False)
    step({"curvature_target": None, "rounding": "stochastic"}, torch.bfloat16, scaled=False)
    kernels = sorted({name.split()[0] for name in compiled})
    print(f"{len(compiled)} kernels for {len(TARGETS)} targets: {', '.join(kernels)}")


if __name__ == "__main__":
    main()
