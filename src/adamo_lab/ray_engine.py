"""The same list of runs on a Ray cluster: an existing one, or one on this machine.

A run trains in the study's folder where the worker sees that folder (one machine, or shared
storage), so that it can go on after an interruption; elsewhere in a scratch folder of its node, and
the driver writes its record.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .engines import STOPPED, Outcome, Setup, View, failure, interruptible, train_safely
from .errors import LabError, writing
from .records import Record, Row, RunConfig, find

POLL_SECONDS = 0.5


class Board:
    """An actor that collects progress from all nodes and carries the wish to stop to them."""

    def __init__(self) -> None:
        self.news: list[tuple[str, int, Row]] = []
        self.stopping = False

    def report(self, id: str, epoch: int, row: Row) -> bool:
        """Is it time to stop? An epoch without an evaluation asks only."""
        if row:
            self.news.append((id, epoch, row))
        return self.stopping

    def take(self) -> list[tuple[str, int, Row]]:
        news, self.news = self.news, []
        return news

    def stop(self) -> None:
        self.stopping = True


def run_ray(configs: Sequence[RunConfig], setup: Setup, view: View) -> list[Outcome]:
    """Hand the runs to Ray, one task each, and watch."""
    ray = connect(setup)
    setup = absolute(setup)
    token = setup.out / f".shared-{uuid.uuid4().hex}"
    with writing(token):
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
    board = ray.remote(num_cpus=0)(Board).remote()
    needs = {"num_gpus": 1} if setup.device.startswith("cuda") else {"num_cpus": 1}
    remote = ray.remote(max_retries=2, **needs)(train_on_node)
    try:
        waiting = {remote.remote(config, setup, token.name, board): config for config in configs}
        for config in configs:
            view.started(config)
        return watch(ray, waiting, board, setup, view)
    finally:
        token.unlink(missing_ok=True)
        ray.kill(board)


def absolute(setup: Setup) -> Setup:
    """Workers of a cluster start in folders of their own."""
    data = setup.data_dir and setup.data_dir.resolve()
    return replace(setup, out=setup.out.resolve(), data_dir=data)


def connect(setup: Setup) -> Any:
    """Ray, started here or joined at its address."""
    try:
        import ray
    except ImportError as error:
        raise LabError("--engine ray needs Ray: pip install 'adamo-optim[ray]'") from error
    if not ray.is_initialized():
        try:
            if setup.ray_address:
                ray.init(address=setup.ray_address, log_to_driver=False)
            else:
                ray.init(num_cpus=setup.workers, log_to_driver=False, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LabError(f"no Ray cluster at {setup.ray_address!r}: {error}") from error
    return ray


def watch(
    ray: Any, waiting: dict[Any, RunConfig], board: Any, setup: Setup, view: View
) -> list[Outcome]:
    """Pass progress on and gather outcomes until nothing is left."""
    outcomes: list[Outcome] = []
    names = {config.id: config for config in waiting.values()}
    with interruptible() as stop:
        while waiting:
            if stop():
                board.stop.remote()
            ready, _ = ray.wait(list(waiting), timeout=POLL_SECONDS)
            for id, epoch, row in ray.get(board.take.remote()):
                view.progressed(names[id], epoch, row)
            for reference in ready:
                outcome = gather(ray, reference, waiting.pop(reference), setup)
                outcomes.append(outcome)
                view.ended(outcome)
    return outcomes


def gather(ray: Any, reference: Any, config: RunConfig, setup: Setup) -> Outcome:
    """The outcome of a task, its record written here; Ray's own errors become failures."""
    try:
        outcome, record = ray.get(reference)
    except ray.exceptions.RayError as error:
        return failure(config, LabError(f"Ray lost it: {first_line(error)}"), setup)
    if record is not None:
        setup.keep(record)
    return outcome


def train_on_node(
    config: RunConfig, setup: Setup, token: str, board: Any
) -> tuple[Outcome, Record | None]:
    """One run on a worker of the cluster."""
    import ray
    import torch

    torch.set_num_threads(1)
    away = not (setup.out / token).exists()  # this node does not see the study's folder
    if away:  # a folder of this call's own: an older record elsewhere is none of this study's
        setup = replace(setup, out=Path(tempfile.gettempdir()) / "adamo-lab" / token / config.id)
    asked, stop = 0.0, False

    def tell(epoch: int, row: Row) -> None:
        nonlocal asked, stop
        now = time.monotonic()
        if row or now - asked > POLL_SECONDS:
            asked, stop = now, bool(ray.get(board.report.remote(config.id, epoch, row)))

    tell(0, {})
    if stop:
        return Outcome(config, STOPPED), None
    outcome = train_safely(config, setup, lambda _, epoch, row: tell(epoch, row), lambda: stop)
    if not away:
        return outcome, None
    record = find(setup.file, config.id)
    shutil.rmtree(setup.out, ignore_errors=True)
    return outcome, record


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
