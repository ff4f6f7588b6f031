"""A user's model as one of the laboratory's tasks: what they bring, its batches, its randomness."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from adamo_optim import param_groups

from .errors import LabError, require
from .records import RunConfig
from .tasks.base import Batch, Phase, Task
from .train import new_model

OWN = (  # names of the laboratory's own numbers
    "epoch",
    "train_loss",
    "lr",
    "weight_norm",
    "matrix_norm",
    "valid_loss",
    "diverged_at",
    "weights_sha256",
)

LossFunction = Callable[[nn.Module, Any], Tensor]
Metrics = Callable[[nn.Module, Any], Mapping[str, float | Tensor]]
Batches = Iterable[Any] | Callable[[int], Iterable[Any]]  # or a function of the epoch, from 0
Schedule = Callable[[float], float]  # share of the training done → factor of the learning rate

END = object()
UNSEEDED = (
    "under the same seed; draw its random numbers from torch, numpy or random, and from no "
    "generator of its own"
)
READ_AGAIN = (
    f"{UNSEEDED}. It must be a DataLoader or a list of batches: an iterator can be read only once, "
    "and persistent_workers carry their random numbers on"
)


@dataclass(frozen=True)
class Recipe:
    """What the user brings."""

    model_fn: Callable[[], nn.Module]
    train: Batches
    loss_fn: LossFunction
    valid: Iterable[Any] | None = None
    metrics: Metrics | None = None
    example: Any = None
    schedule: str | Schedule = "constant"
    autocast: torch.dtype | None = None


class Yours(Task):
    """A user's model in the form that the lab's runs need. A batch is a tuple of one: the user's.

    Its stream of batches is read as it comes, as it may not fit into memory.
    """

    name = "yours"
    title = "Your model"

    def __init__(self, config: RunConfig, device: torch.device, recipe: Recipe) -> None:
        self.recipe = recipe
        self.done = 0.0  # epochs, in the middle of the batch at hand
        super().__init__(config, device, None)

    def all_options(self, config: RunConfig) -> dict[str, Any]:
        return dict(config.options)

    def load(self) -> None:
        pass

    def model(self) -> nn.Module:
        seed_others(self.seed_of(-1, purpose=2))
        return self.recipe.model_fn()

    def example(self) -> Any:
        return moved(self.recipe.example, self.device)

    def rehearsed(self) -> nn.Module:
        """A model on which one batch of everything has been tried.

        Whoever trains second must not begin where the first one ended, nor anywhere else.
        """
        model, again = new_model(self), new_model(self)
        ours, theirs = [*model.parameters()], [*again.parameters()]
        require(ours, "model_fn made a model without parameters: there is nothing to train")
        same = all(map(torch.equal, ours, theirs))
        require(same, f"model_fn made two models with different weights {UNSEEDED}")
        require(
            not {*map(id, ours)} & {*map(id, theirs)},
            "model_fn returned the same parameters twice, so the second optimizer would go on "
            "where the first one ended; make a new model in it (copy.deepcopy of yours will do)",
        )
        try:
            param_groups(model, self.example())
        except (RuntimeError, TypeError, ValueError) as error:
            cause = error.__cause__ or str(error).partition(": pass forward")[0]  # not ours
            raise LabError(
                "example_batch must be what the model takes, a loader's (x, y) or x alone, with "
                f"several samples, or be left out; the model said: {cause}"
            ) from error
        batch = self.steady(lambda: (b for _, b in self.stream(0)), "train_loader")
        loss = self.loss(model.train(), (batch,), Phase())
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        one = isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad
        require(one, f"loss_fn must return one number that has a gradient, got {what}")
        if (valid := self.recipe.valid) is not None:
            batch = self.steady(lambda: self.validation(valid), "valid_loader")
            with torch.no_grad():
                self.measure(model.eval(), batch)
        return model

    def steady(self, read: Callable[[], Iterator[Any]], what: str) -> Any:
        """The first batch, which must be the same whenever it is read."""
        batch, again = next(read(), END), next(read(), END)
        require(batch is not END, f"{what} gave no batch; is its data set empty?")
        same = all(map(torch.equal, tensors(batch), tensors(again)))
        require(same, f"{what} gave two different first batches {READ_AGAIN}")
        return batch

    def lr_factor(self, epoch: float) -> float:
        """Of the moment after so many epochs, parts of one included."""
        at = min(epoch, self.config.epochs)  # a loader may have more batches than its length says
        if callable(self.recipe.schedule):
            return float(self.recipe.schedule(at / self.config.epochs))
        return super().lr_factor(at)

    def autocast(self) -> torch.autocast:
        dtype = self.recipe.autocast
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def step_factor(self) -> float:
        return self.lr_factor(self.done)

    def batches(self, epoch: int) -> Iterator[Any]:
        """One by one, as they may not fit into memory."""
        self.done = -1.0
        for done, batch in self.stream(epoch):
            self.done = done
            yield ([batch],)
        fine = self.done >= 0
        require(fine, f"train_loader gave no batch in epoch {epoch}, counted from 0")

    def stream(self, epoch: int) -> Iterator[tuple[float, Any]]:
        """An epoch's batches, each with how many epochs are done in its middle.

        They are the same for every optimizer of a seed.
        """
        source, seed = self.recipe.train, self.seed_of(epoch, purpose=3)
        seed_others(seed)
        if not isinstance(source, Iterable):
            with Randomness(self.seed_of(epoch, purpose=4)):
                source = source(epoch)
        length = None
        with contextlib.suppress(Exception):  # a DataLoader may have none, others say so otherwise
            length = len(source)  # type: ignore[arg-type]
        for i, batch in enumerate(self.read(source, seed, epoch)):
            yield epoch + ((i + 0.5) / length if length else 0.5), batch

    def validation(self, source: Iterable[Any]) -> Iterator[Any]:
        """The same after every epoch."""
        return self.read(source, self.seed_of(-1, purpose=5), 0)

    def read(self, source: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
        """Batches on the device. What the model draws in between changes none of them."""
        seed_others(seed)
        seed_loader(source, seed, epoch)
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
        with self.autocast():
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
            totals = totals or dict.fromkeys(values, torch.zeros((), device=self.device))
            totals = {key: total + size * values[key] for key, total in totals.items()}
            count += size
        return {key: total / count for key, total in totals.items()}

    def measure(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        with self.autocast():
            loss = self.recipe.loss_fn(model, batch)
            extra = self.recipe.metrics(model, batch) if self.recipe.metrics else {}
        taken = ", ".join(key for key in extra if key in OWN)
        require(not taken, f"metrics may not be called {taken}; choose another name")
        values = dict(valid_loss=loss, **extra)  # refuses names that are no text
        numbers = {k: torch.as_tensor(v, device=self.device) for k, v in values.items()}
        return {key: number.detach().double().reshape(()) for key, number in numbers.items()}


# --- batches


def moved(batch: Any, device: torch.device) -> Any:
    """A batch of any structure, its tensors on the device."""
    return tree_map(lambda part: part.to(device) if hasattr(part, "to") else part, batch)


def tensors(batch: Any) -> list[Tensor]:
    return [part for part in tree_leaves(batch) if isinstance(part, Tensor)]


def size_of(batch: Any) -> int:
    """How many examples a batch has: the first dimension of its first tensor, else 1."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 1)


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
