"""The fused backend on CUDA: Triton kernels over all tensors of a bucket, five launches a step.

Imported only when a fused CUDA step is asked for; needs Triton, which PyTorch's CUDA builds bring.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
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
except ImportError:  # CPU builds of torch come without Triton
    triton = None

# Entries a program works through, and has in flight at once; warps. Measured on an H200
# (docs/log.md): pass 1 only reads and likes long programs, passes 2 and 3 also write and like
# many short ones.
REDUCE = {"CHUNK": 8192, "TILE": 1024, "num_warps": 8}
UPDATE = {"CHUNK": 2048, "TILE": 512, "num_warps": 4}
LAW = {"TILE": 2048, "num_warps": 8}

TYPES: dict[torch.dtype, Any] = {}
if triton is not None:
    TYPES = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }


def unsupported(p: Tensor, group: dict[str, Any]) -> str:
    """Why the fused kernels cannot update ``p``; empty if they can."""
    if triton is None:
        return "Triton is not installed"
    if p.dtype not in TYPES:
        return f"the fused CUDA kernel does not take {p.dtype}"
    if type(p) not in (Tensor, torch.nn.Parameter):
        return f"the fused CUDA kernel does not take {type(p).__name__}"
    if not geometry.is_dense(p):
        return "the fused CUDA kernel takes dense tensors only, and this one is strided"
    rows_apart = p.dim() > 1 and p.shape[0] > 1 and p.stride(0) != p.numel() // p.shape[0]
    if group["previous_gradient"] == "sampled" and rows_apart:
        return "the rows that previous_gradient='sampled' keeps are scattered in this layout"
    return ""


class Kind(NamedTuple):
    """What is compiled into the kernels for a tensor."""

    W: Any
    G: Any
    PREVIOUS: Any
    CURVATURE: int  # 0: no g⁻; 1: of the whole tensor; 2: of a slice
    STOCHASTIC: bool  # rounding of a bfloat16 weight


class Launch(NamedTuple):
    """A range of chunks whose tensors are of one kind: one launch of a pass."""

    base: int
    count: int
    kind: Kind


class Cut:
    """All tensors cut into chunks, those of one kind next to each other."""

    def __init__(self, params: list[Tensor], kinds: list[Kind], chunk: int) -> None:
        block: list[int] = []
        start: list[int] = []
        first, last = [0] * len(params), [0] * len(params)
        self.launches: list[Launch] = []
        for slot in sorted(range(len(params)), key=lambda slot: str(kinds[slot])):
            pieces = -(-params[slot].numel() // chunk)
            first[slot], last[slot] = len(block), len(block) + pieces
            if pieces and self.launches and self.launches[-1].kind == kinds[slot]:
                *_, old = self.launches
                self.launches[-1] = old._replace(count=old.count + pieces)
            elif pieces:
                self.launches.append(Launch(len(block), pieces, kinds[slot]))
            block += [slot] * pieces
            start += range(0, pieces * chunk, chunk)
        upload = functools.partial(torch.tensor, device=params[0].device)
        self.count = len(block)
        self.block = upload(block, dtype=torch.int32)
        self.start = upload(start, dtype=torch.int64)
        self.first, self.last = upload(first, dtype=torch.int64), upload(last, dtype=torch.int64)


class Whole(NamedTuple):
    """Sums that are complete, as if every block were one chunk."""

    count: int
    first: Tensor
    last: Tensor


class Plan:
    """The tables of one bucket on the device: where its tensors are and how they are cut."""

    def __init__(self, bucket: Bucket, params: list[Tensor], grads: list[Tensor | None]) -> None:
        self.device, self.params, states = bucket.device, params, bucket.states
        if bucket.mesh is not None:
            states = [{key: geometry.local(x) for key, x in state.items()} for state in states]
        self.blocks, self.traits = len(self.params), torch.stack(list(bucket.traits))
        # ⟨m,w⟩ is what SGD on the norm takes out of m
        self.read_m = any(group["radial"] == "sgd" for group in bucket.groups)
        self.strides = [p.stride() for p in self.params]
        self.dtypes = [
            p.dtype if g is None else g.dtype for p, g in zip(self.params, grads, strict=True)
        ]
        self.previous = [state.get("previous_grad") for state in states]
        self.state_pointers = [
            [0 if (x := state.get(key)) is None else x.data_ptr() for state in states]
            for key in ("exp_avg", "exp_avg_sq", "previous_grad")
        ]
        kinds = self._kinds(bucket.stochastic)
        self.coarse = Cut(self.params, kinds, REDUCE["CHUNK"])
        self.fine = Cut(self.params, kinds, UPDATE["CHUNK"])
        self._place_samples(bucket)
        upload = functools.partial(torch.tensor, device=self.device)
        self.numel = upload([p.numel() for p in self.params], dtype=torch.int64)
        self.number = upload(bucket.rounding_seeds, dtype=torch.int64)
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=self.device)
        self.partial_reduce = zeros(5, self.coarse.count)
        self.partial_moments = zeros(2, self.fine.count)
        self.coefficients = zeros(kernels.ROWS, self.blocks)
        self.pointers = torch.zeros(5, self.blocks, dtype=torch.int64, device=self.device)
        self.host_pointers: list[list[int]] = []
        self.aligned = False
        self.spare: Tensor | None = self._host_table()  # a capture must not allocate it
        self.kept: list[Tensor] = []  # tables of captured graphs
        self.runners: dict[Any, Callable[..., None]] = {}
        self.whole: Whole | None = None
        if bucket.mesh is not None:
            index = torch.arange(self.blocks, device=self.device)
            self.whole = Whole(self.blocks, index, index + 1)
            self.ones = torch.ones_like(self.ratio_of_samples)
            self.sums, self.products = zeros(5, self.blocks), zeros(2, self.blocks)
            self.active = torch.zeros_like(index)

    def add_up(self, partial: Tensor, cut: Cut, out: Tensor, rows: int) -> None:
        """Partial sums, ``rows`` of them, as one number per block."""
        self.launch(
            None, kernels.totals, self.blocks,
            partial, cut.count, cut.first, cut.last, out, self.blocks, rows, **LAW,
        )  # fmt: skip

    def _kinds(self, stochastic: list[bool]) -> list[Kind]:
        """A tensor without g⁻ joins those with one: its count of samples is 0."""
        kinds, sampled = [], any(self._is_sampled(slot) for slot in range(self.blocks))
        stored = next((x.dtype for x in self.previous if x is not None), None)
        for slot, (p, g, previous) in enumerate(
            zip(self.params, self.dtypes, self.previous, strict=True)
        ):
            curvature = 0 if stored is None else 2 if sampled and previous is None else 1
            if previous is not None:
                curvature = 2 if self._is_sampled(slot) else 1
            kept = stored or torch.float32 if previous is None else previous.dtype
            kinds.append(Kind(TYPES[p.dtype], TYPES[g], TYPES[kept], curvature, stochastic[slot]))
        return kinds

    def _is_sampled(self, slot: int) -> bool:
        previous = self.previous[slot]
        return previous is not None and previous.shape != self.params[slot].shape

    def _place_samples(self, bucket: Bucket) -> None:
        """Where g⁻ lies inside g, in entries: all of it, a slice, or nothing."""
        starts, counts = [], []
        for p, previous, rows in zip(self.params, self.previous, bucket.rows, strict=True):
            starts.append(0 if rows is None else rows[0] * p.stride(0))
            counts.append(0 if previous is None else previous.numel())
        upload = functools.partial(torch.tensor, device=self.device)
        self.sample_start = upload(starts, dtype=torch.int64)
        self.samples = upload(counts, dtype=torch.int64)
        self.ratio_of_samples = upload(bucket.ratios, dtype=torch.float64)

    def _host_table(self) -> Tensor:
        pin = self.device.type == "cuda"
        return torch.empty(5, self.blocks, dtype=torch.int64, device="cpu", pin_memory=pin)

    def locate(self, grads: list[Tensor | None], capturing: bool) -> tuple[Tensor, bool]:
        """The table of addresses, refreshed if one has changed, and whether all divide by 16."""
        pointers = [
            [p.data_ptr() for p in self.params],
            [0 if g is None else g.data_ptr() for g in grads],
            *self.state_pointers,  # other buffers would have made another bucket
        ]
        if capturing:
            # A graph copies its table again in every replay: it has one of its own, on both sides.
            table = torch.empty_like(self.pointers)
            host = self._host_table() if self.spare is None else self.spare
            self.spare = None
            self.kept += [table, host]
            table.copy_(host.copy_(torch.tensor(pointers, device="cpu")), non_blocking=True)
            return table, _aligned(pointers)
        if self.spare is None:
            self.spare = self._host_table()
        if pointers != self.host_pointers:
            self.host_pointers, self.aligned = pointers, _aligned(pointers)
            self.pointers.copy_(torch.tensor(pointers, device="cpu"), non_blocking=True)
        return self.pointers, self.aligned

    def fits(self, grads: list[Tensor | None]) -> bool:
        """False if a gradient came in another dtype than the plan was made for."""
        return all(g is None or g.dtype is d for g, d in zip(grads, self.dtypes, strict=True))

    def in_layout(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients in the layout of their parameters; a copy only where it differs."""
        result = grads
        for slot, (g, strides) in enumerate(zip(grads, self.strides, strict=True)):
            if g is None or g.stride() == strides:  # nearly always
                continue
            if not geometry.same_strides(g.stride(), strides, g.shape):
                result = list(grads) if result is grads else result
                result[slot] = torch.empty_like(self.params[slot], dtype=g.dtype).copy_(g)
        return result

    def launch(
        self, key: Any, kernel: Any, count: int, *args: Any, num_warps: int, **constants: Any
    ) -> None:
        """Launch a kernel; from the second time on without Triton's inspection of the arguments.

        ``key`` names what may differ between calls with this plan; the rest is the same tables.
        """
        runner = self.runners.get(key)
        if runner is not None:
            runner(*args, *constants.values())
            return
        compiled = kernel[(count,)](*args, **constants, num_warps=num_warps, enable_fp_fusion=True)
        if key is not None and hasattr(compiled, "__getitem__"):  # the interpreter returns None
            self.runners[key] = compiled[(count, 1, 1)]


