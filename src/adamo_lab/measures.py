"""Numbers about a model in training, and the form in which a record keeps them.

The paper starts from two observations about AdamW: gradient and decay pull at the norm in turn and
make it oscillate, and what the gradient has along w gets into Adam's second moments. Both are
numbers, and :class:`Norms` counts them: how much of the way that a norm goes within :data:`WINDOW`
steps is undone within them, and how much of ‖g‖², the sum of what Adam's second moments average, is
radial: of all that a run adds up, where large gradients decide, and of a single step's, where each
counts alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LabError
from .records import Row

WINDOW = 100  # steps. Of a random walk's way in so many, 90 % are undone


def spread(total: float, squares: float, steps: int) -> Row:
    """Mean and standard deviation of the gradient's norm over the steps of an epoch."""
    mean = total / max(steps, 1)
    variance = max(squares / max(steps, 1) - mean * mean, 0.0)
    return {"gradient_norm": mean, "gradient_norm_sd": math.sqrt(variance)}


def gradient_norm_variation(rows: Sequence[Row]) -> float | None:
    """How much the gradient's norm varies from step to step, relative to its size.

    The coefficient of variation over the steps of an epoch, averaged over the epochs recorded: a
    pure number, as gradients of scale-invariant weights grow when the weights shrink, and their
    standard deviation with them. None where no gradient was watched.
    """
    pairs = [(row.get("gradient_norm"), row.get("gradient_norm_sd")) for row in rows]
    ratios = [sd / mean for mean, sd in pairs if mean and sd is not None]
    return math.fsum(ratios) / len(ratios) if ratios else None


def rounded(value: Any) -> Any:
    """Plain numbers with five digits, at any depth; None where they are not finite."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    number = float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None


def digest_of(model: nn.Module) -> str:
    """A fingerprint of all weights and buffers: equal exactly when two runs ended alike."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


class Norms:
    """Sums over the steps of a run, one entry per matrix; all on the device, nothing waits.

    The way of a norm is measured in log ‖w‖, so that matrices of any size count alike; where the
    last step took it is not seen. A matrix that starts at zero has no such way and is left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights = {n: p for n, p in model.named_parameters() if p.dim() > 1 and p.any()}
        if not self.weights:
            raise LabError("watch=norms needs a model with a matrix that is not zero")
        self.log = self.squares().log() / 2
        self.start = self.log.clone()  # of the window
        zeros = (torch.zeros_like(self.log) for _ in range(7))
        self.steps, self.way, self.net, self.radial, self.whole, self.shares, self.moved = zeros

    def squares(self) -> Tensor:
        return torch.stack([p.detach().double().square().sum() for p in self.weights.values()])

    @torch.no_grad()
    def observe(self) -> None:
        """Between the backward pass and the step."""
        ww = self.squares()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.weights.values()]
        wide = [g.double() for g in grads]
        gw = torch.stack([(g * p).sum() for g, p in zip(wide, self.weights.values(), strict=True)])
        radial, whole = gw.square() / ww, torch.stack([g.square().sum() for g in wide])
        self.radial += radial
        self.whole += whole
        self.shares += torch.where(whole > 0, radial / whole, 0.0)
        self.moved += whole > 0
        now = ww.log() / 2
        self.way += (now - self.log).abs()
        self.log.copy_(now)
        full = self.steps % WINDOW == 0
        self.net += torch.where(full, (now - self.start).abs(), 0.0)
        self.start.copy_(torch.where(full, now, self.start))
        self.steps += 1

    def result(self) -> dict[str, float]:
        """Over all matrices: ways and squares added up, and the mean of single steps' shares."""
        covered = self.net + (self.log - self.start).abs()  # the unfinished window included
        return {
            "way_undone": (1 - covered.sum() / self.way.sum()).item(),
            "way_a_step": (self.way.mean() / (self.steps[0] - 1)).item(),
            "radial_share": (self.radial.sum() / self.whole.sum()).item(),
            "radial_share_of_a_step": (self.shares / self.moved).nanmean().item(),
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, x in state.items():
            getattr(self, name).copy_(x)
