"""AngularAdamW in axolotl by one line of YAML; the settings are axolotl's own.

plugins: [adamo_optim.integrations.axolotl.AngularAdamWPlugin]
optim_args: {max_angle: 0.1}  # what axolotl has no setting for: options, overrides
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin

from .transformers import FromModel


class AngularAdamWPlugin(BasePlugin):
    """Puts AngularAdamW, with the rules of the model, in the place of ``optimizer:``."""

    # BasePlugin.create_optimizer would be the hook by its name; axolotl 0.19 never calls it.
    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Tell the trainer how to make its optimizer: with its own numbers, when it wants one."""
        args = trainer.args
        for name in ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups"):
            if getattr(args, name, None) is not None:
                raise ValueError(f"AngularAdamWPlugin has no {name}: leave it out.")
        own = cfg.get("optim_args") or {}
        if not isinstance(own, Mapping):
            raise ValueError(f"optim_args must be a mapping of options, got {own!r}")
        options = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
            **own,
        }
        trainer.optimizer_cls_and_kwargs = (FromModel, options)
