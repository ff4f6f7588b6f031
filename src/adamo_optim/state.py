"""The state of AdamO: per-parameter buffers and 0-D tensors, stacked for the law.

``optimizer.state[p]`` is an ordinary dictionary of tensors. A :class:`Bucket` holds the blocks of
one device and backend; the 0-D tensors of its parameters are views into one vector per quantity,
so that the law works on vectors and ``state_dict`` still sees ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from . import control, foreach, geometry, loop, sharded
from .backends import fused_backend
from .blocks import Blocks
from .control import UNSET, First, Memory, Options, Second, Sums, Traits
from .options import OptionTable
from .rules import needs_previous_gradient, rule_of

SCALARS = Memory._fields
BUFFERS = ("exp_avg", "exp_avg_sq", "previous_grad")
START = Memory(0.0, 0.0, UNSET, 0.0, 0.0, UNSET, 0.0)  # type: ignore[arg-type]  # numbers here


def initialize(state: dict[str, Any], p: Tensor, group: dict[str, Any], seed: int) -> None:
    """Bring one parameter's state up to the options: create, convert or drop what changed."""
    dtype, scalar = geometry.compute_dtype(p), geometry.scalar_dtype(p.device)
    older = "mean_square" not in state and state.get("exp_avg_sq") is not None
    for key, value in zip(SCALARS, START, strict=True):
        wanted = _get_scalar_dtype() if key == "step" else scalar
        old = state.get(key, value)
        if isinstance(old, Tensor) and geometry.is_sharded(old):
            old = geometry.local(old)  # a number is the same on all ranks
        if not isinstance(old, Tensor):
            state[key] = torch.tensor(float(old), dtype=wanted, device=p.device)
        elif old.device != p.device or old.dtype != wanted:
            state[key] = _move(old, p.device, wanted)
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = _buffer(state.get(key), p, dtype)
    if older:
        set_mean_square(state)
    _initialize_previous(state, p, group, seed)


def is_fresh(state: dict[str, Any]) -> bool:
    """No step has written it; reads the device."""
    step = state.get("step")
    return isinstance(step, Tensor) and not step.is_meta and float(geometry.local(step)) == 0


def set_mean_square(state: dict[str, Any]) -> None:
    """The mean of v, for a v that comes from elsewhere: an older checkpoint, or AdamW."""
    v = state["exp_avg_sq"].detach()
    state["mean_square"] = sharded.whole_sum(v) / max(geometry.real_numel(v), 1)


def complete_mean_square(state: dict[str, Any]) -> None:
    """A checkpoint older than ``mean_square``, loaded over a fresh state, has left its 0 there."""
    found = [state.get(key) for key in ("mean_square", "step", "exp_avg_sq")]
    if all(isinstance(x, Tensor) and not x.is_meta for x in found):
        mean, step = (float(geometry.local(x).detach()) for x in found[:2])
        if mean == 0 and step > 0:
            set_mean_square(state)


def _initialize_previous(
    state: dict[str, Any], p: Tensor, group: dict[str, Any], seed: int
) -> None:
    rule, _ = rule_of(p, group)
    if not needs_previous_gradient(rule, group):
        if state.pop("previous_grad", None) is not None:
            _forget_curvature(state)
        return
    kind = group["previous_gradient"]
    dtype = torch.bfloat16 if kind == "bfloat16" else geometry.compute_dtype(p)
    like, old = geometry.as_real(p.detach()), state.get("previous_grad")
    rows = geometry.sample_rows(p, seed) if kind == "sampled" else None
    if rows is not None:
        like = geometry.local(like).narrow(0, *rows)
        if old is not None and not old.is_meta:
            old = geometry.sample_of(old, p, seed, rows)
    fresh = old is None or old.shape != like.shape or old.is_meta
    state["previous_grad"] = _buffer(None if fresh else old, like, dtype)
    if fresh:
        _forget_curvature(state)  # a new g⁻ knows nothing


def _forget_curvature(state: dict[str, Any]) -> None:
    for key in ("tau", "tau_reference", "curvature_step"):
        state[key] = torch.full_like(state[key], START._asdict()[key])


