"""The state of AdamO: per-parameter buffers and 0-D tensors, stacked for the law.

``optimizer.state[p]`` is an ordinary dictionary of tensors. A :class:`Bucket` holds the blocks of
one device and backend; the 0-D tensors of its parameters are views into one vector per quantity,
so that the law works on vectors and ``state_dict`` still sees ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from . import control, foreach, geometry, loop
from .backends import fused_step
from .blocks import Blocks
from .control import UNSET, First, Memory, Options, Second, Sums, Traits
from .options import OptionTable
from .rules import needs_previous_gradient, rule_of

SCALARS = Memory._fields
BUFFERS = ("exp_avg", "exp_avg_sq", "previous_grad")
START = Memory(0.0, 0.0, UNSET, 0.0, 0.0, UNSET)  # type: ignore[arg-type]  # numbers here


def initialize(state: dict[str, Any], p: Tensor, group: dict[str, Any], seed: int) -> None:
    """Bring one parameter's state up to the options: create, convert or drop what changed."""
    dtype, scalar = geometry.compute_dtype(p), geometry.scalar_dtype(p.device)
    for key, value in zip(SCALARS, START, strict=True):
        wanted = _get_scalar_dtype() if key == "step" else scalar
        old = state.get(key, value)
        if not isinstance(old, Tensor):
            state[key] = torch.tensor(float(old), dtype=wanted, device=p.device)
        elif old.device != p.device or old.dtype != wanted:
            state[key] = _move(old, p.device, wanted)
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = _buffer(state.get(key), p, dtype)
    _initialize_previous(state, p, group, seed)


def _initialize_previous(
    state: dict[str, Any], p: Tensor, group: dict[str, Any], seed: int
) -> None:
    rule, _ = rule_of(p, group)
    if not needs_previous_gradient(rule, group):
        state.pop("previous_grad", None)
        return
    kind = group["previous_gradient"]
    like = geometry.as_real(geometry.sample(p, seed) if kind == "sampled" else p)
    dtype = torch.bfloat16 if kind == "bfloat16" else geometry.compute_dtype(p)
    old = state.get("previous_grad")
    if old is not None and kind == "sampled" and old.shape == geometry.as_real(p).shape:
        old = old.view_as(like) if old.shape == like.shape else geometry.sample(old, seed).clone()
    fresh = old is None or old.shape != like.shape or old.is_meta
    state["previous_grad"] = _buffer(None if fresh else old, like, dtype)
    if fresh and float(state["curvature_step"]) > 0:  # a new g⁻ knows nothing: start over
        for key in ("tau", "tau_reference", "curvature_step"):
            state[key] = torch.full_like(state[key], START._asdict()[key])


