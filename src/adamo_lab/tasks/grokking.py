"""Modular addition, (a + b) mod p: the network memorizes first and generalizes much later."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import require
from ..records import Row
from .base import Examples, best

THRESHOLD = 0.95  # of the test accuracy: the grokking epoch is the first one above it
WATCHED = 0.5  # from here to the threshold every epoch is evaluated


class EmbeddingMLP(nn.Module):
    """Embedding(p, width) for a and b → Linear(2·width, width) → ReLU → Linear(width, p).

    There are only p values of each input, so the first layer is applied to the p embeddings and
    its rows are looked up, in place of applying it to every pair: the same function with a fifth
    of the arithmetic at batch 512.
    """

    def __init__(self, p: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(p, width)
        self.hidden = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, p)

    def tables(self) -> tuple[Tensor, Tensor]:
        """What each value of a and of b adds to the hidden layer, [p, width] each."""
        left, right = self.hidden.weight.chunk(2, dim=1)
        embedding = self.embedding.weight
        return F.linear(embedding, left, self.hidden.bias), F.linear(embedding, right)

    def forward(self, pairs: Tensor) -> Tensor:  # [batch, 2] → [batch, p]
        left, right = self.tables()
        a, b = pairs.unbind(-1)
        return self.output(F.relu(F.embedding(a, left) + F.embedding(b, right)))


class OneHotMLP(nn.Module):
    """One-hot inputs → Linear(2p, width) → ReLU → Linear(width, p), by the same look-up."""

    def __init__(self, p: int, width: int) -> None:
        super().__init__()
        self.p = p
        self.hidden = nn.Linear(2 * p, width)
        self.output = nn.Linear(width, p)

    def forward(self, pairs: Tensor) -> Tensor:
        columns = self.hidden.weight.t()  # [2p, width]: row a, row p + b
        a, b = pairs.unbind(-1)
        hidden = F.embedding(a, columns) + F.embedding(b + self.p, columns) + self.hidden.bias
        return self.output(F.relu(hidden))


MODELS = {"embedding": EmbeddingMLP, "one-hot": OneHotMLP}


class Grokking(Examples):
    name = "grokking"

    def load(self) -> None:
        p = self.options["p"]
        pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p)).to(self.device)
        order = torch.randperm(p * p, generator=self.generator(-1)).to(self.device)
        count = round(self.options["train_share"] * len(order))
        taken = f"train_share {self.options['train_share']} takes {count} of {len(order)} pairs"
        fine = 0 < count < len(order)
        require(fine, f"{taken}; leave some to train with and some to test")
        self.pairs, self.sums, self.count = pairs[order], pairs[order].sum(-1) % p, count
        self.train = self.pairs[:count], self.sums[:count]
        self.test = self.pairs[count:], self.sums[count:]

    def model(self) -> nn.Module:
        return MODELS[self.options["model"]](self.options["p"], self.options["width"])

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        correct = (model(self.pairs).argmax(-1) == self.sums).float()
        return {
            "train_accuracy": correct[: self.count].mean(),
            "test_accuracy": correct[self.count :].mean(),
        }

    def due(self, epoch: int, rows: list[Row]) -> bool:
        """Every tenth epoch, and every one in the transition, so that its epoch is exact."""
        last = rows[-1]["test_accuracy"] if rows else 0.0
        watched = last > WATCHED and grokking_epoch(rows) is None
        return super().due(epoch, rows) or watched

    def result(self, rows: list[Row]) -> Row:
        return {"grokking_epoch": grokking_epoch(rows), **best(rows, "test_accuracy")}


def grokking_epoch(rows: list[Row]) -> int | None:
    passed = (row["epoch"] for row in rows if row["test_accuracy"] > THRESHOLD)
    return next(passed, None)


TASK = Grokking
