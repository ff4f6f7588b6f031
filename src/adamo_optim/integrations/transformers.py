"""Rules from the model in transformers' Trainer, which hands a bare class no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..adamo import AdamO
from ..angular import AngularAdamW
from ..example_batch import Forward
from ..groups import param_groups


class FromModel:
    """What ``optimizer_cls_and_kwargs`` takes in the place of a class, with rules of the model.

    The Trainer calls ``FromModel()(model, **kwargs)``. Biases and norms do not decay, as in the
    Trainer's own groups.

    Example:
        >>> settings = {"lr": 1e-3, "weight_decay": 0.1}
        >>> trainer = Trainer(model, args, optimizer_cls_and_kwargs=(FromModel, settings))
    """

    def __call__(
        self,
        model: nn.Module,
        arguments: Any = None,
        *,
        optimizer: type[Optimizer] = AngularAdamW,
        example_batch: Any = None,
        forward: Forward | None = None,
        overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Optimizer:
        """The optimizer of a model.

        Args:
            model: the model, before it is wrapped for distributed training.
            arguments: the training arguments, which axolotl passes; not read.
            optimizer: ``AngularAdamW`` or ``AdamO``.
            example_batch: as in ``param_groups``; ``None``: random tokens, for language models.
            forward: as in ``param_groups``; with random tokens it is the logits.
            overrides: as in ``param_groups``.
            options: those of the optimizer.
        """
        if not isinstance(optimizer, type) or not issubclass(optimizer, (AdamO, AngularAdamW)):
            raise ValueError(f"optimizer must be AngularAdamW or AdamO, got {optimizer!r}")
        if example_batch is None:
            example_batch, forward = random_tokens(model), forward or logits
        groups = param_groups(model, example_batch, forward=forward, overrides=overrides)
        for group in groups:
            if group["rule"] == "low_dim":
                group.setdefault("weight_decay", 0.0)
        return optimizer(groups, **options)


def random_tokens(model: nn.Module) -> dict[str, Any]:
    """Two short sequences of a language model's tokens; the global random state stays."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"{type(model).__name__} has no config.vocab_size to draw tokens from: pass "
            "example_batch, a batch of what the model takes."
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(size, (2, 16), generator=generator)
    tokens = tokens.to(next(model.parameters()).device)
    batch = {"input_ids": tokens}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = tokens
    return batch


def logits(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """The model's logits, without the cache, which the loss does not read."""
    # `model` is a copy in float64, which flash attention and grouped experts do not take
    for choose in ("set_attn_implementation", "set_experts_implementation"):
        if hasattr(model, choose):
            getattr(model, choose)("eager")
    return model(**batch, use_cache=False).logits
