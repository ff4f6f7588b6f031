"""What happens to the norms of the weights, step by step.

The paper starts from two observations about AdamW: gradient and decay pull at the norm in turn and
make it oscillate, and what the gradient has along w gets into Adam's second moments. Both are
numbers, and this counts them: how much of the way that a norm goes within :data:`WINDOW` steps is
undone within them, and how much of ‖g‖², the sum of what Adam's second moments average, is radial:
of all that a run adds up, where large gradients decide, and of a single step's, where each counts
alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .errors import LabError

WINDOW = 100  # steps. Of a random walk's way in so many, 90 % are undone


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
        self.steps, self.way, self.net = (torch.zeros_like(self.log) for _ in range(3))
        self.radial, self.whole = torch.zeros_like(self.log), torch.zeros_like(self.log)
        self.shares, self.moved = torch.zeros_like(self.log), torch.zeros_like(self.log)

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
        return {
            "way_undone": (1 - self.covered().sum() / self.way.sum()).item(),
            "way_a_step": (self.way.mean() / (self.steps[0] - 1)).item(),
            "radial_share": (self.radial.sum() / self.whole.sum()).item(),
            "radial_share_of_a_step": (self.shares / self.moved).nanmean().item(),
        }

    def covered(self) -> Tensor:
        """How far the norms got, window by window, the unfinished one included."""
        return self.net + (self.log - self.start).abs()

    # --- in checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, x in state.items():
            getattr(self, name).copy_(x)
