"""Two noisy spirals in the plane: the shape of a decision boundary, and how weights grow."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from .base import Examples, accuracy

RADIUS = 1.3  # the boundary is drawn on [-RADIUS, RADIUS]²


def spirals(
    count: int, noise: float, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Points [count, 2] on two interleaved spirals of one turn, and which one each is on."""
    label = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator).sqrt()
    angle = 2 * math.pi * turn + math.pi * label
    points = turn[:, None] * torch.stack((angle.cos(), angle.sin()), 1)
    points += noise * torch.randn(count, 2, generator=generator)
    return points.to(device), label.to(device)


class Toy2d(Examples):
    """The data are made by formula: ``synthetic`` changes nothing here."""

    name = "toy2d"

    def load(self) -> None:
        generator = self.generator(-1)
        self.train, self.test = (
            spirals(count, self.options["noise"], generator, self.device)
            for count in (self.options["points"], 2000)
        )

    def model(self) -> nn.Module:
        width = self.options["width"]
        layers: list[nn.Module] = []
        for features in (2, width):
            layers += [nn.Linear(features, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, 2))

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        points, labels = self.test
        return {
            "test_accuracy": accuracy(model(points), labels),
            "boundary_length": boundary_length(self.margin(model)),
        }

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
