"""Your own model with several optimizers: the same weights, the same batches, the same budget.

The runs are the laboratory's: seeded, resumed after an interruption, one record each. A run that
was finished is not trained again unless the model, the data, the loss or the settings changed, as
far as that shows in the first batches, the first loss, or the code and values of what is given (see
``fingerprint``; those that change while it runs excepted); ``fresh=True`` trains again in any case.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adamo_optim import param_groups

from . import optimizers as registry
from .engines import failure, interruptible, is_finished, locked, resolve_device
from .errors import LabError
from .fingerprint import fingerprint
from .records import FAILED, FINISHED, RUN, Record, Row, RunConfig, canonical, load
from .summary import OWN_COLUMNS, table
from .tasks.base import Batch, Phase, Task
from .train import CHECKPOINT, CHECKPOINT_SECONDS, Progress, Run, Stopped, drive, new_model, threads

LossFunction = Callable[[nn.Module, Any], Tensor]
Metrics = Callable[[nn.Module, Any], Mapping[str, float | Tensor]]
Batches = Iterable[Any] | Callable[[int], Iterable[Any]]  # or a function of the epoch, from 0

END = object()


@dataclass(frozen=True)
class Recipe:
    """What the user brings."""

    model_fn: Callable[[], nn.Module]
    train: Batches
    loss_fn: LossFunction
    valid: Iterable[Any] | None = None
    metrics: Metrics | None = None
    example: Any = None


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
    optimizers: Sequence[str] = ("adamw", "adamo"),
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
            must be the same for the same model, batch and seed: a counter belongs in the model.
        epochs: the budget.
        optimizers: names in the registry, ``adamo-lab list`` shows them; the first is the one that
            times are compared with.
        hyper: changes to their settings, by name: ``{"adamw": {"lr": 3e-4}}``.
        valid_loader: batches on which the loss is evaluated after every epoch.
        metrics: ``metrics(model, batch)``, more numbers about a validation batch, by name. Like
            the loss they are averaged over the batches, weighted by their size.
        example_batch: what the model takes, x of a loader's (x, y), so that AdamO finds
            scale-invariant weights (see ``adamo_optim.param_groups``). Without it the rules go by
            shape. What it decides counts, not its values: it may be another one every time.
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
    where, root = resolve_device(str(device)), Path(out)
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
            for config, file in product(configs, (RUN, CHECKPOINT)):
                (root / config.id / file).unlink(missing_ok=True)
        known = [config.id for config in configs if is_finished(root / config.id)]
        try:
            records = [
                run_one(config, recipe, where, root / config.id, progress, stop)
                for config in heeding(stop, configs)
            ]
        except Stopped as error:
            call = "the same call without fresh=True" if fresh else "the same call"
            raise KeyboardInterrupt(f"stopped; {call} goes on from here") from error
    return Comparison(name, records, write(root, root / "report") if write else None, known)


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


def rehearse(
    recipe: Recipe, settings: Mapping[str, Mapping[str, Any]], device: torch.device
) -> str:
    """One batch of everything, so that mistakes show at once; returns a digest of what it saw.

    Twice, with two models: what differs then, such as a list of results or the time at which a
    model was made, is no part of the experiment.
    """
    name = next(iter(settings))
    task = Yours(RunConfig("yours", name, 0, 1, settings[name]), device, recipe)
    with steady(device):
        model, other = new_model(task), new_model(task)
        check_start(model, other)
        rules = rules_of(other, task.example())
        for key in settings:
            registry.build(key, settings[key], other, task.example())
        loss, first_time = try_out(task)
        first_time |= describe(recipe, model)
        again, second_time = try_out(task)
        second_time |= describe(recipe, other)
    check_batches(first_time, second_time)
    check_loss(loss, again, 1e-5 if device.type == "cpu" else 1e-2)  # elsewhere sums have no order
    return digest_of(rules | dict(first_time.items() & second_time.items()))[:8]


def check_batches(first_time: Mapping[str, str], second_time: Mapping[str, str]) -> None:
    for loader in ("train_loader", "valid_loader"):
        if first_time.get(loader) != second_time.get(loader):
            raise LabError(
                f"{loader} gave two different first batches under the same seed; draw its random "
                "numbers from torch, numpy or random, and from no generator of its own, and let "
                "loss_fn and metrics change no batch in place"
            )


def check_loss(one: float, other: float, tolerance: float) -> None:
    """A counter in a loss, say, would go on where the last run's ended."""
    if not math.isclose(one, other, rel_tol=tolerance) and not (one != one and other != other):
        raise LabError(
            f"loss_fn gave {one:.6g} and then {other:.6g} for the same weights, batch and seed, so "
            "every optimizer would have another loss; keep what it counts or collects in the model "
            "(a buffer), new for every run, and draw random numbers from torch, numpy or random"
        )