def _buffer(old: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """``old`` on the device, in the dtype and in the memory layout it needs, or zeros."""
    if like.is_complex():
        dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    if old is None or old.is_meta:
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
    return geometry.lay_out_like(_move(geometry.place_like(old, like), like.device, dtype), like)


def sampled_state(previous: Tensor, p: Tensor) -> bool:
    """True if g⁻ is kept of a slice only."""
    if geometry.is_sharded(p):
        return not geometry.is_sharded(previous)
    return previous.shape != geometry.as_real(p).shape


def whole_previous(previous: Tensor, p: Tensor, seed: int) -> Tensor:
    """What a checkpoint holds for the slice of a sharded parameter: g⁻ in full, 0 outside of it.

    The ranks' parts of the slice differ in size, which no placement describes; at full size any
    other number of ranks can load it.
    """
    shard = torch.zeros_like(geometry.as_real(geometry.local(p)), dtype=previous.dtype)
    rows = geometry.sample_rows(p, seed)
    if rows is not None:
        shard.narrow(0, *rows).copy_(previous)
    return geometry.shard_like(shard, p)


def apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose numbers share no memory with those of other parameters.

    ``pickle`` writes all the memory behind a tensor: every number would bring the whole vector.
    """
    numbers = {key: state[key] for key in SCALARS if isinstance(state.get(key), Tensor)}
    result = dict(state)
    for kind in {(x.dtype, x.device) for x in numbers.values()}:
        alike = {key: x for key, x in numbers.items() if (x.dtype, x.device) == kind}
        result.update(zip(alike, torch.stack(list(alike.values())).unbind(), strict=True))
    return result


def same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    """The very same objects in the same order; a comparison that every step can afford."""
    return len(new) == len(old) and all(map(is_, new, old))


def _move(old: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if old.is_meta and device.type != "meta":
        raise RuntimeError("optimizer state on the meta device has no values to continue from")
    return old.to(device=device, dtype=dtype)


class Record(NamedTuple):
    """The vectors of the last step, from which diagnostics are computed when asked for."""

    sums: Sums
    uw: Tensor
    uu: Tensor
    first: First
    second: Second
    tau: Tensor
    active: Tensor


class Bucket:
    """The blocks of one device, and one mesh if they are sharded, that one backend updates."""

    def __init__(self, device: torch.device, backend: str, mesh: Any = None) -> None:
        self.device, self.backend, self.mesh = device, backend, mesh
        self.dtype = geometry.scalar_dtype(device)
        self.groups: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.params: list[Tensor] = []
        self.names: list[str] = []
        self.rules: list[str] = []
        self.seeds: list[int] = []
        self.stochastic: list[bool] = []  # which weights are rounded at random
        self.mesh_rows: list[int] = []  # the parameters' numbers among those on the mesh
        self.states: list[dict[str, Any]] = []
        self.present: list[bool] = []
        self.takes_part: list[bool] = []  # the same, and stand-ins for gradients of other ranks
        self.last: Record | Callable[[], Record] | None = None
        self.kept: list[Any] = []  # what captured graphs read
        self.plan: Any = None  # what a fused backend prepared for this bucket
        self.stage: Any = None  # and where it stands between the passes of a sharded step

    def add_group(self, group: dict[str, Any]) -> None:
        self.groups.append(group)
        self.sizes.append(0)

    def add(
        self, p: Tensor, name: str, rule: str, seed: int, state: dict[str, Any], mesh_row: int = 0
    ) -> None:
        self.sizes[-1] += 1
        self.mesh_rows.append(mesh_row)
        self.params.append(p)
        self.names.append(name)
        self.rules.append(rule)
        self.seeds.append(seed)
        rounding = self.groups[-1]["rounding"]
        self.stochastic.append(rounding == "stochastic" and p.dtype == torch.bfloat16)
        self.states.append(state)

    def finish(self) -> None:
        """Lay out the vectors once all parameters are in."""
        vector = self._vector
        self.dtypes = [p.dtype for p in self.params]
        self.devices = [self.device] * len(self.params)
        self.shapes = [p.shape for p in self.params]
        self.strides = [p.stride() for p in self.params]
        self.table = OptionTable(self.sizes, self.device, self.dtype)
        self.traits = Traits(
            low_dim=vector([rule == "low_dim" for rule in self.rules]),
            scale_invariant=vector([rule == "scale_invariant" for rule in self.rules]),
            inverse_root=vector([max(geometry.real_numel(p), 1) ** -0.5 for p in self.params]),
            rounding=vector([geometry.rounding_level(p.dtype, self.dtype) for p in self.params]),
            smallest_eps=vector([geometry.smallest_eps(p) for p in self.params]),
            largest_square=vector([geometry.largest_square(p) for p in self.params]),
        )
        self._place_samples()
        self._place_rounding()
        if self.mesh is not None:
            self.index_on_mesh = torch.tensor(self.mesh_rows, device=self.device)
            self.counted = vector([geometry.counted_once(p) for p in self.params])
        if self.differentiable:
            return
        self.memory = Memory(
            *(torch.stack([s[key].detach() for s in self.states]) for key in SCALARS)
        )
        for state, views in zip(
            self.states, zip(*map(torch.unbind, self.memory), strict=True), strict=True
        ):
            state.update(zip(SCALARS, views, strict=True))
        # compared by identity in every step
        self.entries = list(chain.from_iterable(map(dict.values, self.states)))
        self.own = self._own_entries()

    def _place_samples(self) -> None:
        """Which rows g⁻ is of, if not of all, and what κ of them is multiplied by."""
        self.rows: list[tuple[int, int] | None] = []
        self.ratios: list[float] = []
        for p, state, seed in zip(self.params, self.states, self.seeds, strict=True):
            previous = state.get("previous_grad")
            sampled = previous is not None and sampled_state(previous, p)
            self.rows.append(geometry.sample_rows(p, seed) if sampled else None)
            self.ratios.append(geometry.sample_ratio(p, previous))

    def _place_rounding(self) -> None:
        """Under which number and at which places random bits are drawn: those of the whole."""
        self.rounding_seeds = list(self.seeds)
        self.rounding_places: list[Tensor | None] = [None] * len(self.params)
        for slot, p in enumerate(self.params):
            if self.mesh is not None and self.stochastic[slot]:
                places = geometry.places_of_shard(p)
                if isinstance(places, int):
                    self.rounding_seeds[slot] = geometry.moved_number(self.seeds[slot], places)
                else:
                    self.rounding_places[slot] = places

    @property
    def differentiable(self) -> bool:
        return self.backend == "differentiable"

    def is_current(self) -> bool:
        """False when somebody changed a parameter's storage or replaced a tensor of its state."""
        if [p.dtype for p in self.params] != self.dtypes:
            return False
        if [p.device for p in self.params] != self.devices:
            return False
        if [p.shape for p in self.params] != self.shapes:
            return False
        if [p.stride() for p in self.params] != self.strides:
            return False
        if self.differentiable:
            return True
        entries = list(chain.from_iterable(map(dict.values, self.states)))
        if not same(entries, self.entries):
            if not same(self._own_entries(), self.own):
                return False
            self.entries = entries  # somebody keeps things of theirs beside ours
        return True

    def _own_entries(self) -> list[Any]:
        return [state.get(key) for state in self.states for key in (*SCALARS, *BUFFERS)]

    def read(self) -> Memory:
        """The scalar state as vectors."""
        if self.differentiable:
            return Memory(*(torch.stack([s[key] for s in self.states]) for key in SCALARS))
        return self.memory

    def write(self, memory: Memory) -> None:
        """Store the scalar state after a step."""
        if not self.differentiable:
            for old, new in zip(self.memory, memory, strict=True):
                old.copy_(new)
            return
        for key, stack in zip(SCALARS, memory, strict=True):
            for state, value in zip(self.states, stack.unbind(), strict=True):
                state[key] = value.to(state[key].dtype)

    def mark_active(self, present: list[bool], takes_part: list[bool]) -> None:
        """Which blocks have a gradient, as mask and index; uploaded only when it changes."""
        if present != self.present or takes_part != self.takes_part:
            self.present, self.takes_part = present, takes_part
            slots = [slot for slot, here in enumerate(takes_part) if here]
            lists = (present, slots, takes_part)
            tensors = (torch.tensor(values, device="cpu") for values in lists)
            self.active, self.index, self.takes = (
                x.to(self.device, non_blocking=True) for x in tensors
            )

    def _vector(self, values: Sequence[float]) -> Tensor:
        host = torch.tensor(values, dtype=self.dtype, device="cpu")
        return host.to(self.device, non_blocking=True)

    def local_gradients(self) -> list[Tensor | None]:
        """This rank's shards of the gradients.

        A sharded block that has no gradient here may have one on other ranks: there is no way to
        know before the sums are added up, so zeros stand in for it. ``requires_grad`` is the same
        on all ranks.
        """
        result: list[Tensor | None] = []
        for p, name in zip(self.params, self.names, strict=True):
            if p.grad is not None:
                result.append(geometry.local_gradient(p, p.grad, name))
            else:
                result.append(torch.zeros_like(geometry.local(p)) if p.requires_grad else None)
        return result

    def prepare(self) -> Work | None:
        """The host's part of a step: collect gradients and options; None without a gradient."""
        self.last = None
        grads = [p.grad for p in self.params]
        present = takes_part = [g is not None for g in grads]
        if self.mesh is not None:
            if self.mesh.get_coordinate() is None:  # this rank holds no part of them
                return None
            grads = self.local_gradients()
            takes_part = [g is not None for g in grads]
        elif True not in present:
            return None
        self.mark_active(present, takes_part)
        blocks = Blocks(self.dtype, self.differentiable, self.shares_second_moments())
        # the fused CUDA backend keeps tables of its own
        wants_blocks = self.backend != "fused" or self.device.type != "cuda"
        for slot, g in enumerate(grads):
            if g is not None:
                if g.layout is not torch.strided:
                    geometry.refuse_sparse(self.names[slot])
                if g.is_neg():  # a lazy minus sign, which memory does not show
                    grads[slot] = g = g.resolve_neg()
                if wants_blocks:
                    self.add_block(blocks, slot, g)
        options = self.table(self.groups, self.differentiable)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # a later step may replace them, and the graph knows their addresses only
            self.kept.append((self.active, self.index, self.takes, *self.table.tensors()))
        return Work(self, blocks, options, grads)

    def shares_second_moments(self) -> bool:
        """Whether a block may have one second moment for all of its entries."""
        asked = {group["second_moment"] for group in self.groups}
        return "block" in asked or ("auto" in asked and "scale_invariant" in self.rules)

    def add_block(self, blocks: Blocks, slot: int, g: Tensor) -> None:
        p, state = self.params[slot], self.states[slot]
        if self.mesh is not None:
            p = geometry.local(p)
            state = {key: geometry.local(state[key]) for key in BUFFERS if key in state}
        seed = self.rounding_seeds[slot] if self.stochastic[slot] else None
        blocks.add(
            *(slot, p, g, state, self.rows[slot], self.ratios[slot], seed),
            self.rounding_places[slot],
        )

    def spread(self, values: list[Tensor], width: int) -> Tensor:
        """Scalars of the blocks in this step → one row for every block, 0 for the others."""
        if len(values) == len(self.params):
            return torch.stack(values)
        zeros = torch.zeros(len(self.params), width, dtype=self.dtype, device=self.device)
        return zeros.index_copy(0, self.index, torch.stack(values)) if values else zeros


class Middle(NamedTuple):
    """What pass 2 leaves behind for law 2 and pass 3."""

    sums: Sums
    active: Tensor
    first: First
    memory: Memory
    updates: list[Tensor]


def refuse_scaling(amp: Mapping[str, Tensor | None]) -> None:
    """Only the fused backends unscale and skip by themselves; a GradScaler knows that."""
    if any(x is not None for x in amp.values()):
        raise RuntimeError(
            "grad_scale and found_inf are for fused=True, on parameters that are not sharded: "
            "unscale the gradients with GradScaler.unscale_(optimizer) first."
        )


class Work(NamedTuple):
    """One step of a bucket, ready to run."""

    bucket: Bucket
    blocks: Blocks
    options: Options
    grads: list[Tensor | None]

    def run(self, **amp: Tensor | None) -> None:
        """The device's part of a step: three passes and the two laws between them."""
        bucket = self.bucket
        if bucket.backend == "fused":
            here = {k: x if x is None else x.to(bucket.device) for k, x in amp.items()}
            fused_backend(bucket.device).step(self, **here)
            return
        refuse_scaling(amp)
        middle, products = self.moments(self.reduce(), bucket.active)
        self.apply(middle, products)

    @property
    def passes(self) -> Any:
        return foreach if self.bucket.backend == "foreach" else loop

    def reduce(self) -> Tensor:
        """Pass 1: the five sums of every block, one row each."""
        return self.bucket.spread(self.passes.reduce(self.blocks), len(Sums._fields))

    def moments(self, rows: Tensor, active: Tensor) -> tuple[Middle, Tensor]:
        """Law 1 and pass 2; also returns ⟨u,w⟩ and ‖u‖², one row per block."""
        bucket, sums = self.bucket, Sums(*rows.unbind(1))
        first, memory = control.before(self.options, bucket.traits, bucket.read(), sums, active)
        updates, products = self.passes.moments(self.blocks, first)
        return Middle(sums, active, first, memory, updates), bucket.spread(products, 2)

    def apply(self, middle: Middle, products: Tensor) -> None:
        """Law 2 and pass 3."""
        bucket, (sums, active, first, memory, updates) = self.bucket, middle
        uw, uu = products.unbind(1)
        second, memory = control.after(self.options, bucket.traits, first, memory, sums, uw, uu)
        self.passes.apply(self.blocks, updates, first, second, memory.step)
        bucket.write(memory)
        if bucket.differentiable:
            for i, slot in enumerate(self.blocks.slots):
                self.blocks.put_back(i, bucket.params[slot], bucket.states[slot])
        bucket.last = Record(sums, uw, uu, first, second, memory.tau, active)
