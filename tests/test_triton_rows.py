"""``block="row"`` in the CUDA kernels, in Triton's interpreter: rows in registers and long ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adamo_optim import AdamO
from oracle import RELATIVE, ROW_CASES, Case, adamo_for, compare, expected_end, train
from test_triton import fused_step, give_gradients, parameters

cuda = pytest.importorskip("adamo_optim.cuda")
if cuda.missing:
    pytest.skip(cuda.missing, allow_module_level=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py runs them for real"),
]
STEPS = 3


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter reduces entry by entry, in Python."""
    monkeypatch.setattr(cuda.cuda_rows, "COMMON", 8)


@pytest.mark.slow
@pytest.mark.parametrize("case", ROW_CASES, ids=lambda case: case.name)
def test_rows_agree_with_the_reference(case: Case) -> None:
    dtype = torch.bfloat16 if case.name == "rows_stochastic" else torch.float32
    optimizer = train(adamo_for(case, dtype, foreach=False), STEPS, fused_step)
    compare(optimizer, expected_end(case, dtype, STEPS), RELATIVE[dtype])


@pytest.mark.slow
def test_float64_agrees_with_the_reference() -> None:
    optimizer = train(adamo_for(ROW_CASES[0], torch.float64, foreach=False), STEPS, fused_step)
    compare(optimizer, expected_end(ROW_CASES[0], torch.float64, STEPS), 1e-10)


KINDS = [
    pytest.param((6, 12), {}, id="small"),
    pytest.param((4, 24), {"SMALL": 0}, id="head and tail"),
    pytest.param((3, 16), {"SMALL": 0}, id="head alone"),
    pytest.param((3, 22), {"SMALL": 0}, id="a masked tail"),
    pytest.param((3, 70), {"REGISTERS": 32}, id="long"),
]


@pytest.mark.parametrize(("shape", "limits"), KINDS)
@pytest.mark.parametrize("previous", ["exact", None])
def test_every_kind_of_row(
    shape: tuple[int, int],
    limits: dict[str, int],
    previous: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a vector, and a tensor that is one block and too large for a program."""
    monkeypatch.setattr(cuda.cuda_rows, "REGISTERS", 80)
    for name, value in limits.items():
        monkeypatch.setattr(cuda.cuda_rows, name, value)
    ends = []
    for step in (AdamO.step, fused_step):
        params = parameters((5,), shape, (2, 9, 3), (1, 90))
        params.append(nn.Parameter(torch.view_as_complex(parameters((3, 4, 2))[0].detach())))
        options = {} if previous else {"curvature_target": None}
        optimizer = AdamO(params, block="row", foreach=False, **options)
        for seed in range(3):
            give_gradients(params, seed)
            if seed == 1:
                params[1].grad[0] = float("nan")  # one row is left alone
                params[2].grad = None
            step(optimizer)
        ends.append([[p.detach(), *optimizer.state[p].values()] for p in params])
        shown = optimizer.diagnostics(synchronize=True)
        ends[-1].append([shown[f"group0.param{i}"]["norm"] for i in (0, 1)])
    for a, b in zip(*ends, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_found_inf_and_scale() -> None:
    ends = []
    for amp in ({}, {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)}):
        params = parameters((4, 6), (9,))
        optimizer = AdamO(params, block="row", foreach=False)
        for seed in range(2):
            give_gradients(params, seed, 8.0 if amp else 1.0)
            fused_step(optimizer, **amp)
        ends.append([p.detach().clone() for p in params])
    for x, y in zip(*ends, strict=True):
        torch.testing.assert_close(x, y)
    before = [x.clone() for p in params for x in (p.detach(), *optimizer.state[p].values())]
    fused_step(optimizer, grad_scale=torch.tensor(8.0), found_inf=torch.tensor(1.0))
    after = [x for p in params for x in (p.detach(), *optimizer.state[p].values())]
    assert all(map(torch.equal, before, after))


def test_channels_last_rows_are_one_piece_of_memory() -> None:
    ends = []
    for step in (AdamO.step, fused_step):
        (p,) = parameters((8, 6, 3, 3))
        p = nn.Parameter(p.detach().contiguous(memory_format=torch.channels_last))
        optimizer = AdamO([p], block="row", foreach=False)
        for seed in range(3):
            give_gradients([p], seed)
            step(optimizer)
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
