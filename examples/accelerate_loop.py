"""A loop with Accelerate: bfloat16, accumulation, clipping, a schedule, save and resume.

    python examples/accelerate_loop.py [--epochs 4] [--out lab-output/accelerate]

Build the optimizer from the bare model; `prepare` wraps both. `log_diagnostics` sees through it.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from adamo_optim import AngularAdamW, param_groups
from adamo_optim.callbacks import log_diagnostics


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)
    )


def make_data(count: int = 512) -> TensorDataset:
    """Points around four centres."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (count,), generator=generator)
    centres = torch.randn(4, 20, generator=generator)
    return TensorDataset(centres[labels] + torch.randn(count, 20, generator=generator), labels)


def train(epochs: int, folder: str, resume_at: int = 0) -> dict[str, Tensor]:
    """Train from epoch ``resume_at`` on; returns the final weights."""
    set_seed(0)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="bf16", gradient_accumulation_steps=2
    )
    data = make_data()
    model = make_model()
    groups = param_groups(model, data.tensors[0][:32])
    optimizer = AngularAdamW(groups, lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume_at:
        accelerator.load_state(f"{folder}/epoch-{resume_at}")

    step = 0
    for epoch in range(resume_at, epochs):
        loader.set_epoch(epoch)
        total = 0.0
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    step += 1
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # `accelerator` as the logger: its own trackers
                log_diagnostics(optimizer, accelerator, step, every=10)
            total += loss.item()
        scheduler.step()
        accelerator.print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}")
        accelerator.save_state(f"{folder}/epoch-{epoch + 1}")
    return accelerator.get_state_dict(model)  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description="AngularAdamW with Accelerate.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", default="lab-output/accelerate", help="where states are saved")
    flags = parser.parse_args()
    whole = train(flags.epochs, flags.out)
    print("\nThe second half again, from the saved state:")
    resumed = train(flags.epochs, flags.out, resume_at=flags.epochs // 2)
    same = all(torch.equal(whole[name], resumed[name]) for name in whole)
    print("the weights are", "the same, bit for bit" if same else "different")


if __name__ == "__main__":
    main()
