"""scikit-learn's handwritten digits with a small BatchNorm network: seconds on a CPU."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import LabError
from ..records import Row
from .base import Examples, accuracy, best

TRAIN_SIZE = 1000  # of 1,797; the other 797 are the test set, the same for every seed


@lru_cache(maxsize=1)
def load_digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] in [0, 1] and labels, in a fixed random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LabError(
            "the digits come with scikit-learn: pip install 'adamo-optim[lab]'"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).div(16).view(-1, 1, 8, 8)
    return images[order], torch.tensor(labels)[order]


def made_digits() -> tuple[Tensor, Tensor]:
    """Ten random patterns with noise, in the same shapes."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (1797,), generator=generator)
    noise = torch.randn(1797, 1, 8, 8, generator=generator)
    return patterns[labels] + 0.5 * noise, labels


class Digits(Examples):
    name = "digits"

    def load(self) -> None:
        images, labels = made_digits() if self.config.synthetic else load_digits()
        images, labels = images.to(self.device), labels.to(self.device)
        self.train = images[:TRAIN_SIZE], labels[:TRAIN_SIZE]
        self.test = images[TRAIN_SIZE:], labels[TRAIN_SIZE:]

    def model(self) -> nn.Module:
        width = self.options["width"]

        def block(channels_in: int, channels_out: int) -> nn.Module:
            conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
            return nn.Sequential(conv, nn.BatchNorm2d(channels_out), nn.ReLU())

        return nn.Sequential(
            block(1, width),
            block(width, 2 * width),
            nn.MaxPool2d(2),
            block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        images, labels = self.test
        logits = model(images)
        return {
            "test_accuracy": accuracy(logits, labels),
            "test_loss": F.cross_entropy(logits, labels),
        }

    def result(self, rows: list[Row]) -> Row:
        return best(rows, "test_accuracy")


TASK = Digits
