"""Training steps per second: ResNet-18, and GPT-2 124M with QK-norm, on made data."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from adamo_optim import AdamO, AngularAdamW, param_groups

from ..tasks.cifar100 import ResNet18
from ..tasks.gpt import GPT
from .clock import Clock

VOCABULARY, TOKENS, COMPILED = 50257, (16, 1024), "-compiled"
MODELS = [f"{name}{suffix}" for name in ("resnet18", "gpt-124m") for suffix in ("", COMPILED)]


def training(name: str, device: torch.device) -> tuple[nn.Module, Tensor, Callable[[], Tensor]]:
    """A model, a batch for it, and a function that computes its loss."""
    torch.manual_seed(0)
    if name == "resnet18":
        model: nn.Module = ResNet18().to(device)
        x = torch.randn(128, 3, 32, 32, device=device)
        if device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            x = x.to(memory_format=torch.channels_last)
        y = torch.randint(100, (128,), device=device)
    else:
        gpt = GPT(layers=12, heads=12, width=768, context=1024)
        gpt.token = nn.Embedding(VOCABULARY, 768)
        gpt.head.weight = gpt.token.weight  # tied, as GPT-2's are
        nn.init.normal_(gpt.token.weight, std=0.02)
        model = gpt.to(device)
        x = torch.randint(VOCABULARY, TOKENS, device=device)
        y = x.roll(-1, 1).flatten()

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return functional.cross_entropy(model(x).flatten(0, -2).float(), y)

    return model, x, loss


def train_speed(name: str, device: torch.device, clock: Clock, rounds: int) -> dict[str, float]:
    """Training steps per second of ours, as shares of those under AdamW fused.

    ``-compiled``: the whole step, forward, backward and optimizer, under ``torch.compile``.
    """
    model, batch, loss = training(name.removesuffix(COMPILED), device)
    groups = param_groups(model, batch[:2])
    optimizers = {
        "AdamW fused": torch.optim.AdamW(model.parameters(), fused=True),
        "AngularAdamW": AngularAdamW([dict(group) for group in groups]),
        "AdamO": AdamO([dict(group) for group in groups]),
        "AdamO rows": AdamO([dict(group) for group in groups], block="row"),
    }

    def run(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    if name.endswith(COMPILED):
        run = torch.compile(run)
    for optimizer in [*optimizers.values()] * 3:
        run(optimizer)
    times = [
        [clock.seconds(lambda o=o: run(o), 10) for o in optimizers.values()] for _ in range(rounds)
    ]
    speed = {"adamw_fused_steps_per_second": statistics.median(1 / row[0] for row in times)}
    for i, ours in enumerate([*optimizers][1:], start=1):
        speed[ours] = statistics.median(row[0] / row[i] for row in times)
    return speed
