"""Inner products of blocks, and what a block is made of.

The only file that knows how a parameter is stored: complex, low precision, sharded, flattened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

# A row of this many products is summed by one thread, so that the total does not depend on the
# number of threads (torch starts to split a sum at 32,768 entries).
CHUNK = 16384
PIECE = 8 * CHUNK  # what a reduction on the CPU works on at a time: 1 MB in float64

SAMPLE = 16  # "sampled" keeps about one gradient entry in SAMPLE

FLAT_PARAMETER_HELP = (
    "AdamO needs the norm of every weight tensor, and a flattened parameter has lost it. "
    "Use FSDP2 (torch.distributed.fsdp.fully_shard) or DistributedDataParallel instead; "
    "see docs/troubleshooting.md."
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


def largest_square(x: Tensor) -> float:
    """The largest number that v of this parameter holds."""
    return torch.finfo(compute_dtype(x)).max


def smallest_eps(x: Tensor) -> float:
    """The square root of the smallest positive number of the buffers, rounded up.

    Below it v underflows to 0, and m/√v would be unbounded.
    """
    return 1e-161 if compute_dtype(x) == torch.float64 else 1e-22


def as_real(x: Tensor) -> Tensor:
    """Complex tensors as pairs of real numbers, so that the inner product is the real one."""
    if not x.is_complex():
        return x
    return shard_like(torch.view_as_real(local(x)), x) if is_sharded(x) else torch.view_as_real(x)


def real_numel(x: Tensor) -> int:
    """How many real numbers the whole tensor holds, on all ranks together."""
    return x.numel() * (2 if x.is_complex() else 1)


# ---- the slice that previous_gradient="sampled" keeps ------------------------------------------


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


def sample_rows(p: Tensor, seed: int) -> tuple[int, int] | None:
    """The slice in rows of this rank's shard: first and number. None: it is the whole tensor."""
    if p.dim() == 0:
        return None
    begin, length = sample_range(p.shape, seed)
    if length == p.shape[0]:
        return None
    if not is_sharded(p):
        return begin, length
    start, count = rows_of_shard(p)
    low = min(max(begin - start, 0), count)
    high = min(max(begin + length - start, 0), count)
    return low, high - low


def sample_of(old: Tensor, p: Tensor, seed: int, rows: tuple[int, int]) -> Tensor:
    """A loaded g⁻ as this rank's part of the slice: from the whole tensor, or the whole slice."""
    whole = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
    if old.shape == whole:
        return local(place_like(old, p)).narrow(0, *rows).clone()
    begin, length = sample_range(p.shape, seed)
    if not is_sharded(p) or old.shape != (length, *whole[1:]):
        return old
    first = rows[0] + rows_of_shard(p)[0] - begin if rows[1] else 0
    part = old.narrow(0, first, rows[1])
    for dim, index in enumerate(indices_of_shard(p)[1:], start=1):
        part = part.index_select(dim, index.flatten().to(part.device))
    return part.contiguous()


def sample_ratio(p: Tensor, previous: Tensor | None) -> float:
    """What κ of the kept entries is multiplied by: all entries over kept ones, of all ranks."""
    if previous is None or is_sharded(previous):
        return 1.0
    if is_sharded(p):
        return p.shape[0] / sample_range(p.shape, 0)[1]
    return real_numel(p) / max(previous.numel(), 1)


# ---- inner products ----------------------------------------------------------------------------


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


