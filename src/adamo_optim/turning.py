"""Weights that turn: their state, and a step in two passes with two laws between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .backends import fused_module
from .batches import Sums, batches
from .blocks import Blocks, block_of
from .buckets import Bucket, Member
from .diagnostics import of_turns
from .dtensor import as_real, is_sharded, lay_out_like, local, rows_of_shard
from .geometry import in_rows, is_dense, lie_alike, real_numel, row_count, scalar_dtype
from .law import (
    TURN_RECORD,
    TURN_SHARED,
    UNSET,
    Turn,
    TurnMemory,
    TurnOptions,
    TurnSums,
    TurnTraits,
    Whole,
    square_law,
    turn_law,
)
from .sharding import whole_sums

NUMBERS = TurnMemory._fields
LEAST, MOST = 1e-24, 1e30  # sums of squares that float32 holds with all of their digits


def rows_of(p: Tensor, group: Mapping[str, Any]) -> int | None:
    """How many second moments a weight has; None where one is for all of it."""
    return None if group["second_moment"] == "tensor" else row_count(p)


def begin(
    state: dict[str, Any], p: Tensor, rows: int | None, squares: float | Tensor = 0.0
) -> None:
    """The state of a weight that is about to turn: from nothing, or from AdamW's.

    ``squares`` is the sum of AdamW's second moments, of the weight or of each row, over all ranks.
    """
    scalar = scalar_dtype(p.device)
    for key in ("exp_avg_sq", "max_exp_avg_sq"):
        state.pop(key, None)
    mean = squares * (rows or 1) / max(real_numel(p), 1)
    start = {"step": 0.0, "mean_square": mean, "initial_norm": UNSET}
    for key, value in start.items():
        old = state.get(key, value)
        if not isinstance(old, Tensor):
            old = torch.tensor(float(old), dtype=scalar, device=p.device)
        old = local(old).to(p.device, scalar)
        shape = () if rows is None or key in TURN_SHARED else (rows,)
        if old.shape != shape:  # one for all has become one for each row, or the reverse
            old = old.mean().expand(shape)
        state[key] = old.contiguous()
    old = state.get("exp_avg")
    if old is None:
        state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    elif old.shape == p.shape:  # a model may change its layout or move, or a checkpoint differ
        state["exp_avg"] = lay_out_like(old.to(p.device, p.dtype), p)


def end(state: dict[str, Any], p: Tensor, step_on_device: bool) -> None:
    """AdamW's state for a weight that has turned so far: every entry has its block's average."""
    mean = local(state.pop("mean_square"))
    state.pop("initial_norm", None)
    square = torch.zeros_like(p, memory_format=torch.preserve_format)
    here = as_real(local(square))
    if mean.dim():
        first, count = rows_of_shard(p) if is_sharded(p) else (0, p.shape[0])
        mean = mean[first : first + count].view(-1, *(1,) * (here.dim() - 1))
    here.copy_(mean.expand(here.shape))
    state["exp_avg_sq"] = square
    device = p.device if step_on_device else torch.device("cpu")
    state["step"] = local(state["step"]).detach().to(device, torch.float32)


def started_at_zero(state: Mapping[str, Any]) -> bool:
    """Its state is AdamW's, with a mark: it has no direction, and follows AdamW for good."""
    return "initial_norm" in state and "exp_avg_sq" in state


@torch.no_grad()
def beginnings(
    new: list[tuple[Tensor, dict[str, Any]]], states: Mapping[Tensor, Any]
) -> list[tuple[Tensor, dict[str, Any], bool, float | Tensor]]:
    """Of weights that may turn: is its norm 0, and what do its second moments add up to?

    Reads the devices once, in the first step; one collective a mesh.
    """
    params = [p for p, _ in new]
    capturing = any(p.is_cuda for p in params) and torch.cuda.is_current_stream_capturing()
    asked = [] if capturing else params
    filled = [torch.count_nonzero(local(p)).to(scalar_dtype(p.device)) for p in asked]
    loaded = [(p, group) for p, group in new if "exp_avg_sq" in states.get(p, {})]
    added = [added_up(p, states[p]["exp_avg_sq"], rows_of(p, group)) for p, group in loaded]
    sums = whole_sums([*filled, *added], [*asked, *(p for p, _ in loaded)])
    counts = torch.stack([x.cpu() for x in sums[: len(asked)]]).tolist() if asked else []
    zero = {p: not count for p, count in zip(asked, counts, strict=True)}
    totals = {p: x for (p, _), x in zip(loaded, sums[len(asked) :], strict=True)}
    return [(p, group, zero.get(p, False), totals.get(p, 0.0)) for p, group in new]


