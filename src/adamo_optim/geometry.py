"""Inner products of blocks, and what a block is made of.

The only file that knows how a parameter is stored: complex, low precision, sharded, flattened.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

# A row of this many products is summed by one thread, so that the total does not depend on the
# number of threads (torch starts to split a sum at 32,768 entries).
CHUNK = 16384

SAMPLE = 16  # "sampled" keeps about one gradient entry in SAMPLE

FLAT_PARAMETER_HELP = (
    "AdamO needs the norm of every weight tensor, and a flattened parameter has lost it. "
    "Use FSDP2 (torch.distributed.fsdp.fully_shard) or DistributedDataParallel instead."
)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the buffers and of the elementwise arithmetic for parameter ``x``."""
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


def smallest_eps(x: Tensor) -> float:
    """The square root of the smallest positive number of the buffers, rounded up.

    Below it v underflows to 0, and m/√v would be unbounded.
    """
    return 1e-161 if compute_dtype(x) == torch.float64 else 1e-22


def as_real(x: Tensor) -> Tensor:
    """Complex tensors as pairs of real numbers, so that the inner product is the real one."""
    return torch.view_as_real(x) if x.is_complex() else x


def sample_range(shape: torch.Size, seed: int) -> tuple[int, int]:
    """First row and number of rows of the slice that "sampled" keeps: about 1/16 of dimension 0.

    Whole rows are one piece of memory in the usual layouts, and stay together when the first
    dimension is sharded. The slice is the same in every step; ``seed`` moves it per parameter.
    """
    length = -(-shape[0] // SAMPLE)
    return (seed * 2654435761 % 2**32) % (shape[0] - length + 1), length  # Knuth's hash


def sample(x: Tensor, seed: int) -> Tensor:
    """The slice of ``x`` that "sampled" keeps of the previous gradient."""
    return x.narrow(0, *sample_range(x.shape, seed)) if x.dim() else x


def total(products: Tensor) -> Tensor:
    """The sum of all entries of a freshly computed tensor, the same for any number of threads."""
    count = products.numel()
    if products.device.type != "cpu" or count <= CHUNK:
        return products.sum()
    # memory order, whatever the layout: the result of an elementwise operation is dense
    flat = products if products.dim() == 1 else products.as_strided((count,), (1,))
    whole = count // CHUNK * CHUNK
    rows = flat[:whole].view(-1, CHUNK).sum(dim=1)
    return rows.sum() + flat[whole:].sum()


def dot(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩ as a 0-D tensor of their dtype."""
    return total(x * y)


def round_stochastically(value: Tensor, step: Tensor, number: int) -> Tensor:
    """float32 → bfloat16, up or down with the probabilities that make the mean exact.

    The random bits are a hash (Wellons' lowbias32) of step, parameter and place in memory, so that
    a resumed run repeats them, no generator is touched and every backend draws the same ones.
    """
    value, mask = value.float(), 0xFFFFFFFF
    index = torch.arange(value.numel(), device=value.device).as_strided(value.shape, value.stride())
    key = step.long() * 0x9E3779B9 + number * 0x85EBCA6B
    x = (index * 0x9E3779B1 + key) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    noise = (x ^ (x >> 16)) & 0xFFFF
    bits = (value.view(torch.int32) + noise.int()) & -0x10000
    return torch.where(value.isfinite(), bits.view(torch.float32), value).bfloat16()


def check_parameter(p: Tensor, name: str) -> None:
    """Refuse what cannot keep a norm of its own, with the reason and the alternative."""
    if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        raise RuntimeError(f"{name} is an FSDP1 flat parameter. {FLAT_PARAMETER_HELP}")
    if hasattr(p, "ds_id"):
        raise RuntimeError(f"{name} is managed by DeepSpeed ZeRO. {FLAT_PARAMETER_HELP}")
    if not (p.is_floating_point() or p.is_complex()):
        raise TypeError(f"{name} must be a floating or complex tensor, got {p.dtype}.")
    if hasattr(p, "device_mesh") and hasattr(p, "placements"):
        raise RuntimeError(
            f"{name} is a DTensor; this version of AdamO does not run on sharded parameters yet. "
            "Use DistributedDataParallel, or build the optimizer before sharding for inspection "
            "only."
        )


def refuse_sparse(name: str) -> NoReturn:
    """A sparse gradient has no norm in the directions it leaves out."""
    raise RuntimeError(
        f"AdamO does not support sparse gradients, and the gradient of {name} is one. "
        "Use sparse=False in the embedding, or torch.optim.SparseAdam for this parameter."
    )
