"""From the words of a command line to the runs that they ask for."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from .errors import LabError, require
from .records import RunConfig, is_number

MOST_SEEDS = 10_000
PYTHONS = {"True": True, "False": False, "None": None}


def configs_of(
    task: str,
    optimizers: Iterable[str],
    seeds: Iterable[int],
    epochs: int | None,
    changes: Iterable[dict[str, Any]],
    options: dict[str, Any],
    synthetic: bool,
) -> list[RunConfig]:
    """All combinations, every name checked before the first run starts."""
    from .optimizers import check_own, legal_arguments, settings
    from .tasks import all_options, info

    full = info(task).epochs
    options = all_options(task, options)
    configs: dict[str, RunConfig] = {}  # a setting named twice is one run
    for seed, name, change in itertools.product(seeds, optimizers, changes):
        hyper = settings(task, name, change)
        if unknown := sorted(set(change) - legal_arguments(name)):
            raise LabError(f"{name} has no hyper-parameter {unknown[0]!r}")
        check_own(name, hyper)
        require(is_number(hyper["lr"]), f"lr must be a number, got {hyper['lr']!r}")
        config = RunConfig(task, name, seed, epochs or full, hyper, options, 1.0, synthetic)
        configs[config.id] = config
    return [*configs.values()]


def parse_seeds(text: str) -> tuple[int, ...]:
    """``3`` is the first three, ``0,2`` these two, ``5-9`` five of them."""
    try:
        if "," in text:
            seeds = tuple(int(part) for part in text.split(",") if part)
        elif "-" in text:
            first, last = map(int, text.split("-"))
            seeds = tuple(range(first, last + 1)[: MOST_SEEDS + 1])
        else:
            seeds = tuple(range(int(text))[: MOST_SEEDS + 1])
    except ValueError:
        seeds = ()
    if len(seeds) > MOST_SEEDS:
        raise LabError(f"--seeds asks for more than {MOST_SEEDS} seeds: {text!r}")
    if not seeds or min(seeds) < 0:
        raise LabError(f"--seeds takes a count (3), a list (0,2) or a range (5-9), got {text!r}")
    return seeds


def pairs(texts: Iterable[str]) -> dict[str, Any]:
    return {name: parse(value) for name, value in map(split_pair, texts)}


def split_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise LabError(f"expected name=value, got {text!r}")
    return name, value


def parse(text: str) -> Any:
    """A JSON value where it is one (1e-3, true, null), as Python writes it too; else the text."""
    if text in PYTHONS:
        return PYTHONS[text]
    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite_number)
    except ValueError:
        return text


def parse_list(text: str) -> list[Any]:
    """Values between commas, those inside brackets excepted: [0.9,0.95],[0.8,0.9] are two."""
    values = parse(f"[{text}]")
    return values if isinstance(values, list) else [parse(part) for part in text.split(",")]


def finite_number(text: str) -> float:
    return number if math.isfinite(number := float(text)) else refuse(text)


def refuse(constant: str) -> NoReturn:
    raise LabError(f"{constant} is not a value that a run can have")
