"""The fused backend on CUDA: Triton kernels over all tensors of a bucket, a few launches a step.

Imported only when a fused CUDA step is asked for; needs Triton, which PyTorch's CUDA builds bring.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dtensor import as_real, local
from .geometry import compute_dtype, is_dense, real_numel, same_strides

try:
    import triton
    import triton.language as tl

    from . import cuda_rows
    from . import triton_kernels as kernels

    missing = ""
except ImportError as error:  # CPU builds of torch come without Triton
    triton = None
    missing = f"the fused CUDA kernels need Triton 3.4 or newer: {error}"

# Entries a program works through, and has in flight at once; warps. Measured on an H200
# (docs/log.md): a pass that only reads likes long programs, those that write many short ones.
READ = {"CHUNK": 8192, "TILE": 1024, "num_warps": 8}
WRITE = {"CHUNK": 2048, "TILE": 512, "num_warps": 4}
LAW = {"TILE": 2048, "num_warps": 8}

TYPES: dict[torch.dtype, Any] = {}
if triton is not None:
    TYPES = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float64: tl.float64,
        torch.complex64: tl.float32,
        torch.complex128: tl.float64,
    }


def unsupported(p: Tensor) -> str:
    """Why the fused kernels cannot update ``p``; empty if they can."""
    if triton is None:
        return missing
    if p.dtype not in TYPES:
        return f"the fused CUDA kernel does not take {p.dtype}"
    if type(p) not in (Tensor, torch.nn.Parameter):
        return f"the fused CUDA kernel does not take {type(p).__name__}"
    if not is_dense(p):
        return "the fused CUDA kernel takes dense tensors only, and this one is strided"
    if p.is_conj() or p.is_neg():
        return "the fused CUDA kernel reads memory, which does not show a lazy conjugation or sign"
    return ""


class Variant(NamedTuple):
    """What is compiled into the passes for a tensor; of a complex one, for its real numbers."""

    W: Any
    G: Any
    WIDE: Any  # of the arithmetic, and AdamO's moments
    PREVIOUS: Any = None
    CURVATURE: int = 0  # 0: no g⁻; 1: of the whole tensor; 2: of a slice
    STOCHASTIC: bool = False  # rounding of a bfloat16 weight
    even: bool = True  # blocks begin where a multiple of 16 entries does


class Launch(NamedTuple):
    """A range of chunks whose tensors are of one variant: one launch of a pass."""

    base: int
    count: int
    variant: Variant


class Chunks:
    """All tensors cut into chunks, those of one variant next to each other."""

    def __init__(
        self, counts: list[int], variants: list[Variant], length: int, device: torch.device
    ) -> None:
        block: list[int] = []
        start: list[int] = []
        first, last = [0] * len(counts), [0] * len(counts)
        self.launches: list[Launch] = []
        for slot in sorted(range(len(counts)), key=lambda slot: str(variants[slot])):
            pieces = -(-counts[slot] // length)
            first[slot], last[slot] = len(block), len(block) + pieces
            if pieces and self.launches and self.launches[-1].variant == variants[slot]:
                *_, old = self.launches
                self.launches[-1] = old._replace(count=old.count + pieces)
            elif pieces:
                self.launches.append(Launch(len(block), pieces, variants[slot]))
            block += [slot] * pieces
            start += range(0, pieces * length, length)
        upload = functools.partial(torch.tensor, device=device)
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

    def __init__(self, bucket: Any, params: list[Tensor], grads: list[Tensor | None]) -> None:
        self.device, self.params = bucket.device, params
        states = [bucket.local_state(member) for member in bucket.members]
        self.blocks = bucket.blocks
        self.strides = [p.stride() for p in params]
        self.dtypes = [
            p.dtype if g is None else g.dtype for p, g in zip(params, grads, strict=True)
        ]
        self.buffers = [[state.get(key) for state in states] for key in bucket.BUFFERS]
        variants = self.variants_of(bucket, *self.buffers)
        counts, variants = self.split(bucket, [real_numel(p) for p in params], variants)
        self.short = Chunks(counts, variants, WRITE["CHUNK"], self.device)
        self.long = Chunks(counts, variants, READ["CHUNK"], self.device)
        self.numel = torch.tensor(counts, dtype=torch.int64, device=self.device)
        self.zeros = functools.partial(torch.zeros, dtype=torch.float64, device=self.device)
        self.record = self.zeros(len(bucket.RECORD), self.blocks)
        shape = (2 + len(self.buffers), len(params))
        self.pointers = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.addresses = self.pointers.unbind()
        self.host_pointers: list[list[int]] = []
        self.aligned = False
        self.spare: Tensor | None = self._host_table()  # a capture must not allocate it
        self.kept: list[Tensor] = []  # tables of captured graphs
        self.runners: dict[Any, Callable[..., None]] = {}
        self.whole: Whole | None = None
        if bucket.mesh is not None:
            index = torch.arange(self.blocks, device=self.device)
            self.whole = Whole(self.blocks, index, index + 1)
            self.active = torch.zeros_like(index)

    def variants_of(self, bucket: Any, *buffers: list[Tensor | None]) -> list[Variant]:
        return [
            Variant(TYPES[p.dtype], TYPES[g], TYPES[compute_dtype(p)])
            for p, g in zip(self.params, self.dtypes, strict=True)
        ]

    def split(
        self, bucket: Any, counts: list[int], variants: list[Variant]
    ) -> tuple[list[int], list[Variant]]:
        """The entries of every block that are cut into chunks, and how these are compiled."""
        self.chunked = self.blocks  # so many blocks are, the first ones
        return counts, variants

    def _host_table(self) -> Tensor:
        pin = self.device.type == "cuda"
        return torch.empty(self.pointers.shape, dtype=torch.int64, device="cpu", pin_memory=pin)

    def locate(self, grads: list[Tensor | None], capturing: bool) -> tuple[Any, bool]:
        """The rows of addresses, refreshed if one has changed, and whether all divide by 16."""
        # the buffers' too: who offloads state moves their memory (x.data = x.data.to(...))
        tensors = (self.params, grads, *self.buffers)
        pointers = list(map(_addresses, tensors))
        if capturing:
            # A graph copies its table again in every replay: it has one of its own, on both sides.
            table = torch.empty_like(self.pointers)
            host = self._host_table() if self.spare is None else self.spare
            self.spare = None
            self.kept += [table, host]
            table.copy_(host.copy_(torch.tensor(pointers, device="cpu")), non_blocking=True)
            return table.unbind(), _aligned(pointers)
        if self.spare is None:
            self.spare = self._host_table()
        if pointers != self.host_pointers:
            self.host_pointers, self.aligned = pointers, _aligned(pointers)
            self.pointers.copy_(torch.tensor(pointers, device="cpu"), non_blocking=True)
        return self.addresses, self.aligned

    def fits(self, grads: list[Tensor | None]) -> bool:
        """False if a gradient came in another dtype than the plan was made for."""
        return all(g is None or g.dtype is d for g, d in zip(grads, self.dtypes, strict=True))

    def in_layout(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients in the layout of their parameters; a copy only where it differs."""
        result = grads
        for slot, (g, strides) in enumerate(zip(grads, self.strides, strict=True)):
            if g is None or g.stride() == strides:  # nearly always
                continue
            if not same_strides(g.stride(), strides, g.shape):
                result = list(grads) if result is grads else result
                result[slot] = torch.empty_like(self.params[slot], dtype=g.dtype).copy_(g)
        return result

    def launch(
        self,
        key: Any,
        kernel: Any,
        count: int,
        *args: Any,
        num_warps: int,
        maxnreg: int | None = None,
        launch_pdl: bool = False,
        **constants: Any,
    ) -> None:
        """Launch a kernel; from the second time on with the same addresses, without a look at them.

        ``key`` names what may differ between calls with this plan; the rest is the same tables.
        """
        runner = self.runners.get(key)
        if runner is not None:
            runner()
            return
        how = {"num_warps": num_warps, "maxnreg": maxnreg, "enable_fp_fusion": True}
        how |= {"launch_pdl": True} if launch_pdl else {}
        compiled = kernel[(count,)](*args, **constants, **how)
        if key is not None and hasattr(compiled, "__getitem__"):  # the interpreter returns None
            fixed = [x.data_ptr() if isinstance(x, Tensor) else x for x in args]
            run = compiled[(count, 1, 1)]
            self.runners[key] = functools.partial(run, *fixed, *constants.values())


