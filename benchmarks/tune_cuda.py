"""Sweep the launch constants of the fused CUDA kernels: device time per kernel, host time."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from adamo_lab.bench.shapes import NETWORKS
from adamo_optim import AdamO, cuda


def kernel_times(step: Callable[[], Any], rounds: int = 10) -> dict[str, float]:
    """Microseconds on the device per step, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            step()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.device_time_total > 0]
    return {e.key[:12]: round(e.device_time_total / rounds, 1) for e in events}


def host_microseconds(step: Callable[[], Any], rounds: int = 60) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def parameters(network: str) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(s, device="cuda") * 0.02) for s in NETWORKS[network]]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["gpt-124m", "resnet18"])
    parser.add_argument(
        "--constants",
        nargs="+",
        default=["8192,1024,8/2048,1024,4"],
        help="CHUNK,TILE,WARPS of pass 1 / of passes 2 and 3",
    )
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for network in arguments.networks:
        params = parameters(network)
        count = sum(p.numel() for p in params)
        adamw = torch.optim.AdamW(params, fused=True)
        for _ in range(3):
            adamw.step()
        base = sum(kernel_times(adamw.step).values())
        host = host_microseconds(adamw.step)
        print(f"{network}: {count / 1e6:.1f} M, AdamW fused {base:.0f} us, host {host:.0f} us")
        for constants in arguments.constants:
            for table, numbers in zip(
                (cuda.REDUCE, cuda.UPDATE), constants.split("/"), strict=True
            ):
                table.update(
                    zip(("CHUNK", "TILE", "num_warps"), map(int, numbers.split(",")), strict=True)
                )
            none = AdamO(params, fused=True, curvature_target=None)
            for _ in range(3):
                none.step()
            without = sum(kernel_times(none.step).values())
            del none
            optimizer = AdamO(params, fused=True)
            for _ in range(3):
                optimizer.step()
            times = kernel_times(optimizer.step)
            total = sum(times.values())
            rate = 56 * count / total / 1e6
            host_time = host_microseconds(optimizer.step)
            print(
                f"  {constants:26s} {total:.0f} us {total / base:.3f}x {rate:.2f} TB/s "
                f"host {host_time:.0f} us {host_time / host:.2f}x; "
                f"no curvature {without / base:.3f}x",
                times,
            )
        if arguments.profile:
            with cProfile.Profile() as profile:
                for _ in range(200):
                    optimizer.step()
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
