"""ResNet-18 and GPT-2 124M, for steps per second of a whole training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..tasks.cifar100 import ResNet18
from ..tasks.language import GPT

VOCABULARY, CONTEXT = 50257, 1024


def gpt() -> nn.Module:
    """GPT-2 124M."""
    return GPT(VOCABULARY, layers=12, heads=12, width=768, context=CONTEXT, tied=True)


def training(name: str, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model and a function that computes its loss on made data."""
    torch.manual_seed(0)
    if name == "resnet18":
        model: nn.Module = ResNet18().to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        x = torch.randn(128, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
        y = torch.randint(100, (128,), device=device)
    else:
        model = gpt().to(device)
        x = torch.randint(VOCABULARY, (16, CONTEXT), device=device)
        y = x.roll(-1, 1).flatten()

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return functional.cross_entropy(model(x).flatten(0, -2).float(), y)

    return model, loss
