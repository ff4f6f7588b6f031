"""PyTorch's optimizer suite: complex, large, empty and mixed tensors; the backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from adamo_optim import AdamO
from torch_kit import (
    ADAMO_ENTRY,
    ANGULAR_ENTRY,
    FEW,
    FOREACH,
    TURNING_ENTRY,
    Case,
    Entry,
    Regression,
    assert_same,
    build,
    clones,
    flat,
    gradients,
    over_backends,
    over_entries,
    over_inputs,
    set_gradients,
)

unfused = over_backends(skip=("differentiable", "fused"))  # torch's fused AdamW is for real numbers


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


# ---- complex --------------------------------------------------------------------------------


def complex_and_real() -> tuple[list[Tensor], list[Tensor]]:
    """Complex parameters and their real views; the last one is real, to mix both."""
    complexes = [torch.randn(10, 5, dtype=torch.complex64), torch.randn(10, dtype=torch.complex64)]
    mixed = [*complexes, torch.randn(10, 5)]
    reals = [torch.view_as_real(p).clone() if p.is_complex() else p.clone() for p in mixed]
    return [p.requires_grad_() for p in mixed], [p.requires_grad_() for p in reals]


@unfused
def test_complex_parameters_step_like_their_real_views(case: Case) -> None:
    mixed, reals = complex_and_real()
    optimizer = build(mixed, case)
    # the complex shape decides the rule, so the real views have to be told
    rules = [row.rule for row in optimizer.explain()]
    groups = [{"params": [p], "rule": rule} for p, rule in zip(reals, rules, strict=True)]
    real_optimizer = build(groups, case)
    for seed in range(5):
        grads = gradients(mixed, seed)
        set_gradients(mixed, grads)
        set_gradients(reals, [torch.view_as_real(g) if g.is_complex() else g for g in grads])
        optimizer.step()
        real_optimizer.step()
        as_reals = [torch.view_as_real(p) if p.is_complex() else p for p in mixed]
        assert_same([p.detach() for p in as_reals], [p.detach() for p in reals])


def test_the_online_test_counts_a_complex_number_as_two_reals() -> None:
    """|cos| lies between δ/√100 and δ/√50: as 100 numbers this block is not scale-invariant."""
    weight = torch.zeros(10, 5, dtype=torch.complex64)
    weight[0, 0] = 1.0
    grad = torch.zeros_like(weight)
    grad[0, 0], grad[1, 0] = 0.06, (1 - 0.06**2) ** 0.5
    found = []
    for p, g in [(weight, grad), (torch.view_as_real(weight), torch.view_as_real(grad))]:
        p = p.clone().requires_grad_()
        p.grad = g.clone()
        optimizer = AdamO([p], delta=0.5, weight_decay=0.0)
        optimizer.step()
        (row,) = optimizer.diagnostics(synchronize=True).values()
        found.append(row["scale_invariant"])
    assert found == [0.0, 0.0]


def rosenbrock(point: Tensor) -> Tensor:
    x, y = point
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


@unfused
def test_a_complex_vector_steps_like_its_real_and_imaginary_parts(case: Case) -> None:
    """Adam is elementwise, so this holds for blocks of the low-dim rule, whatever the options."""
    start = torch.randn(2, dtype=torch.complex64)
    whole = start.clone().requires_grad_()
    parts = [start.real.clone().requires_grad_(), start.imag.clone().requires_grad_()]
    optimizer, part_optimizer = build([whole], case), build(parts, case)
    if case.entry.cls is AdamO:
        optimizer.param_groups[0]["rule"] = part_optimizer.param_groups[0]["rule"] = "low_dim"
    for _ in range(5):
        optimizer.zero_grad()
        part_optimizer.zero_grad()
        rosenbrock(whole).abs().backward()
        rosenbrock(torch.complex(*parts)).abs().backward()
        optimizer.step()
        part_optimizer.step()
        assert_close(torch.view_as_real(whole.detach()).unbind(-1), tuple(clones(parts)))
    assert not torch.equal(whole.detach(), start)


# ---- foreach against the for-loop -----------------------------------------------------------


def foreach_inputs(only: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """The inputs with which foreach=True is legal."""
    cases = over_inputs(only=only).args[1]
    legal = [c for c in cases if c.entry.is_legal({**c.kwargs, "foreach": True}, "cpu")]
    return pytest.mark.parametrize("case", legal, ids=lambda case: case.id)


def small_net(dtype: torch.dtype) -> tuple[nn.Sequential, list[Tensor]]:
    """A network, and its parameters with a 0-D and two empty ones appended."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(dtype)
    extra = [torch.rand((), dtype=dtype), torch.rand(0, dtype=dtype), torch.rand(0, 3, dtype=dtype)]
    for p in extra:
        p.requires_grad_().grad = torch.rand_like(p)
    return net, [*net.parameters(), *extra]


def run_small_net(
    case: Case, dtype: torch.dtype, **flags: Any
) -> Iterator[tuple[list[Tensor], list[dict[str, Any]]]]:
    """Seven steps; the third has no gradients, and a layer is frozen for two of them."""
    net, params = small_net(dtype)
    optimizer = build(params, case, **flags)
    batch = torch.arange(1, 7, dtype=dtype).reshape(3, 2) / 10
    for step in range(7):
        for p in net.parameters():
            p.grad = None
        net[2].requires_grad_(step not in (3, 4))
        if step != 2:
            net(batch).sum().backward()
        optimizer.step()
        yield params, [optimizer.state[p] for p in params]


