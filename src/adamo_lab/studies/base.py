"""What a study is: a list of runs, what the paper printed, and the claims the runs decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..optimizers import settings
from ..records import RunConfig
from ..tasks import all_options

HELD_OUT_OF_MADE_UP = 500  # images; a study's own number may be more than there are


@dataclass(frozen=True)
class Request:
    """How a user wants a study run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    scale: float = 1.0
    synthetic: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task


@dataclass(frozen=True)
class Metric:
    """A column: a key of the records' results, and how it reads."""

    key: str
    label: str
    percent: bool = False  # stored as a share, shown as per cent
    higher_is_better: bool = True
    digits: int = 2


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that compares two optimizers.

    ``relation`` is ">" or "<" (the first is larger or smaller: Welch's t-test, one-sided), or "="
    (indistinguishable: the 90 % confidence interval of the difference lies within ``margin``).
    """

    text: str
    metric: str
    first: str
    relation: str
    second: str
    margin: float = 0.0
    source: str = ""  # where the paper says so


@dataclass(frozen=True)
class Study:
    """One table or figure of the paper."""

    name: str
    title: str
    about: str
    kind: str  # how it is drawn: "table", "trials", "boundaries", "landscape", "curves", "heatmaps"
    runs: Callable[[Request], list[RunConfig]]
    metrics: tuple[Metric, ...]
    optimizers: tuple[str, ...]  # the order of the rows
    paper: Mapping[str, Mapping[str, tuple[float, float | None]]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    seeds: int = 3
    axes: tuple[tuple[str, str], ...] = ()  # heat maps: the two hyper-parameters of each optimizer
    example: str = ""


def run(
    task: str,
    optimizer: str,
    seed: int,
    epochs: int,
    request: Request,
    *,
    hyper: Mapping[str, Any] | None = None,
    **options: Any,
) -> RunConfig:
    """One run of a study with the laboratory's settings and some changes to them."""
    chosen = settings(task, optimizer, hyper)
    return run_with(chosen, task, optimizer, seed, epochs, request, **options)


def run_with(
    hyper: Mapping[str, Any],
    task: str,
    optimizer: str,
    seed: int,
    epochs: int,
    request: Request,
    **options: Any,
) -> RunConfig:
    """One run with exactly these hyper-parameters, shortened by the request's scale."""
    if request.synthetic and options.get("holdout"):
        options["holdout"] = HELD_OUT_OF_MADE_UP
    return RunConfig(
        task=task,
        optimizer=optimizer,
        seed=seed,
        epochs=max(1, round(epochs * request.scale)),
        hyper=hyper,
        options=all_options(task, {**options, **request.options}),
        scale=request.scale,
        synthetic=request.synthetic,
    )
