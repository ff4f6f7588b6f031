"""The same list of runs on a Ray cluster: an existing one, or one on this machine.

A run trains in the study's folder where the worker sees that folder (one machine, or shared
storage), so that it can go on anywhere after an interruption; elsewhere in a scratch folder of its
node. Its record travels to the driver, which alone writes it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .engines import CHECKPOINT, STOPPED, Outcome, Setup, View, failure, interruptible, train_safely
from .errors import LabError, writing
from .records import FINISHED, Record, Row, RunConfig

POLL_SECONDS = 0.5


class Board:
    """An actor that collects progress from all nodes and carries the wish to stop to them."""

    def __init__(self) -> None:
        self.news: list[tuple[str, int, Row]] = []
        self.stopping = False

    def report(self, *news: Any) -> bool:
        """Is it time to stop?"""
        self.news += [news] if news else []
        return self.stopping

    def take(self, stop: bool) -> list[tuple[str, int, Row]]:
        self.stopping = stop
        news, self.news = self.news, []
        return news


def run_ray(configs: Sequence[RunConfig], setup: Setup, view: View) -> list[Outcome]:
    """Hand the runs to Ray, one task each, pass progress on and gather outcomes."""
    ray, setup = connect(setup), absolute(setup)
    with writing(setup.out):
        setup.out.mkdir(parents=True, exist_ok=True)
    board = ray.remote(num_cpus=0)(Board).remote()
    needs = {"num_gpus": 1} if setup.device.startswith("cuda") else {"num_cpus": 1}
    remote = ray.remote(max_retries=2, **needs)(train_on_node)
    outcomes: list[Outcome] = []
    waiting = {remote.remote(config, setup, board): config for config in configs}
    names = {config.id: config for config in configs}
    for config in configs:
        view.started(config)
    try:
        with interruptible() as stop:
            while waiting:
                ready, _ = ray.wait(list(waiting), timeout=POLL_SECONDS)
                for id, epoch, row in ray.get(board.take.remote(stop())):
                    view.progressed(names[id], epoch, row)
                for reference in ready:
                    outcomes.append(gather(ray, reference, waiting.pop(reference), setup))
                    view.ended(outcomes[-1])
    finally:
        ray.kill(board)
    return outcomes


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


def gather(ray: Any, reference: Any, config: RunConfig, setup: Setup) -> Outcome:
    """The outcome of a task, its record written here; Ray's own errors become failures."""
    try:
        outcome, records = ray.get(reference)
        for record in records:
            setup.keep(record)
    except ray.exceptions.RayError as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return failure(config, LabError(f"Ray lost it: {said}"), setup)
    except LabError as error:  # a full disk here
        return failure(config, error, setup)
    return outcome


def train_on_node(config: RunConfig, setup: Setup, board: Any) -> tuple[Outcome, list[Record]]:
    """One run on a worker of the cluster."""
    import ray
    import torch

    records: list[Record] = []

    class Node(Setup):
        def done(self, config: RunConfig) -> bool:
            return False  # a record that only this node has would be of no use

        def keep(self, record: Record) -> None:
            records.append(record)
            if record.status == FINISHED:
                (self.folder(config) / CHECKPOINT).unlink(missing_ok=True)

    def stopping(*news: Any) -> bool:
        return ray.get(board.report.remote(*news))

    def progress(config: RunConfig, epoch: int, row: Row) -> None:
        nonlocal stop
        if row:  # at every evaluation; epochs may be too short to ask
            stop = stopping(config.id, epoch, row)

    torch.set_num_threads(1)
    if not setup.out.is_dir():
        setup = replace(setup, out=Path(tempfile.gettempdir()) / "adamo-lab")
    if stop := stopping():
        return Outcome(config, STOPPED), records
    return train_safely(config, Node(**vars(setup)), progress, lambda: stop), records
