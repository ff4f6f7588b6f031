"""Times and memory of a step, on a GPU by its own clock."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# torch's profiler says on stderr when it starts and stops, in the middle of the bar
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

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

    def host_seconds(self, run: Run) -> float:
        """Time until the call comes back."""
        times = []
        for _ in range(5):
            self.wait()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

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

    def extra_bytes(self, run: Run) -> int:
        """The most that a step holds beside what was there before."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            return torch.cuda.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            run()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        moved = [e for e in events if e["name"] == "[memory]"]
        held = most = 0
        for event in sorted(moved, key=lambda e: e["ts"]):
            held += event["args"]["Bytes"]
            most = max(most, held)
        return most

    def copy_rate(self) -> float:
        """Bytes a second of a large copy, read and written."""
        size = 2**30 if self.cuda else 2**28
        a = torch.ones(size // 4, device="cuda" if self.cuda else "cpu")
        b = torch.empty_like(a)
        return 2 * size / statistics.median(self.seconds(lambda: b.copy_(a), 3) for _ in range(9))
