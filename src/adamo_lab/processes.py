"""Several runs at a time on the CPU: a process each, watched by a thread each.

Not a pool of processes: one that the system kills must not take the others down.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from .engines import STOPPED, Outcome, Setup, View, failure, interruptible, train_safely
from .errors import LabError
from .records import RunConfig

POLL_SECONDS = 0.5  # between two looks at whether the user wants to stop


def run_processes(configs: Sequence[RunConfig], setup: Setup, view: View) -> list[Outcome]:
    """Train up to ``setup.workers`` runs at a time, each with its share of the cores."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adamo_lab.train", "adamo_optim"])  # torch is loaded once
    with uninterrupted():  # Ctrl-C reaches the whole group of processes, and these are to ignore it
        forkserver.ensure_running()
    threads = max(1, cores() // setup.workers)
    begun: list[BaseProcess] = []
    voice = threading.Lock()

    def tell(what: Callable[..., None], *about: Any) -> None:
        with voice:  # a view need not know of threads
            what(*about)

    def run(config: RunConfig) -> Outcome:
        if stop():
            return Outcome(config, STOPPED)
        tell(view.started, config)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(config, setup, threads, theirs))
        process.start()
        theirs.close()
        begun.append(process)
        message: Any = None
        with ours, contextlib.suppress(EOFError, OSError):  # its end without an outcome
            while not isinstance(message := ours.recv(), Outcome):
                tell(view.progressed, config, *message)
        process.join()
        if isinstance(message, Outcome):
            outcome = message
        elif stop():  # it may not have been ready yet to stop in good order
            outcome = Outcome(config, STOPPED)
        else:
            outcome = failure(config, LabError(cause(process.exitcode or 0)), setup)
        tell(view.ended, outcome)
        return outcome

    with interruptible() as stop, ThreadPoolExecutor(setup.workers) as watching:
        try:
            waiting = [watching.submit(run, config) for config in configs]
            while wait(waiting, timeout=POLL_SECONDS).not_done:
                if stop():
                    for process in begun:
                        process.terminate()
            return [future.result() for future in waiting]
        finally:  # leave none behind, whatever the reason: a second Ctrl-C does not wait
            watching.shutdown(wait=False, cancel_futures=True)
            for process in begun:
                process.kill()


def cause(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    hint = "; was there enough memory?" if -code == signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-code).name}{hint}"


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
