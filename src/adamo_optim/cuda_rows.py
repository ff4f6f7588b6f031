"""Which blocks a CUDA step handles in one pass, and how they are cut into programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton

from . import triton_rows as kernels

REGISTERS = 8192  # entries of a row that a program can hold
SMALL = 1 << 18  # entries of a tensor that is not worth a launch of its own
COMMON = 1024  # the tile of those
PER_THREAD = 36  # entries
LONG = {"TILE": 2048, "num_warps": 8}


class Kind(NamedTuple):
    """What is compiled into a launch."""

    variant: Any
    even: bool  # a row is a multiple of 16 entries
    head: int  # 0: the row is long
    tail: int
    masked: bool

    @property
    def warps(self) -> int:
        """Every warp computes the laws, so few of them are best; registers are the limit."""
        needed = -(-(self.head + self.tail) // (32 * PER_THREAD))
        return max(triton.next_power_of_2(needed), 1)

    @property
    def registers(self) -> int | None:
        """So few that twelve warps share a multiprocessor, where that spills next to nothing."""
        entries = (self.head + self.tail) // (32 * self.warps)
        return 168 if entries <= (20 if self.variant.CURVATURE else 24) else None


def kind_of(variant: Any, rows: int, length: int) -> Kind:
    """The launch that rows of a tensor belong to; small tensors share one."""
    even = length % 16 == 0
    if length > REGISTERS:
        return Kind(variant, even, 0, 0, True)
    if rows == 1 or (rows * length <= SMALL and length <= COMMON):
        return Kind(variant, False, max(triton.next_power_of_2(length), COMMON), 0, True)
    head = max(1 << (length.bit_length() - 1), 4)
    tail = max(triton.next_power_of_2(length - head), 4) if length > head else 0
    return Kind(variant, even, head, tail, head + tail != length)


class Programs:
    """The programs of all tensors, those of one kind next to each other.

    Args:
        tensors: their slots in the table of addresses, variants, numbers of rows and row lengths.
        first_block: for every slot the column of its first block.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[int, Any, int, int]],
        first_block: list[int],
        device: torch.device,
    ) -> None:
        slots: list[int] = []
        rows: list[int] = []
        lengths = [0] * len(first_block)
        self.launches: list[tuple[int, int, Kind]] = []
        kinds: dict[Kind, list[tuple[int, int]]] = {}
        for slot, variant, count, length in tensors:
            lengths[slot] = length
            if count * length > 0:
                kinds.setdefault(kind_of(variant, count, length), []).append((slot, count))
        for kind, those in kinds.items():
            base = len(slots)
            for slot, count in those:
                slots += [slot] * count
                rows += range(count)
            self.launches.append((base, len(slots) - base, kind))
        # where the hardware can: a launch may begin while the last rows of the one before are busy
        several = device.type == "cuda" and len(self.launches) > 1
        self.overlap = several and torch.cuda.get_device_capability(device) >= (9, 0)
        self.slot = torch.tensor(slots, dtype=torch.int32, device=device)
        self.row = torch.tensor(rows, dtype=torch.int32, device=device)
        self.first_block = torch.tensor(first_block, dtype=torch.int64, device=device)
        self.length = torch.tensor(lengths, dtype=torch.int64, device=device)


def launch(work: Any, programs: Programs) -> None:
    """The whole step of these blocks."""
    plan = work.plan
    scaled = {"SCALED": work.grad_scale is not None, "CHECKED": work.found_inf is not None}
    for number, (base, count, kind) in enumerate(programs.launches):
        v = kind.variant
        types = {"W": v.W, "G": v.G, "PREVIOUS": v.PREVIOUS, "WIDE": v.WIDE}
        types |= {"KEEPS": int(v.CURVATURE > 0), "STOCHASTIC": v.STOCHASTIC}
        kernel, size = kernels.long_rows, LONG
        if kind.head:
            kernel = kernels.rows
            size = {"HEAD": kind.head, "TAIL": kind.tail, "MASKED": kind.masked}
            size |= {"num_warps": kind.warps, "maxnreg": kind.registers}
        plan.launch(
            work.key("rows", number), kernel, count,
            *work.pointers, work.grad_scale, work.found_inf,
            programs.slot, programs.row, base, programs.first_block, programs.length,
            *work.matrices, plan.number,
            **types, **scaled, ALIGNED=work.aligned and kind.even, **size,
            OVERLAP=programs.overlap, launch_pdl=programs.overlap and number > 0,
        )  # fmt: skip
