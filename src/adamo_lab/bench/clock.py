"""Times and memory of a step, on a GPU by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], Any]


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Run, repeats: int) -> float:
        """Mean time of a run."""
        self.wait()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        self.wait()
        return (time.perf_counter() - start) / repeats

    def device_seconds(self, run: Run, repeats: int) -> float:
        """Time the GPU is busy: launch gaps left out, kernels that overlap counted once."""
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            for _ in range(repeats):
                run()
            self.wait()
        ranges = [e.time_range for e in found.events() or () if e.device_type == DeviceType.CUDA]
        busy = until = 0.0
        for part in sorted(ranges, key=lambda part: part.start):
            busy += max(0.0, part.end - max(part.start, until))
            until = max(until, part.end)
        return busy / 1e6 / repeats

    def extra_bytes(self, run: Run) -> int | None:
        """The most that a step on a GPU holds beside what was there before."""
        if not self.cuda:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
