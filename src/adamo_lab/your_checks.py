"""What can be said against the arguments of a comparison before anything is trained."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import optimizers as registry
from .errors import LabError
from .records import canonical
from .tasks import LEGAL
from .your_task import Recipe


def count_of(epochs: Any) -> int:
    with contextlib.suppress(TypeError):
        if not isinstance(epochs, bool) and operator.index(epochs) > 0:
            return operator.index(epochs)
    raise LabError(f"epochs must be a whole number of at least 1, got {epochs!r}")


def seeds_of(seeds: Any) -> list[int]:
    """As on the command line a number is a count."""
    try:
        several = seeds if isinstance(seeds, Iterable) else range(operator.index(seeds))
        numbers = [operator.index(seed) for seed in several]
    except TypeError as error:
        raise LabError(f"seeds must be whole numbers, or how many, got {seeds!r}") from error
    if not numbers or len({*numbers}) < len(numbers) or min(numbers) < 0:
        raise LabError(f"seeds must be different, >= 0 and at least one, got {seeds!r}")
    return numbers


def check(recipe: Recipe, names: Sequence[str], hyper: Mapping[str, Mapping[str, Any]]) -> None:
    """One sentence for what makes no sense."""
    if isinstance(recipe.model_fn, nn.Module) or not callable(recipe.model_fn):
        raise LabError(
            "model_fn must be a function that makes a new model for every run, and is a "
            f"{type(recipe.model_fn).__name__}; lambda: copy.deepcopy(model) makes one of yours"
        )
    if isinstance(names, str) or not names or len({*names}) < len(names):
        raise LabError(f"optimizers must be different and at least one, got {names!r}")
    if not isinstance(hyper, Mapping) or not all(isinstance(v, Mapping) for v in hyper.values()):
        raise LabError(f'hyper must be like {{"adamw": {{"lr": 3e-4}}}}, got {hyper!r}')
    for name in hyper:
        if name not in names:
            raise LabError(f"hyper names {name!r}, which is not among {', '.join(names)}")
    if recipe.metrics and recipe.valid is None:
        raise LabError("metrics are taken on valid_loader, and there is none; give one")
    check_loader("train_loader", recipe.train)
    if recipe.valid is not None:
        check_loader("valid_loader", recipe.valid)


def check_loader(what: str, source: Any) -> None:
    if not isinstance(source, Iterable) and not callable(source):
        raise LabError(
            f"{what} must be a DataLoader, a list of batches or a function of the epoch, and is a "
            f"{type(source).__name__}; wrap a data set in a DataLoader"
        )
    if isinstance(source, Iterator):
        raise LabError(
            f"{what} is an iterator and can be read only once; give a DataLoader or a list"
        )
    if getattr(source, "persistent_workers", False):
        raise LabError(
            f"{what} has persistent_workers=True, which carries random numbers from one run to "
            "the next; make it with persistent_workers=False"
        )


def settings_of(
    names: Sequence[str], lrs: Sequence[float] | None, hyper: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """Every optimizer with the lab's settings for a model nobody knows and the user's changes."""
    made = []
    for name in names:
        changes = hyper.get(name, {})
        if lrs is not None and "lr" in changes:
            raise LabError(f"hyper gives an lr for {name}, and lrs gives some for all; leave one")
        legal = registry.legal_arguments(name) - {*registry.OWN}  # of the lab's own protocols
        if unknown := [key for key in changes if key not in legal]:
            known = ", ".join(sorted(legal))
            raise LabError(f"{name} has no argument {unknown[0]!r}; it has {known}")
        rates = [{"lr": lr} for lr in lrs] if lrs is not None else [{}]
        for rate in rates:
            chosen = registry.settings("yours", name, {**changes, **rate})
            made.append((name, {k: v for k, v in chosen.items() if k in legal}))
    try:
        unique = {canonical([name, chosen]) for name, chosen in made}
    except (TypeError, ValueError) as error:
        raise LabError(f"hyper must hold numbers, words or lists: {error}") from error
    if not made or len(unique) < len(made):
        raise LabError(f"lrs must be different and at least one, got {lrs!r}")
    return made


def training_options(recipe: Recipe, warmup: float, clip: float | None) -> dict[str, Any]:
    """What a run's config says about its training, every value checked."""
    schedule, dtype = recipe.schedule, recipe.autocast
    words, legal = LEGAL["schedule"]
    if not callable(schedule) and not legal(schedule):
        raise LabError(f"schedule must be {words}, or a function, got {schedule!r}")
    words, legal = LEGAL["warmup"]
    if not legal(warmup):
        raise LabError(f"warmup must be {words}, got {warmup!r}")
    if clip is not None and not (type(clip) in (int, float) and clip > 0):
        raise LabError(f"clip must be a number above 0 or None, got {clip!r}")
    if dtype not in (None, torch.bfloat16):
        raise LabError(f"autocast must be torch.bfloat16 or None, got {dtype}")
    return {
        "schedule": getattr(schedule, "__name__", "your own") if callable(schedule) else schedule,
        "warmup": float(warmup),
        "clip": None if clip is None else float(clip),
        "autocast": str(dtype).removeprefix("torch.") if dtype else None,
    }
