"""A plain PyTorch loop: autocast, GradScaler, torch.compile, a schedule, diagnostics, resuming.

    python examples/plain_pytorch.py [--optimizer adamo] [--epochs 4] [--no-compile]

AngularAdamW takes AdamW's numbers; AdamO's weight decay is another one (its default). On a CPU it
computes in bfloat16; on a GPU in float16, where a GradScaler guards small gradients.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from adamo_optim import AdamO, AngularAdamW, param_groups
from adamo_optim.callbacks import log_diagnostics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_data(count: int = 512) -> tuple[Tensor, Tensor]:
    """Points around four centres."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (count,), generator=generator)
    centres = torch.randn(4, 20, generator=generator)
    points = centres[labels] + torch.randn(count, 20, generator=generator)
    return points.to(DEVICE), labels.to(DEVICE)


def make_optimizer(name: str, model: nn.Module, batch: Tensor) -> AdamO | AngularAdamW:
    groups = param_groups(model, batch)  # before torch.compile
    if name == "adamo":
        return AdamO(groups, lr=1e-3)
    return AngularAdamW(groups, lr=1e-3, weight_decay=0.1)


def train(name: str, epochs: int, out: str, compiled: bool, resume_at: int = 0) -> nn.Module:
    points, labels = make_data()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)
    ).to(DEVICE)
    optimizer = make_optimizer(name, model, points[:32])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if resume_at:
        checkpoint = torch.load(f"{out}/epoch-{resume_at}.pt", weights_only=True)
        for key, part in parts.items():
            part.load_state_dict(checkpoint[key])
    else:
        print(optimizer.explain(), "\n")
    forward = torch.compile(model) if compiled else model
    writer, step = SummaryWriter(out), resume_at * (len(points) // 32)
    for epoch in range(resume_at, epochs):
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(epoch))
        for rows in order.to(DEVICE).split(32):
            with torch.autocast(DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16):
                loss = F.cross_entropy(forward(points[rows]), labels[rows])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # so that clipping sees the gradients' true size
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            step += 1
            log_diagnostics(optimizer, writer, step, every=16)
        scheduler.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")  # type: ignore[possibly-unbound]
        torch.save(
            {key: part.state_dict() for key, part in parts.items()}, f"{out}/epoch-{epoch + 1}.pt"
        )
    writer.close()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="A plain PyTorch loop.")
    parser.add_argument("--optimizer", choices=["angular", "adamo"], default="angular")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument("--out", default="lab-output/plain", help="checkpoints and event files")
    flags = parser.parse_args()
    os.makedirs(flags.out, exist_ok=True)
    settings = (flags.optimizer, flags.epochs, flags.out, flags.compiled)
    whole = train(*settings)
    print("\nThe second half again, from the checkpoint:")
    resumed = train(*settings, resume_at=flags.epochs // 2)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print("the weights are", "the same, bit for bit" if same else "different")


if __name__ == "__main__":
    main()
