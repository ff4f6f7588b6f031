"""The tasks by name, with their options. Importing one imports torch; this table does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import lookup, require

if TYPE_CHECKING:
    from .base import Task


@dataclass(frozen=True)
class Info:
    """What can be said about a task without running it."""

    about: str
    epochs: int  # the full length
    defaults: Mapping[str, Any]  # a run's config holds all of these
    later: Mapping[str, Any] = field(default_factory=dict)  # younger: held where changed; ids stay
    unit: str = "epoch"  # what figures call one


Rule = tuple[str, Callable[[Any], bool]]  # in words, and as a test


def whole(least: int) -> Rule:
    return f"a whole number >= {least}", lambda v: type(v) is int and v >= least


def fraction(words: str, legal: Callable[[float], bool]) -> Rule:
    return words, lambda v: type(v) in (int, float) and legal(v)


def one_of(*choices: str | bool) -> Rule:
    names = [str(choice).lower() if isinstance(choice, bool) else choice for choice in choices]
    words = " or ".join([", ".join(names[:-1]), names[-1]])
    return words, lambda v: any(v is c if isinstance(c, bool) else v == c for c in choices)


# What an option may be, in whatever task it occurs; also None where that is its default.
LEGAL: dict[str, Rule] = {
    **dict.fromkeys(
        ("batch", "every", "width", "layers", "heads", "context", "steps", "patch"), whole(1)
    ),
    **dict.fromkeys(("p", "points", "resolution"), whole(2)),
    **dict.fromkeys(("snapshots", "swa", "channels_last"), one_of(True, False)),
    "watch": one_of(True, False, "norms"),
    "holdout": whole(0),
    "noise": fraction("a number >= 0", lambda v: v >= 0),
    "train_share": fraction("above 0 and below 1", lambda v: 0 < v < 1),
    **dict.fromkeys(
        ("dropout", "smoothing", "warmup"), fraction(">= 0 and below 1", lambda v: 0 <= v < 1)
    ),
    "corpus": one_of("shakespeare", "wikitext2"),
    "model": one_of("embedding", "one-hot"),
    "precision": one_of("bfloat16", "float32"),
    "schedule": one_of("constant", "cosine", "linear", "step"),
    "stem": one_of("3x3", "7x7"),
    "text": one_of("enwik8", "topics"),
    "judge": one_of("valid", "test"),
    "norms": one_of("before", "after"),
}

# "watch" records the spread of the gradient's norm ("norms": and what norms.py counts), "snapshots"
# keeps weights for a landscape.
WATCHING = {"watch": False, "snapshots": False}
CONSTANT = {"schedule": "constant"}  # the learning rate, unless asked otherwise

TASKS = {
    "cifar100": Info(
        "ResNet-18 on CIFAR-100, the paper's protocol (take a GPU)",
        300,
        {
            "batch": 128,
            "precision": "bfloat16",
            "holdout": 0,  # training images kept for validation; the test set is then not touched
            "every": None,  # epochs between two evaluations; None: about a hundred a run
            "stem": "3x3",
            "width": 64,
            "channels_last": True,
            "swa": True,
            "smoothing": 0.1,
            **WATCHING,
        },
        {"schedule": "step"},  # of the learning rate, until SWA has its own; the paper's drops
    ),
    "digits": Info(
        "a small BatchNorm network on handwritten digits: seconds on a CPU",
        40,
        {"batch": 50, "width": 32, **WATCHING},
        CONSTANT,
    ),
    "gpt": Info(
        "a modern GPT with QK-norm on the bytes of enwik8 (take a GPU)",
        150,
        {
            "text": "enwik8",  # "topics": what Python's help() shows
            "layers": 12,
            "heads": 8,
            "width": 512,
            "context": 512,
            "batch": 64,
            "steps": 10,  # in one round, which is this task's epoch
            "warmup": 0.05,
            "schedule": "linear",
            "precision": "bfloat16",
            "every": None,
            **WATCHING,
        },
        {
            "judge": "valid",  # the text that a run is judged by; "test": the last 5 M bytes
            "norms": "before",  # each part; "after": then the scale of no matrix matters
        },
        unit="round",
    ),
    "grokking": Info(
        "modular addition, p = 97: when does generalization set in?",
        5000,
        {
            "p": 97,
            "train_share": 0.3,
            "batch": 512,
            "width": 128,
            "model": "embedding",
            "every": 10,
            **WATCHING,
        },
        CONSTANT,
    ),
    "language": Info(
        "a small GPT on Tiny Shakespeare (characters) or WikiText-2 (words)",
        50,
        {
            "corpus": "shakespeare",
            "layers": 2,
            "heads": 4,
            "width": 96,
            "context": 64,
            "batch": 32,
            "steps": 100,  # in one round, which is this task's epoch
            "dropout": 0.0,
            "warmup": 0.04,
            "precision": "float32",
            "every": None,
            **WATCHING,
        },
        {"schedule": "cosine"},
        unit="round",
    ),
    "toy2d": Info(
        "two spirals in the plane: decision boundaries and norms",
        1000,
        {
            "points": 200,
            "noise": 0.12,
            "batch": 50,
            "width": 64,
            "every": 10,
            "resolution": 80,
            **WATCHING,
        },
        CONSTANT,
    ),
    "vit": Info(
        "a vision transformer with QK-norm on CIFAR-100 (take a GPU)",
        100,
        {
            "layers": 9,
            "heads": 6,
            "width": 384,
            "patch": 4,
            "batch": 256,
            "warmup": 0.05,
            "schedule": "cosine",
            "smoothing": 0.1,
            "precision": "bfloat16",
            "holdout": 0,
            "every": None,
            **WATCHING,
        },
    ),
}


def info(name: str) -> Info:
    return lookup("task", name, TASKS)


def unit(name: str) -> str:
    """What one pass of the training loop is called in a figure of this task, or of any other."""
    return TASKS[name].unit if name in TASKS else "epoch"


def data_of(task: str, options: Mapping[str, Any]) -> str:
    """The data set that a run reads, as ``data.check`` calls it; most need no files."""
    if task in ("cifar100", "vit"):
        return "cifar100"
    return str(options.get("corpus") or options.get("text") or task)


def task_class(name: str) -> type[Task]:
    """The class of a task; imports torch."""
    info(name)
    return import_module(f"{__package__}.{name}").TASK


def check_option(name: str, value: Any) -> None:
    words, legal = LEGAL[name]
    require(legal(value), f"{name} must be {words}, got {value!r}")


def all_options(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A task's options with a user's changes, every name and value checked."""
    task = info(name)
    known = {**task.defaults, **task.later}
    made = dict(task.defaults)
    for option, value in changes.items():
        require(option in known, f"{name} has no option {option!r}; it has {', '.join(known)}")
        if [value, known[option]] != [None, None]:
            check_option(option, value)
        if option in task.defaults or value != known[option]:
            # 0 and 0.0 are one setting and must be one run
            made[option] = float(value) if isinstance(known[option], float) else value
    return made
