"""What a user sees while runs train: bars on a terminal, lines in a log, curves in TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .engines import FAILED, KNOWN, STOPPED, Outcome
from .errors import LabError
from .optimizers import REGISTRY
from .records import Row, RunConfig

SHOWN = ("train_loss", "test_accuracy", "valid_accuracy", "valid_loss")
LOG_SECONDS = 20.0  # between two lines about one run, where there is no terminal


class Bars:
    """A bar for every run that is under way, and one for all."""

    def __init__(self, console: Console, total: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(compact=True),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
        )
        self.all = self.progress.add_task("[bold]all runs", total=total, note="")
        self.bars: dict[str, TaskID] = {}
        self.notes: dict[str, str] = {}

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def started(self, config: RunConfig) -> None:
        self.bars[config.id] = self.progress.add_task(
            escape(title(config)), total=config.epochs, note=""
        )

    def progressed(self, config: RunConfig, epoch: int, row: Row) -> None:
        self.notes[config.id] = numbers(row) or self.notes.get(config.id, "")
        bar = self.bars[config.id]
        self.progress.update(bar, completed=epoch, note=self.notes[config.id])

    def ended(self, outcome: Outcome) -> None:
        config = outcome.config
        if config.id in self.bars:
            self.progress.remove_task(self.bars.pop(config.id))
        self.progress.advance(self.all)
        self.progress.console.print(verdict(outcome, self.notes.get(config.id, "")))


class Lines:
    """The same for a log file: a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last: dict[str, float] = {}
        self.notes: dict[str, str] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def started(self, config: RunConfig) -> None:
        self.last[config.id] = time.monotonic()
        self.console.print(f"{escape(title(config))}: started", soft_wrap=True)

    def progressed(self, config: RunConfig, epoch: int, row: Row) -> None:
        self.notes[config.id] = numbers(row) or self.notes.get(config.id, "")
        now = time.monotonic()
        if row and now - self.last[config.id] > LOG_SECONDS:
            self.last[config.id] = now
            text = f"{escape(title(config))}: {epoch}/{config.epochs}  {self.notes[config.id]}"
            self.console.print(text, soft_wrap=True)

    def ended(self, outcome: Outcome) -> None:
        self.console.print(verdict(outcome, self.notes.get(outcome.config.id, "")), soft_wrap=True)


class TensorBoard:
    """Every number of every row, for ``tensorboard --logdir``."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise LabError("--tensorboard needs the package: pip install tensorboard") from error
        self.make = SummaryWriter
        self.folder = folder
        self.writers: dict[str, Any] = {}

    def started(self, config: RunConfig) -> None:
        self.writers[config.id] = self.make(str(self.folder / config.id))

    def progressed(self, config: RunConfig, epoch: int, row: Row) -> None:
        for name, value in row.items():
            if name != "epoch" and value is not None:
                self.writers[config.id].add_scalar(name, value, epoch)

    def ended(self, outcome: Outcome) -> None:
        if outcome.config.id in self.writers:
            self.writers.pop(outcome.config.id).close()


def title(config: RunConfig) -> str:
    label = REGISTRY[config.optimizer].label if config.optimizer in REGISTRY else config.optimizer
    return f"{config.task}, {label}, seed {config.seed}"


def numbers(row: Row) -> str:
    shown = ((name, row[name]) for name in SHOWN if row.get(name) is not None)
    return "  ".join(
        f"{name.replace('_', ' ')} {100 * value:.1f} %"
        if name.endswith("accuracy")
        else f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in shown
    )


def verdict(outcome: Outcome, note: str) -> str:
    """One line about a run that is over, in rich's markup."""
    name = escape(title(outcome.config))
    if outcome.status == FAILED:
        return f"[red]✗[/] {name}: {escape(outcome.error)}"
    if outcome.status == STOPPED:
        return f"[yellow]■[/] {name}: stopped; the same command goes on from here"
    if outcome.status == KNOWN:
        return f"[green]✓[/] {name}: a record was there"
    return f"[green]✓[/] {name}: {escape(note)}"
