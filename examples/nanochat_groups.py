"""A loop of your own with a `kind` in every group, as in nanochat: one optimizer a kind.

    python examples/nanochat_groups.py

Optimizers keep keys that they do not know, so `kind` and `initial_lr` are there for your schedule
and in your checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adamo_optim import AngularAdamW, param_groups

KINDS = {"angular": AngularAdamW, "adamw": torch.optim.AdamW}
RATES = {"angular": 1e-3, "adamw": 3e-3}


class Attention(nn.Module):
    """QK-norm, without learned gains: the scale of q and k does not matter."""

    def __init__(self, tokens: int = 16, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k = (F.rms_norm(f(h), h.shape[-1:]) for f in (self.q, self.k))
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], self.v(h)[:, None])
        return self.head(h + mixed[:, 0])


def make_optimizers(model: nn.Module, batch: Tensor) -> list[Any]:
    groups = param_groups(model, batch)
    for group in groups:
        group["kind"] = "angular" if group["rule"] == "scale_invariant" else "adamw"
        group["lr"] = group["initial_lr"] = RATES[group["kind"]]
    return [
        make([group for group in groups if group["kind"] == kind]) for kind, make in KINDS.items()
    ]


def train(model: nn.Module, optimizers: list[Any], x: Tensor, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flip(1).flatten())
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / steps)
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randint(16, (32, 8))
    optimizers = make_optimizers(model, x[:4])
    for optimizer in optimizers:
        names = [name for group in optimizer.param_groups for name in group["param_names"]]
        print(f"{type(optimizer).__name__}: {', '.join(names)}")
    losses = train(model, optimizers, x, 100)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
