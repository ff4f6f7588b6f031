"""Your own model with AdamW and AngularAdamW side by side: replace the three functions with yours.

    python examples/your_model.py [--epochs 10] [--seeds 3] [--out lab-output/your-model]

Here they are a small network and scikit-learn's handwritten digits; it takes seconds on one core.
For a seed, both optimizers start from the same weights and see the same batches, with two learning
rates each. Run it again and nothing is trained twice; take another name when you change the model.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from adamo_lab import compare


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
    )


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    return {"valid_accuracy": (model(images).argmax(1) == labels).float().mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare AdamW and AngularAdamW on your model.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default="lab-output/your-model", help="records and report")
    arguments = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    train, valid = random_split(data, [1297, 500], torch.Generator().manual_seed(0))
    comparison = compare(
        make_model,
        DataLoader(train, batch_size=64, shuffle=True),
        loss_fn,
        epochs=arguments.epochs,
        optimizers=("adamw", "angular"),
        lrs=(1e-3, 3e-3),
        # yours; the rest stays at the lab's settings
        hyper={"adamw": {"weight_decay": 0.05}, "angular": {"weight_decay": 0.05}},
        valid_loader=DataLoader(valid, batch_size=256),
        metrics=metrics,
        example_batch=torch.stack([train[i][0] for i in range(32)]),
        seeds=range(arguments.seeds),
        out=arguments.out,
        name="digits, two layers",
    )
    print(comparison)
    print(f"\nThe report: {comparison.report}")


if __name__ == "__main__":
    main()
