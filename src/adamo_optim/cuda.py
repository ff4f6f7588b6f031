"""The fused backend on CUDA: Triton kernels over all tensors of a bucket, five launches a step.

Imported only when a fused CUDA step is asked for; needs Triton, which PyTorch's CUDA builds bring.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import geometry
from .control import First, Second, Sums

if TYPE_CHECKING:
    from .state import Bucket, Record, Work

try:
    import triton
    import triton.language as tl

    from . import triton_kernels as kernels
except ImportError:  # pragma: no cover - CPU builds of torch come without Triton
    triton = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 1024  # entries a program has in flight
WARPS = 4
CHUNK = 4096  # entries a program works through, TILE by TILE
LAW_TILE, LAW_WARPS = 512, 4


def unsupported(p: Tensor, group: dict[str, Any]) -> str:
    """Why the fused kernels cannot update ``p``; empty if they can."""
    if triton is None:
        return "Triton is not installed"
    if p.dtype not in DTYPES:
        return f"the fused CUDA kernel does not take {p.dtype}"
    if type(p) not in (Tensor, torch.nn.Parameter):
        return f"the fused CUDA kernel does not take {type(p).__name__}"
    if not is_dense(p):
        return "the fused CUDA kernel takes dense tensors only, and this one is strided"
    rows_apart = p.dim() > 1 and p.shape[0] > 1 and p.stride(0) != p.numel() // p.shape[0]
    if group["previous_gradient"] == "sampled" and rows_apart:
        return "the rows that previous_gradient='sampled' keeps are scattered in this layout"
    return ""


def is_dense(x: Tensor) -> bool:
    """True if the entries fill one piece of memory, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda s: s[::-1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Launch(NamedTuple):
    """A range of chunks whose tensors have the same types, so that one kernel launch does them."""

    base: int
    count: int
    types: dict[str, Any]


class Plan:
    """The tables of one bucket on the device: where its tensors are and how they are cut."""

    def __init__(self, bucket: Bucket, grads: list[Tensor | None]) -> None:
        self.device, self.params = bucket.device, bucket.params
        self.states, self.traits = bucket.states, torch.stack(list(bucket.traits))
        self.strides = [p.stride() for p in self.params]
        self.blocks = len(self.params)
        self.previous = [state.get("previous_grad") for state in self.states]
        self.state_pointers = [
            [0 if (x := state.get(key)) is None else x.data_ptr() for state in self.states]
            for key in ("exp_avg", "exp_avg_sq", "previous_grad")
        ]
        self.gradient_dtypes = [
            p.dtype if g is None else g.dtype for p, g in zip(self.params, grads, strict=True)
        ]
        self._cut()
        self._place_samples(bucket.seeds)
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=self.device)
        self.partial = zeros(5, self.chunks)
        self.partial_mw = zeros(self.chunks)
        self.coefficients = zeros(kernels.ROWS, self.blocks)
        self.pointers = torch.zeros(5, self.blocks, dtype=torch.int64, device=self.device)
        self.spare: Tensor | None = self._host_table()  # a capture must not allocate it
        self.kept: list[Tensor] = []  # tables of captured graphs
        self.host_pointers: list[list[int]] = []
        self.versions: list[int] = []  # of the parameters, as the last step left them

    def _cut(self) -> None:
        """Chunks, sorted by the types of their tensors."""
        self.chunk = max(CHUNK, TILE)
        self.kinds = [self._kind(slot) for slot in range(self.blocks)]
        order = sorted(range(self.blocks), key=lambda slot: str(self.kinds[slot]))
        block: list[int] = []
        start: list[int] = []
        ranges = {}
        self.launches: list[Launch] = []
        for slot in order:
            begin = len(block)
            pieces = -(-self.params[slot].numel() // self.chunk)
            block += [slot] * pieces
            start += [k * self.chunk for k in range(pieces)]
            ranges[slot] = begin
            if self.launches and self.launches[-1].types == self.kinds[slot]:
                last = self.launches[-1]
                self.launches[-1] = last._replace(count=last.count + pieces)
            else:
                self.launches.append(Launch(begin, pieces, self.kinds[slot]))
        self.chunks = len(block)
        upload = functools.partial(torch.tensor, device=self.device)
        self.chunk_block = upload(block, dtype=torch.int32)
        self.chunk_start = upload(start, dtype=torch.int64)
        self.first_chunk = upload([ranges[s] for s in range(self.blocks)], dtype=torch.int64)
        ends = [ranges[s] + -(-p.numel() // self.chunk) for s, p in enumerate(self.params)]
        self.last_chunk = upload(ends, dtype=torch.int64)
        self.numel = upload([p.numel() for p in self.params], dtype=torch.int64)

    def _kind(self, slot: int) -> dict[str, Any]:
        """The compile-time constants that a tensor needs."""
        p, previous = self.params[slot], self.previous[slot]
        curvature = 0
        if previous is not None:
            curvature = 1 if previous.shape == p.shape else 2
        return {
            "W": TRITON_TYPES[p.dtype],
            "G": TRITON_TYPES[self.gradient_dtypes[slot]],
            "PREVIOUS": TRITON_TYPES[torch.float32 if previous is None else previous.dtype],
            "CURVATURE": curvature,
        }

    def _place_samples(self, seeds: list[int]) -> None:
        """Where g⁻ lies inside g, in entries: all of it, a slice, or nothing."""
        starts, counts, ratios = [], [], []
        for p, previous, seed in zip(self.params, self.previous, seeds, strict=True):
            count = 0 if previous is None else previous.numel()
            begin = 0
            if 0 < count < p.numel():
                begin = geometry.sample_range(p.shape, seed)[0] * p.stride(0)
            starts.append(begin)
            counts.append(count)
            ratios.append(p.numel() / max(count, 1))
        upload = functools.partial(torch.tensor, device=self.device)
        self.sample_start = upload(starts, dtype=torch.int64)
        self.samples = upload(counts, dtype=torch.int64)
        self.ratio_of_samples = upload(ratios, dtype=torch.float64)

    def _host_table(self) -> Tensor:
        pin = self.device.type == "cuda"
        return torch.empty(5, self.blocks, dtype=torch.int64, pin_memory=pin)

    def locate(self, grads: list[Tensor | None], capturing: bool) -> tuple[Tensor, bool]:
        """The table of addresses, refreshed if one has changed, and whether all divide by 16."""
        pointers = [
            [p.data_ptr() for p in self.params],
            [0 if g is None else g.data_ptr() for g in grads],
            *self.state_pointers,  # other buffers would have made another plan
        ]
        if capturing:
            # A graph copies its table again in every replay: it has one of its own, on both sides.
            table = torch.empty_like(self.pointers)
            host = self._host_table() if self.spare is None else self.spare
            self.spare = None
            self.kept += [table, host]
            table.copy_(host.copy_(torch.tensor(pointers)), non_blocking=True)
            return table, _aligned(pointers)
        if self.spare is None:
            self.spare = self._host_table()
        if pointers != self.host_pointers:
            self.host_pointers, self.aligned = pointers, _aligned(pointers)
            self.pointers.copy_(torch.tensor(pointers), non_blocking=True)
        return self.pointers, self.aligned

    def fits(self, grads: list[Tensor | None]) -> bool:
        """False if a gradient came in another dtype than the plan was made for."""
        return all(
            g is None or g.dtype is dtype
            for g, dtype in zip(grads, self.gradient_dtypes, strict=True)
        )

    def in_layout(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients in the layout of their parameters; a copy only where it differs."""
        result = grads
        for slot, (g, strides) in enumerate(zip(grads, self.strides, strict=True)):
            if g is not None and g.stride() != strides and g.numel() > 0:
                result = list(grads) if result is grads else result
                result[slot] = torch.empty_like(self.params[slot], dtype=g.dtype).copy_(g)
        return result


def _aligned(pointers: list[list[int]]) -> bool:
    return functools.reduce(operator.or_, (x for row in pointers for x in row), 0) % 16 == 0


@torch._disable_dynamo
def step(work: Work, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
    """One step of a bucket."""
    bucket, options = work.bucket, work.options
    grads = [p.grad for p in bucket.params]
    plan = bucket.plan
    if plan is None or not plan.fits(grads):
        plan = bucket.plan = Plan(bucket, grads)
    grads = plan.in_layout(grads)
    capturing = bucket.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    pointers, aligned = plan.locate(grads, capturing)
    # ⟨m,w⟩ was reduced in the last pass 3; it is void if somebody has written to a weight since.
    # A graph's replays cannot ask, so a captured step reads m.
    read_m = capturing or plan.versions != [p._version for p in plan.params]
    matrix = bucket.table.matrix_of(options)
    launch_all(plan, bucket, matrix, pointers, aligned, read_m, grad_scale, found_inf)
    torch.autograd.graph.increment_version(
        [p for p, g in zip(plan.params, grads, strict=True) if g is not None]
    )
    plan.versions = [p._version for p in plan.params]
    bucket.last = functools.partial(record, plan)


def launch_all(
    plan: Plan,
    bucket: Bucket,
    options: Tensor,
    pointers: Tensor,
    aligned: bool,
    read_m: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Pass 1, law 1, pass 2, law 2, pass 3."""
    w, g, m, v, previous = pointers
    memory, blocks, chunks = bucket.memory, plan.blocks, plan.chunks
    scaled, checked = grad_scale is not None, found_inf is not None
    common = {"ALIGNED": aligned, "CHUNK": plan.chunk, "TILE": TILE, "num_warps": WARPS}
    for base, count, types in plan.launches:
        if count:
            kernels.reduce[(count,)](
                w, g, m, previous, plan.numel, plan.sample_start, plan.samples, grad_scale,
                plan.chunk_block, plan.chunk_start, base, plan.partial, chunks,
                READ_M=read_m, SCALED=scaled, **types, **common,
            )  # fmt: skip
    kernels.law_before[(blocks,)](
        options, plan.traits, *memory, g, found_inf, plan.partial, plan.partial_mw, chunks,
        plan.first_chunk, plan.last_chunk, plan.ratio_of_samples, plan.coefficients, blocks,
        MW_FROM_PASS_1=read_m, CHECKED=checked, TILE=LAW_TILE, num_warps=LAW_WARPS,
    )  # fmt: skip
    for base, count, types in plan.launches:
        if count:
            kernels.moments[(count,)](
                w, g, m, v, previous, plan.numel, plan.sample_start, plan.samples, grad_scale,
                plan.chunk_block, plan.chunk_start, base, plan.partial, chunks,
                plan.coefficients, blocks, SCALED=scaled, **types, **common,
            )  # fmt: skip
    kernels.law_after[(blocks,)](
        options, plan.traits, memory.step, memory.radial_momentum, memory.initial_norm,
        plan.partial, chunks, plan.first_chunk, plan.last_chunk, plan.coefficients, blocks,
        TILE=LAW_TILE, num_warps=LAW_WARPS,
    )  # fmt: skip
    for base, count, types in plan.launches:
        if count:
            kernels.apply[(count,)](
                w, m, v, plan.numel, plan.chunk_block, plan.chunk_start, base, plan.partial_mw,
                chunks, plan.coefficients, blocks, W=types["W"], **common,
            )  # fmt: skip


def record(plan: Plan) -> Record:
    """The scalars of the last step, for diagnostics."""
    from .state import Record

    rows = list(plan.coefficients.clone().unbind())
    flags = {name: rows[k] > 0 for k, name in enumerate(First._fields) if name in FLAGS}
    first = First(*rows[:15])._replace(**flags)
    second = Second(*rows[15:17], *(row > 0 for row in rows[17:20]))
    sums, (uw, uu, tau, active) = Sums(*rows[20:25]), rows[25:]
    return Record(sums, uw, uu, first, second, tau, active > 0)


FLAGS = ("live", "use_gradient", "keep_gradient", "low_dim", "scale_invariant", "guarded_scale")
TRITON_TYPES: dict[torch.dtype, Any] = {}
if triton is not None:
    TRITON_TYPES = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }
