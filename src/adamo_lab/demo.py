"""The demo: three small stories in minutes, and a page that says what happened in them.

Every sentence about a result is made from the records of the run at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .records import FINISHED, Record, RunConfig, load
from .words import configs_of

if TYPE_CHECKING:
    from .engines import Setup

QUICK = 0.02  # of every run's length
SUMS_EPOCHS, TEXT_ROUNDS, SPIRALS_EPOCHS = 2500, 80, 500
LRS = (1e-3, 2e-3, 4e-3, 8e-3)
TEXT = {"text": "topics", "layers": 1, "heads": 2, "width": 64, "context": 32, "batch": 32}
TITLE = "AdamW, AdamO and AngularAdamW, side by side"


def demo_runs(quick: bool = False) -> list[RunConfig]:
    """About three minutes on two cores; the long runs first, so that no core idles at the end."""
    scale, text = QUICK if quick else 1.0, {**TEXT, "precision": "float32"}
    made = []
    for task, other, seed, epochs, options, changes in (
        ("grokking", "adamo", 1, SUMS_EPOCHS, {}, [{}]),
        ("gpt", "angular", 0, TEXT_ROUNDS, text, [{"lr": lr} for lr in LRS]),
        ("toy2d", "adamo", 0, SPIRALS_EPOCHS, {}, [{}]),
    ):
        length = max(2, round(epochs * scale))
        for change in changes:
            names = ("adamw", other)
            made += configs_of(task, names, [seed], length, [change], options, synthetic=False)
    return made


def write_page(setup: Setup) -> Path:
    """The page and, on the terminal, what it opens with."""
    from .report import Cover, write_report

    records = [record for record in load(setup.file)[0] if record.status == FINISHED]
    told = {task: tell(records) for task, tell in STORIES.items()}
    lead = [*told.values(), "One run each: enough to see how they differ, not to decide."]
    stories = {task: (TITLES[task], f"{told[task]} {BACKGROUND[task]}") for task in STORIES}
    cover = Cover(TITLE, " ".join(lead), stories)
    page = write_report(setup.out, setup.out / "report", cover)
    print("", *told.values(), f"The page: {page}", sep="\n")
    return page


# --- what happened, in a sentence each


def sums(records: Sequence[Record]) -> str:
    """When each generalized, and with what norm it ended."""
    adamw, adamo = (only(records, "grokking", name).result for name in ("adamw", "adamo"))
    first, second = adamo["grokking_epoch"], adamw["grokking_epoch"]
    norms = f"(norm of the weights {adamo['weight_norm']:.0f} and {adamw['weight_norm']:.0f})"
    if first and second:
        what = f"AdamO generalizes at epoch {first:,} and AdamW at epoch {second:,}"
    elif first or second:
        done, other = ("AdamO", "AdamW") if first else ("AdamW", "AdamO")
        what = f"{done} generalizes at epoch {first or second:,}, {other} not in the time given"
    else:
        what = "neither AdamO nor AdamW generalizes in the time given"
    return f"On modular addition {what} {norms}."


def text(records: Sequence[Record]) -> str:
    """At how many learning rates the turn helps, and what each reaches at its best."""
    losses = {
        (r.config.optimizer, r.config.hyper["lr"]): r.result["valid_loss"]
        for r in records
        if r.config.task == "gpt" and r.result["valid_loss"] is not None
    }
    best = {
        name: min((loss, lr) for (n, lr), loss in losses.items() if n == name)
        for name in ("angular", "adamw")
    }
    rates = [lr for name, lr in losses if name == "angular" and ("adamw", lr) in losses]
    won = sum(losses["angular", lr] < losses["adamw", lr] for lr in rates)
    numbers = [f"{best[name][0]:.3f} (lr {best[name][1]:g})" for name in ("angular", "adamw")]
    return (
        f"On text AngularAdamW ends below AdamW at {won} of {len(rates)} learning rates; at its "
        f"best it reaches a validation loss of {numbers[0]}, AdamW {numbers[1]}."
    )


def spirals(records: Sequence[Record]) -> str:
    """Which boundary is shorter, and whose weights are smaller."""
    adamw, adamo = (only(records, "toy2d", name).result for name in ("adamw", "adamo"))
    lengths = [row["boundary_length"] for row in (adamo, adamw)]
    norms = [row["weight_norm"] for row in (adamo, adamw)]
    drawn = "have no boundary to compare" if None in lengths else (
        f"draw a boundary of length {lengths[0]:.1f} and {lengths[1]:.1f}"
    )  # fmt: skip
    return (
        f"Between two spirals AdamO and AdamW {drawn}, with weights of norm "
        f"{norms[0]:.1f} and {norms[1]:.1f}."
    )


def only(records: Sequence[Record], task: str, name: str) -> Record:
    return next(r for r in records if (r.config.task, r.config.optimizer) == (task, name))


STORIES = {"grokking": sums, "gpt": text, "toy2d": spirals}
TITLES = {
    "grokking": "Modular addition: when does understanding set in?",
    "gpt": "A small GPT on Python's own help: does the learning rate matter less?",
    "toy2d": "Two spirals: decision boundaries",
}
BACKGROUND = {
    "grokking": "The network learns (a + b) mod 97 from 30 % of all pairs. It soon knows those by "
    "heart, and understands the others much later: watch the test accuracy rise, and the norm of "
    "the weights, which AdamO moves at a pace of its own.",
    "gpt": "QK-norm makes the length of the query and key weights meaningless. AngularAdamW has "
    "found them and turns them by an angle that the learning rate sets; everything else follows "
    "AdamW. Look at the loss over the learning rate first.",
    "toy2d": "The background shows what each network answers everywhere, the dots what it was "
    "shown. The paper says that AdamO's norms are smaller and its boundaries smoother. There is "
    "no norm layer here, so AngularAdamW would be AdamW.",
}
