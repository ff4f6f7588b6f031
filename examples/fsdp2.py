"""FSDP2: sharded training, a checkpoint, and a second run that continues from it.

    torchrun --nproc-per-node 2 examples/fsdp2.py [--optimizer adamo]

Runs on GPUs with nccl and on a CPU with gloo, in seconds. The data are made: a random network is to
be imitated. Any number of processes may continue what another number has saved.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from adamo_optim import AdamO, AngularAdamW, param_groups, rebind

OPTIMIZERS = {"angular": AngularAdamW, "adamo": AdamO}


def build(name: str, device: torch.device) -> tuple[nn.Module, AdamO | AngularAdamW]:
    torch.manual_seed(0)  # the same weights on every rank
    blocks = [
        nn.Sequential(nn.Linear(n, 48, bias=False), nn.LayerNorm(48), nn.GELU()) for n in (16, 48)
    ]
    model = nn.Sequential(*blocks, nn.Linear(48, 5)).to(device)
    # The rules first, from the whole model; then shard; then the groups get the new parameters.
    groups = param_groups(model, torch.randn(8, 16, device=device))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model, OPTIMIZERS[name](rebind(groups, model), lr=1e-3)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Another batch for every rank and step; the targets come from a fixed random network."""
    source = torch.Generator().manual_seed(dist.get_world_size() * step + dist.get_rank())
    teacher = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    x = torch.randn(32, 16, generator=source)
    return x.to(device), torch.tanh(x @ teacher).to(device)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: torch.device
) -> float:
    loss = torch.zeros(())
    for step in steps:
        x, y = batch(step, device)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)  # says what to read
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 with AngularAdamW or AdamO")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="angular")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="for the checkpoint; default: a temporary one")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    folder = [arguments.folder or Path(tempfile.mkdtemp())]
    dist.broadcast_object_list(folder)
    half, end = arguments.steps // 2, arguments.steps

    model, optimizer = build(arguments.optimizer, device)
    if dist.get_rank() == 0:
        print(optimizer.explain())
    train(model, optimizer, range(half), device)
    save(model, optimizer, folder[0] / "half")
    straight = train(model, optimizer, range(half, end), device)

    model, optimizer = build(arguments.optimizer, device)  # as a new run would
    load(model, optimizer, folder[0] / "half")
    resumed = train(model, optimizer, range(half, end), device)

    rows = optimizer.diagnostics(synchronize=True)  # numbers of the whole weights, on every rank
    if dist.get_rank() == 0:
        for name, row in rows.items():
            print(f"{name:10} norm {row['norm']:7.3f}  angle {row['angle']:.4f}")
        print(f"loss after {end} steps: {straight:.6f}, and {resumed:.6f} resumed at step {half}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
