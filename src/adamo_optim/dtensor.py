"""Sharded parameters (DTensor: FSDP2, tensor parallelism): this rank's part, and where it lies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .geometry import is_dense


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


def whole(x: Any) -> Tensor:
    """All of a DTensor, in a collective; any other tensor as it is."""
    return x.full_tensor() if is_sharded(x) else x


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


def as_real(x: Tensor) -> Tensor:
    """Complex tensors as pairs of real numbers, so that the inner product is the real one."""
    if not x.is_complex():
        return x
    return shard_like(torch.view_as_real(local(x)), x) if is_sharded(x) else torch.view_as_real(x)


def place_like(x: Any, p: Any) -> Tensor:
    """``x`` on the mesh and in the placements of ``p``.

    A gradient that is still a sum of the ranks' terms (Partial: tensor parallelism leaves them on
    replicated parameters) is added up here, in a collective of its own. An ordinary tensor is
    taken as the whole, the same on all ranks: a full checkpoint.
    """
    if not is_sharded(p):
        refuse_shards(x)
        return x
    if not is_sharded(x):
        from torch.distributed.tensor import distribute_tensor

        x = x.to(p.device)  # every rank cuts out its own part, nothing is sent
        return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)
    if x.placements == p.placements and x.device_mesh == p.device_mesh:
        return x
    return x.redistribute(p.device_mesh, p.placements)


def refuse_shards(x: Any) -> None:
    """For the state of an ordinary parameter."""
    if is_sharded(x):
        raise RuntimeError(
            "optimizer state in the form of DTensors cannot be loaded for ordinary parameters. "
            "Load it through torch.distributed.checkpoint, or save it with "
            "StateDictOptions(full_state_dict=True); see docs/troubleshooting.md."
        )


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


def holds_whole_rows(p: Any) -> bool:
    """True for a DTensor none of whose rows lies on several ranks, but for copies of it."""
    return is_sharded(p) and all(
        x.is_replicate() or getattr(x, "dim", None) == 0 for x in placements_of(p)
    )


def rows_like(x: Tensor, p: Any) -> Tensor:
    """A number for each of this rank's rows of ``p``, as a DTensor of those of all rows."""
    from torch.distributed.tensor import DTensor

    where = (p.device_mesh, p.placements)
    return DTensor.from_local(x, *where, run_check=False, shape=p.shape[:1], stride=(1,))


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
            "previous_gradient='sampled', block='row' and second_moment='row' need shards of "
            f"adjoining rows; the placements {placements_of(p)} of a parameter of shape "
            f"{tuple(p.shape)} scatter them. Use previous_gradient='bfloat16', block='tensor' and "
            "second_moment='tensor' for it; see docs/troubleshooting.md."
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
