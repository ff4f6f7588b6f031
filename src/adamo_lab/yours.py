"""Your own model with several optimizers: the same weights, the same batches, the same budget.

The runs are the laboratory's: seeded, resumed after an interruption, one record each. A run that
was finished is not trained again unless the model, the data, the loss or the settings changed, as
far as that shows in the first batches, the first loss, or the code and values of what is given (see
``fingerprint``; those that change while it runs excepted); ``fresh=True`` trains again in any case.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import optimizers as registry
from .engines import CHECKPOINT, Setup, failure, interruptible, resolve_device
from .errors import LabError
from .records import FAILED, Record, Row, RunConfig, canonical, find, forget
from .rehearsal import rehearse
from .summary import table
from .train import CHECKPOINT_SECONDS, Progress, Run, Stopped, drive
from .your_task import Batches, LossFunction, Metrics, Recipe, Yours, kept_randomness


@dataclass
class Comparison:
    """The records of a comparison, and how they read."""

    name: str
    records: list[Record]  # finished and failed, seed by seed
    report: Path | None = None
    known: list[str] = field(default_factory=list)  # ids of the records that were there before

    def table(self) -> str:
        """Final numbers as plain text, mean ± standard deviation over the seeds."""
        there = [r.config for r in self.records if r.id in self.known]
        names = (f"{registry.entry(c.optimizer).label}, seed {c.seed}" for c in there)
        told = f"A record was there, and fresh=True trains again: {'; '.join(names)}"
        return "\n".join([table(self.name, self.records), *([told] if there else [])])

    def __str__(self) -> str:
        return self.table()


def compare(
    model_fn: Callable[[], nn.Module],
    train_loader: Batches,
    loss_fn: LossFunction,
    *,
    epochs: int,
    optimizers: Sequence[str] = ("adamw", "adamo", "angular"),
    hyper: Mapping[str, Mapping[str, Any]] | None = None,
    valid_loader: Iterable[Any] | None = None,
    metrics: Metrics | None = None,
    example_batch: Any = None,
    seeds: int | Iterable[int] = (0,),
    out: str | Path = "lab-output/yours",
    device: str | torch.device = "cpu",
    name: str = "your model",
    report: bool = True,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Train a model with each optimizer under the same conditions.

    Args:
        model_fn: makes a new model; called under the same seed for every optimizer.
        train_loader: a ``DataLoader``, a list of batches, anything that can be read once an epoch,
            or a function of the epoch (from 0) that returns batches. Its random numbers, from
            torch, numpy, random or a loader's generator, depend on seed and epoch alone, so every
            optimizer sees the same batches in the same order; data that draw from a generator of
            their own are refused.
        loss_fn: ``loss_fn(model, batch)``, the loss to minimize; it gets batches on ``device``. It
            must be the same for the same model, batch and seed: a counter belongs into a buffer of
            the model.
        epochs: the budget.
        optimizers: names in the registry, ``adamo-lab list`` shows them; the first is the one that
            times are compared with.
        hyper: changes to their settings, by name: ``{"adamw": {"lr": 3e-4}}``.
        valid_loader: batches on which the loss is evaluated after every epoch.
        metrics: ``metrics(model, batch)``, more numbers about a validation batch, by name. Like
            the loss they are averaged over the batches, weighted by their size.
        example_batch: what the model takes, a loader's (x, y) or x alone, so that AdamO and
            AngularAdamW find scale-invariant weights (see ``adamo_optim.param_groups``). Without it
            the rules go by shape, and AngularAdamW is AdamW. What it decides counts, not its
            values: it may be another one every time.
        seeds: one run of each optimizer for every seed; a number n stands for 0 to n - 1.
        out: the folder of the records and the report.
        device: where to train.
        name: of the model, for the report.
        report: write the report.
        fresh: train again what is there already.
        progress: called after every epoch with the run's config, the epoch and its numbers.

    Example:
        >>> comparison = compare(make_model, loader, loss_fn, epochs=10)  # doctest: +SKIP
        >>> print(comparison.table())  # doctest: +SKIP
    """
    recipe = Recipe(model_fn, train_loader, loss_fn, valid_loader, metrics, example_batch)
    epochs, numbers = count_of(epochs), seeds_of(seeds)
    check(recipe, optimizers, hyper or {})
    where, setup = resolve_device(str(device)), Setup(Path(out), "yours")
    write = report_writer() if report else None
    settings = {key: settings_of(key, (hyper or {}).get(key, {})) for key in optimizers}
    with kept_randomness(where), interruptible() as stop:
        options = {"name": name, "version": rehearse(recipe, settings, where)}
        configs = [
            RunConfig("yours", key, seed, epochs, settings[key], options)
            for seed in numbers  # seed by seed, so that a busy machine slows all alike
            for key in optimizers
        ]
        if fresh:  # all at once: an interruption must leave no old record among the new
            forget(setup.file, {config.id for config in configs})
            for config in configs:
                (setup.folder(config) / CHECKPOINT).unlink(missing_ok=True)
        known = [config.id for config in configs if setup.done(config)]
        try:
            records = [
                run_one(config, recipe, where, setup, progress, stop)
                for config in heeding(stop, configs)
            ]
        except Stopped as error:
            call = "the same call without fresh=True" if fresh else "the same call"
            raise KeyboardInterrupt(f"stopped; {call} goes on from here") from error
    page = write(setup.out, setup.out / "report") if write else None
    return Comparison(name, records, page, known)


