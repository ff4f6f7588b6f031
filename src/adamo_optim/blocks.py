"""What the passes work on: the blocks that have a gradient in this step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import geometry


class Blocks:
    """Lists of real tensors, one entry per block: w, g, m, v, g⁻ and the slice of g it is of.

    Of a sharded parameter they are this rank's shards.

    ``replace`` is for the differentiable backend: the lists then take the new tensors in the
    place of the old ones, which autograd may still need. ``shared``: a block may have one second
    moment, and then v does not count.
    """

    def __init__(self, scalar: torch.dtype, replace: bool, shared: bool = False) -> None:
        self.scalar, self.replace, self.shared = scalar, replace, shared
        self.slots: list[int] = []  # the blocks' places in the vectors of the law
        self.w: list[Tensor] = []
        self.g: list[Tensor] = []
        self.m: list[Tensor] = []
        self.v: list[Tensor] = []
        self.previous: list[Any] = []  # Tensor or None
        self.sampled: list[Any] = []
        self.ratios: list[float] = []  # what κ of the slice is multiplied by
        self.seeds: list[int | None] = []  # for stochastic rounding; None: to nearest
        self.places: list[Tensor | None] = []  # for it: in the whole tensor; None: as in memory

    def __len__(self) -> int:
        return len(self.slots)

    def add(
        self,
        slot: int,
        p: Tensor,
        g: Tensor,
        state: dict[str, Any],
        rows: tuple[int, int] | None = None,
        ratio: float = 1.0,
        seed: int | None = None,
        places: Tensor | None = None,
    ) -> None:
        """``rows``: the first and the number of those that g⁻ is of, if not of all of them."""
        previous, sampled = state.get("previous_grad"), None
        if previous is not None:
            sampled = geometry.as_real(g if rows is None else g.narrow(0, *rows))
        self.slots.append(slot)
        self.w.append(geometry.as_real(p.clone() if self.replace else p))
        self.g.append(geometry.as_real(g))
        self.m.append(geometry.as_real(state["exp_avg"]))
        self.v.append(geometry.as_real(state["exp_avg_sq"]))
        self.previous.append(previous)
        self.sampled.append(sampled)
        self.ratios.append(ratio)
        self.seeds.append(seed)
        self.places.append(places)

    def pick(self, vector: Tensor) -> list[Tensor]:
        """The entries of a law's vector that belong to these blocks, as 0-D tensors."""
        entries = vector.unbind()
        return [entries[slot] for slot in self.slots]

    def write(self, column: list[Any], i: int, value: Tensor) -> None:
        if self.replace:
            column[i] = value.to(column[i].dtype)
        else:
            column[i].copy_(value)

    def write_weight(self, i: int, value: Tensor, steps: list[Tensor]) -> None:
        """The new weight in its own precision."""
        seed = self.seeds[i]
        if seed is not None:
            value = geometry.round_stochastically(value, steps[i], seed, self.places[i])
        self.write(self.w, i, value)

    def put_back(self, i: int, p: Tensor, state: dict[str, Any]) -> None:
        """After a differentiable step: the new tensors become the parameter and its state."""
        complex_like = torch.view_as_complex if p.is_complex() else lambda x: x
        p.copy_(complex_like(self.w[i]))
        state["exp_avg"] = complex_like(self.m[i])
        state["exp_avg_sq"] = complex_like(self.v[i])
        if self.previous[i] is not None:
            state["previous_grad"] = self.previous[i]