def rules_of(model: nn.Module, example: Any) -> dict[str, str]:
    """What the example decides, by parameter."""
    try:
        groups = param_groups(model, example)
    except (RuntimeError, TypeError, ValueError) as error:
        cause = error.__cause__ or str(error).partition(": pass forward")[0]  # not ours to offer
        raise LabError(
            "example_batch must be what the model takes, x of a loader's (x, y) and several "
            f"samples of it, or be left out; the model said: {cause}"
        ) from error
    return {f"rule of {name}": group["rule"] for group in groups for name, _ in group["params"]}


@contextlib.contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """One thread and deterministic kernels: the same numbers whenever it is asked for them."""
    convolutions = fixed_convolutions() if device.type == "cuda" else contextlib.nullcontext()
    with convolutions, threads(1):
        yield


@contextlib.contextmanager
def fixed_convolutions() -> Iterator[None]:
    """cuDNN's algorithms are those of every run, not those that happen to be fastest now.

    ``cudnn.flags`` would also touch the TF32 flags, and refuses what their newer names may say.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def try_out(task: Yours) -> tuple[float, dict[str, str]]:
    """The first loss; the first batches' digests, and what a new model makes of them, in short."""
    model = new_model(task).train()
    torch.manual_seed(task.seed_of(0, purpose=1))  # as at the beginning of an epoch
    batch = first(task.stream(0), "train_loader")
    seen = {"train_loader": digest_of(fingerprint({"batch": batch}))}
    loss = task.loss(model, (batch,), Phase())
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LabError(f"loss_fn must return one number that has a gradient, got {what}")
    values = {"loss": loss.detach()}
    if task.recipe.valid is not None:
        batch = first(task.validation(task.recipe.valid), "valid_loader")
        seen["valid_loader"] = digest_of(fingerprint({"batch": batch}))
        with torch.no_grad():
            values |= task.measure(model.eval(), batch)
    told = {f"value of {key}": f"{value.item():.3e}" for key, value in values.items()}
    return loss.item(), seen | told


def describe(recipe: Recipe, model: nn.Module) -> dict[str, str]:
    """All that is known before a run; a library's own kind of loader has no more than a length."""
    loaders = {"all of train_loader": recipe.train, "all of valid_loader": recipe.valid}
    lengths = {f"length of {name}": length_of(loader) for name, loader in loaders.items()}
    functions = {"model_fn": recipe.model_fn, "loss": recipe.loss_fn, "metrics": recipe.metrics}
    return fingerprint({**functions, **loaders, **lengths, "model": model})


def length_of(loader: Any) -> int | None:
    with contextlib.suppress(Exception):  # a DataLoader may have none, and others say so otherwise
        return len(loader)


def digest_of(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(canonical(dict(parts)).encode()).hexdigest()


def check_start(model: nn.Module, again: nn.Module) -> None:
    """Whoever trains second must not begin where the first one ended, nor anywhere else."""
    if any(is_lazy(tensor) for tensor in chain(model.parameters(), model.buffers())):
        raise LabError(
            "model_fn made a model with lazy layers, whose weights have no shape yet; call it once "
            "on a batch before you return it"
        )
    parameters = {id(p) for p in model.parameters()}
    if not parameters:
        raise LabError("model_fn made a model without parameters: there is nothing to train")
    if parameters & {id(p) for p in again.parameters()}:
        raise LabError(
            "model_fn returned the same parameters twice, so the second optimizer would go on "
            "where the first one ended; make a new model in it (copy.deepcopy of yours will do)"
        )
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=False)
    if not all(same_values(a, b) for a, b in pairs):
        raise LabError(
            "model_fn made two models with different weights under the same seed; draw its random "
            "numbers from torch, numpy or random, and from no generator of its own"
        )


