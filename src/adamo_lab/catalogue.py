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
from .tasks import TASKS, unit

if TYPE_CHECKING:
    from .engines import Outcome, Setup
    from .groups import Group

KINDS = ("studies", "tasks", "optimizers")
MOST = 5  # columns beside the optimizer; the report has all


def show(what: str) -> None:
    """All of it on a screen, or all about one kind."""
    if what and what not in KINDS:
        raise LabError(f"{what!r} cannot be listed; say {', '.join(KINDS)}, or nothing")
    console = Console()
    if what in ("", "studies"):
        rows = [(s.name, f"{s.title}. {s.about}" if what else s.title) for s in STUDIES.values()]
        lines(console, "Studies", "adamo-lab study NAME", rows)
    if what in ("", "tasks"):
        details = {n: f". {t.epochs} {t.unit}s; {pairs_of(t.defaults)}" for n, t in TASKS.items()}
        rows = [(n, t.about + (details[n] if what else "")) for n, t in TASKS.items()]
        lines(console, "Tasks", "adamo-lab run NAME", rows)
    if what == "optimizers":
        for task in ("cifar100", "gpt"):
            known = SETTINGS[task]
            rows = [(name, pairs_of(known[name])) for name in REGISTRY if name in known]
            lines(console, f"Optimizers on {task}", "adamo-lab run TASK -o NAME", rows)
    if not what:
        every = [("", ", ".join(REGISTRY))]
        lines(console, "Optimizers", "adamo-lab list optimizers for their settings", every)


def pairs_of(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def lines(console: Console, title: str, command: str, rows: Sequence[tuple[str, str]]) -> None:
    console.print(f"[bold]{title}[/] [dim]({command})[/]")
    table = Table.grid(padding=(0, 2))
    for name, about in rows:
        table.add_row(f"  {escape(name)}", escape(about))
    console.print(table)


# --- what some runs came to


def summarize(outcomes: Sequence[Outcome], setup: Setup) -> None:
    """The report's tables of these runs, where the records are, and the next command."""
    from .groups import groups
    from .records import FINISHED, load

    console = Console()
    asked = {outcome.config.id for outcome in outcomes}
    records = load(setup.file)[0] if setup.file.exists() else []
    done = [r for r in records if r.id in asked and r.status == FINISHED]
    for group in groups(done, STUDIES.get(setup.name)):
        console.print(terminal_table(group))
    counts = Counter(outcome.status for outcome in outcomes)
    words = {"finished": "finished", "known": "were there already", "failed": "failed"}
    said = [f"{counts[key]} {word}" for key, word in words.items() if counts[key]]
    if counts["stopped"]:
        said.append(f"{counts['stopped']} stopped or not begun: the same command goes on")
    console.print(f"{len(outcomes)} runs: {', '.join(said)}.")
    if done:
        console.print(f"Records: {setup.file}", soft_wrap=True)
        console.print(f"Next:    adamo-lab report {setup.out}", soft_wrap=True)


def terminal_table(group: Group) -> Table:
    """The table of the report, marked as it is there, with as many metrics as fit."""
    from . import tables

    many = len(group.lines) > tables.MOST_LINES
    made = tables.best_table(group, {}) if many else tables.table(group)
    length = f"{group.epochs} {unit(group.task)}{'s' if group.epochs != 1 else ''}"
    title = escape(", ".join(filter(None, [group.task, group.label, length])))
    title += "".join(f"  [yellow]{escape(banner)}[/]" for banner in group.banners)
    shown = Table(title=title, title_justify="left", title_style="bold")
    shown.add_column("optimizer", no_wrap=True)
    heads = [f"{head} {name}".strip() for head, below in made.heads for name in below][:MOST]
    for head in heads:
        shown.add_column(escape(head), justify="right")
    for row in made.rows:
        texts = ((escape(f"{cell.text} {cell.note}".strip()), cell.best) for cell in row.cells)
        cells = [f"[bold]{text}[/]" if best else text for text, best in texts]
        shown.add_row(escape(row.label), *cells[:MOST])
    return shown
