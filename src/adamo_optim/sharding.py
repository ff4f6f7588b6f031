"""A step of sharded blocks: the ranks' passes in step with each other.

Every rank runs the passes on its shards. What a pass has summed is added up over the ranks, in one
small collective for all blocks on a mesh (AdamO needs two a step, a weight that turns one), and
every rank applies the same law to the same numbers. A block has the same row in the collective on
every rank and in every step, whether it has a gradient or not and whichever backend a rank updates
it with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dtensor import counted_once, mesh_of


@torch._disable_dynamo
@torch.no_grad()
def step(works: list[Any], rows: int) -> None:
    """One step of all buckets of a mesh that holds ``rows`` blocks."""
    moments = [work.bucket.moments_of_stand_ins() for work in works]
    sums = [work.begin() for work in works]
    # a last column tells whether any rank has a gradient
    sums = [torch.cat([x, present(work)], dim=1) for x, work in zip(sums, works, strict=True)]
    totals = add_up(works, sums, rows)
    active = [total[:, -1] > 0 for total in totals]
    for those, here in zip(moments, active, strict=True):
        for i, moment, before in those:  # no rank had a gradient, so nothing has happened
            moment.copy_(torch.where(here[i], moment, before))
    totals = [total[:, :-1] for total in totals]
    while True:
        zipped = zip(works, totals, active, strict=True)
        sums = [work.proceed(total, here) for work, total, here in zipped]
        if sums[0] is None:
            return
        totals = add_up(works, sums, rows)


def present(work: Any) -> Tensor:
    """1 for every block that has a gradient on this rank, as a column."""
    bucket = work.bucket
    return bucket.active.to(bucket.dtype).unsqueeze(1)


def add_up(works: list[Any], values: list[Tensor], rows: int) -> list[Tensor]:
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


def whole_sums(values: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Numbers that every rank has of its shard of a parameter, added up: a collective a mesh.

    Not for a step: it is for what the first one must know.
    """
    result, on_mesh = list(values), dict[Any, list[int]]()
    for i, p in enumerate(params):
        mesh = mesh_of(p)
        if mesh is not None and mesh.size() > 1 and mesh.get_coordinate() is not None:
            on_mesh.setdefault(mesh, []).append(i)
    for mesh, those in on_mesh.items():
        mine = [values[i] * counted_once(params[i]) for i in those]  # as in add_up
        common = torch.cat([x.reshape(-1).to(mesh.device_type, torch.float64) for x in mine])
        torch.distributed.all_reduce(common, group=group_of(mesh))
        for i, total in zip(those, common.split([x.numel() for x in mine]), strict=True):
            result[i] = total.view(values[i].shape).to(values[i].device)
    return result


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
