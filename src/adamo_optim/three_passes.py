"""A step of AdamO: three passes over the blocks of a bucket, and the two laws between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from . import loop
from .backends import fused_module
from .blocks import Blocks, block_of
from .buckets import Bucket, Member
from .diagnostics import of_adamo
from .dtensor import as_real, is_sharded, local, places_of_shard
from .geometry import largest_square, real_numel, rounding_level, smallest_eps
from .law import (
    RECORD,
    ForMoments,
    Memory,
    Options,
    Products,
    Sums,
    Traits,
    moments_law,
    weights_law,
)
from .rounding import moved_number
from .sampling import sample_ratio, sample_rows
from .state import BUFFERS, sampled_state


class ThreePasses(Bucket):
    """Blocks that AdamO updates."""

    Options, Traits, Memory, RECORD, BUFFERS = Options, Traits, Memory, RECORD, BUFFERS

    def quantities(self, record: dict[str, Tensor], memory: dict[str, Tensor]) -> dict[str, Tensor]:
        return of_adamo(record, memory)

    def traits_of(self, member: Member) -> Traits:
        p, numbers = member.p, real_numel(member.p)
        numbers //= 1 if member.rows is None else p.shape[0]
        values: dict[str, Any] = {
            "low_dim": member.rule == "low_dim",
            "scale_invariant": member.rule == "scale_invariant",
            "inverse_root": max(numbers, 1) ** -0.5,
            "rounding": rounding_level(p.dtype, self.dtype),
            "smallest_eps": smallest_eps(p),
            "largest_square": largest_square(p),
        }
        return Traits(**values)

    @staticmethod
    def numbers_of(group: Mapping[str, Any]) -> Iterator[float | Tensor]:
        target, absolute = group["curvature_target"], group["radial_lr"]
        isotropic = group["decay_lr"] == "tangential"
        yield group["lr"]
        yield from group["betas"]
        yield group["eps"]
        yield 0.0 if isotropic else group["weight_decay"]
        yield group["weight_decay"] if isotropic else 0.0
        yield group["radial_lr_ratio"] if absolute is None else 0.0
        yield 0.0 if absolute is None else absolute
        yield group["radial_beta"]
        yield float(target == "auto")
        yield 0.0 if target is None or target == "auto" else target
        yield group["curvature_beta"]
        yield group["low_dim_scale"]
        yield 0.0 if group["delta"] is None else group["delta"]
        yield group["wd_ratio"]
        yield float(group["guard"])
        yield -1.0 if group["maximize"] else 1.0

    def finish(self) -> None:
        super().finish()
        self.rows: list[tuple[int, int] | None] = []  # those g⁻ is of, if not of all
        self.ratios: list[float] = []  # what κ of them is multiplied by
        # for stochastic rounding: the number and the places at which random bits are drawn
        self.stochastic = [
            m.group["rounding"] == "stochastic" and m.p.dtype == torch.bfloat16
            for m in self.members
        ]
        self.seeds = [m.number for m in self.members]
        self.places: list[Tensor | None] = [None] * len(self.members)
        for i, m in enumerate(self.members):
            previous = m.state.get("previous_grad")
            sampled = previous is not None and sampled_state(previous, m.p)
            self.rows.append(sample_rows(m.p, m.number) if sampled else None)
            self.ratios.append(sample_ratio(m.p, previous))
            if is_sharded(m.p) and self.stochastic[i]:
                places = places_of_shard(m.p)
                if isinstance(places, int):
                    self.seeds[i] = moved_number(m.number, places)
                else:
                    self.places[i] = places

    def work(self, amp: Mapping[str, Tensor | None]) -> Any:
        """This step, ready to run; None without a gradient."""
        grads = self.prepare()
        if grads is None:
            return None
        if self.backend == "fused" and not self.holds_shards:
            return fused_module(self.device).Work(self, grads, self.options(), **amp)
        refuse_scaling(amp)
        kind = fused_module(self.device).Work if self.backend == "fused" else Work
        return kind(self, grads, self.options())

    def blocks_of(self, grads: list[Tensor | None]) -> Blocks:
        """The tensors of the members that take part."""
        together = self.backend == "foreach"
        blocks = Blocks(self.dtype, self.sizes, self.differentiable, together)
        for i, (member, g) in enumerate(zip(self.members, grads, strict=True)):
            if g is None:
                continue
            state, rows, (count, first) = self.local_state(member), self.rows[i], self.rows_here[i]
            sampled = None
            if state.get("previous_grad") is not None:
                sampled = as_real(g if rows is None else g.narrow(0, *rows))
            blocks.append(
                block_of(
                    i,
                    local(member.p),
                    g,
                    state,
                    self.differentiable,
                    sampled=sampled,
                    ratio=self.ratios[i],
                    seed=self.seeds[i] if self.stochastic[i] else None,
                    places=self.places[i],
                    rows=count,
                    first_row=first,
                )
            )
        return blocks


class Work:
    """One step in torch calls.

    A step of sharded blocks stops where their sums must be added up over the ranks: ``begin`` and
    ``proceed`` return the sums of this rank, and ``proceed`` takes those of all; None: it is done.
    """

    first: ForMoments | None = None
    sums: Sums
    active: Tensor
    memory: Memory

    def __init__(self, bucket: ThreePasses, grads: list[Tensor | None], options: Options) -> None:
        self.bucket, self.options = bucket, options
        self.blocks = bucket.blocks_of(grads)
        self.members = [block.member for block in self.blocks]

    def run(self) -> None:
        products = self.proceed(self.begin(), self.bucket.active)
        assert products is not None
        self.proceed(products, self.bucket.active)

    def begin(self) -> Tensor:
        """Pass 1: the five sums of every block, one row each."""
        four, kappa = loop.reduce(self.blocks)
        rows, kappa = (self.bucket.spread(x, self.members, n) for x, n in ((four, 4), (kappa, 1)))
        return torch.cat([rows[:, :3], kappa, rows[:, 3:]], dim=1)  # in the order of Sums

    def proceed(self, rows: Tensor, active: Tensor) -> Tensor | None:
        """A law, and the pass that follows it."""
        bucket, columns = self.bucket, rows.unbind(1)
        traits = Traits(*bucket.traits.unbind())
        if self.first is None:
            self.sums, self.active = Sums(*columns), active
            self.first, self.memory = moments_law(
                self.options, traits, bucket.read(), self.sums, active
            )
            products = loop.moments(self.blocks, self.first)
            return bucket.spread(products, self.members, len(Products._fields))
        products = Products(*columns)
        second, memory = weights_law(
            self.options, traits, self.memory, self.sums, self.first, products
        )
        loop.apply(self.blocks, self.first, second, memory.step)
        bucket.write(memory)
        if bucket.differentiable:
            self.put_back()
        record = (*self.sums, *products, *self.first, *second, self.active)
        bucket.last = torch.stack([x.to(bucket.dtype) for x in record]).detach()
        return None

    def put_back(self) -> None:
        """After a differentiable step: the new tensors become the parameter and its state."""
        for block in self.blocks:
            member = self.bucket.members[block.member]
            as_before = torch.view_as_complex if member.p.is_complex() else lambda x: x
            member.p.copy_(as_before(block.w))
            member.state["exp_avg"] = as_before(block.m)
            assert block.v is not None
            member.state["exp_avg_sq"] = as_before(block.v)
            if block.previous is not None:
                member.state["previous_grad"] = block.previous


def refuse_scaling(amp: Mapping[str, Tensor | None]) -> None:
    """Only the fused backends unscale and skip by themselves; a GradScaler knows that."""
    if any(x is not None for x in amp.values()):
        raise RuntimeError(
            "grad_scale and found_inf are for fused=True, on parameters that are not sharded: "
            "unscale the gradients with GradScaler.unscale_(optimizer) first."
        )
