"""What a result depends on beside its config: versions, hardware, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any


def describe(
    device: Any = None, seconds: float | None = None, warnings: list[str] | None = None
) -> dict[str, Any]:
    """Versions, device, commit and date; how long the run trained, and what it was warned of."""
    import torch

    import adamo_optim

    about: dict[str, Any] = {
        "adamo_optim": adamo_optim.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    if device is not None:
        on_gpu = device.type == "cuda"
        about["device"] = torch.cuda.get_device_name(device) if on_gpu else processor()
        about["threads"] = torch.get_num_threads()
    if seconds is not None:
        about["seconds"] = round(seconds, 4)
    if warnings:
        about["warnings"] = warnings
    return about


def slow_backend(device: Any) -> str:
    """A sentence where AdamO's steps take many times as long as they should; else nothing."""
    from adamo_optim.native import kernel

    if device.type != "cpu" or not isinstance(reason := kernel(), str):
        return ""
    return f"AdamO is slow here, and times mean little: {reason}"


@cache
def commit() -> str:
    """The commit of the source tree, with a mark when files differ from it; else "unknown".

    ``ADAMO_COMMIT`` says it where the files travelled without their repository.
    """
    if stated := os.environ.get("ADAMO_COMMIT"):
        return stated
    try:
        name = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", ".", "../adamo_optim")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}, with changes" if changed else name


def git(*arguments: str) -> str:
    where = Path(__file__).resolve().parent
    output = subprocess.check_output(["git", *arguments], cwd=where, stderr=subprocess.DEVNULL)
    return output.decode().strip()


@cache
def processor() -> str:
    """The CPU's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
