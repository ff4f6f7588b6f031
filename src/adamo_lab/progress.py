"""What a user sees while runs train: bars on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from .engines import FAILED, KNOWN, STOPPED, Outcome
from .groups import differs, show
from .optimizers import REGISTRY
from .records import Row, RunConfig

SHOWN = ("train_loss", "test_accuracy", "valid_accuracy", "valid_loss")
LOG_SECONDS = 20.0  # between two lines about one run, where there is no terminal


class Notes:
    """What there is to say about every run, by its id."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.names = names or {}
        self.notes: dict[str, str] = {}
        self.diverged: set[str] = set()

    def name(self, config: RunConfig) -> str:
        return escape(self.names.get(config.id) or titles([config])[config.id])

    def note(self, config: RunConfig, epoch: int, row: Row) -> str:
        if "train_loss" in row and row["train_loss"] is None:
            self.diverged.add(config.id)
            self.notes[config.id] = f"diverged at epoch {epoch}"
        else:
            self.notes[config.id] = numbers(row) or self.notes.get(config.id, "")
        return self.notes[config.id]

    def verdict(self, outcome: Outcome) -> str:
        """One line about a run that is over, in rich's markup."""
        name, note = self.name(outcome.config), self.notes.get(outcome.config.id, "")
        if outcome.status == FAILED:
            return f"[red]✗[/] {name}: {escape(outcome.error)}"
        if outcome.status == STOPPED:
            return f"[yellow]■[/] {name}: stopped; the same command goes on from here"
        if outcome.status == KNOWN:
            return f"[green]✓[/] {name}: a record was there"
        mark = "[yellow]![/]" if outcome.config.id in self.diverged else "[green]✓[/]"
        return f"{mark} {name}: {escape(note)}"


class Bars:
    """A bar for every run that is under way, and one for all."""

    def __init__(
        self, console: Console, total: int, names: Mapping[str, str] | None = None
    ) -> None:
        self.progress = bar(console, TextColumn("[dim]{task.fields[note]}"))
        self.all = self.progress.add_task("[bold]all runs", total=total, note="")
        self.bars: dict[str, TaskID] = {}
        self.notes = Notes(names)

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def started(self, config: RunConfig) -> None:
        self.bars[config.id] = self.progress.add_task(
            self.notes.name(config), total=config.epochs, note=""
        )

    def progressed(self, config: RunConfig, epoch: int, row: Row) -> None:
        note = self.notes.note(config, epoch, row)
        self.progress.update(self.bars[config.id], completed=epoch, note=note)

    def ended(self, outcome: Outcome) -> None:
        config = outcome.config
        if config.id in self.bars:
            self.progress.remove_task(self.bars.pop(config.id))
        if outcome.status != STOPPED:
            self.progress.advance(self.all)
        self.progress.console.print(self.notes.verdict(outcome))


class Lines:
    """The same for a log file: a line now and then."""

    def __init__(self, console: Console, names: Mapping[str, str] | None = None) -> None:
        self.console = console
        self.last: dict[str, float] = {}
        self.notes = Notes(names)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def started(self, config: RunConfig) -> None:
        self.last[config.id] = time.monotonic()
        self.console.print(f"{self.notes.name(config)}: started", soft_wrap=True)

    def progressed(self, config: RunConfig, epoch: int, row: Row) -> None:
        note = self.notes.note(config, epoch, row)
        now = time.monotonic()
        if row and now - self.last[config.id] > LOG_SECONDS:
            self.last[config.id] = now
            text = f"{self.notes.name(config)}: {epoch}/{config.epochs}  {note}"
            self.console.print(text, soft_wrap=True)

    def ended(self, outcome: Outcome) -> None:
        self.console.print(self.notes.verdict(outcome), soft_wrap=True)


def display(console: Console, configs: Sequence[RunConfig]) -> Bars | Lines:
    """What suits the console: bars on a terminal, lines in a log."""
    names = titles(configs)
    return Bars(console, len(configs), names) if console.is_terminal else Lines(console, names)


def bar(console: Console, *columns: ProgressColumn) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(compact=True),
        *columns,
        console=console,
    )


@contextlib.contextmanager
def counting(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for something that says how much of how much is done; in a log, a line at the end."""
    with bar(console) as progress:
        task = progress.add_task(what, total=1)
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
        varying = [k for k in dict.fromkeys(k for d in told for k in d) if differs(k, told)]
        for config, own in zip(same, told, strict=True):
            parts = [f"{key} {show(own[key])}" for key in varying if key in own]
            made[config.id] = ", ".join([task, label, *parts, f"seed {config.seed}"])
    return made


def numbers(row: Row) -> str:
    shown = ((name, row[name]) for name in SHOWN if row.get(name) is not None)
    return "  ".join(
        f"{name.replace('_', ' ')} {100 * value:.1f} %"
        if name.endswith("accuracy")
        else f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in shown
    )
