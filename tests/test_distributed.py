"""Sharded training against single-process training, in real processes over gloo.

The checks are functions that every rank runs (see ``distributed_kit``); what a check compares with
is the same optimizer on whole tensors in the same process.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from adamo_optim import AdamO
from distributed_kit import CHECKS, check, outcomes
from oracle import CONDITIONED, Case

pytestmark = [pytest.mark.dist]

# Even, uneven and empty shards on 2 and 4 ranks; the last one starts at zero.
SHAPES: list[tuple[int, ...]] = [(8, 6), (7, 5), (1, 9), (33, 3), (4, 3, 3), (9,), (3,), (6, 4)]
RELATIVE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1e-6}


# ---- tensors, whole and sharded ------------------------------------------------------------------


def weights(dtype: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    blocks = [torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in SHAPES]
    return [*blocks[:-1], torch.zeros(SHAPES[-1], dtype=dtype)]


def gradients(dtype: torch.dtype, step: int) -> list[Tensor | None]:
    """Noise around a drift; step 3 is all zeros, and the fifth block has none in every third."""
    source = torch.Generator().manual_seed(100 + step)
    result: list[Tensor | None] = []
    for i, shape in enumerate(SHAPES):
        noise = torch.randn(shape, generator=source, dtype=torch.float64)
        drift = torch.cos(torch.arange(noise.numel()) * 0.7 + 0.02 * step).reshape(shape)
        absent = i == 4 and step % 3 == 1
        result.append(None if absent else ((noise + drift) * (step != 3)).to(dtype))
    return result


def fitting(placements: Sequence[Any], x: Tensor) -> list[Any]:
    """The placements, with Replicate for a dimension that the tensor has not."""
    return [
        Replicate() if isinstance(p, Shard) and p.dim >= x.dim() else p for p in placements
    ]


def spread(x: Tensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    return distribute_tensor(x, mesh, fitting(placements, x), src_data_rank=None)


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def optimizers(
    case: Case, dtype: torch.dtype, mesh: Any, placements: Sequence[Any], **backend: Any
) -> tuple[AdamO, AdamO]:
    """The same optimizer on whole and on sharded tensors."""
    plain = [nn.Parameter(x) for x in weights(dtype)]
    sharded = [nn.Parameter(spread(x, mesh, placements)) for x in weights(dtype)]
    return (
        AdamO([{"params": plain, "rule": case.rule}], **case.options, foreach=False),
        AdamO([{"params": sharded, "rule": case.rule}], **case.options, **backend),
    )


def set_gradients(optimizer: AdamO, grads: Sequence[Tensor | None]) -> None:
    for p, g in zip(optimizer.param_groups[0]["params"], grads, strict=True):
        p.grad = g
        if isinstance(p, DTensor) and g is not None:
            p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)


def distance(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖/‖expected‖ in float64."""
    actual, expected = whole(actual).double(), whole(expected).double()
    size = float(expected.norm())
    return float((actual - expected).norm()) / (size if size > 0 else 1.0)


def compare(expected: AdamO, actual: AdamO, tolerance: float, what: str) -> None:
    """Parameters and the whole state."""
    pairs = zip(expected._parameters(), actual._parameters(), strict=True)
    for (p, name, *_), (q, *_) in pairs:
        where = f"{what}: {name} {tuple(p.shape)}"
        assert distance(q, p) < tolerance, f"{where} {distance(q, p)}"
        old, new = expected.state[p], actual.state[q]
        assert old.keys() == new.keys(), where
        for key, value in old.items():
            if key == "radial_momentum":  # an average of what may cancel: relative to ‖g‖
                size = float(old["exp_avg_sq"].sum().sqrt()) + 1.0
                error = abs(float(new[key] - value)) / size
            elif key == "previous_grad" and value.shape != p.shape:
                continue  # the ranks' parts of a slice; they show in tau
            else:
                error = distance(new[key], value)
            assert error < tolerance, f"{where} {key} {error}"


def agree(
    case: Case,
    dtype: torch.dtype,
    mesh: Any,
    placements: Sequence[Any],
    steps: int,
    **backend: Any,
) -> tuple[AdamO, AdamO]:
    expected, actual = optimizers(case, dtype, mesh, placements, **backend)
    for step in range(steps):
        for optimizer in (expected, actual):
            set_gradients(optimizer, gradients(dtype, step))
            optimizer.step()
    what = f"{case.name} {dtype} {placements}"
    compare(expected, actual, RELATIVE[dtype], what)
    return expected, actual


def mesh_1d() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


BY_NAME = {case.name: case for case in CONDITIONED}
DEFAULTS = BY_NAME["defaults"]


# ---- the trajectory ------------------------------------------------------------------------------


@check(2, 4)
def every_option_on_one_dimension(_: Path) -> None:
    mesh = mesh_1d()
    for case in CONDITIONED:
        for placement in (Shard(0), Shard(1), Replicate()):
            agree(case, torch.float64, mesh, [placement], 5)


@check(2, 4)
def fifty_steps(_: Path) -> None:
    mesh = mesh_1d()
    for backend in ({"foreach": False}, {"foreach": True}, {}):
        for dtype in (torch.float64, torch.float32):
            agree(DEFAULTS, dtype, mesh, [Shard(0)], 50, **backend)


@check(4)
def meshes_of_two_dimensions(_: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for name in ("defaults", "sampled_previous", "angular", "cosine_test"):
        for placements in (
            [Replicate(), Shard(0)],
            [Shard(0), Replicate()],
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
            [Shard(0), Shard(0)],
            [Replicate(), Replicate()],
        ):
            agree(BY_NAME[name], torch.float64, mesh, placements, 10)


# ---- the tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def on_2_ranks(folder: Path) -> dict[str, str]:
    return outcomes(__name__, 2, folder)


@pytest.fixture(scope="module")
def on_4_ranks(folder: Path, on_2_ranks: dict[str, str]) -> dict[str, str]:
    return outcomes(__name__, 4, folder)  # after the other launch, whose checkpoint it loads


@pytest.mark.parametrize("name", [function.__name__ for function in CHECKS[2]])
def test_on_2_ranks(name: str, on_2_ranks: dict[str, str]) -> None:
    error = on_2_ranks.get(name, "not run, because an earlier check failed")
    assert not error, error


@pytest.mark.parametrize("name", [function.__name__ for function in CHECKS[4]])
def test_on_4_ranks(name: str, on_4_ranks: dict[str, str]) -> None:
    error = on_4_ranks.get(name, "not run, because an earlier check failed")
    assert not error, error
