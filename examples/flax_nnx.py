"""Flax NNX: a convolution before BatchNorm turns, all else follows AdamW.

python examples/flax_nnx.py [--optimizer adamo] [--steps 150]
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from adamo_optim.optax import adamo, angular_adamw, find_rules


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(x.mean((1, 2)))


def make_data(count: int = 256) -> tuple[Array, Array]:
    """Noisy stripes in four directions."""
    labels = jnp.arange(count) % 4
    row, column = jnp.mgrid[:8, :8]
    stripes = jnp.stack([row, column, row + column, row - column]) % 4 < 2
    noise = jax.random.normal(jax.random.key(0), (count, 8, 8))
    return (stripes[labels] + 0.5 * noise)[..., None], labels


def rules_of(model: Network, batch: Array) -> nnx.State:
    """Pure, without nnx's Variables, as nnx.Optimizer hands parameters to optax.

    Running statistics are an input: they become float64, too.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def apply(params: nnx.State, rest: nnx.State, x: Array) -> Array:
        return nnx.merge(graph, params, rest)(x)

    return find_rules(apply, nnx.as_pure(params), nnx.as_pure(rest), batch)


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, x: Array, y: Array) -> Array:
    def loss_of(model: Network) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def train(name: str, steps: int) -> list[float]:
    x, y = make_data()
    model = Network(nnx.Rngs(0))
    rules = rules_of(model, x[:16])
    schedule = optax.cosine_decay_schedule(3e-2, steps)
    if name == "adamo":
        transformation = adamo(schedule, radial_lr_ratio=10.0, rules=rules)
    else:
        transformation = angular_adamw(schedule, weight_decay=0.1, rules=rules)
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    for path, rule in nnx.to_flat_state(rules):
        print(".".join(map(str, path)), rule)
    return [float(train_step(model, optimizer, x, y)) for _ in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Flax NNX.")
    parser.add_argument("--optimizer", choices=["angular", "adamo"], default="angular")
    parser.add_argument("--steps", type=int, default=150)
    flags = parser.parse_args()
    losses = train(flags.optimizer, flags.steps)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