def _addresses(tensors: list[Any]) -> list[int]:
    try:
        return list(map(Tensor.data_ptr, tensors))
    except TypeError:  # not all are there
        return [0 if x is None else x.data_ptr() for x in tensors]


def _aligned(pointers: list[list[int]]) -> bool:
    return functools.reduce(operator.or_, (x for row in pointers for x in row), 0) % 16 == 0


class AdamOPlan(Plan):
    """With g⁻, of the whole tensor or of a slice, and stochastic rounding."""

    def __init__(self, bucket: Any, params: list[Tensor], grads: list[Tensor | None]) -> None:
        super().__init__(bucket, params, grads)
        self.partial_reduce = self.zeros(5, self.long.count)
        self.partial_moments = self.zeros(2, self.short.count)
        # where g⁻ lies inside g, in entries: all of it, a slice, or nothing
        starts, counts = [], []
        for p, previous, rows in zip(map(as_real, params), self.previous, bucket.rows, strict=True):
            starts.append(0 if rows is None else rows[0] * p.stride(0))
            counts.append(0 if previous is None else previous.numel())
        upload = functools.partial(torch.tensor, device=self.device)
        self.sample_start = upload(starts, dtype=torch.int64)
        self.samples = upload(counts, dtype=torch.int64)
        self.ratios = upload(bucket.ratios, dtype=torch.float64)
        self.number = upload(bucket.seeds, dtype=torch.int64)
        self.ones = torch.ones_like(self.ratios)

    def variants_of(self, bucket: Any, *buffers: list[Tensor | None]) -> list[Variant]:
        """A tensor without g⁻ joins those with one: its count of samples is 0."""
        self.previous = buffers[-1]
        sampled = [
            x is not None and x.shape != p.shape
            for x, p in zip(self.previous, map(as_real, self.params), strict=True)
        ]
        stored = next((x.dtype for x in self.previous if x is not None), None)
        variants = super().variants_of(bucket)
        for slot, x in enumerate(self.previous):
            curvature = 0 if stored is None else 2 if any(sampled) and x is None else 1
            if x is not None:
                curvature = 2 if sampled[slot] else 1
            kept = TYPES[(stored or torch.float32) if x is None else x.dtype]
            more = {"CURVATURE": curvature, "STOCHASTIC": bucket.stochastic[slot]}
            variants[slot] = variants[slot]._replace(PREVIOUS=kept, **more)
        return variants

    def split(
        self, bucket: Any, counts: list[int], variants: list[Variant]
    ) -> tuple[list[int], list[Variant]]:
        """Rows take one pass, and so do small tensors beside them: they share the launches."""
        by_row = any(m.rows is not None for m in bucket.members)
        limit = cuda_rows.REGISTERS if by_row else -1
        one_pass = [
            m.rows is not None or n <= limit for m, n in zip(bucket.members, counts, strict=True)
        ]
        tensors = []
        for slot, (size, variant) in enumerate(zip(bucket.sizes, variants, strict=True)):
            if one_pass[slot]:
                variant = variant._replace(CURVATURE=int(self.previous[slot] is not None))
                tensors.append((slot, variant, size, counts[slot] // max(size, 1)))
        self.programs = cuda_rows.Programs(tensors, bucket.starts, self.device)
        self.chunked = one_pass.count(False)
        assert not any(one_pass[: self.chunked])  # the bucket has sorted them
        return [0 if one else n for one, n in zip(one_pass, counts, strict=True)], variants


class Fused:
    """A step of a bucket with Triton; all of it at once or, sharded, pass by pass.

    ``grad_scale`` divides the gradients and a nonzero ``found_inf`` skips the step: what a
    ``GradScaler`` hands to optimizers whose kernels unscale by themselves.
    """

    Plan: Any = Plan

    def __init__(
        self,
        bucket: Any,
        grads: list[Tensor | None],
        options: Any,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        self.bucket = bucket
        params = bucket.params
        if bucket.holds_shards:
            params = list(map(local, params))  # the wrapper may have moved them
        plan = bucket.plan
        if plan is None or not plan.fits(grads):
            plan = bucket.plan = self.Plan(bucket, params, grads)
        self.plan, plan.params = plan, params
        self.kept = plan.in_layout(grads)  # copies must live as long as their addresses are used
        on_cuda = bucket.device.type == "cuda"
        capturing = on_cuda and torch.cuda.is_current_stream_capturing()
        self.pointers, self.aligned = plan.locate(self.kept, capturing)
        here = bucket.device
        self.grad_scale, self.found_inf = (
            x if x is None else x.to(here) for x in (grad_scale, found_inf)
        )
        # the matrices of the law
        settings = bucket.table.matrix_of(options).contiguous()
        self.matrices = (settings, bucket.traits, bucket.memory, plan.record, plan.blocks)
        # under AMP, other people's tensors come in: let Triton look at them
        unscaled = grad_scale is None and found_inf is None
        self.plain = unscaled and self.pointers is plan.addresses
        self.address_of_settings = settings.data_ptr()
        self.passed = 0

    def key(self, *what: Any) -> Any:
        return (*what, self.aligned, self.address_of_settings) if self.plain else None

    def on_device(self) -> Any:
        """Triton launches on the current device."""
        device = self.bucket.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def totals(self, partial: Tensor, chunks: Chunks) -> Tensor:
        """Partial sums as one row for each block: for sharded ones, whose law comes later."""
        plan, rows = self.plan, partial.shape[0]
        out = plan.zeros(rows, plan.blocks)
        plan.launch(
            None, kernels.totals, plan.blocks,
            partial, chunks.count, chunks.first, chunks.last, out, plan.blocks, rows, **LAW,
        )  # fmt: skip
        return out

    def finish(self) -> None:
        plan = self.plan
        written = [p for p, g in zip(plan.params, self.kept, strict=True) if g is not None]
        torch.autograd.graph.increment_version(written)
        self.bucket.last = plan.record.clone


class Work(Fused):
    """A step of AdamO: five launches (pass 1, law, pass 2, law, pass 3), or one pass for rows."""

    Plan = AdamOPlan

    @torch._disable_dynamo
    def run(self) -> None:
        plan = self.plan
        with self.on_device():
            cuda_rows.launch(self, plan.programs)
            if not plan.chunked:
                return self.finish()
            self.reduce()
            self.before_moments(self.pointers[1], plan.partial_reduce, plan.long, plan.ratios)
            self.moments()
            self.before_weights(plan.partial_moments, plan.short)
            self.apply()
        self.finish()

    def begin(self) -> Tensor:
        plan = self.plan
        with self.on_device():
            self.reduce()
            sums = self.totals(plan.partial_reduce, plan.long)
        sums[3] *= plan.ratios  # κ
        # a block without a gradient left stale partial sums
        return torch.where(self.bucket.takes, sums, 0).T

    def proceed(self, rows: Tensor, active: Tensor) -> Tensor | None:
        plan, whole = self.plan, self.plan.whole
        assert whole is not None
        self.passed += 1
        with self.on_device():
            if self.passed == 1:
                plan.active.copy_(active)
                self.before_moments(plan.active, rows.T.contiguous(), whole, plan.ones)
                self.moments()
                # a block that is not live left stale partial sums, which its law takes as 0
                return self.totals(plan.partial_moments, plan.short).T
            self.before_weights(rows.T.contiguous(), whole)
            self.apply()
        self.finish()
        return None

    def reduce(self) -> None:
        plan, chunks, (w, g, m, _, previous) = self.plan, self.plan.long, self.pointers
        for i, (base, count, variant) in enumerate(chunks.launches):
            plan.launch(
                self.key("reduce", i), kernels.reduce, count,
                w, g, m, previous, plan.numel, plan.sample_start, plan.samples, self.grad_scale,
                chunks.block, chunks.start, base, plan.partial_reduce, chunks.count,
                W=variant.W, G=variant.G, PREVIOUS=variant.PREVIOUS, WIDE=variant.WIDE,
                CURVATURE=variant.CURVATURE, SCALED=self.grad_scale is not None,
                ALIGNED=self.aligned, **READ,
            )  # fmt: skip

    def before_moments(self, active: Tensor, partial: Tensor, chunks: Any, ratios: Tensor) -> None:
        """``active`` is 0 where a block has no gradient."""
        plan = self.plan
        key = None if chunks is plan.whole else self.key("before_moments")
        plan.launch(
            key, kernels.before_moments, plan.chunked,
            *self.matrices, active, self.found_inf, partial, chunks.count, chunks.first,
            chunks.last, ratios, CHECKED=self.found_inf is not None, **LAW,
        )  # fmt: skip

    def moments(self) -> None:
        plan, chunks, (w, g, m, v, previous) = self.plan, self.plan.short, self.pointers
        for i, (base, count, variant) in enumerate(chunks.launches):
            plan.launch(
                self.key("moments", i), kernels.moments, count,
                w, g, m, v, previous, plan.numel, plan.sample_start, plan.samples, self.grad_scale,
                chunks.block, chunks.start, base, plan.partial_moments, chunks.count,
                plan.record, plan.blocks, W=variant.W, G=variant.G, PREVIOUS=variant.PREVIOUS,
                WIDE=variant.WIDE, CURVATURE=variant.CURVATURE,
                SCALED=self.grad_scale is not None, ALIGNED=self.aligned, **WRITE,
            )  # fmt: skip

    def before_weights(self, partial: Tensor, chunks: Any) -> None:
        plan = self.plan
        key = None if chunks is plan.whole else self.key("before_weights")
        plan.launch(
            key, kernels.before_weights, plan.chunked,
            *self.matrices, partial, chunks.count, chunks.first, chunks.last, **LAW,
        )  # fmt: skip

    def apply(self) -> None:
        plan, chunks, (w, _, m, v, _) = self.plan, self.plan.short, self.pointers
        for i, (base, count, variant) in enumerate(chunks.launches):
            plan.launch(
                self.key("apply", i), kernels.apply, count,
                w, m, v, plan.numel, chunks.block, chunks.start, base, plan.record, plan.blocks,
                self.bucket.memory, plan.number,
                W=variant.W, WIDE=variant.WIDE, STOCHASTIC=variant.STOCHASTIC,
                ALIGNED=self.aligned, **WRITE,
            )  # fmt: skip


class TurnPlan(Plan):
    """Its blocks are weights, or their rows."""

    def __init__(self, bucket: Any, params: list[Tensor], grads: list[Tensor | None]) -> None:
        super().__init__(bucket, params, grads)
        self.partial = self.zeros(4, self.short.count)

    def split(
        self, bucket: Any, counts: list[int], variants: list[Variant]
    ) -> tuple[list[int], list[Variant]]:
        self.by_row = self.blocks != len(counts)
        self.slots = self.offsets = self.first_block = self.sizes = None
        if not self.by_row:
            return counts, variants
        slots: list[int] = []
        offsets: list[int] = []
        lengths: list[int] = []
        for slot, (size, (here, first)) in enumerate(
            zip(bucket.sizes, bucket.rows_here, strict=True)
        ):
            mine = range(size) if here is None else range(first, first + here)
            length = counts[slot] // max(len(mine), 1)
            slots += [slot] * size
            offsets += [(i - first) * length for i in range(size)]
            lengths += [length if i in mine else 0 for i in range(size)]  # the others' are not here
        upload = functools.partial(torch.tensor, dtype=torch.int64, device=self.device)
        self.slots, self.offsets = upload(slots), upload(offsets)
        self.first_block, self.sizes = upload(bucket.starts), upload(bucket.sizes)
        even = [variants[s]._replace(even=o % 16 == 0) for s, o in zip(slots, offsets, strict=True)]
        return lengths, even


class TurnWork(Fused):
    """The three launches of a step of weights that turn: pass 1, law, pass 2."""

    Plan = TurnPlan

    @torch._disable_dynamo
    def run(self) -> None:
        with self.on_device():
            self.reduce()
            self.before_turn(self.pointers[1], self.plan.partial, self.plan.short)
            self.apply()
        self.finish()

    def begin(self) -> Tensor:
        with self.on_device():
            self.reduce()
            sums = self.totals(self.plan.partial, self.plan.short)
        return torch.where(self.bucket.takes, sums, 0).T

    def proceed(self, rows: Tensor, active: Tensor) -> None:
        plan = self.plan
        assert plan.whole is not None
        here = active if plan.first_block is None else active[plan.first_block]
        plan.active[: len(here)] = here
        with self.on_device():
            self.before_turn(self.plan.active, rows.T.contiguous(), self.plan.whole)
            self.apply()
        self.finish()

    def reduce(self) -> None:
        plan, chunks, (w, g, m) = self.plan, self.plan.short, self.pointers
        settings, *_, blocks = self.matrices
        for i, (base, count, variant) in enumerate(chunks.launches):
            plan.launch(
                self.key("reduce", i), kernels.turn_reduce, count,
                w, g, m, plan.numel, self.grad_scale, self.found_inf, chunks.block, chunks.start,
                base, plan.partial, chunks.count, settings, blocks, plan.slots, plan.offsets,
                W=variant.W, G=variant.G, WIDE=variant.WIDE, SCALED=self.grad_scale is not None,
                CHECKED=self.found_inf is not None, ROWS=plan.by_row,
                ALIGNED=self.aligned and variant.even, **WRITE,
            )  # fmt: skip

    def before_turn(self, active: Tensor, partial: Tensor, chunks: Any) -> None:
        plan = self.plan
        key = None if chunks is plan.whole else self.key("before_turn")
        plan.launch(
            key, kernels.before_turn, len(plan.params),
            *self.matrices, active, self.found_inf, partial, chunks.count, chunks.first,
            chunks.last, plan.first_block, plan.sizes, CHECKED=self.found_inf is not None,
            ROWS=plan.by_row, **LAW,
        )  # fmt: skip

    def apply(self) -> None:
        plan, chunks, (w, _, m) = self.plan, self.plan.short, self.pointers
        for i, (base, count, variant) in enumerate(chunks.launches):
            plan.launch(
                self.key("apply", i), kernels.turn_apply, count,
                w, m, plan.numel, chunks.block, chunks.start, base, plan.record, plan.blocks,
                plan.slots, plan.offsets, W=variant.W, WIDE=variant.WIDE, ROWS=plan.by_row,
                ALIGNED=self.aligned and variant.even, **WRITE,
            )  # fmt: skip
