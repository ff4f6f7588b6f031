"""ResNet-18 and GPT-2 124M, for steps per second of a whole training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..tasks.cifar100 import ResNet18


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.norm(self.layers(x)) @ self.token.weight.T


def training(name: str, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model and a function that computes its loss on made data."""
    torch.manual_seed(0)
    if name == "resnet18":
        model: nn.Module = ResNet18().to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        x = torch.randn(128, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
        y = torch.randint(100, (128,), device=device)
    else:
        model = GPT().to(device)
        x = torch.randint(50257, (16, 1024), device=device)
        y = x.roll(-1, 1).flatten()

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return functional.cross_entropy(model(x).flatten(0, -2).float(), y)

    return model, loss