def report_writer() -> Callable[[Path, Path], Path]:
    """What is missing for a report should be known before hours of training."""
    try:
        from .report import OWN_COVER, write_report
    except ImportError as error:
        raise LabError(
            f"the report needs {error.name}: pip install 'adamo-optim[lab]', or say report=False"
        ) from error
    return lambda results, out: write_report(results, out, OWN_COVER)


# --- what can be checked before anything is trained


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
    if not numbers or len({*numbers}) < len(numbers):
        raise LabError(f"seeds must be different and at least one, got {seeds!r}")
    if min(numbers) < 0:
        raise LabError(f"seeds must be >= 0, got {min(numbers)}")
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


def settings_of(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The lab's settings for a model nobody knows, with the user's changes."""
    hyper = registry.settings("yours", name, changes)
    legal = registry.legal_arguments(name) - {*registry.OWN}  # those belong to the lab's protocols
    for key in changes:
        if key not in legal:
            raise LabError(f"{name} has no argument {key!r}; it has {', '.join(sorted(legal))}")
    hyper = {key: value for key, value in hyper.items() if key in legal}
    try:
        canonical(hyper)
    except (TypeError, ValueError) as error:
        raise LabError(f"hyper of {name} must be numbers, words or lists: {error}") from error
    return hyper


def heeding(stop: Callable[[], bool], configs: Iterable[RunConfig]) -> Iterator[RunConfig]:
    """One by one; asked to stop in its last epoch, a run ends, and whatever comes next does not."""
    for config in configs:
        if stop():
            raise Stopped(config.id)
        yield config
    if stop():  # what the caller does next
        raise Stopped


def run_one(
    config: RunConfig,
    recipe: Recipe,
    device: torch.device,
    setup: Setup,
    progress: Progress | None,
    stop: Callable[[], bool],
) -> Record:
    """A run's record: the one that is there, or a new one, finished or failed."""
    try:
        with setup.holding(config) as folder:
            if not setup.done(config):
                run = Run(config, Yours(config, device, recipe), folder)
                setup.keep(drive(run, train_epoch, progress, stop, CHECKPOINT_SECONDS))
    except Stopped:
        raise
    except Exception as error:  # whatever a user's model may raise: the other runs go on
        return Record(config, FAILED, error=failure(config, error, setup).error)
    record = find(setup.file, config.id)
    assert record is not None
    return record


def train_epoch(run: Run) -> Row | None:
    """One epoch of a stream of batches; only the training is timed."""
    task = run.task
    assert isinstance(task, Yours)
    started, phase, steps = time.perf_counter(), task.phase(run.epoch), 0
    run.begin(phase)
    for batch in task.stream(run.epoch):
        run.approach()
        run.step((batch,), phase)
        steps += 1
    if not steps:
        raise LabError(f"train_loader gave no batch in epoch {run.epoch}, counted from 0")
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
    task.epoch_seconds.append(time.perf_counter() - started)
    run.seconds += task.epoch_seconds[-1]
    run.end(phase, steps)
    return run.collect()
