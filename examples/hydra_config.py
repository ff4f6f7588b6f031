"""Hydra and OmegaConf: the optimizer is a `_target_` in the configuration.

    python examples/hydra_config.py

`_partial_: true`, and call the result with the groups: `instantiate(config, params=groups)` would
turn the groups into configurations, which no optimizer takes.
"""

from __future__ import annotations

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from adamo_optim import param_groups

CONFIG = """
optimizer:
  _target_: adamo_optim.AngularAdamW
  _partial_: true
  lr: 1e-3
  betas: [0.9, 0.95]
  weight_decay: 0.1
"""


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 2))
    x = torch.randn(64, 8)
    optimizer = instantiate(OmegaConf.create(CONFIG).optimizer)(param_groups(model, x))
    print(optimizer.explain())
    for step in range(20):
        optimizer.zero_grad()
        loss = (model(x) - x[:, :2]).square().mean()
        loss.backward()
        optimizer.step()
        if step in (0, 19):
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
