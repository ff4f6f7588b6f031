"""What a study is: runs, what to read off them, what the paper printed, and claims to decide.

A new one is a value in a file of this folder, listed in ``__init__``; commands, report and verdicts
follow from it::

    GPT = Study(
        name="evidence-gpt",  # its records: evidence-gpt.jsonl.gz
        title="A GPT on enwik8",
        about="AdamW's and AngularAdamW's trials at equal budgets.",
        kind="trials",
        runs=(Runs("gpt", 150, (*trials("adamw", lr=(1e-3, 2e-3), weight_decay=(0.1, 0.5)),
                                *trials("angular", lr=(1e-3, 2e-3), weight_decay=(0.1,)))),),
        metrics=(Metric("valid_loss", "validation loss", higher_is_better=False, digits=4),),
        seeds=(0,),
    )
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ..optimizers import REGISTRY, settings
from ..records import RunConfig, canonical
from ..tasks import all_options

HELD_OUT_OF_MADE_UP = 500  # images; a study's own number may be more than there are


@dataclass(frozen=True)
class Arm:
    """A row: an optimizer, with changes to the laboratory's settings of it on the task."""

    optimizer: str
    hyper: Mapping[str, Any]
    name: str  # what claims call it
    label: str  # in tables and figures


def arm(optimizer: str, name: str = "", label: str = "", **hyper: Any) -> Arm:
    return Arm(optimizer, hyper, name or optimizer, label or REGISTRY[optimizer].label)


def arms(*optimizers: str) -> tuple[Arm, ...]:
    """Rows with the laboratory's settings."""
    return tuple(arm(name) for name in optimizers)


def trials(
    optimizer: str, name: str = "", label: str = "", /, **axes: Sequence[Any]
) -> tuple[Arm, ...]:
    """A row for every combination of values: ``trials("adamw", lr=(1e-3, 2e-3), …)``."""
    return tuple(
        arm(optimizer, name, label, **dict(zip(axes, values, strict=True)))
        for values in product(*axes.values())
    )


@dataclass(frozen=True)
class Runs:
    """Rows that share a table: one task, one length, one choice of the task's options."""

    task: str
    epochs: int
    arms: tuple[Arm, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def configs(
        self, seeds: Sequence[int], scale: float, synthetic: bool, options: Mapping[str, Any]
    ) -> list[RunConfig]:
        fewer = {"holdout": HELD_OUT_OF_MADE_UP} if self.options.get("holdout") else {}
        changes = {**self.options, **(fewer if synthetic else {}), **options}
        options = all_options(self.task, changes)
        epochs = max(1, round(self.epochs * scale))
        return [
            RunConfig(
                self.task,
                arm.optimizer,
                seed,
                epochs,
                settings(self.task, arm.optimizer, arm.hyper),
                options,
                scale,
                synthetic,
            )
            for seed in seeds
            for arm in self.arms
        ]


@dataclass(frozen=True)
class Metric:
    """A column: a key of the records' results, and how it reads."""

    key: str
    label: str
    percent: bool = False  # stored as a share, shown as per cent
    higher_is_better: bool = True
    digits: int = 2
    ranked: bool = True  # its best value may be called so

    def better(self, values: Iterable[float]) -> float:
        """The best of some."""
        return (max if self.higher_is_better else min)(values)


@dataclass(frozen=True)
class Claim:
    """A sentence that compares two rows in a metric: ``sides`` is "adamo > adamw".

    ">" and "<" say which is larger (Welch's t-test, one-sided), "=" that they cannot be told apart
    (the 90 % confidence interval of the difference lies within ``margin``).
    """

    text: str
    metric: str
    sides: str
    source: str  # where the paper says so
    margin: float = 0.0

    @property
    def first(self) -> str:
        return self.sides.split()[0]

    @property
    def relation(self) -> str:
        return self.sides.split()[1]

    @property
    def second(self) -> str:
        return self.sides.split()[2]


def claims(source: str, metric: str, sides: Mapping[str, str]) -> tuple[Claim, ...]:
    """Several from one place about one metric: ``{text: sides}``."""
    return tuple(Claim(text, metric, side, source) for text, side in sides.items())


@dataclass(frozen=True)
class Study:
    """A table or figure: its records are the file of its name."""

    name: str
    title: str
    about: str
    runs: tuple[Runs, ...]
    metrics: tuple[Metric, ...]
    claims: tuple[Claim, ...] = ()
    paper: Mapping[str, Mapping[str, tuple[float, float | None]]] = field(default_factory=dict)
    # "trials": the best of each; "heatmaps", "landscape", "curves": their figures; "numbers": none
    kind: str = "table"
    seeds: tuple[int, ...] = (0, 1, 2)

    def configs(
        self,
        seeds: Sequence[int],
        scale: float = 1.0,
        synthetic: bool = False,
        options: Mapping[str, Any] | None = None,  # of the task
    ) -> list[RunConfig]:
        asked = seeds, scale, synthetic, options or {}
        return [config for runs in self.runs for config in runs.configs(*asked)]

    def arm(self, config: RunConfig) -> Arm | None:
        """The row that a run belongs to; one with other hyper-parameters has none."""
        hyper = canonical(dict(config.hyper))  # a pair is a list in a file
        for runs in (r for r in self.runs if r.task == config.task):
            for one in (a for a in runs.arms if a.optimizer == config.optimizer):
                if canonical(settings(runs.task, one.optimizer, one.hyper)) == hyper:
                    return one
        return None
