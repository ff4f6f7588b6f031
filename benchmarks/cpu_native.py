"""Time one optimizer step on the CPU: the native kernel against torch's AdamW.

    python benchmarks/cpu_native.py [--threads 2] [--rounds 15] [--tiny] [--dtype bfloat16]

Every round runs all optimizers one after the other; ratios are taken within a round and their
median and quartiles over the rounds are printed, so that a busy machine disturbs both sides
alike; "best" is the ratio of the shortest times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from adamo_optim import AdamO, native

# ResNet-18 for small images, without its last 512-channel block: 9.2 M parameters
CONVOLUTIONS = [(64, 3), *[(64, 64)] * 4, (128, 64), *[(128, 128)] * 3, (256, 128)]
CONVOLUTIONS += [*[(256, 256)] * 3, (512, 256), *[(512, 512)] * 2]
LINEAR = [(512, 512), (512, 512), (100, 512)]
SHAPES = [(*shape, 3, 3) for shape in CONVOLUTIONS] + LINEAR
SHAPES += [(shape[0],) for shape in SHAPES for _ in range(2)]

TINY = [(8, 8)] * 200


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    source = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=source).to(dtype)) for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=source).to(dtype) * 0.01
    return params


def contestants(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Names and steps; the first is the measure of the others."""
    adamw, steps = torch.optim.AdamW, {}
    kinds = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    for name, arguments in kinds.items():
        steps[f"AdamW {name}"] = adamw(parameters(shapes, dtype), **arguments).step
    options = {
        "exact": {},
        "bfloat16 g-": {"previous_gradient": "bfloat16"},
        "sampled g-": {"previous_gradient": "sampled"},
        "no curvature": {"curvature_target": None},
    }
    for name, arguments in options.items():
        optimizer = AdamO(parameters(shapes, dtype), fused=True, **arguments)
        steps[f"AdamO native, {name}"] = optimizer.step
    return steps


def seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--version", type=int, default=1, help="0 portable, 1 AVX2")
    parser.add_argument("--helpers", action="store_true", help="own threads, not OpenMP's")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    module = native.kernel()
    assert not isinstance(module, str), module
    module.use(arguments.version, arguments.helpers)
    shapes = TINY if arguments.tiny else SHAPES
    steps = contestants(shapes, getattr(torch, arguments.dtype))
    first = next(iter(steps))
    count = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"{count:,} parameters in {len(shapes)} tensors, {arguments.threads} threads")
    for step in steps.values():
        step()
    rounds = [{k: seconds(s) for k, s in steps.items()} for _ in range(arguments.rounds)]
    print(f"{'':28} {'median':>10}  {'ratio':>6}  {'quartiles':>12}  {'best':>6}")
    for name in steps:
        times = [r[name] for r in rounds]
        ratios = [r[name] / r[first] for r in rounds]
        low, median, high = statistics.quantiles(ratios, n=4)
        best = min(times) / min(r[first] for r in rounds)
        print(
            f"{name:28} {statistics.median(times) * 1e3:7.2f} ms  {median:5.2f}x  "
            f"{low:5.2f}–{high:5.2f}x  {best:5.2f}x"
        )


if __name__ == "__main__":
    main()