def added_up(p: Tensor, squares: Tensor, rows: int | None) -> Tensor:
    """The sum of this rank's second moments, or those of every row."""
    here = as_real(local(squares))
    if rows is None:
        return here.sum(dtype=scalar_dtype(p.device))
    sums = here.new_zeros(rows, dtype=scalar_dtype(p.device))
    first, count = rows_of_shard(p) if is_sharded(p) else (0, rows)
    sums[first : first + count] = here.flatten(1).sum(1, dtype=sums.dtype)
    return sums


class TwoPasses(Bucket):
    """Blocks that AngularAdamW turns."""

    Options, Traits, Memory, RECORD = TurnOptions, TurnTraits, TurnMemory, TURN_RECORD
    BUFFERS, SHARED = ("exp_avg",), TURN_SHARED

    def traits_of(self, member: Member) -> TurnTraits:
        inverse_root: Any = max(real_numel(member.p), 1) ** -0.5
        return TurnTraits(inverse_root, inverse_root * (member.rows or 1) ** 0.5)

    def finish(self) -> None:
        super().finish()
        if self.blocks != len(self.members):
            sizes = torch.tensor(self.sizes, device="cpu")
            self.member_of = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
            self.member_of = self.member_of.to(self.device)
            first = torch.tensor(self.starts, device="cpu").repeat_interleave(sizes)
            self.first_of = first.to(self.device)  # the first block of every block's weight

    def read(self) -> TurnMemory:
        """What blocks share is their first one's: its place is that of the state."""
        memory = super().read()
        if self.blocks == len(self.members) or self.differentiable:
            return memory
        shared = {key: getattr(memory, key)[self.first_of] for key in self.SHARED}
        return memory._replace(**shared)

    def of_weights(self, x: Tensor) -> Tensor:
        """Numbers of the blocks, added up over those of a weight, in every one of its places."""
        if self.blocks == len(self.members):
            return x
        return torch.stack([part.sum() for part in x.split(self.sizes)])[self.member_of]

    def laws(
        self, options: TurnOptions, sums: TurnSums, active: Tensor
    ) -> tuple[Turn, TurnMemory, tuple[Tensor, ...]]:
        """The two laws; what pass 2 needs, the new memory, and the record of the step."""
        traits = TurnTraits(*self.traits.unbind())
        scaled, memory = square_law(options, traits, self.read(), sums, active)
        whole = Whole(*map(self.of_weights, (sums.ww, scaled.uw, scaled.uu)))
        turn, memory = turn_law(options, traits, memory, scaled, whole, active)
        return turn, memory, (*sums, *scaled, *whole, *turn, active)

    def quantities(self, record: dict[str, Tensor], memory: dict[str, Tensor]) -> dict[str, Tensor]:
        return of_turns({**record, "gg": self.of_weights(record["gg"])}, memory)

    @staticmethod
    def numbers_of(group: Mapping[str, Any]) -> Iterator[float | Tensor]:
        yield group["lr"]
        yield from group["betas"]
        yield group["eps"]
        yield 0.0 if group["angular_rms"] is None else group["angular_rms"]
        yield group["max_angle"]
        yield -1.0 if group["maximize"] else 1.0

    def work(self, amp: Mapping[str, Tensor | None]) -> Any:
        grads = self.prepare()
        if grads is None:
            return None
        amp = {k: None if x is None else x.to(self.device) for k, x in amp.items()}
        kind = fused_module(self.device).TurnWork if self.backend == "fused" else Work
        return kind(self, grads, self.options(), **amp)

    def moments_of_stand_ins(self) -> list[tuple[int, Tensor, Tensor]]:
        result = []
        for i, member in enumerate(self.members):
            if self.takes_part[i] and not self.present[i]:
                moment = local(member.state["exp_avg"])
                result.append((self.starts[i], moment, moment.clone()))
        return result


