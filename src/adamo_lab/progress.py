"""What a user sees while runs train: bars on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .engines import FAILED, KNOWN, STOPPED, Outcome, View
from .optimizers import REGISTRY
from .records import Row, RunConfig
from .runs import show, telling

SHOWN = ("train_loss", "test_accuracy", "valid_accuracy", "valid_loss")
DIVERGED = "diverged"
LOG_SECONDS = 20.0  # between two lines about one run, where there is no terminal


class Display(View):
    """A bar for every run that is under way, and one for all; in a log, a line now and then."""

    def __init__(self, console: Console, configs: Sequence[RunConfig]) -> None:
        self.console, self.names = console, titles(configs)
        self.progress = bars(console)
        self.all = self.progress.add_task("[bold]all runs", total=len(configs), note="")
        self.bars: dict[str, TaskID] = {}
        self.notes: dict[str, str] = {}
        self.said: dict[str, float] = {}  # when a line was last written

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def started(self, config: RunConfig) -> None:
        name = self.name(config)
        self.bars[config.id] = self.progress.add_task(name, total=config.epochs, note="")
        self.said[config.id] = time.monotonic()
        if not self.console.is_terminal:
            self.tell(f"{name}: started")

    def progressed(self, config: RunConfig, epoch: int, row: Row) -> None:
        diverged = "train_loss" in row and row["train_loss"] is None
        note = f"{DIVERGED} at epoch {epoch}" if diverged else numbers(row)
        note = self.notes[config.id] = note or self.notes.get(config.id, "")
        self.progress.update(self.bars[config.id], completed=epoch, note=note)
        now = time.monotonic()
        if row and not self.console.is_terminal and now - self.said[config.id] > LOG_SECONDS:
            self.said[config.id] = now
            self.tell(f"{self.name(config)}: {epoch}/{config.epochs}  {note}")

    def ended(self, outcome: Outcome) -> None:
        id = outcome.config.id
        if id in self.bars:
            self.progress.remove_task(self.bars.pop(id))
        if outcome.status != STOPPED:
            self.progress.advance(self.all)
        note = self.notes.get(id, "")
        mark, said = {
            FAILED: ("[red]✗[/]", escape(outcome.error)),
            STOPPED: ("[yellow]■[/]", "stopped; the same command goes on from here"),
            KNOWN: ("[green]✓[/]", "a record was there"),
        }.get(outcome.status, ("[green]✓[/]", note))
        mark = "[yellow]![/]" if said == note and note.startswith(DIVERGED) else mark
        self.tell(f"{mark} {self.name(outcome.config)}: {said}")

    def tell(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def name(self, config: RunConfig) -> str:
        return escape(self.names.get(config.id) or titles([config])[config.id])


def bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(compact=True),
        TextColumn("[dim]{task.fields[note]}"),
        console=console,
    )


@contextlib.contextmanager
def counting(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for something that says how much of how much is done; in a log, a line at the end."""
    with bars(console) as progress:
        task = progress.add_task(what, total=1, note="")
        yield lambda done, total: progress.update(task, completed=done, total=total)


def titles(configs: Iterable[RunConfig]) -> dict[str, str]:
    """By id: task and optimizer, what tells its runs apart, and the seed."""
    alike: dict[tuple[str, str], list[RunConfig]] = {}
    for config in configs:
        alike.setdefault((config.task, config.optimizer), []).append(config)
    made = {}
    for (task, optimizer), same in alike.items():
        label = REGISTRY[optimizer].label if optimizer in REGISTRY else optimizer
        told = [{**c.hyper, **c.options, "epochs": c.epochs} for c in same]
        varying = telling(told)
        for config, own in zip(same, told, strict=True):
            parts = [f"{key} {show(own[key])}" for key in varying if key in own]
            made[config.id] = ", ".join([task, label, *parts, f"seed {config.seed}"])
    return made


def numbers(row: Row) -> str:
    shown = ((name.replace("_", " "), row[name]) for name in SHOWN if row.get(name) is not None)
    return "  ".join(
        f"{name} {100 * value:.1f} %" if name.endswith("accuracy") else f"{name} {value:.4g}"
        for name, value in shown
    )
