"""timm with AngularAdamW by name: a small ResNet with layer decay and timm's own schedule.

    python examples/timm_classifier.py [--epochs 4]

`register()` makes "angularadamw" and "adamo" known to timm's factory. timm leaves biases and the
model's `no_weight_decay()` without decay, and its default weight_decay is 0. `layer_decay` sets
lr_scale, which timm's schedulers apply (torch's do not); the angle of a turn follows lr, too.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from adamo_optim import AngularAdamW
from adamo_optim.integrations.timm import param_group_fn, register


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet10t", num_classes=4, channels=(16, 16, 32, 32), stem_width=8)


def make_data(count: int = 256) -> tuple[Tensor, Tensor]:
    """Noise with a bright quarter; the label says which quarter."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (count,), generator=generator)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, label // 2 * 16 :, label % 2 * 16 :][:, :16, :16] += 0.5
    return images, labels


def make_optimizer(model: nn.Module, images: Tensor) -> AngularAdamW:
    """timm's groups by depth and decay, split further by our rules."""
    register()
    groups = param_group_fn(images[:8], weight_decay=0.1, layer_decay=0.8)
    optimizer = create_optimizer_v2(model, opt="angularadamw", lr=1e-3, param_group_fn=groups)
    assert isinstance(optimizer, AngularAdamW)
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description="AngularAdamW with timm.")
    parser.add_argument("--epochs", type=int, default=4)
    flags = parser.parse_args()
    images, labels = make_data()
    model = make_model()
    optimizer = make_optimizer(model, images)
    print(optimizer.explain(), "\n")
    steps = flags.epochs * (len(images) // 32)
    scheduler = CosineLRScheduler(optimizer, t_initial=steps, warmup_t=2, t_in_epochs=False)
    for step in range(steps):
        scheduler.step_update(step)
        rows = slice(step * 32 % len(images), step * 32 % len(images) + 32)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 8 == 0:
            rates = [group["lr"] for group in optimizer.param_groups]
            print(
                f"step {step + 1}: loss {loss.item():.4f}, lr {min(rates):.1e} to {max(rates):.1e}"
            )


if __name__ == "__main__":
    main()
