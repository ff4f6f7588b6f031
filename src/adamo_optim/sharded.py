"""A step of sharded parameters: the ranks' passes in step with each other.

Every rank runs the three passes on its shards. What pass 1 and pass 2 have summed is added up over
the ranks, in one small collective each for all parameters on a mesh, and every rank applies the
same law to the same numbers. A parameter has the same row in the collective on every rank and in
every step, whether it has a gradient or not and whichever backend a rank updates it with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import geometry
from .backends import fused_backend

if TYPE_CHECKING:
    from .state import Work


@torch._disable_dynamo
@torch.no_grad()
def step(works: list[Work], rows: int) -> None:
    """One step of all buckets of a mesh that holds ``rows`` parameters."""
    passes = [
        fused_backend(work.bucket.device) if work.bucket.backend == "fused" else type(work)
        for work in works
    ]
    sums = [p.reduce(work) for p, work in zip(passes, works, strict=True)]
    # a last column tells whether any rank has a gradient
    sums = [torch.cat([x, present(work)], dim=1) for x, work in zip(sums, works, strict=True)]
    halves = [
        p.moments(work, total[:, :-1], total[:, -1] > 0)
        for p, work, total in zip(passes, works, add_up(works, sums, rows), strict=True)
    ]
    products = add_up(works, [x for _, x in halves], rows)
    for p, work, (middle, _), total in zip(passes, works, halves, products, strict=True):
        p.apply(work, middle, total)


def present(work: Work) -> Tensor:
    """1 for every block that has a gradient on this rank, as a column."""
    bucket = work.bucket
    return bucket.active.to(bucket.dtype).unsqueeze(1)


def add_up(works: list[Work], values: list[Tensor], rows: int) -> list[Tensor]:
    """The sums over the mesh of one row of numbers per block, in one collective.

    Ranks that hold copies count once; the others' numbers are multiplied by 0, not left out, so
    that a NaN on any of them makes a NaN for all: they must agree on what is not finite.
    """
    mesh, device = works[0].bucket.mesh, works[0].bucket.device
    if device.type != mesh.device_type:  # CPU offload: the group may not work on the CPU
        device = torch.device(mesh.device_type)
    matrix = torch.zeros(rows, values[0].shape[1], dtype=torch.float64, device=device)
    for work, x in zip(works, values, strict=True):
        bucket = work.bucket
        x = x * bucket.counted.unsqueeze(1)
        matrix[bucket.index_on_mesh.to(matrix.device)] = x.to(matrix.device, matrix.dtype)
    if mesh.size() > 1:
        torch.distributed.all_reduce(matrix, group=group_of(mesh))
    return [
        matrix[work.bucket.index_on_mesh.to(matrix.device)].to(x.device, x.dtype)
        for work, x in zip(works, values, strict=True)
    ]


def whole_sum(x: Any) -> Tensor:
    """The sum of a tensor's finite entries, over the ranks that hold parts of it; not in a step."""
    part = geometry.as_real(geometry.local(x))
    dtype = geometry.scalar_dtype(part.device)
    total = part.sum(dtype=dtype)
    if not total.isfinite():
        total = torch.where(part.isfinite(), part, 0).sum(dtype=dtype)
    mesh = geometry.mesh_of(x)
    if mesh is None or mesh.size() == 1 or mesh.get_coordinate() is None:
        return total
    common = (total * geometry.counted_once(x)).to(mesh.device_type)  # as in add_up
    torch.distributed.all_reduce(common, group=group_of(mesh))
    return common.to(total.device)


# ranks: (the world at that time, their group); the world may be left and entered again
_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}


def group_of(mesh: Any) -> Any:
    """The process group of all ranks of a mesh.

    A new one is made for a part of the world with several dimensions, once, and only its own ranks
    meet for it: other ranks may have no parameter on such a mesh.
    """
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks, world = tuple(sorted(mesh.mesh.flatten().tolist())), torch.distributed.group.WORLD
    if len(ranks) == torch.distributed.get_world_size():
        return world
    known, group = _groups.get(ranks, (None, None))
    if known is not world:
        group = torch.distributed.new_group(list(ranks), use_local_synchronization=True)
        _groups[ranks] = world, group
    return group
