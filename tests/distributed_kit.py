"""Checks that run in several processes: a launch runs many, and every one is its own test.

A check is a function ``check(world)`` that all ranks call in the same order. It is registered for
the numbers of ranks it is for; ``outcomes`` launches the processes once and tells what became of
each check.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

TIMEOUT = datetime.timedelta(seconds=60)  # ranks that wait for one that failed give up after it
CHECKS: dict[int, list[Callable[[Path], None]]] = {1: [], 2: [], 4: []}


def check(*worlds: int) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a check for these numbers of ranks; it gets a folder all launches share."""

    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        for world in worlds:
            CHECKS[world].append(function)
        return function

    return register


def outcomes(module: str, world: int, folder: Path) -> dict[str, str]:
    """Run the module's checks on ``world`` ranks: "" for a passed one, else what went wrong.

    Where another process has begun to, in the same folder, wait for what it finds.
    """
    result = folder / f"outcomes-{world}.json"
    try:
        (folder / f"begun-{world}").touch(exist_ok=False)
    except FileExistsError:
        while not result.exists():
            time.sleep(0.2)
        return json.loads(result.read_text())
    found = _launch(module, world, folder)
    result.with_suffix(".new").write_text(json.dumps(found))
    result.with_suffix(".new").replace(result)
    return found


def _launch(module: str, world: int, folder: Path) -> dict[str, str]:
    context = torch.multiprocessing.spawn(
        _rank, (module, world, str(folder)), nprocs=world, join=False
    )
    assert context is not None
    with contextlib.suppress(torch.multiprocessing.ProcessRaisedException):  # told below
        while not context.join():
            pass
    found: dict[str, str] = {}
    for rank in range(world):
        path = folder / f"outcome-{world}-{rank}.json"
        for name, error in (json.loads(path.read_text()) if path.exists() else {}).items():
            found[name] = found.get(name, "") + (f"rank {rank}: {error}" if error else "")
    return found


def _rank(rank: int, module: str, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = "1"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{world}",
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
    )
    __import__(module)  # registers the checks in this process
    found: dict[str, str] = {}
    for function in CHECKS[world]:
        found[function.__name__] = _run(function, Path(folder), announce=rank == 0)
        path = Path(folder) / f"outcome-{world}-{rank}.json"
        path.with_suffix(".new").write_text(json.dumps(found))
        path.with_suffix(".new").replace(path)  # whole or not at all: another rank may end us
        if found[function.__name__]:  # the ranks are no longer in step: this ends them all
            raise RuntimeError(f"{function.__name__} failed")
    dist.destroy_process_group()


def _run(function: Callable[[Path], None], folder: Path, announce: bool) -> str:
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "weight_decay=.*of every weight")
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
            # torch's own, about what a tensor-parallel layer returns
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            function(folder)
    except BaseException:  # a CheckpointException is no Exception
        return traceback.format_exc()
    if announce:  # shown by pytest for a failed test, or with -s
        print(f"{function.__name__}: {time.perf_counter() - start:.1f} s", flush=True)
    return ""
