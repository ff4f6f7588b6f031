"""Two noisy spirals in the plane: the shape of a decision boundary, and how weights grow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..records import Row
from .base import Batch, Phase, Task, accuracy, shuffled

RADIUS = 1.3  # the boundary is drawn on [-RADIUS, RADIUS]²


def spirals(count: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points [count, 2] on two interleaved spirals of one turn, and which one each is on."""
    label = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator).sqrt()
    angle = 2 * math.pi * turn + math.pi * label
    points = turn[:, None] * torch.stack((angle.cos(), angle.sin()), 1)
    return points + noise * torch.randn(count, 2, generator=generator), label


class Toy2d(Task):
    """The data are made by formula: ``synthetic`` changes nothing here."""

    name = "toy2d"

    def load(self) -> None:
        generator = self.generator(-1)
        noise = self.options["noise"]
        train = spirals(self.options["points"], noise, generator)
        test = spirals(2000, noise, generator)
        self.train = train[0].to(self.device), train[1].to(self.device)
        self.test = test[0].to(self.device), test[1].to(self.device)

    def model(self) -> nn.Module:
        width = self.options["width"]
        layers: list[nn.Module] = []
        for features in (2, width):
            layers += [nn.Linear(features, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, 2))

    def example(self) -> Any:
        return self.train[0][:16]

    def batches(self, epoch: int) -> list[Batch]:
        points, labels = self.train
        stacks = shuffled(len(labels), self.options["batch"], self.generator(epoch))
        return [(points[i], labels[i]) for i in (stack.to(self.device) for stack in stacks)]

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Tensor:
        points, labels = batch
        return F.cross_entropy(model(points), labels)

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        points, labels = self.test
        return {
            "test_accuracy": accuracy(model(points), labels),
            "boundary_length": boundary_length(self.margin(model)),
        }

    def due(self, epoch: int, rows: list[Row]) -> bool:
        return epoch % self.options["every"] == 0

    def margin(self, model: nn.Module) -> Tensor:
        """By how much the second class leads, on a grid [y, x] over the square."""
        axis = torch.linspace(-RADIUS, RADIUS, self.options["resolution"], device=self.device)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        logits = model(torch.stack((x, y), -1))
        return logits[..., 1] - logits[..., 0]

    @torch.no_grad()
    def arrays(self, model: nn.Module) -> dict[str, np.ndarray]:
        points, labels = self.train
        return {
            "grid": self.margin(model).sigmoid().cpu().numpy().astype(np.float32),
            "extent": np.array([-RADIUS, RADIUS, -RADIUS, RADIUS]),
            "points": points.cpu().numpy(),
            "labels": labels.cpu().numpy(),
        }


def boundary_length(margin: Tensor) -> Tensor:
    """Length of the line between the classes: grid edges it crosses, times their length.

    A straight line at an angle counts up to √2 times its length; for a comparison that will do. NaN
    where there is no such line, or the network has diverged: that is not the shortest one.
    """
    side = margin > 0
    crossed = (side[1:] != side[:-1]).sum() + (side[:, 1:] != side[:, :-1]).sum()
    drawn = margin.isfinite().all() & (crossed > 0)
    return torch.where(drawn, crossed * (2 * RADIUS / (len(margin) - 1)), torch.nan)


TASK = Toy2d
