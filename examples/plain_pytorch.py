"""A plain PyTorch loop with AdamO: autocast, GradScaler, torch.compile, a schedule, resuming.

    python examples/plain_pytorch.py [--epochs 4] [--no-compile] [--out lab-output/plain]

On a CPU it computes in bfloat16; on a GPU in float16, where a GradScaler guards small gradients.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from adamo_optim import AdamO, param_groups
from adamo_optim.callbacks import log_diagnostics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_data(count: int = 512) -> tuple[Tensor, Tensor]:
    """Points around four centres."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (count,), generator=generator)
    centres = torch.randn(4, 20, generator=generator)
    points = centres[labels] + torch.randn(count, 20, generator=generator)
    return points.to(DEVICE), labels.to(DEVICE)


def train(epochs: int, out: str, compiled: bool = True, resume_at: int = 0) -> nn.Module:
    points, labels = make_data()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)
    ).to(DEVICE)
    optimizer = AdamO(param_groups(model, points[:32]), lr=1e-3)  # before torch.compile
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if resume_at:
        checkpoint = torch.load(f"{out}/epoch-{resume_at}.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
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
            {n: part.state_dict() for n, part in parts.items()}, f"{out}/epoch-{epoch + 1}.pt"
        )
    writer.close()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="AdamO in a plain PyTorch loop.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument("--out", default="lab-output/plain", help="checkpoints and event files")
    flags = parser.parse_args()
    os.makedirs(flags.out, exist_ok=True)
    whole = train(flags.epochs, flags.out, flags.compiled)
    print("\nThe second half again, from the checkpoint:")
    resumed = train(flags.epochs, flags.out, flags.compiled, resume_at=flags.epochs // 2)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print("the weights are", "the same, bit for bit" if same else "different")


if __name__ == "__main__":
    main()
