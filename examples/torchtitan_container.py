"""torchtitan: a container that knows our optimizers; patterns say which weights turn.

    python examples/torchtitan_container.py

In your configuration: `optimizer=Container.Config(param_groups=[...])`. torchtitan builds the class
that a Config is nested in: without one of its own, `Container.Config` would build torchtitan's.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from adamo_optim import AdamO, AngularAdamW


class Container(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        ours = {"AdamO": AdamO, "AngularAdamW": AngularAdamW}
        return ours.get(name) or OptimizersContainer._resolve_optimizer_factory(name)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
    )


def group(pattern: str, name: str, **options: object) -> ParamGroupConfig:
    kwargs = {"lr": 1e-2, **options}
    return ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=kwargs)


def build(model: nn.Module, name: str = "AngularAdamW") -> Container:
    """In a transformer with QK-norm the first pattern is that of its queries and keys."""
    groups = [group(r"^0\.weight", name, rule="scale_invariant"), group(".*", name)]
    implementation = "fused" if torch.cuda.is_available() else "for-loop"
    config = Container.Config(param_groups=groups, implementation=implementation)
    return config.build(model_parts=[model])


def train(model: nn.Module, container: Container, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[:, :2]).square().mean()
        container.zero_grad()
        loss.backward()
        container.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    model = make_model()
    container = build(model)
    print(container.optimizers[0].explain())  # type: ignore[attr-defined]
    losses = train(model, container, 20)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    other = copy.deepcopy(model)
    resumed = build(other)
    saved = copy.deepcopy(container.state_dict())  # flat, by the names of the parameters
    resumed.load_state_dict(saved)
    same = train(model, container, 5) == train(other, resumed, 5)
    print("resumed:", "the same, bit for bit" if same else "different")


if __name__ == "__main__":
    main()
