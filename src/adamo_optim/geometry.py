"""How the entries of a tensor lie in memory, their precision, and sums over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A row of this many products is summed by one thread, so that the total does not depend on the
# number of threads (torch starts to split a sum at 32,768 entries). Rows are short, because in
# float32 a norm of 4,096 entries was not exact enough for the tests.
CHUNK = 1024


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of AdamO's buffers and of the elementwise arithmetic for parameter ``x``."""
    return torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype of norms, inner products and coefficients: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def rounding_level(dtype: torch.dtype, scalar: torch.dtype) -> float:
    """Squared relative size under which ``g − φ_w(g)`` is rounding noise.

    Two units of the gradient's own precision, or what the difference of two sums in ``scalar``
    can resolve, whichever is larger (the latter for float64 blocks: about 6e-8 of ‖g‖).
    """
    real = torch.empty((), dtype=dtype).real.dtype if dtype.is_complex else dtype
    return max((2 * torch.finfo(real).eps) ** 2, 16 * torch.finfo(scalar).eps)


def largest_square(x: Tensor) -> float:
    """The largest number that v of this parameter holds."""
    return torch.finfo(compute_dtype(x)).max


def smallest_eps(x: Tensor) -> float:
    """The square root of the smallest positive number of the buffers, rounded up.

    Below it v underflows to 0, and m/√v would be unbounded.
    """
    return 1e-161 if compute_dtype(x) == torch.float64 else 1e-22


def real_numel(x: Tensor) -> int:
    """How many real numbers the whole tensor holds, on all ranks together."""
    return x.numel() * (2 if x.is_complex() else 1)


def row_count(x: Tensor) -> int | None:
    """How many rows (dimension 0) a tensor has; None for a vector, for one row, for rows of 1."""
    rows = x.shape[0] if x.dim() > 1 else 1
    return rows if 1 < rows < real_numel(x) else None


def same_strides(a: Sequence[int], b: Sequence[int], shape: Sequence[int]) -> bool:
    """Do they lay a tensor out alike? Where a dimension has one place, its stride means nothing."""
    return (
        a == b
        or 0 in shape
        or all(x == y or size == 1 for x, y, size in zip(a, b, shape, strict=True))
    )


def is_dense(x: Tensor) -> bool:
    """Do the entries fill one piece of memory, in whatever order of the dimensions?"""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def lie_alike(first: Tensor, *others: Tensor) -> bool:
    """Are they dense, and do entries of one place lie in one order?"""
    return is_dense(first) and all(
        same_strides(x.stride(), first.stride(), first.shape) for x in others
    )


def flat(x: Tensor) -> Tensor:
    """A dense tensor in the order of its memory."""
    return x.as_strided((x.numel(),), (1,))


def total(products: Tensor) -> Tensor:
    """The sum of all entries of a freshly computed tensor, the same for any number of threads."""
    if products.device.type != "cpu" or products.numel() <= CHUNK:
        return products.sum()
    # memory order, whatever the layout: the result of an elementwise operation is dense
    parts = [rows.sum(dim=1).sum(dtype=torch.float64) for rows in in_rows(products)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def in_rows(x: Tensor) -> list[Tensor]:
    """The entries of a dense tensor as a matrix with rows of CHUNK, and what is left over."""
    line = x if x.dim() == 1 else flat(x)
    whole = x.numel() // CHUNK * CHUNK
    if whole == 0:
        return [line.view(1, -1)]
    rows, rest = line[:whole].view(-1, CHUNK), line[whole:].view(1, -1)
    return [rows, rest] if rest.numel() else [rows]
