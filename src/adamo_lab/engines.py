"""Where a list of runs is trained: one after another, in processes, on a GPU, or on a Ray cluster.

Every engine takes the same list and leaves the same records. A run that is finished already is not
trained again, one that was interrupted goes on, and one that fails does not take the others down.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .errors import LabError, writing
from .records import FAILED, FINISHED, RUN, Record, Row, RunConfig, load, load_folders

if TYPE_CHECKING:
    import torch

KNOWN, STOPPED = "known", "stopped"


@dataclass(frozen=True)
class Setup:
    """How and where to train; beyond rounding, none of it changes a result.

    On a CPU the number of workers decides how many threads a run has, and these how it rounds; its
    record says how many, and a run that goes on keeps them.
    """

    out: Path  # one folder a run below it
    root: Path | None = None  # a record anywhere below counts as done; default: ``out``
    data_dir: Path | None = None
    device: str = "cpu"
    workers: int = 1  # processes; on a GPU, runs side by side
    checkpoint_seconds: float = 30.0
    compile: bool = True  # on a GPU
    ray_address: str | None = None

    def folder(self, config: RunConfig) -> Path:
        """Where a run lives: where another study has begun it, else in this one's folder."""
        here = self.out / config.id
        if self.root is None or here.exists():
            return here
        return next(self.root.glob(f"*/{config.id}"), here)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: finished, known (a record was there), failed or stopped."""

    config: RunConfig
    status: str
    error: str = ""


class View(Protocol):
    """Whoever watches: a progress display, TensorBoard, a test."""

    def started(self, config: RunConfig) -> None: ...

    def progressed(self, config: RunConfig, epoch: int, row: Row) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


class Views:
    """Several views as one."""

    def __init__(self, views: Iterable[View] = ()) -> None:
        self.views = list(views)

    def started(self, config: RunConfig) -> None:
        for view in self.views:
            view.started(config)

    def progressed(self, config: RunConfig, epoch: int, row: Row) -> None:
        for view in self.views:
            view.progressed(config, epoch, row)

    def ended(self, outcome: Outcome) -> None:
        for view in self.views:
            view.ended(outcome)


ENGINES = ("auto", "serial", "processes", "cuda", "ray")
Engine = Callable[[Sequence[RunConfig], Setup, View], list[Outcome]]


def run_all(
    configs: Iterable[RunConfig], setup: Setup, engine: str = "auto", view: View | None = None
) -> list[Outcome]:
    """Train what has not been trained yet; one outcome for every config, in order."""
    view = view or Views()
    unique = list({config.id: config for config in configs}.values())
    known, damaged = load_folders(setup.root or setup.out)
    asked = {config.id for config in unique}
    if problems := [problem for folder, problem in damaged if folder in asked]:
        raise LabError("; ".join(problems))
    done = {id for id, record in known.items() if record.status == FINISHED}
    outcomes = {c.id: Outcome(c, KNOWN) for c in unique if c.id in done}
    for outcome in outcomes.values():
        view.ended(outcome)
    todo = [config for config in unique if config.id not in done]
    if todo:
        with writing(setup.out):
            setup.out.mkdir(parents=True, exist_ok=True)
        for outcome in pick(engine, setup)(todo, setup, view):
            outcomes[outcome.config.id] = outcome
    return [outcomes[config.id] for config in unique]


def pick(name: str, setup: Setup) -> Engine:
    """The engine of that name; "auto" goes by the device."""
    if name not in ENGINES:
        raise LabError(f"unknown engine {name!r}; known are {', '.join(ENGINES)}")
    if name == "auto":
        name = "cuda" if setup.device.startswith("cuda") else "processes"
        name = "serial" if name == "processes" and setup.workers == 1 else name
    if name == "cuda" and not setup.device.startswith("cuda"):
        raise LabError(f"--engine cuda needs a CUDA device, and the device is {setup.device}")
    if name == "cuda":
        from .side_by_side import run_cuda as engine
    elif name == "ray":
        from .ray_engine import run_ray as engine
    elif name == "processes":
        from .processes import run_processes as engine
    else:
        engine = run_serial
    return engine


def run_serial(configs: Sequence[RunConfig], setup: Setup, view: View) -> list[Outcome]:
    """One after another in this process."""
    outcomes = []
    with interruptible() as stop:
        for config in configs:
            if stop():
                outcomes.append(Outcome(config, STOPPED))
                continue
            view.started(config)
            outcome = train_safely(config, setup, view.progressed, stop)
            outcomes.append(outcome)
            view.ended(outcome)
    return outcomes


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for a stop at the end of the epoch; a second Ctrl-C does not wait."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may handle signals
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_safely(
    config: RunConfig,
    setup: Setup,
    progress: Callable[[RunConfig, int, Row], None],
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train one run; an error becomes a failed record and a failed outcome."""
    from . import train

    folder = setup.folder(config)
    try:
        with locked(folder):
            if is_finished(folder):  # another process was faster
                return Outcome(config, KNOWN)
            train.train(
                config,
                folder,
                device=setup.device,
                data_dir=setup.data_dir,
                progress=progress,
                stop=stop,
                checkpoint_seconds=setup.checkpoint_seconds,
            )
    except train.Stopped:
        return Outcome(config, STOPPED)
    except Exception as error:
        return failure(config, error, folder)
    return Outcome(config, FINISHED)


class Busy(LabError):
    """Another process trains this run; its folder is not ours to write to."""


def is_finished(folder: Path) -> bool:
    """Is there a good record? One that cannot be read is none."""
    try:
        return (folder / RUN).exists() and load(folder).status == FINISHED
    except LabError:
        return False


def failure(config: RunConfig, error: BaseException, folder: Path) -> Outcome:
    """Record the cause, where that is possible, and report it."""
    from .train import failed

    if isinstance(error, Busy) or is_finished(folder):
        return Outcome(config, FAILED, str(error))
    try:
        cause = failed(config, error, folder).error
    except LabError as also:  # a full disk: the cause cannot be recorded, only reported
        cause = f"{error}; and {also}"
    return Outcome(config, FAILED, cause)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process out of a run's folder; the system lets go when this one dies."""
    path = folder / "lock"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(handle).st_ino == path.stat().st_ino
        except OSError as error:
            raise Busy(f"{folder.name} is being trained by another process") from error
        if not held:  # its last owner removed it while we were opening it: others lock a new one
            raise Busy(f"{folder.name} was being trained by another process; try again")
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def finished_record(setup: Setup, config: RunConfig) -> Record:
    """The record of a finished run, wherever it lies below the root."""
    folder = setup.folder(config)
    if (folder / RUN).exists():
        return load(folder)
    found = (setup.root or setup.out).rglob(f"{config.id}/{RUN}")
    path = next(found, None)
    if path is None:
        raise LabError(f"there is no record of {config.id} below {setup.root or setup.out}")
    return load(path.parent)


def resolve_device(name: str) -> torch.device:
    """A device by name; "auto" is the GPU if there is one."""
    import torch

    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LabError(f"unknown device {name!r}; say cpu, cuda or auto") from error
    if device.type == "cuda" and not available:
        raise LabError("no CUDA device was found; say --device cpu")
    return device