def _buffer(old: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """``old`` on the device and in the dtype it needs, or zeros in the layout of ``like``."""
    if like.is_complex():
        dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    if old is None or old.is_meta or old.shape != like.shape:
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
    return _move(old, like.device, dtype)


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
    """The blocks of one device that one backend updates."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.device, self.backend = device, backend
        self.dtype = geometry.scalar_dtype(device)
        self.groups: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.params: list[Tensor] = []
        self.names: list[str] = []
        self.rules: list[str] = []
        self.seeds: list[int] = []
        self.stochastic: list[bool] = []  # which weights are rounded at random
        self.states: list[dict[str, Any]] = []
        self.present: list[bool] = []
        self.last: Record | Callable[[], Record] | None = None
        self.plan: Any = None  # what a fused backend prepared for this bucket

    def add_group(self, group: dict[str, Any]) -> None:
        self.groups.append(group)
        self.sizes.append(0)

    def add(self, p: Tensor, name: str, rule: str, seed: int, state: dict[str, Any]) -> None:
        self.sizes[-1] += 1
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
        self.table = OptionTable(self.sizes, self.device, self.dtype)
        self.traits = Traits(
            low_dim=vector([rule == "low_dim" for rule in self.rules]),
            scale_invariant=vector([rule == "scale_invariant" for rule in self.rules]),
            inverse_root=vector([max(geometry.as_real(p).numel(), 1) ** -0.5 for p in self.params]),
            rounding=vector([geometry.rounding_level(p.dtype, self.dtype) for p in self.params]),
            smallest_eps=vector([geometry.smallest_eps(p) for p in self.params]),
        )
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

    @property
    def differentiable(self) -> bool:
        return self.backend == "differentiable"

    def is_current(self) -> bool:
        """False when somebody moved a parameter or replaced a tensor of its state."""
        if [p.dtype for p in self.params] != self.dtypes:
            return False
        if [p.device for p in self.params] != self.devices:
            return False
        if self.differentiable:
            return True
        entries = list(chain.from_iterable(map(dict.values, self.states)))
        return len(entries) == len(self.entries) and all(map(is_, entries, self.entries))

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

    def mark_active(self, present: list[bool]) -> None:
        """Which blocks have a gradient, as mask and index; uploaded only when it changes."""
        if present != self.present:
            self.present = present
            slots = [slot for slot, here in enumerate(present) if here]
            self.active = torch.tensor(present).to(self.device, non_blocking=True)
            self.index = torch.tensor(slots).to(self.device, non_blocking=True)

    def _vector(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self.dtype).to(self.device, non_blocking=True)

    def prepare(self) -> Work | None:
        """The host's part of a step: collect gradients and options; None without a gradient."""
        grads = [p.grad for p in self.params]
        present = [g is not None for g in grads]
        if True not in present:
            return None
        self.mark_active(present)
        blocks = Blocks(self.dtype, replace=self.differentiable)
        # the fused CUDA backend keeps tables of its own
        wants_blocks = self.backend != "fused" or self.device.type != "cuda"
        for slot, g in enumerate(grads):
            if g is not None:
                if g.layout is not torch.strided:
                    geometry.refuse_sparse(self.names[slot])
                if wants_blocks:
                    self.add_block(blocks, slot, g)
        return Work(self, blocks, self.table(self.groups, self.differentiable))

    def add_block(self, blocks: Blocks, slot: int, g: Tensor) -> None:
        state, seed, stochastic = self.states[slot], self.seeds[slot], self.stochastic[slot]
        blocks.add(slot, self.params[slot], g, state, seed, stochastic)

    def spread(self, values: Tensor) -> tuple[Tensor, ...]:
        """Rows of scalars of the active blocks → one vector per scalar over all, 0 elsewhere."""
        if len(values) < len(self.params):
            zeros = values.new_zeros(len(self.params), values.shape[1])
            values = zeros.index_copy(0, self.index, values)
        return values.unbind(dim=1)


class Work(NamedTuple):
    """One step of a bucket, ready to run."""

    bucket: Bucket
    blocks: Blocks
    options: Options

    def run(self, **amp: Tensor | None) -> None:
        """The device's part of a step: three passes and the two laws between them."""
        bucket, blocks, options = self
        if bucket.backend == "fused":
            fused_step(bucket.device)(self, **amp)
            return
        passes = foreach if bucket.backend == "foreach" else loop
        memory = bucket.read()
        sums = Sums(*bucket.spread(passes.reduce(blocks)))
        first, memory = control.before(options, bucket.traits, memory, sums, bucket.active)
        updates, products = passes.moments(blocks, first)
        uw, uu = bucket.spread(products)
        second, memory = control.after(options, bucket.traits, first, memory, sums, uw, uu)
        passes.apply(blocks, updates, second, memory.step)
        bucket.write(memory)
        if bucket.differentiable:
            for i, slot in enumerate(blocks.slots):
                blocks.put_back(i, bucket.params[slot], bucket.states[slot])
        bucket.last = Record(sums, uw, uu, first, second, memory.tau, bucket.active)