def assert_backends_agree(case: Case, dtype: torch.dtype) -> None:
    runs = (run_small_net(case, dtype, foreach=foreach) for foreach in (False, True))
    for (loop, loop_states), (foreach, foreach_states) in zip(*runs, strict=True):
        assert_close(flat(foreach), flat(loop))
        for ours, theirs in zip(foreach_states, loop_states, strict=True):
            assert {k: x.dtype for k, x in ours.items()} == {k: x.dtype for k, x in theirs.items()}
            assert_close(flat(ours.values()), flat(theirs[key] for key in ours))


@foreach_inputs()
def test_foreach_matches_the_for_loop(case: Case) -> None:
    assert_backends_agree(case, torch.float64)


@foreach_inputs(only=FEW)
@pytest.mark.parametrize("default_dtype", [torch.float64, torch.float16], ids=str, indirect=True)
def test_foreach_matches_the_for_loop_under_another_default_dtype(
    case: Case, default_dtype: torch.dtype
) -> None:
    assert_backends_agree(case, torch.float64)


@pytest.mark.parametrize("default_dtype", [torch.float64, torch.float16], ids=str, indirect=True)
@over_backends(skip=("differentiable",), only=("default",))
def test_the_default_dtype_changes_no_step(default_dtype: torch.dtype, case: Case) -> None:
    under_default = Regression()
    assert under_default.weight.dtype == torch.float32
    under_default.train(build(under_default.params, case), 5)
    torch.set_default_dtype(torch.float32)
    plain = Regression()
    plain.train(build(plain.params, case), 5)
    assert_same(clones(under_default.params), clones(plain.params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@over_entries([ADAMO_ENTRY, TURNING_ENTRY])
def test_the_backends_agree_on_large_tensors(entry: Entry, dtype: torch.dtype) -> None:
    """They go through them in pieces."""
    ends = []
    for flags in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        source = torch.Generator().manual_seed(5)
        params = [torch.randn(700, 900, generator=source), torch.randn(300_001, generator=source)]
        params = [p.to(dtype).requires_grad_() for p in params]
        optimizer = entry.make(params[: 1 if entry.turns else 2], **flags)
        for seed in range(3):
            set_gradients(params, gradients(params, seed))
            optimizer.step()
        own = optimizer.param_groups[0]["params"]
        ends.append([*clones(own), *(optimizer.state[p]["exp_avg"] for p in own)])
    for end in ends[1:]:
        assert_close(end, ends[0])


def mixed_parameters() -> list[Tensor]:
    source = torch.Generator().manual_seed(6)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
    shapes: tuple[tuple[int, ...], ...] = ((4, 3), (3,))
    return [
        torch.rand(shape, generator=source).to(dtype).requires_grad_()
        for dtype in dtypes
        for shape in shapes
    ]


@foreach_inputs()
def test_foreach_matches_the_for_loop_with_mixed_dtypes(case: Case) -> None:
    runs = []
    for foreach in (False, True):
        params = mixed_parameters()
        if case.kwargs.get("rounding") == "stochastic":  # which float16 refuses
            params = [p for p in params if p.dtype != torch.float16]
        optimizer = build(params, case, foreach=foreach)
        for seed in range(4):
            set_gradients(params, gradients(params, seed))
            optimizer.step()
        runs.append((params, [dict(optimizer.state[p]) for p in params]))
    (loop, loop_states), (foreach, foreach_states) = runs
    for ours, theirs in zip([*foreach, *foreach_states], [*loop, *loop_states], strict=True):
        assert_close(ours, theirs)


@FOREACH
@over_entries()
def test_parameters_of_other_dtypes_change_nothing(entry: Entry, foreach: bool) -> None:
    together, apart = mixed_parameters(), mixed_parameters()
    optimizers = [entry.make(together, foreach=foreach)]
    optimizers += [entry.make([p], foreach=foreach) for p in apart]
    for seed in range(3):
        grads = gradients(together, seed)
        set_gradients(together, grads)
        set_gradients(apart, grads)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(clones(together), clones(apart))


@pytest.mark.parametrize("kind", ["for-loop", "foreach", "differentiable", "fused"])
def test_the_backend_asked_for_is_the_backend_used(kind: str) -> None:
    flags = {flag: kind == flag for flag in ("foreach", "differentiable", "fused")}
    found = [
        {
            row.name.split(".")[1]: row.backend
            for row in make(Regression().params, **flags).explain()
        }
        for make in (ADAMO_ENTRY.make, ANGULAR_ENTRY.make, TURNING_ENTRY.make)
    ]
    torchs = "torch for-loop" if kind == "differentiable" else f"torch {kind}"
    ours = kind if kind in ("differentiable", "fused") else "torch calls"
    assert found == [
        {"param0": kind, "param1": kind},
        {"param0": torchs, "param1": torchs},
        {"param0": ours, "param1": torchs},
    ]


def test_the_default_backend_on_the_cpu() -> None:
    """Never foreach, as in torch: lists of tensors gain nothing there."""
    for make, expected in (
        (ADAMO_ENTRY.make, ["fused", "fused"]),
        (ANGULAR_ENTRY.make, ["torch fused", "torch fused"]),
        (TURNING_ENTRY.make, ["fused", "torch fused"]),
    ):
        assert [row.backend for row in make(Regression().params).explain()] == expected


@FOREACH
@over_entries()
def test_parameters_without_storage_are_left_alone(entry: Entry, foreach: bool) -> None:
    """A model on the meta device can have an optimizer, which does nothing there."""
    net = nn.Linear(3, 2, device="meta")
    optimizer = entry.make(net.parameters(), foreach=foreach)
    for p in net.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    assert all(p.is_meta for p in net.parameters())
