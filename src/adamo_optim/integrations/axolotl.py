"""AngularAdamW in axolotl by one line of YAML; the settings are axolotl's own.

plugins: [adamo_optim.integrations.axolotl.AngularAdamWPlugin]
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from .transformers import FromModel


class AngularAdamWPlugin(BasePlugin):
    """Puts AngularAdamW, with the rules of the model, in the place of ``optimizer:``."""

    # BasePlugin.create_optimizer would be the hook by its name; axolotl 0.19 never calls it.
    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Tell the trainer how to make its optimizer: with its own numbers, when it wants one."""
        args = trainer.args
        options = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
        }
        trainer.optimizer_cls_and_kwargs = (FromModel, options)
