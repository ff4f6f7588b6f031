"""LoRA with PEFT and AdamO: a small Llama learns through adapters, in seconds on one core.

    python examples/peft_lora.py [--steps 100]

LoRA's B starts at zero. A norm of zero has no direction, so AdamO gives B the low-dim rule (plain
Adam) for good, and `explain()` says so; A is an ordinary matrix with a norm to train. AngularAdamW
would be AdamW here: the frozen weight beside an adapter fixes its scale, so nothing may turn.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from adamo_optim import AdamO

VOCABULARY, LENGTH = 32, 24


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    adapters = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    return get_peft_model(LlamaForCausalLM(config), adapters)  # type: ignore[arg-type]


def make_data(count: int = 64) -> Tensor:
    """Sequences that count upwards from a random number by a random stride."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH)) % VOCABULARY


def make_optimizer(model: nn.Module) -> AdamO:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return AdamO(trained, lr=1e-2)


def train(model: nn.Module, optimizer: AdamO, steps: int) -> list[float]:
    tokens, losses = make_data(), []
    for step in range(steps):
        rows = tokens[step * 16 % len(tokens) :][:16]
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="AdamO on LoRA adapters.")
    parser.add_argument("--steps", type=int, default=100)
    flags = parser.parse_args()
    model = make_model()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = make_optimizer(model)
    for row in optimizer.explain()[:2]:
        print(f"{row.name}\n    {row.rule}: {row.reason}")
    train(model, optimizer, flags.steps)

    weights = dict(model.named_parameters())
    norms = [p.norm().item() for name, p in weights.items() if "lora_B" in name]
    print(f"\nnorms of B, from 0: {min(norms):.2f} to {max(norms):.2f}")
    moved = [name for name, old in frozen.items() if not torch.equal(weights[name], old)]
    print(f"base weights that moved: {len(moved)} of {len(frozen)}")


if __name__ == "__main__":
    main()
