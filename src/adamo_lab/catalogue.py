"""What the command line shows: the catalogue of the laboratory, and what some runs came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .errors import LabError
from .optimizers import REGISTRY, SETTINGS
from .studies import STUDIES
from .tasks import TASKS

if TYPE_CHECKING:
    from .engines import Outcome, Setup

KINDS = ("studies", "tasks", "optimizers")
MOST = 5  # columns beside the optimizer; the report has all


def show(what: str) -> None:
    """All of it on a screen, or all about one kind."""
    if what and what not in KINDS:
        raise LabError(f"{what!r} cannot be listed; say {', '.join(KINDS)}, or nothing")
    if what in ("", "studies"):
        told = {s.name: f"{s.title}. {s.about}" if what else s.title for s in STUDIES.values()}
        # names like evidence-gpt say enough for a screen
        rows = [(name, about) for name, about in told.items() if what or "-" not in name]
        rows += [] if what else [("others", ", ".join(name for name in told if "-" in name))]
        lines("Studies", "adamo-lab study NAME; adamo-lab list studies for more", rows)
    if what in ("", "tasks"):
        details = {n: f". {t.epochs} {t.unit}s; {pairs_of(t.defaults)}" for n, t in TASKS.items()}
        rows = [(n, t.about + (details[n] if what else "")) for n, t in TASKS.items()]
        lines("Tasks", "adamo-lab run NAME", rows)
    for task in ("cifar100", "gpt") if what == "optimizers" else ():
        rows = [(n, pairs_of(SETTINGS[task][n])) for n in REGISTRY if n in SETTINGS[task]]
        lines(f"Optimizers on {task}", "adamo-lab run TASK -o NAME", rows)
    if not what:
        every = [("", ", ".join(REGISTRY))]
        lines("Optimizers", "adamo-lab list optimizers for their settings", every)


def pairs_of(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def lines(title: str, command: str, rows: Sequence[tuple[str, str]]) -> None:
    console, table = Console(), Table.grid(padding=(0, 2))
    console.print(f"[bold]{title}[/] [dim]({command})[/]")
    for name, about in rows:
        table.add_row(f"  {escape(name)}", escape(about))
    console.print(table)


# --- what some runs came to


def summarize(outcomes: Sequence[Outcome], setup: Setup) -> None:
    """The report's tables of these runs, where the records are, and the next command."""
    from . import tables
    from .records import FINISHED, load
    from .runs import groups

    asked = {outcome.config.id for outcome in outcomes}
    records = load(setup.file)[0] if setup.file.exists() else []
    done = [r for r in records if r.id in asked and r.status == FINISHED]
    for group in groups(done, STUDIES.get(setup.name)):
        many = len(group.lines) > tables.MOST_LINES
        made = tables.best_table(group) if many else tables.table(group)
        title = ", ".join(filter(None, [group.config.task, group.label, group.length]))
        shown = tables.text(made, MOST)
        print("  ".join([title, *group.banners]), shown, sep="\n\n", end="\n\n")
    counts = Counter(outcome.status for outcome in outcomes)
    words = {"finished": "finished", "known": "were there already", "failed": "failed"}
    said = [f"{counts[key]} {word}" for key, word in words.items() if counts[key]]
    if counts["stopped"]:
        said.append(f"{counts['stopped']} stopped or not begun: the same command goes on")
    print(f"{len(outcomes)} runs: {', '.join(said)}.")
    if done:
        print(f"Records: {setup.file}", f"Next:    adamo-lab report {setup.out}", sep="\n")
