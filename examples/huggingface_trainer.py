"""transformers' Trainer: a small Qwen3 on made-up sequences, in seconds on one core.

    python examples/huggingface_trainer.py [--steps 60] [--by-class] [--out lab-output/trainer]

Build the optimizer yourself and pass it as `optimizers=(optimizer, None)`: the Trainer still makes
the schedule, and accumulates, clips, saves and resumes as always. The learning_rate and the
weight_decay of TrainingArguments do not reach an optimizer that you built.

The shorter way, `--by-class` here: `optimizer_cls_and_kwargs=(FromModel, {"lr": 1e-3})`. With
AngularAdamW in the place of FromModel nobody looks at the model: that is AdamW, and says so.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from adamo_optim import AngularAdamW, param_groups
from adamo_optim.callbacks import transformers_callback
from adamo_optim.integrations.transformers import FromModel

VOCABULARY, LENGTH = 32, 24


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config)


def make_data(count: int = 256) -> list[dict[str, Tensor]]:
    """Sequences that count upwards from a random number by a random stride."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_optimizer(model: nn.Module, data: list[dict[str, Tensor]]) -> AngularAdamW:
    """Rules from the architecture: the norms on queries and keys make their weights' scale moot."""
    batch = {"input_ids": torch.stack([row["input_ids"] for row in data[:2]])}
    groups = param_groups(model, batch, forward=lambda m, b: m(**b, use_cache=False).logits)
    return AngularAdamW(groups, lr=1e-3, weight_decay=0.1)


def make_trainer(args: TrainingArguments, by_class: bool = False) -> Trainer:
    model, data = make_model(), make_data()
    if by_class:
        pair = (FromModel, {"lr": 1e-3, "weight_decay": 0.1})
        trainer = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=pair)  # type: ignore[arg-type]
        trainer.create_optimizer()  # else train() does, and there is nothing to explain yet
    else:
        optimizer = make_optimizer(model, data)
        trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None))  # type: ignore[arg-type]
    trainer.add_callback(transformers_callback(trainer, every=10))  # diagnostics to report_to
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="AngularAdamW in the transformers Trainer.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--by-class", action="store_true", help="by optimizer_cls_and_kwargs")
    parser.add_argument("--out", default="lab-output/trainer", help="checkpoints and event files")
    flags = parser.parse_args()
    args = TrainingArguments(
        output_dir=flags.out,
        max_steps=flags.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        bf16=True,  # autocast: the weights and their state stay in float32
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=10,
        save_steps=flags.steps // 2,
        report_to="tensorboard",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = make_trainer(args, flags.by_class)
    print(trainer.optimizer.explain(), "\n")  # type: ignore[union-attr]
    trainer.train()
    print("\nThe second half again, from the checkpoint:")
    resumed = make_trainer(args, flags.by_class)
    resumed.train(resume_from_checkpoint=f"{flags.out}/checkpoint-{flags.steps // 2}")


if __name__ == "__main__":
    main()
