"""The tasks by name. Importing one imports torch; the list alone does not."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import LabError

if TYPE_CHECKING:
    from .base import Task

# name: what `adamo-lab list` says about it
TASKS = {
    "cifar100": "ResNet-18 on CIFAR-100, the paper's protocol (needs the data; a GPU is advised)",
    "digits": "a small BatchNorm network on scikit-learn's handwritten digits: seconds on a CPU",
    "grokking": "modular addition, p = 97: when does generalization set in?",
    "language": "a small GPT on Tiny Shakespeare (characters) or WikiText-2 (words)",
    "toy2d": "two spirals in the plane: decision boundaries and norms",
}


def task_class(name: str) -> type[Task]:
    """The class of a task, or one sentence that names the choices."""
    if name not in TASKS:
        raise LabError(f"unknown task {name!r}; known are {', '.join(TASKS)}")
    return import_module(f"{__package__}.{name}").TASK
