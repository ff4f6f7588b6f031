"""Several runs at a time on the CPU: a process each, watched over a pipe each.

Not a pool: a worker that the system kills must not take the others, or a shared queue, down.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from .engines import STOPPED, Outcome, Setup, View, failure, interruptible, train_safely
from .errors import LabError
from .records import RunConfig

POLL_SECONDS = 0.5  # between two looks at whether the user wants to stop
STOP_SECONDS = 60.0  # for a worker to end its epoch and write a checkpoint


def run_processes(configs: Sequence[RunConfig], setup: Setup, view: View) -> list[Outcome]:
    """Train up to ``setup.workers`` runs at a time, each with its share of the cores."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adamo_lab.train", "adamo_optim"])  # torch is loaded once
    with uninterrupted():  # Ctrl-C reaches the whole group of processes, and these are to ignore it
        forkserver.ensure_running()
    threads = max(1, cores() // setup.workers)
    waiting = list(reversed(configs))
    working: dict[Connection, Worker] = {}
    outcomes: list[Outcome] = []
    with interruptible() as stop, ending(working):
        while waiting or working:
            if stop():
                outcomes += [Outcome(config, STOPPED) for config in waiting]
                waiting.clear()
                for worker in working.values():
                    worker.stop()
            while waiting and len(working) < setup.workers:
                worker = Worker(context, waiting.pop(), setup, threads)
                working[worker.pipe] = worker
                view.started(worker.config)
            for pipe in wait(list(working), timeout=POLL_SECONDS):
                worker = working[pipe]  # type: ignore[index]
                message = worker.receive()
                if isinstance(message, Outcome):
                    del working[worker.pipe]
                    outcomes.append(message)
                    view.ended(message)
                else:
                    view.progressed(worker.config, *message)
    return outcomes


class Worker:
    """One run in a process of its own."""

    def __init__(self, context: Any, config: RunConfig, setup: Setup, threads: int) -> None:
        self.config, self.setup, self.asked = config, setup, False
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(config, setup, threads, theirs))
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """(epoch, row), or the outcome; a process that died without one has failed.

        Unless it was asked to stop: it may not have been ready yet to do so in good order.
        """
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            if self.asked:
                message = Outcome(self.config, STOPPED)
            else:
                message = failure(self.config, LabError(self.cause()), self.setup)
        if isinstance(message, Outcome):
            self.process.join()
            self.pipe.close()
        return message

    def stop(self) -> None:
        """Ask once for a checkpoint and an end."""
        if not self.asked:
            self.asked = True
            self.process.terminate()

    def cause(self) -> str:
        code = self.process.exitcode or 0
        if code >= 0:
            return f"its process ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = "; was there enough memory?" if -code == signal.SIGKILL else ""
        return f"its process was killed by {name}{hint}"


def work(config: RunConfig, setup: Setup, threads: int, pipe: Connection) -> None:
    """The life of a worker. An interrupt is the parent's business; SIGTERM means: stop soon."""
    import torch

    stop = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    torch.set_num_threads(threads)

    def progress(config: RunConfig, epoch: int, row: dict[str, Any]) -> None:
        try:
            pipe.send((epoch, row))
        except OSError:  # the parent is gone: leave a checkpoint and go, too
            stop.append(True)

    outcome = train_safely(config, setup, progress, lambda: bool(stop))
    with contextlib.suppress(OSError):
        pipe.send(outcome)


@contextlib.contextmanager
def ending(working: dict[Connection, Worker]) -> Iterator[None]:
    """Leave no process behind, whatever the reason for leaving; a second Ctrl-C does not wait."""
    seconds = STOP_SECONDS
    try:
        yield
    except KeyboardInterrupt:
        seconds = 0.0
        raise
    finally:
        for worker in working.values():
            worker.stop()
        deadline = time.monotonic() + seconds
        for worker in working.values():
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """No Ctrl-C for processes that are started here, nor for this one meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def cores() -> int:
    """How many this process may use, which in a container is fewer than there are."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
