"""Where a list of runs is trained: one after another, in processes, on a GPU, or on a Ray cluster.

Every engine takes the same list and leaves the same records. A run that is finished already is not
trained again, one that was interrupted goes on, and one that fails does not take the others down.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import environment
from .disk import Busy, locked
from .errors import LabError
from .records import FAILED, FINISHED, SUFFIX, Record, Row, RunConfig, find, load_all, save

if TYPE_CHECKING:
    import torch

KNOWN, STOPPED = "known", "stopped"
CHECKPOINT, LOCK = "checkpoint.pt", "lock"  # in the folder of a run that has not ended

logger = logging.getLogger("adamo_lab")


@dataclass(frozen=True)
class Setup:
    """How and where to train; beyond rounding, none of it changes a result.

    On a CPU the number of workers decides how many threads a run has, and these how it rounds; its
    record says how many, and a run that goes on keeps them.
    """

    out: Path  # a file for every study; a record in any of them counts as done
    name: str  # of this one: its file, and beside it its folder of runs that have not ended
    data_dir: Path | None = None
    device: str = "cpu"
    workers: int = 1  # processes; on a GPU, runs side by side
    checkpoint_seconds: float = 30.0
    compile: bool = True  # on a GPU
    ray_address: str | None = None
    make: Callable[..., Any] | None = None  # of a task, if not by its name: a user's model

    @property
    def file(self) -> Path:
        return self.out / f"{self.name}{SUFFIX}"

    def folder(self, config: RunConfig) -> Path:
        """Of checkpoints: where another study has begun the run, else in this one's."""
        here = self.out / self.name / config.id
        return here if here.exists() else next(self.out.glob(f"*/{config.id}"), here)

    def done(self, config: RunConfig) -> bool:
        """Has another process been faster?"""
        known = find(self.file, config.id)
        return known is not None and known.status == FINISHED

    def keep(self, record: Record) -> None:
        """Put a run into the study's file; only then is its checkpoint of no more use."""
        save(record, self.file)
        if record.status == FINISHED:
            (self.folder(record.config) / CHECKPOINT).unlink(missing_ok=True)

    @contextlib.contextmanager
    def holding(self, config: RunConfig) -> Iterator[Path]:
        """The run's folder, for this process alone; gone afterwards if nothing is left in it."""
        folder = self.folder(config)
        try:
            with locked(folder / LOCK):
                yield folder
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()


@dataclass(frozen=True)
class Outcome:
    """How a run ended: finished, known (a record was there), failed or stopped."""

    config: RunConfig
    status: str
    error: str = ""


class View:
    """Whoever watches: a progress display, TensorBoard, a test. This one looks away."""

    def started(self, config: RunConfig) -> None: ...

    def progressed(self, config: RunConfig, epoch: int, row: Row) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


ENGINES = {  # a module, imported when it is asked for, and its function
    "serial": (".engines", "run_serial"),
    "processes": (".processes", "run_processes"),
    "cuda": (".side_by_side", "run_cuda"),
    "ray": (".ray_engine", "run_ray"),
}
Engine = Callable[[Sequence[RunConfig], Setup, View], list[Outcome]]


def run_all(
    configs: Iterable[RunConfig], setup: Setup, engine: str = "auto", view: View | None = None
) -> list[Outcome]:
    """Train what has not been trained yet; one outcome for every config, in order."""
    view = view or View()
    unique = {config.id: config for config in configs}
    records, problems = load_all(setup.out)
    for problem in problems:
        logger.warning(problem)
    finished = (r for r in records if r.status == FINISHED and r.id in unique)
    known = {r.id: r for r in sorted(finished, key=lambda r: r.study == setup.name)}
    outcomes = {id: Outcome(config, KNOWN) for id, config in unique.items() if id in known}
    for id, outcome in outcomes.items():
        if known[id].study != setup.name:  # a study's file holds all of its runs
            setup.keep(known[id])
        view.ended(outcome)
    todo = [config for id, config in unique.items() if id not in outcomes]
    if todo:
        outcomes |= {o.config.id: o for o in pick(engine, setup)(todo, setup, view)}
    return [outcomes[id] for id in unique]


def pick(name: str, setup: Setup) -> Engine:
    """The engine of that name; "auto" goes by the device."""
    if name == "auto":
        several = "processes" if setup.workers > 1 else "serial"
        name = "cuda" if setup.device.startswith("cuda") else several
    if name not in ENGINES:
        raise LabError(f"unknown engine {name!r}; known are auto, {', '.join(ENGINES)}")
    if name == "cuda" and not setup.device.startswith("cuda"):
        raise LabError(f"--engine cuda needs a CUDA device, and the device is {setup.device}")
    module, function = ENGINES[name]
    return getattr(import_module(module, __package__), function)


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
    asked: list[int] = getattr(signal.getsignal(signal.SIGTERM), "asked", [])  # of a caller, too

    def ask(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may handle signals
        return
    ask.asked = asked  # type: ignore[attr-defined]
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

    try:
        with setup.holding(config) as folder:
            if setup.done(config):
                return Outcome(config, KNOWN)
            record = train.train(
                config,
                folder,
                device=setup.device,
                data_dir=setup.data_dir,
                make=setup.make,
                progress=progress,
                stop=stop,
                checkpoint_seconds=setup.checkpoint_seconds,
            )
            setup.keep(record)
    except train.Stopped:
        return Outcome(config, STOPPED)
    except Exception as error:
        return failure(config, error, setup)
    return Outcome(config, FINISHED)


def failure(config: RunConfig, error: BaseException, setup: Setup) -> Outcome:
    """Record the cause, where that is possible, and report it."""
    ours = isinstance(error, LabError)
    cause = str(error) if ours else f"{type(error).__name__}: {error}"
    if not isinstance(error, Busy):
        try:  # the next attempt replaces it
            setup.keep(Record(config, FAILED, environment=environment.describe(), error=cause))
        except LabError as also:  # a full disk: the cause cannot be recorded, only reported
            cause = f"{cause}; and {also}"
    return Outcome(config, FAILED, cause)


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
