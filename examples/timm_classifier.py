"""timm with AdamO by name: a small vision transformer with layer decay and timm's own schedule.

    python examples/timm_classifier.py [--epochs 4]

`register()` makes "adamo" known to timm's factory. timm leaves biases and the model's
`no_weight_decay()` without decay, and its default weight_decay is 0. `layer_decay` sets lr_scale,
which timm's schedulers apply (torch's do not); AdamO's radial step follows lr, so it is scaled too.
"""

from __future__ import annotations

import argparse

import timm
import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from adamo_optim import AdamO
from adamo_optim.integrations import with_rules
from adamo_optim.integrations.timm import register


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=4,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=4,
        qk_norm=True,
    )


def make_data(count: int = 256) -> tuple[Tensor, Tensor]:
    """Noise with a bright quarter; the label says which quarter."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (count,), generator=generator)
    images = torch.randn(count, 3, 16, 16, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, label // 2 * 8 :, label % 2 * 8 :][:, :8, :8] += 0.5
    return images, labels


def make_optimizer(model: nn.Module, images: Tensor) -> AdamO:
    """timm's groups by depth and decay, split further by AdamO's rules."""

    def groups(model: nn.Module) -> list[dict[str, object]]:
        no_decay = model.no_weight_decay()  # type: ignore[operator]
        by_depth = param_groups_layer_decay(
            model, weight_decay=1e-3, layer_decay=0.8, no_weight_decay_list=no_decay
        )
        return with_rules(by_depth, model, images[:8])

    register()
    optimizer = create_optimizer_v2(model, opt="adamo", lr=3e-3, param_group_fn=groups)
    # The short way, with rules by shape alone:
    #   create_optimizer_v2(model, opt="adamo", lr=3e-3, weight_decay=1e-3, layer_decay=0.8)
    assert isinstance(optimizer, AdamO)
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description="AdamO with timm.")
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
            print(f"step {step + 1}: loss {loss.item():.4f}, lr {min(rates):.1e} to {max(rates):.1e}")


if __name__ == "__main__":
    main()