def _aligned(pointers: list[list[int]]) -> bool:
    return functools.reduce(operator.or_, (x for row in pointers for x in row), 0) % 16 == 0


class Launches:
    """The five launches of one step of a bucket: pass 1, law 1, pass 2, law 2, pass 3."""

    def __init__(
        self, work: Work, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        bucket = self.bucket = work.bucket
        grads, params = work.grads, bucket.params
        if bucket.mesh is not None:
            params = list(map(geometry.local, params))  # the wrapper may have moved them
        plan = bucket.plan
        if plan is None or not plan.fits(grads):
            plan = bucket.plan = Plan(bucket, params, grads)
        self.plan, plan.params = plan, params
        self.kept = plan.in_layout(grads)  # copies must live as long as their addresses are used
        on_cuda = bucket.device.type == "cuda"
        capturing = on_cuda and torch.cuda.is_current_stream_capturing()
        self.pointers, self.aligned = plan.locate(self.kept, capturing)
        self.settings = bucket.table.matrix_of(work.options)
        self.grad_scale, self.found_inf = grad_scale, found_inf
        # under AMP, other people's tensors come in: let Triton look at them
        unscaled = grad_scale is None and found_inf is None
        self.plain = unscaled and self.pointers is plan.pointers

    def key(self, *what: Any) -> Any:
        return (*what, self.aligned) if self.plain else None

    def reduce(self) -> None:
        """Pass 1."""
        plan, coarse, (w, g, m, _, previous) = self.plan, self.plan.coarse, self.pointers
        for i, (base, count, kind) in enumerate(coarse.launches):
            plan.launch(
                self.key("reduce", i), kernels.reduce, count,
                w, g, m, previous, plan.numel, plan.sample_start, plan.samples, self.grad_scale,
                coarse.block, coarse.start, base, plan.partial_reduce, coarse.count,
                W=kind.W, G=kind.G, PREVIOUS=kind.PREVIOUS, READ_M=plan.read_m,
                CURVATURE=kind.CURVATURE, SCALED=self.grad_scale is not None,
                ALIGNED=self.aligned, **REDUCE,
            )  # fmt: skip

    def law_before(self, active: Tensor, partial: Tensor, cut: Cut | Whole) -> None:
        """Law 1, from partial sums; ``active`` is 0 where a block has no gradient."""
        plan = self.plan
        ratio = plan.ones if cut is plan.whole else plan.ratio_of_samples
        plan.launch(
            self.key("before"), kernels.law_before, plan.blocks,
            self.settings, plan.traits, *self.bucket.memory, active, self.found_inf, partial,
            cut.count, cut.first, cut.last, ratio, plan.coefficients, plan.blocks,
            READ_M=plan.read_m, CHECKED=self.found_inf is not None, **LAW,
        )  # fmt: skip

    def moments(self) -> None:
        """Pass 2."""
        plan, fine, (w, g, m, v, previous) = self.plan, self.plan.fine, self.pointers
        for i, (base, count, kind) in enumerate(fine.launches):
            plan.launch(
                self.key("moments", i), kernels.moments, count,
                w, g, m, v, previous, plan.numel, plan.sample_start, plan.samples, self.grad_scale,
                fine.block, fine.start, base, plan.partial_moments, fine.count,
                plan.coefficients, plan.blocks, W=kind.W, G=kind.G, PREVIOUS=kind.PREVIOUS,
                CURVATURE=kind.CURVATURE, SCALED=self.grad_scale is not None,
                ALIGNED=self.aligned, **UPDATE,
            )  # fmt: skip

    def law_after(self, partial: Tensor, cut: Cut | Whole) -> None:
        """Law 2, from partial sums."""
        plan, memory = self.plan, self.bucket.memory
        plan.launch(
            self.key("after"), kernels.law_after, plan.blocks,
            self.settings, plan.traits, memory.step, memory.radial_momentum, memory.initial_norm,
            partial, cut.count, cut.first, cut.last, plan.coefficients, plan.blocks,
            **LAW,
        )  # fmt: skip

    def apply(self) -> None:
        """Pass 3."""
        plan, fine, (w, _, m, v, _) = self.plan, self.plan.fine, self.pointers
        for i, (base, count, kind) in enumerate(fine.launches):
            plan.launch(
                self.key("apply", i), kernels.apply, count,
                w, m, v, plan.numel, fine.block, fine.start, base, plan.coefficients, plan.blocks,
                self.bucket.memory.step, plan.number,
                W=kind.W, STOCHASTIC=kind.STOCHASTIC, ALIGNED=self.aligned, **UPDATE,
            )  # fmt: skip

    def finish(self) -> None:
        plan = self.plan
        written = [p for p, g in zip(plan.params, self.kept, strict=True) if g is not None]
        torch.autograd.graph.increment_version(written)
        self.bucket.last = functools.partial(record, plan)


def on_device(device: torch.device) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@torch._disable_dynamo
def step(work: Work, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
    """One step of a bucket."""
    run = Launches(work, grad_scale, found_inf)
    plan = run.plan
    with on_device(work.bucket.device):
        run.reduce()
        run.law_before(run.pointers[1], plan.partial_reduce, plan.coarse)
        run.moments()
        run.law_after(plan.partial_moments, plan.fine)
        run.apply()
    run.finish()


# ---- one pass at a time, for sharded blocks ----------------------------------------------------
# The laws read sums as if every block were one chunk: those of the whole, after the collective.


def reduce(work: Work) -> Tensor:
    """Pass 1: the five sums of every block, one row each."""
    run = work.bucket.stage = Launches(work)
    plan = run.plan
    sums = plan.partial_reduce.new_zeros(5, plan.blocks)
    with on_device(work.bucket.device):
        run.reduce()
        plan.add_up(plan.partial_reduce, plan.coarse, sums, 5 if plan.read_m else 4)
    sums[3] *= plan.ratio_of_samples  # κ
    # a block without a gradient left stale partial sums
    return torch.where(work.bucket.takes, sums, 0).T


def moments(work: Work, rows: Tensor, active: Tensor) -> tuple[Launches, Tensor]:
    """Law 1 and pass 2; also returns ⟨u,w⟩ and ‖u‖², one row per block."""
    run: Launches = work.bucket.stage
    plan, products = run.plan, rows.new_zeros(2, run.plan.blocks)
    assert plan.whole is not None
    plan.sums.copy_(rows.T)
    plan.active.copy_(active)
    with on_device(work.bucket.device):
        run.law_before(plan.active, plan.sums, plan.whole)
        run.moments()
        plan.add_up(plan.partial_moments, plan.fine, products, 2)
    # a block that is not live left stale partial sums, and law 2 takes them as 0
    return run, products.T


def apply(work: Work, run: Launches, products: Tensor) -> None:
    """Law 2 and pass 3."""
    plan = run.plan
    assert plan.whole is not None
    plan.products.copy_(products.T)
    with on_device(work.bucket.device):
        run.law_after(plan.products, plan.whole)
        run.apply()
    run.finish()
    work.bucket.stage = None


COLUMNS = (*First._fields, *Second._fields, *Sums._fields, "uw", "uu", "tau", "active")
FLAGS = {
    *("live", "use_gradient", "keep_gradient", "low_dim", "scale_invariant", "active"),
    *("guarded_scale", "guarded_factor", "guarded_decay", "guarded_update", "guarded_turn"),
}


def record(plan: Plan) -> Record:
    """The scalars of the last step, for diagnostics."""
    from .state import Record

    rows = zip(COLUMNS, plan.coefficients.clone().unbind(), strict=True)
    columns = {name: row > 0 if name in FLAGS else row for name, row in rows}
    sums, first, second = (map(columns.__getitem__, kind._fields) for kind in (Sums, First, Second))
    uw, uu, tau, active = (columns[name] for name in ("uw", "uu", "tau", "active"))
    return Record(Sums(*sums), uw, uu, First(*first), Second(*second), tau, active)
