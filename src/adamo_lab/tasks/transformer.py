"""The layers that the tasks ``gpt`` and ``vit`` are made of.

Queries and keys are divided by their own size, without a gain (QK-norm). The scale of the weights
that make them therefore cannot matter. That of the others does, unless norms come after each part.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASE = 10_000.0  # of the rotary frequencies
START = 0.5  # rms of a weight's outputs at the start, for inputs of rms 1


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); norms without gains, ReLU².

    ``after``: x + norm(attention(x)), then x + norm(mlp(x)), as in OLMo 2.
    """

    def __init__(self, width: int, heads: int, after: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = (nn.Identity(), norm) if after else (norm, nn.Identity())
        self.q, self.k, self.v, self.out = (linear(width, width) for _ in range(4))
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor, turns: Tensor | None = None) -> Tensor:
        """[batch, tokens, width]; ``turns`` makes it causal, with rotary positions."""
        x = x + self.after(self.attention(self.before(x), turns))
        return x + self.after(self.down(F.relu(self.up(self.before(x))).square()))

    def attention(self, x: Tensor, turns: Tensor | None) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        q, k = norm(q), norm(k)  # [batch, heads, tokens, width / heads]
        if turns is not None:
            q, k = rotated(q, turns), rotated(k, turns)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=turns is not None)
        return self.out(y.transpose(1, 2).flatten(2))


def linear(inside: int, outside: int) -> nn.Linear:
    return nn.Linear(inside, outside, bias=False)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def initialize(layers: nn.ModuleList) -> None:
    """The outputs of all layers are added up: each starts the smaller, the more there are."""
    for layer in layers:
        assert isinstance(layer, Layer)
        for each in (layer.q, layer.k, layer.v, layer.out, layer.up, layer.down):
            nn.init.normal_(each.weight, std=START / math.sqrt(each.in_features))
        for each in (layer.out, layer.down):
            each.weight.data /= math.sqrt(2 * len(layers))


def rotary(context: int, size: int) -> Tensor:
    """Cosines and sines [2, context, size / 2] by which pairs of entries are turned."""
    frequencies = BASE ** -torch.arange(0, 1, 2 / size, dtype=torch.float64)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).float()


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Entry i and entry i + size / 2 of every head are the pairs."""
    cosine, sine = turns[:, : x.shape[-2]].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1)