def pieces(dtype: torch.dtype, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in another dtype, on the CPU in parts that fit into its cache.

    The conversion then need not travel to memory and back. Tensors whose layouts differ stay whole.
    """
    first, count = tensors[0], tensors[0].numel()
    alike = is_dense(first) and all(
        same_strides(x.stride(), first.stride(), first.shape) for x in tensors
    )
    if first.device.type != "cpu" or torch.compiler.is_compiling() or count <= PIECE or not alike:
        yield tuple(x.to(dtype) for x in tensors)
        return
    flat = [x.as_strided((count,), (1,)) for x in tensors]
    for start in range(0, count, PIECE):
        yield tuple(x[start : start + PIECE].to(dtype) for x in flat)


def same_strides(a: Sequence[int], b: Sequence[int], shape: Sequence[int]) -> bool:
    """Do they lay a tensor out alike? Where a dimension has one place, its stride means nothing."""
    return (
        a == b
        or 0 in shape
        or all(x == y or size == 1 for x, y, size in zip(a, b, shape, strict=True))
    )


def is_dense(x: Tensor) -> bool:
    """Do the entries fill one piece of memory, in whatever order of the dimensions?"""
    if x.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def dot(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩ as a 0-D tensor of their dtype."""
    return total(x * y)


def whole_dot(x: Any, y: Any) -> Tensor:
    """⟨x, y⟩ of whole tensors; for DTensors with a collective of its own, so not in a step."""
    return (x * y).sum().full_tensor() if is_sharded(x) else dot(x, y)


# ---- stochastic rounding -----------------------------------------------------------------------

INDEX_FACTOR, NUMBER_FACTOR = 0x9E3779B1, 0x85EBCA6B


def round_stochastically(
    value: Tensor, step: Tensor, number: int, index: Tensor | None = None
) -> Tensor:
    """float32 → bfloat16, up or down with the probabilities that make the mean exact.

    The random bits are a hash (Wellons' lowbias32) of step, parameter and place in memory, so that
    a resumed run repeats them, no generator is touched and every backend draws the same ones.
    ``index`` gives the places in the whole tensor where they are not those in ``value``.
    """
    value, mask = value.float(), 0xFFFFFFFF
    if index is None:
        index = torch.arange(value.numel(), device=value.device)
        index = index.as_strided(value.shape, value.stride())
    key = step.long() * 0x9E3779B9 + number * NUMBER_FACTOR
    x = (index * INDEX_FACTOR + key) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    noise = (x ^ (x >> 16)) & 0xFFFF
    bits = (value.view(torch.int32) + noise.int()) & -0x10000
    return torch.where(value.isfinite(), bits.view(torch.float32), value).bfloat16()


# ---- sharded parameters (DTensor: FSDP2, tensor parallel) --------------------------------------
# The passes work on this rank's shard; sharded.py adds up their sums over the mesh.


def is_sharded(x: Tensor) -> bool:
    """True for a DTensor, whatever its placements."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def mesh_of(x: Tensor) -> Any:
    """The DeviceMesh of a DTensor; None for any other tensor."""
    return getattr(x, "device_mesh", None) if is_sharded(x) else None


def placements_of(x: Any) -> tuple[Any, ...]:
    return tuple(x.placements)


def local(x: Any) -> Tensor:
    """This rank's shard of a DTensor, not a copy; any other tensor as it is."""
    if not is_sharded(x):
        return x
    if torch.is_grad_enabled():
        with torch.no_grad():
            shard = x.to_local()
    else:  # in a step; the context costs more than the call
        shard = x.to_local()
    return shard.wait() if hasattr(shard, "trigger_wait") else shard  # of a pending collective


def local_gradient(p: Tensor, g: Tensor, name: str) -> Tensor:
    """This rank's shard of the gradient, in the placements of its parameter."""
    if not is_sharded(g) or mesh_of(g) != mesh_of(p):
        raise RuntimeError(
            f"{name} is a DTensor on {mesh_of(p)}, and its gradient is "
            f"{f'on {mesh_of(g)}' if is_sharded(g) else 'an ordinary tensor'}. Make the gradient "
            "a DTensor on the mesh of the parameter (torch.distributed.tensor.distribute_tensor); "
            "see docs/troubleshooting.md."
        )
    return local(place_like(g, p))


def place_like(x: Any, p: Any) -> Tensor:
    """``x`` on the mesh and in the placements of ``p``.

    A gradient that is still a sum of the ranks' terms (Partial: tensor parallelism leaves them on
    replicated parameters) is added up here, in a collective of its own. An ordinary tensor is
    taken as the whole, the same on all ranks: a full checkpoint.
    """
    if not is_sharded(p):
        if is_sharded(x):
            raise RuntimeError(
                "optimizer state in the form of DTensors cannot be loaded for ordinary parameters. "
                "Load it through torch.distributed.checkpoint, or save it with "
                "StateDictOptions(full_state_dict=True); see docs/troubleshooting.md."
            )
        return x
    if not is_sharded(x):
        from torch.distributed.tensor import distribute_tensor

        x = x.to(p.device)  # every rank cuts out its own part, nothing is sent
        return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)
    if x.placements == p.placements and x.device_mesh == p.device_mesh:
        return x
    return x.redistribute(p.device_mesh, p.placements)


def lay_out_like(x: Tensor, p: Tensor) -> Tensor:
    """``x``, of the shape and placements of ``p``, in the memory layout of a new tensor like it."""
    here = local(x)
    there = torch.empty_like(local(p), device="meta")
    if here.stride() == there.stride() or here.numel() == 0:
        return x
    copy = torch.empty_strided(there.shape, there.stride(), dtype=x.dtype, device=x.device)
    return shard_like(copy.copy_(here), p) if is_sharded(p) else copy.copy_(here)