class Work:
    """One step in torch calls; ``begin`` and ``proceed`` as in ``three_passes.Work``."""

    def __init__(
        self,
        bucket: TwoPasses,
        grads: list[Tensor | None],
        options: TurnOptions,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        self.bucket, self.options = bucket, options
        self.grad_scale, self.found_inf = grad_scale, found_inf
        self.in_place = not bucket.differentiable
        on_cpu = bucket.device.type == "cpu"
        flags = (bucket.differentiable, self.in_place and not on_cpu, self.in_place and on_cpu)
        self.blocks = Blocks(bucket.dtype, bucket.sizes, *flags)
        for i, (member, g) in enumerate(zip(bucket.members, grads, strict=True)):
            if g is not None:
                state, p = bucket.local_state(member), local(member.p)
                if self.blocks.read and is_dense(p) and not lie_alike(p, g):
                    g = torch.empty_like(p, dtype=g.dtype).copy_(g)  # the passes want one layout
                count, first = bucket.rows_here[i]
                rows = {"rows": count, "first_row": first}
                self.blocks.append(block_of(i, p, g, state, bucket.differentiable, **rows))
        self.members = [block.member for block in self.blocks]

    def run(self) -> None:
        self.proceed(self.begin(), self.bucket.active)

    def begin(self) -> Tensor:
        """Pass 1: m ← β₁m + (1−β₁)(±g); ‖w‖², ‖g‖², ⟨m,w⟩, ‖m‖²."""
        sums, o, scale = Sums(self.blocks), self.options, self.grad_scale
        for batch in batches(self.blocks, "w g m", o.beta1, (1 - o.beta1) * o.sign):
            w, g, m = batch.tensors
            beta1, rest1 = in_dtype(wide(m).dtype, batch.numbers)
            if scale is not None:
                g = g * scale.double().reciprocal().to(g.dtype)
            read = isinstance(beta1, float)  # on a CPU
            in_place = self.in_place and wide(m) is m and self.found_inf is None
            if in_place and read and rest1 == 1 - beta1:
                new_m = m.lerp_(g.to(m.dtype), rest1)
            else:
                new_m = m.mul_(beta1) if in_place else wide(m) * beta1
                new_m = new_m.add_(wide(g).to(new_m.dtype) * rest1)
            if self.found_inf is not None:
                new_m = torch.where(self.found_inf == 0, new_m, m)
            new_m = new_m.to(m.dtype)
            batch.write("m", new_m)
            if read and lie_alike(w, g, new_m):
                sums[batch.part.i].append(rounded_sums(w, g, new_m))
            else:
                batch.add_products(sums, (w, w), (g, g), (new_m, w), (new_m, new_m))
        return self.bucket.spread(sums.add_up(4), self.members, 4)

    def proceed(self, rows: Tensor, active: Tensor) -> None:
        """The laws, and pass 2: w ← w + (a−1)·w − b·m."""
        bucket, sums = self.bucket, TurnSums(*rows.unbind(1))
        if self.found_inf is not None:
            active = active & (self.found_inf == 0)
        turn, memory, record = bucket.laws(self.options, sums, active)
        for batch in batches(self.blocks, "w m", turn.a1, turn.b):
            w, m = batch.tensors
            a1, b = in_dtype(wide(w).dtype, batch.numbers)
            if isinstance(b, float) and b > 0 and wide(w) is w and lie_alike(w, m):
                step_of_sgd(w, m, lr=b, weight_decay=-a1 / b)
                continue
            w = wide(w)
            shift = (w * a1).sub_(m.to(w.dtype) * b)
            batch.write("w", w.add_(shift) if self.in_place else w + shift)
        bucket.write(memory)
        if bucket.differentiable:
            self.put_back()
        bucket.last = torch.stack([x.to(bucket.dtype) for x in record]).detach()

    def put_back(self) -> None:
        """After a differentiable step: the new tensors become the parameter and its state."""
        for block in self.blocks:
            member = self.bucket.members[block.member]
            as_before = torch.view_as_complex if member.p.is_complex() else lambda x: x
            member.p.copy_(as_before(block.w))
            member.state["exp_avg"] = as_before(block.m)


def rounded_sums(w: Tensor, g: Tensor, m: Tensor) -> Tensor:
    """‖w‖², ‖g‖², ⟨m,w⟩, ‖m‖² of dense tensors on a CPU.

    Rows are summed in the precision of the entries, in half of the time, and added in float64.
    Squares that this precision does not hold are summed in float64.
    """
    rows = [in_rows(wide(x)) for x in (w, g, m)]
    sums = [sums_of_rows(*x) for x in zip(*rows, strict=True)]
    if any(not LEAST < x < MOST for ww, gg, _, mm in sums for x in (ww, gg, mm)):
        sums = [sums_of_rows(*(y.double() for y in x)) for x in zip(*rows, strict=True)]
    return w.new_tensor(sums, dtype=torch.float64).sum(0)


def sums_of_rows(w: Tensor, g: Tensor, m: Tensor) -> tuple[float, float, float, float]:
    norms = torch.stack([torch.linalg.vector_norm(x, dim=1) for x in (w, g, m)]).double()
    ww, gg, mm = norms.mul_(norms).sum(1).tolist()
    return ww, gg, (m * w).sum(1).sum(dtype=torch.float64).item(), mm


def step_of_sgd(w: Tensor, m: Tensor, lr: float, weight_decay: float) -> None:
    """w ← w − lr·(m + weight_decay·w) in torch's one kernel on a CPU that has both coefficients."""
    torch._fused_sgd_(
        [w],
        [m],
        [],
        weight_decay=weight_decay,
        momentum=0.0,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def in_dtype(dtype: torch.dtype, numbers: list[Any]) -> list[Any]:
    """A number for each row has a dtype of its own, which would decide that of a product."""
    return [x.to(dtype) if isinstance(x, Tensor) and x.dim() else x for x in numbers]


def wide(x: Tensor) -> Tensor:
    """The precision of the elementwise arithmetic: float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
