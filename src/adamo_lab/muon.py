"""Muon for hidden matrices, AdamW for everything else: torch's own, joined into one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LabError, require


class MuonAdamW(torch.optim.Optimizer):
    """One learning rate for both: Muon's updates are brought to the size of AdamW's.

    The first group is AdamW's, the second Muon's.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        require(hasattr(torch.optim, "Muon"), "muon needs torch 2.9 or newer")
        hidden = hidden_matrices(model)
        chosen = {id(p) for p in hidden}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self.parts = (
            torch.optim.AdamW(rest, betas=betas, eps=eps, fused=fused, **shared),
            torch.optim.Muon(hidden, momentum=momentum, adjust_lr_fn="match_rms_adamw", **shared),
        )
        groups = [group for part in self.parts for group in part.param_groups]
        super().__init__(groups, {})
        self.share_groups()

    def share_groups(self) -> None:
        """A learning rate that is set here is set there, too."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.share_groups()


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The weights of all linear layers but the last, which makes the model's outputs."""
    found = [module.weight for module in model.modules() if isinstance(module, nn.Linear)][:-1]
    if not found:
        raise LabError("muon needs hidden linear layers, and this model has none; take adamw")
    return found