def shard_like(x: Tensor, p: Any) -> Tensor:
    """This rank's values as a DTensor in the place of ``p``; they may have a last dimension more.

    The stride is only what the whole tensor would have: nothing is laid out with it.
    """
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*p.shape, *x.shape[p.dim() :]))
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return DTensor.from_local(
        x, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride
    )


def counted_once(p: Any) -> bool:
    """True on the ranks that add this parameter to a sum over the whole mesh.

    Of the ranks that hold the same values, the first one on every replicated mesh dimension.
    """
    coordinate = p.device_mesh.get_coordinate()
    return coordinate is not None and all(
        where == 0 or not placement.is_replicate()
        for where, placement in zip(coordinate, p.placements, strict=True)
    )


def indices_of_shard(p: Any) -> list[Tensor]:
    """For every dimension, the places in the whole tensor of this rank's rows, for broadcasting.

    DTensor itself distributes the numbers 0, 1, 2, …, so that this holds for every placement.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    result = []
    for dim, size in enumerate(p.shape):
        shape = [size if d == dim else 1 for d in range(p.dim())]
        placements = [
            x if getattr(x, "dim", None) == dim else Replicate() for x in placements_of(p)
        ]
        index = torch.arange(size, device=p.device).view(shape)
        shard = distribute_tensor(index, p.device_mesh, placements, src_data_rank=None)
        result.append(local(shard).to(p.device))
    return result


def rows_of_shard(p: Tensor) -> tuple[int, int]:
    """First row in the whole tensor, and number of rows, of this rank's shard."""
    rows = indices_of_shard(p)[0].flatten()
    count = rows.numel()
    if count == 0:
        return 0, 0
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 != count:
        raise RuntimeError(
            f"previous_gradient='sampled' needs shards of adjoining rows; the placements "
            f"{placements_of(p)} of a parameter of shape {tuple(p.shape)} scatter them. "
            "Use previous_gradient='bfloat16' for it; see docs/troubleshooting.md."
        )
    return first, count


def places_of_shard(p: Tensor) -> Tensor | int:
    """Where the entries of this rank's shard lie in the memory of the whole tensor.

    A number where it is one piece: the place of its first entry.
    """
    indices, shard = indices_of_shard(p), local(p)
    if shard.numel() == 0:
        return 0
    places = sum((x * stride for x, stride in zip(indices, p.stride(), strict=True)), start=0)
    places = torch.as_tensor(places, device=shard.device).expand(shard.shape)
    inside = torch.arange(shard.numel(), device=shard.device)
    first = int(places.flatten()[0])
    if is_dense(shard) and bool(
        (places == first + inside.as_strided(shard.shape, shard.stride())).all()
    ):
        return first
    return places


def moved_number(number: int, place: int) -> int:
    """The number under which a piece that starts at ``place`` draws the bits of the whole.

    The hash starts from index·A + number·B modulo 2³², B is odd: its inverse turns a move of the
    index into one of the number, and the kernels need not know.
    """
    inverse = pow(NUMBER_FACTOR, -1, 2**32)
    return (number + place * INDEX_FACTOR * inverse) % 2**32


# ---- what is refused ---------------------------------------------------------------------------


def check_parameter(p: Tensor, name: str) -> None:
    """Refuse what cannot keep a norm of its own, with the reason and the alternative."""
    if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        raise RuntimeError(f"{name} is an FSDP1 flat parameter. {FLAT_PARAMETER_HELP}")
    if hasattr(p, "ds_id"):
        raise RuntimeError(f"{name} is managed by DeepSpeed ZeRO. {FLAT_PARAMETER_HELP}")
    if not (p.is_floating_point() or p.is_complex()):
        raise TypeError(
            f"{name} must be a floating or complex tensor, got {p.dtype}; "
            "see docs/troubleshooting.md."
        )
    if is_sharded(p) and any(placement.is_partial() for placement in placements_of(p)):
        raise RuntimeError(
            f"{name} is a DTensor with placements {placements_of(p)}: a rank that holds one term "
            "of a sum knows nothing about the norm. Redistribute it to Shard or Replicate; "
            "see docs/troubleshooting.md."
        )


def refuse_sparse(name: str) -> NoReturn:
    """A sparse gradient has no norm in the directions it leaves out."""
    raise RuntimeError(
        f"AdamO does not support sparse gradients, and the gradient of {name} is one. "
        "Use sparse=False in the embedding, or torch.optim.SparseAdam for this parameter; "
        "see docs/troubleshooting.md."
    )