def same_values(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True  # extra state
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def first(batches: Iterable[Any], what: str) -> Any:
    for batch in batches:
        return batch
    raise LabError(f"{what} gave no batch; is its data set empty?")


# --- the task


class Yours(Task):
    """A user's model in the form that the lab's runs need. A batch is a tuple of one: the user's.

    Its stream of batches is read as it comes, as it may not fit into memory.
    """

    name = "yours"
    title = "Your model"

    def __init__(self, config: RunConfig, device: torch.device, recipe: Recipe) -> None:
        self.recipe = recipe
        self.epoch_seconds: list[float] = []
        super().__init__(config, device, None)

    def all_options(self, config: RunConfig) -> dict[str, Any]:
        return dict(config.options)

    def load(self) -> None:
        pass

    def model(self) -> nn.Module:
        seed_others(self.seed_of(-1, purpose=2))
        model = self.recipe.model_fn()
        if not isinstance(model, nn.Module):
            raise LabError(f"model_fn must return a model, got {type(model).__name__}")
        return model

    def example(self) -> Any:
        return moved(self.recipe.example, self.device)

    def batches(self, epoch: int) -> list[Any]:
        return [([batch],) for batch in self.stream(epoch)]

    def stream(self, epoch: int) -> Iterator[Any]:
        """An epoch's batches; the same for every optimizer of a seed."""
        return self.read(self.recipe.train, self.seed_of(epoch, purpose=3), epoch)

    def validation(self, source: Iterable[Any]) -> Iterator[Any]:
        """The same after every epoch."""
        return self.read(source, self.seed_of(-1, purpose=4), 0)

    def read(self, source: Batches, seed: int, epoch: int) -> Iterator[Any]:
        """Batches on the device. What the model draws in between changes none of them."""
        seed_others(seed)
        seed_loader(source, seed, epoch)
        if not isinstance(source, Iterable):
            source = source(epoch)
        numbers = Randomness(seed)
        with numbers:
            iterator = iter(source)
        while True:
            with numbers:
                batch = next(iterator, END)
            if batch is END:
                return
            yield moved(batch, self.device)

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Tensor:
        loss = self.recipe.loss_fn(model, *batch)
        one = isinstance(loss, Tensor) and loss.dim() > 0 and loss.numel() == 1
        return loss.reshape(()) if one else loss

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        """Means over the validation batches, weighted by their sizes."""
        if self.recipe.valid is None:
            return {}
        totals: dict[str, Tensor] = {}
        count = 0
        for batch in self.validation(self.recipe.valid):
            size = size_of(batch)
            values = self.measure(model, batch)
            if totals and totals.keys() != values.keys():
                names = f"{', '.join(totals)} and then {', '.join(values)}"
                raise LabError(f"metrics must have the same names on every batch, got {names}")
            totals = {key: totals.get(key, 0) + size * value for key, value in values.items()}
            count += size
        return {key: total / count for key, total in totals.items()}

    def measure(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        extra = self.recipe.metrics(model, batch) if self.recipe.metrics else {}
        if not isinstance(extra, Mapping):
            raise LabError(f'metrics must return numbers by name, {{"error": 0.1}}, got {extra!r}')
        taken = [key for key in extra if key in OWN_COLUMNS]
        if taken:
            raise LabError(f"metrics may not be called {', '.join(taken)}; choose another name")
        values = {"valid_loss": self.recipe.loss_fn(model, batch), **extra}
        return {key: self.number(key, value) for key, value in values.items()}

    def number(self, name: str, value: float | Tensor) -> Tensor:
        try:
            number = torch.as_tensor(value, device=self.device).detach().double()
        except (TypeError, ValueError, RuntimeError) as error:
            raise LabError(f"{name} must be one number a batch, got {value!r}") from error
        if number.numel() != 1:
            raise LabError(f"{name} must be one number a batch, got shape {tuple(number.shape)}")
        return number.reshape(())

    def result(self, rows: list[Row]) -> Row:
        """The median epoch's time: the first one warms up, and a busy machine has hiccups."""
        seen = self.epoch_seconds
        return {"seconds_per_epoch": statistics.median(seen)} if seen else {}


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
    folder: Path,
    progress: Progress | None,
    stop: Callable[[], bool],
) -> Record:
    """A run's record: the one that is there, or a new one, finished or failed."""
    if (folder / RUN).exists():
        known = load(folder)
        if known.status == FINISHED:
            return known
    try:
        with locked(folder):
            if is_finished(folder):  # another process was faster
                return load(folder)
            run = Run(config, Yours(config, device, recipe), folder)
            return drive(run, train_epoch, progress, stop, CHECKPOINT_SECONDS)
    except Stopped:
        raise
    except Exception as error:  # whatever a user's model may raise: the other runs go on
        outcome = failure(config, error, folder)
        return Record(config, FAILED, error=outcome.error)


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


# --- batches


def moved(batch: Any, device: torch.device) -> Any:
    """A batch of any structure, its tensors on the device."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def size_of(batch: Any) -> int:
    """How many examples a batch has: the first dimension of its first tensor, else 1."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 1)


def tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(value)


# --- random numbers


class Randomness:
    """A stream of torch's random numbers on the CPU, beside the one that is in use outside."""

    def __init__(self, seed: int) -> None:
        self.inside = torch.Generator().manual_seed(seed).get_state()
        self.outside = self.inside

    def __enter__(self) -> None:
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.inside)

    def __exit__(self, *_: object) -> None:
        self.inside = torch.get_rng_state()
        torch.set_rng_state(self.outside)


def seed_others(seed: int) -> None:
    """The generators that transforms of images and the like draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_loader(loader: Any, seed: int, epoch: int) -> None:
    """A loader's own generator would go on from the last run; a sampler may count epochs."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    parts: list[Any] = [loader, getattr(loader, "sampler", None), batch_sampler, inner]
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


@contextlib.contextmanager
def kept_randomness(device: torch.device) -> Iterator[None]:
    """The caller's random numbers go on afterwards as if nothing had been trained."""
    ours, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(arrays)
