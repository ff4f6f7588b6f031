"""Your own model with several optimizers: the same weights, the same batches, the same budget.

The runs are the laboratory's: seeded, one record each. A comparison with a name goes on after an
interruption, and what it has finished is not trained again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import optimizers as registry
from .engines import CHECKPOINT, KNOWN, Setup, View, interruptible, resolve_device, run_all
from .errors import require, writing
from .records import FAILED, Record, RunConfig, forget, load
from .summary import table, verdicts
from .tasks import check_option
from .train import CHECKPOINT_SECONDS
from .your_task import Batches, LossFunction, Metrics, Recipe, Schedule, Yours, kept_randomness

UNNAMED = "your model"
RUNS = "runs"  # the file of the records, in the folder of the comparison


@dataclass
class Comparison:
    """The records of a comparison, and how they read."""

    name: str
    records: list[Record]  # finished and failed, seed by seed
    report: Path | None = None
    known: list[str] = field(default_factory=list)  # ids of the records that were there before

    @property
    def verdict(self) -> str:
        """A sentence for each optimizer beside the first: difference, interval, number of runs."""
        return "\n".join(verdicts(self.records))

    def table(self) -> str:
        """Final numbers as plain text, mean ± standard deviation over the seeds."""
        there = [r.config for r in self.records if r.id in self.known]
        names = (f"{registry.entry(c.optimizer).label}, seed {c.seed}" for c in there)
        told = f"A record was there, and fresh=True trains again: {'; '.join(names)}"
        return "\n".join([table(self.name, self.records), *([told] if there else [])])

    def __str__(self) -> str:
        return f"{self.verdict}\n\n{self.table()}"


def compare(
    model_fn: Callable[[], nn.Module],
    train_loader: Batches,
    loss_fn: LossFunction,
    *,
    epochs: int,
    optimizers: Sequence[str] = ("adamw", "adamo", "angular"),
    lrs: Sequence[float] | None = None,
    hyper: Mapping[str, Mapping[str, Any]] | None = None,
    schedule: str | Schedule = "cosine",
    warmup: float = 0.0,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    valid_loader: Iterable[Any] | None = None,
    metrics: Metrics | None = None,
    example_batch: Any = None,
    seeds: int | Iterable[int] = (0,),
    out: str | Path = "lab-output/yours",
    device: str | torch.device = "cpu",
    name: str | None = None,
    report: bool = True,
    fresh: bool = False,
    progress: bool | View = True,
) -> Comparison:
    """Train a model with each optimizer under the same conditions, and say which is better.

    Args:
        model_fn: makes a new model; called under the same seed for every optimizer.
        train_loader: a ``DataLoader``, a list of batches, anything that can be read once an epoch,
            or a function of the epoch (from 0) that returns batches. Its random numbers, from
            torch, numpy, random or a loader's generator, depend on seed and epoch alone, so every
            optimizer sees the same batches in the same order.
        loss_fn: ``loss_fn(model, batch)``, the loss to minimize; it gets batches on ``device``.
        epochs: the budget.
        optimizers: names in the registry, ``adamo-lab list optimizers`` shows them; the others are
            compared with the first.
        lrs: learning rates, all of which every optimizer is trained with. The answer depends on
            them, so give several; each optimizer is then judged at its best.
        hyper: changes to their settings, by name: ``{"adamw": {"weight_decay": 0.1}}``.
        schedule: of the learning rate, step by step: "cosine" or "linear" to zero, "step",
            "constant", or a function from the share of the training that is done to a factor.
        warmup: share of the training in which the learning rate rises to its full value.
        clip: the norm at which gradients are clipped.
        autocast: ``torch.bfloat16`` runs loss and metrics under ``torch.autocast``.
        valid_loader: batches on which the loss is evaluated after every epoch; the verdict is about
            it, or about the training loss where there is none.
        metrics: ``metrics(model, batch)``, more numbers about a validation batch, by name. Like
            the loss they are averaged over the batches, weighted by their size.
        example_batch: what the model takes, a loader's (x, y) or x alone, so that AdamO and
            AngularAdamW find scale-invariant weights (see ``adamo_optim.param_groups``). Without it
            the rules go by shape, and AngularAdamW is AdamW.
        seeds: one run of each optimizer for every seed; a number n stands for 0 to n - 1. Below
            two there is no interval, and no verdict.
        out: the folder of the records and the report.
        device: where to train.
        name: of this model, these data and this loss. Runs of the same name and the same settings
            are not trained again, so take another name when you change the model. Without a name
            everything is trained anew.
        report: write the report.
        fresh: train again what is there already under this name.
        progress: show a bar, or whatever has the methods of ``engines.View``.

    Example:
        >>> comparison = compare(make_model, loader, loss_fn, epochs=10)  # doctest: +SKIP
        >>> print(comparison.verdict)  # doctest: +SKIP
    """
    recipe = Recipe(
        model_fn, train_loader, loss_fn, valid_loader, metrics, example_batch, schedule, autocast
    )
    if report:
        from .report import Cover, write_report  # what is missing for it should be known now

    epochs, where = operator.index(epochs), resolve_device(str(device))
    require(epochs > 0, f"epochs must be a whole number of at least 1, got {epochs!r}")
    check(recipe, optimizers, hyper or {})
    settings = settings_of(optimizers, lrs, hyper or {})
    options = {"name": name or UNNAMED, **training_options(recipe, warmup, clip)}
    several = seeds if isinstance(seeds, Iterable) else range(seeds)
    every = (  # seed by seed, so that a busy machine slows all alike
        RunConfig("yours", key, operator.index(seed), epochs, chosen, options)
        for seed, (key, chosen) in product(several, settings)
    )
    configs = [*{config.id: config for config in every}.values()]
    require(configs, "there is nothing to compare: give an optimizer, a seed and a learning rate")
    setup = Setup(
        Path(out),
        RUNS,
        device=str(where),
        checkpoint_seconds=CHECKPOINT_SECONDS,
        make=lambda config, device, _: Yours(config, device, recipe),
    )
    watched = watching(configs) if progress is True else nullcontext(progress or View())
    with kept_randomness(where), interruptible() as stop, watched as view:
        rehearse(recipe, configs, where)
        with writing(setup.out):
            setup.out.mkdir(parents=True, exist_ok=True)
        if fresh or name is None:  # all at once: an interruption must leave no old among the new
            forget(setup.file, {config.id for config in configs})
            for config in configs:
                (setup.folder(config) / CHECKPOINT).unlink(missing_ok=True)
        outcomes = run_all(configs, setup, "serial", view)
        if stop():
            goes_on = "; the same call, without fresh=True, goes on from here" if name else ""
            raise KeyboardInterrupt(f"stopped{goes_on}")
    kept = {record.id: record for record in load(setup.file)[0]}
    failed = {o.config.id: Record(o.config, FAILED, error=o.error) for o in outcomes}
    records = [{**failed, **kept}[config.id] for config in configs]
    known = [o.config.id for o in outcomes if o.status == KNOWN]
    made = Comparison(name or UNNAMED, records, known=known)
    if report:
        lead = f"{made.verdict} The same start, batches and budget for every optimizer.".strip()
        cover = Cover(f"Optimizers on {made.name}", lead)
        made.report = write_report(setup.out, setup.out / "report", cover)
    return made


# --- what can be said against the arguments before anything is trained


def check(recipe: Recipe, names: Sequence[str], hyper: Mapping[str, Mapping[str, Any]]) -> None:
    """One sentence for what makes no sense."""
    require(
        callable(recipe.model_fn) and not isinstance(recipe.model_fn, nn.Module),
        "model_fn must be a function that makes a new model for every run, and is a "
        f"{type(recipe.model_fn).__name__}; lambda: copy.deepcopy(model) makes one of yours",
    )
    require(not isinstance(names, str), f"optimizers must be a list of names, got {names!r}")
    for name in hyper:
        among = ", ".join(names)
        require(name in names, f"hyper names {name!r}, which is not among {among}")
    judged = recipe.valid is not None or not recipe.metrics
    require(judged, "metrics are taken on valid_loader, and there is none; give one")
    for what, source in (("train_loader", recipe.train), ("valid_loader", recipe.valid)):
        fine = source is None or isinstance(source, Iterable) or callable(source)
        batches = "must be a DataLoader, a list of batches or a function of the epoch"
        kind = f"and is a {type(source).__name__}; wrap a data set in a DataLoader"
        require(fine, f"{what} {batches}, {kind}")


def settings_of(
    names: Sequence[str], lrs: Sequence[float] | None, hyper: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """Every optimizer with the lab's settings for a model nobody knows and the user's changes."""
    made = []
    for name in names:
        changes = hyper.get(name, {})
        twice = f"hyper gives an lr for {name}, and lrs gives some for all; leave one"
        require(lrs is None or "lr" not in changes, twice)
        legal = registry.legal_arguments(name) - {*registry.OWN}  # of the lab's own protocols
        for key in changes:
            known = ", ".join(sorted(legal))
            require(key in legal, f"{name} has no argument {key!r}; it has {known}")
        rates = [{"lr": lr} for lr in lrs] if lrs is not None else [{}]
        for rate in rates:
            chosen = registry.settings("yours", name, {**changes, **rate})
            made.append((name, {k: v for k, v in chosen.items() if k in legal}))
    return made


def training_options(recipe: Recipe, warmup: float, clip: float | None) -> dict[str, Any]:
    """What a run's config says about its training, every value checked."""
    schedule, dtype = recipe.schedule, recipe.autocast
    if not callable(schedule):
        check_option("schedule", schedule)
    check_option("warmup", warmup)
    above = clip is None or (type(clip) in (int, float) and clip > 0)
    require(above, f"clip must be a number above 0 or None, got {clip!r}")
    wide = dtype in (None, torch.bfloat16)
    require(wide, f"autocast must be torch.bfloat16 or None, got {dtype}")
    return {
        "schedule": getattr(schedule, "__name__", "your own") if callable(schedule) else schedule,
        "warmup": float(warmup),
        "clip": None if clip is None else float(clip),
        "autocast": str(dtype).removeprefix("torch.") if dtype else None,
    }


# --- training


def rehearse(recipe: Recipe, configs: Sequence[RunConfig], device: torch.device) -> None:
    """A model, every optimizer and one batch, so that mistakes show before hours of training."""
    task = Yours(configs[0], device, recipe)
    model = task.rehearsed()
    for config in configs:
        if config.seed == configs[0].seed:
            registry.build(config.optimizer, config.hyper, model, task.example())


def watching(configs: Sequence[RunConfig]) -> AbstractContextManager[View]:
    """Bars on a terminal, lines now and then elsewhere."""
    from rich.console import Console

    from .progress import Display

    return Display(Console(stderr=True), configs)
