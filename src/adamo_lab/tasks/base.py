"""What a task is: data, model, loss and metrics, in the form that the one training loop needs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..records import Row, RunConfig
from . import all_options, info

Batch = tuple[Tensor, ...]
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
STEPS, GAMMA = 6, 0.2  # the schedule "step" has the paper's drops: ×0.2 after every sixth


@dataclass(frozen=True)
class Phase:
    """What an epoch of the protocol asks for."""

    lr_factor: float = 1.0  # times the optimizer's learning rate
    swa: bool = False  # stochastic weight averaging: its own constant learning rate, and an average
    late: bool = False  # the optimizer's "late" options are on
    label_smoothing: float = 0.0


class Task(ABC):
    """One experiment with one seed, its data on one device. Serves any number of optimizers.

    Randomness comes from ``generator(epoch)`` alone, so that any epoch can be made again after a
    restart, on its own.
    """

    name: ClassVar[str]
    moment: ClassVar[float] = 0.0  # of an epoch whose learning rate it has: 0.5 is its middle
    final_factor: ClassVar[float] = 0.0  # of the learning rate, at the end of its schedule
    evaluations: ClassVar[int] = 100  # a run, about, unless the option "every" says otherwise

    def __init__(self, config: RunConfig, device: torch.device, data_dir: Path | None) -> None:
        self.config = config
        self.options = self.all_options(config)
        self.device = device
        self.data_dir = data_dir
        self.load()

    def all_options(self, config: RunConfig) -> dict[str, Any]:
        return {**info(self.name).later, **all_options(self.name, config.options)}

    @abstractmethod
    def load(self) -> None:
        """Read or make the data and put them on the device."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the CPU, from torch's global random state."""

    @abstractmethod
    def example(self) -> Any:
        """A small batch for ``adamo_optim.param_groups``."""

    @abstractmethod
    def batches(self, epoch: int) -> Iterable[Batch]:
        """An epoch's batches in order, as a list of stacks: every tensor is [steps, batch, ...].

        Batches of one size form one stack; a smaller last batch is a stack of its own.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Tensor:
        """The training loss of one batch; may be compiled and captured, so it reads no device."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        """Metrics as 0-D tensors on the device; the loop reads them later."""

    def phase(self, epoch: int) -> Phase:
        """The protocol at this epoch, counted from 0."""
        return Phase(self.lr_factor(epoch))

    def lr_factor(self, epoch: float) -> float:
        """Warm-up and schedule, as far as the task's options have them."""
        at, epochs = epoch + self.moment, self.config.epochs
        warmup = self.options.get("warmup", 0.0) * epochs
        if at < warmup:
            return at / warmup
        left = annealed(self.options.get("schedule", "constant"), at - warmup, epochs - warmup)
        return self.final_factor + (1 - self.final_factor) * left

    def step_factor(self) -> float | None:
        """Of the learning rate at the next step, where it changes within an epoch."""
        return None

    def autocast(self) -> torch.autocast:
        """Its cache would outlive the step that a CUDA graph captures."""
        dtype = PRECISIONS[self.options["precision"]]
        low = dtype != torch.float32
        return torch.autocast(self.device.type, dtype, enabled=low, cache_enabled=False)

    def due(self, epoch: int, rows: list[Row]) -> bool:
        """Evaluate after this epoch (counted from 1)? The last one always is."""
        often = self.options.get("every") or max(1, self.config.epochs // self.evaluations)
        return epoch % (often if "every" in self.options else 1) == 0

    def result(self, rows: list[Row]) -> Row:
        """What the rows amount to, beside the last row's values."""
        return {}

    def arrays(self, model: nn.Module) -> dict[str, np.ndarray]:
        """What figures need beyond numbers, at the end of a run."""
        return {}

    def calibration(self) -> list[Batch]:
        """Batches that set BatchNorm's statistics of averaged weights; none: nothing to set."""
        return []

    def generator(self, epoch: int) -> torch.Generator:
        """The random numbers of one epoch, on the CPU; epoch -1 is before training."""
        return torch.Generator().manual_seed(self.seed_of(epoch))

    def seed_of(self, epoch: int, purpose: int = 0) -> int:
        """Seeds that have nothing to do with each other, from the run's."""
        entropy = [self.config.seed, epoch + 1, purpose]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


class Examples(Task):
    """A task with a few examples, ``train`` and ``test``: inputs and labels on the device."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def example(self) -> Any:
        return self.train[0][:32]

    def batches(self, epoch: int) -> list[Batch]:
        inputs, labels = self.train
        stacks = shuffled(len(labels), self.options["batch"], self.generator(epoch))
        return [(inputs[i], labels[i]) for i in (stack.to(self.device) for stack in stacks)]

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels, label_smoothing=phase.label_smoothing)


def shuffled(count: int, size: int, generator: torch.Generator) -> list[Tensor]:
    """A random order of ``count`` items as stacks of batches [steps, size], rest included."""
    order = torch.randperm(count, generator=generator)
    whole = count - count % size
    stacks = [order[:whole].view(-1, size)] if whole else []
    return [*stacks, order[whole:].view(1, -1)] if whole < count else stacks


def annealed(schedule: str, at: float, epochs: float) -> float:
    """What a schedule leaves of the learning rate at a moment of a run."""
    return {
        "constant": 1.0,
        "cosine": (1 + math.cos(math.pi * at / epochs)) / 2,
        "linear": 1 - at / epochs,
        "step": GAMMA ** (STEPS * at // epochs),
    }[schedule]


def best(rows: list[Row], key: str) -> Row:
    """The best value on the way; None where there is none."""
    values = [row[key] for row in rows if row[key] is not None]
    return {f"best_{key}": (min if key.endswith("loss") else max)(values, default=None)}


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.argmax(-1) == target).float().mean()
