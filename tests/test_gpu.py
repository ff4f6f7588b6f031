"""On a real GPU: every backend against the reference, no synchronisation, graphs, AMP."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO, AngularAdamW
from oracle import (
    CASES,
    RELATIVE,
    ROW_CASES,
    TURNS,
    Case,
    adamo_for,
    angular_for,
    compare,
    compare_turns,
    distance,
    expected_end,
    expected_turns,
    in_lower_precision,
    train,
)
from test_laws import FAMILIES, agree, launch_laws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),
]
BACKENDS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))


def adamo(params: Any, **options: Any) -> AdamO:
    return AdamO(params, **options)


def angular(params: Any, **options: Any) -> AngularAdamW:
    """Every matrix turns."""
    params = list(params)
    turning = [p for p in params if p.dim() > 1]
    others = [p for p in params if p.dim() <= 1]
    groups = [{"params": turning, "rule": "scale_invariant"}, {"params": others}]
    return AngularAdamW([group for group in groups if group["params"]], **options)


def by_row(params: Any, **options: Any) -> AdamO:
    return AdamO(params, block="row", **options)


EVERY_OPTIMIZER = pytest.mark.parametrize("make", [adamo, angular, by_row])


@pytest.mark.parametrize(("case", "dtype"), in_lower_precision([*CASES, *ROW_CASES]))
def test_fused_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    optimizer = train(adamo_for(case, dtype, "cuda", fused=True), 40)
    compare(optimizer, expected_end(case, dtype, 40), RELATIVE[dtype])


@pytest.mark.parametrize(("case", "dtype"), in_lower_precision(TURNS))
def test_fused_turns_agree_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    optimizer = train(angular_for(case, dtype, "cuda", fused=True), 40)
    compare_turns(optimizer, expected_turns(case, dtype, 40), RELATIVE[dtype])


@pytest.mark.parametrize("case", [*CASES, *ROW_CASES], ids=lambda case: case.name)
def test_fused_agrees_with_the_reference_in_float64(case: Case) -> None:
    steps = 12 if case.ill_conditioned else 60
    optimizer = train(adamo_for(case, torch.float64, "cuda", fused=True), steps)
    compare(optimizer, expected_end(case, torch.float64, steps), RELATIVE[torch.float64])


@EVERY_OPTIMIZER
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_complex_weight_is_one_of_real_numbers(dtype: torch.dtype, make: Any) -> None:
    start, *grads = torch.randn(6, 300, 41, dtype=dtype, device="cuda")
    p, twin = nn.Parameter(start.clone()), nn.Parameter(torch.view_as_real(start).clone())
    for x in (p, twin):
        optimizer = make([x], fused=True)
        for g in grads:
            x.grad = g.conj() if x is p else torch.view_as_real(g.conj().resolve_conj())
            optimizer.step()
    assert not torch.equal(torch.view_as_real(start), twin)
    assert torch.equal(torch.view_as_real(p.detach()), twin.detach())


@pytest.mark.parametrize("name", ["defaults", "paper", "sampled_previous", "cosine_test", "rows"])
def test_foreach_agrees_with_the_reference_in_float64(name: str) -> None:
    case = next(case for case in [*CASES, *ROW_CASES] if case.name == name)
    optimizer = train(adamo_for(case, torch.float64, "cuda", foreach=True), 60)
    compare(optimizer, expected_end(case, torch.float64, 60), RELATIVE[torch.float64])


@EVERY_BACKEND
@pytest.mark.parametrize("case", TURNS, ids=lambda case: case.name)
def test_turns_agree_in_float64(case: Case, backend: dict[str, Any]) -> None:
    optimizer = train(angular_for(case, torch.float64, "cuda", **backend), 60)
    compare_turns(optimizer, expected_turns(case, torch.float64, 60), RELATIVE[torch.float64])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_laws_on_the_device(family: str) -> None:
    from adamo_optim import triton_kernels as kernels

    numbers, laws, memory_of, names = FAMILIES[family]
    options, traits, memory, record, active = numbers(3)
    after, rows = laws(options, traits, memory, record, active)
    there = [x.cuda() for x in (options, traits, memory, record, active)]
    launch_laws(kernels, family, *there)
    if family == "adamo":
        live, products = rows[names.index("live")] > 0, slice(5, 7)
        rows[products] = torch.where(live, rows[products], 0)
    agree(there[2].cpu(), after, memory_of._fields)
    agree(there[3].cpu()[:, active], rows[:, active], names)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.Flatten(),
        nn.Linear(16 * 36, 10),
    ]
    return nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)


def batch(seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, 8, 8, generator=source).cuda()
    return x.contiguous(memory_format=torch.channels_last)


@EVERY_OPTIMIZER
@EVERY_BACKEND
def test_a_step_does_not_synchronise(backend: dict[str, Any], make: Any) -> None:
    model = network()
    optimizer = make(model.parameters(), lr=5e-4, **backend)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(6):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        if step >= 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
            optimizer.diagnostics()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scheduler.step()


@EVERY_OPTIMIZER
@EVERY_BACKEND
def test_captured_graphs_see_new_learning_rates(backend: dict[str, Any], make: Any) -> None:
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(s, device="cuda")) for s in ((33, 17), (9,), (300, 40))]
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = make(params, lr=lr, capturable=True, **backend)
        grads = [torch.zeros_like(p) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        graph = torch.cuda.CUDAGraph()
        for step in range(8):
            source = torch.Generator("cuda").manual_seed(step)
            for g in grads:
                g.copy_(torch.randn(g.shape, device="cuda", generator=source))
            lr.fill_(1e-2 * 0.8**step)
            if captured and step == 3:
                with torch.cuda.graph(graph):
                    optimizer.step()
            if captured and step >= 3:
                graph.replay()
            else:
                optimizer.step()
        assert all(optimizer.state[p]["step"].eq(8).all() for p in params)
        ends.append([[p.detach(), *optimizer.state[p].values()] for p in params])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@EVERY_OPTIMIZER
@EVERY_BACKEND
def test_capture_needs_capturable(backend: dict[str, Any], make: Any) -> None:
    p = nn.Parameter(torch.randn(4, 3, device="cuda"))
    p.grad = torch.randn_like(p)
    optimizer = make([p], **backend)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturable"), torch.cuda.graph(graph):
        optimizer.step()


@EVERY_OPTIMIZER
def test_fused_runs_are_bit_identical(make: Any) -> None:
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(s, device="cuda")) for s in ((1000, 701), (64, 33, 3, 3))
        ]
        optimizer = make(params, fused=True)
        for _ in range(10):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        ends.append([[p.detach(), *optimizer.state[p].values()] for p in params])
    for a, b in zip(*ends, strict=True):
        assert all(map(torch.equal, a, b))


def test_rows_of_every_length() -> None:
    """In registers, with a tail or a mask, and longer ones; one row and one tensor left alone."""
    shapes = [(5,), (300, 768), (512, 768), (64, 3072), (8, 9000), (4096, 64), (33, 147)]
    shapes += [(1024, 2304), (3, 8192), (1, 20000), (7, 5, 3, 3), (129, 4608), (4097, 100)]
    ends = []
    for fused in (False, True):
        source = torch.Generator("cuda").manual_seed(0)
        draw = functools.partial(torch.randn, device="cuda", generator=source)
        params = [nn.Parameter(draw(shape) / 10) for shape in shapes]
        optimizer = AdamO(params, block="row", fused=fused, lr=3e-3)
        for step in range(4):
            for p in params:
                p.grad = draw(p.shape)
            if step == 2:
                params[1].grad[3] = torch.nan
                params[2].grad = None
            optimizer.step()
        ends.append([[p.detach(), *optimizer.state[p].values()] for p in params])
    for these, those in zip(*ends, strict=True):
        for x, y in zip(these, those, strict=True):
            assert distance(x, y.cpu()) < 1e-6


@EVERY_OPTIMIZER
def test_the_number_of_launches_does_not_depend_on_the_number_of_tensors(make: Any) -> None:
    counts = []
    for copies in (2, 40):
        params = [nn.Parameter(torch.randn(50, 30, device="cuda")) for _ in range(copies)]
        optimizer = make(params, fused=True)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        counts.append(sum(e.count for e in profile.key_averages() if e.device_time_total > 0))
    assert counts[0] == counts[1] <= 6


@EVERY_OPTIMIZER
@EVERY_BACKEND
def test_gradscaler_skips_and_unscales(backend: dict[str, Any], make: Any) -> None:
    model, twin = network(), network()
    optimizer, other = (make(m.parameters(), lr=5e-4, **backend) for m in (model, twin))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=1000)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).square().mean()).backward()
        if step == 2:
            model[0].weight.grad[0, 0, 0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            continue
        other.zero_grad()
        twin(batch(step)).square().mean().backward()
        other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert optimizer.state[p]["step"].eq(5).all()


@EVERY_OPTIMIZER
def test_gradients_that_are_unaligned_or_laid_out_otherwise(make: Any) -> None:
    ends = []
    for fused in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(s, device="cuda")) for s in ((37, 41), (16, 8, 3, 3))]
        optimizer = make(params, fused=fused, foreach=None if fused else True)
        for step in range(5):
            source = torch.Generator("cuda").manual_seed(step)
            flat = torch.randn(37 * 41 + 1, device="cuda", generator=source)
            params[0].grad = flat[1:].view(37, 41)  # as DDP's bucket views are
            g = torch.randn(16, 8, 3, 3, device="cuda", generator=source)
            params[1].grad = g.contiguous(memory_format=torch.channels_last)
            optimizer.step()
        ends.append(params)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@EVERY_OPTIMIZER
def test_checkpoints_move_between_devices_and_backends(make: Any) -> None:
    model = network()
    optimizer = make(model.parameters(), lr=5e-4, fused=True)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = network()
    other.load_state_dict(model.state_dict())
    resumed = make(other.parameters(), foreach=True)
    resumed.load_state_dict(saved)
    for group in resumed.param_groups:
        group.update(fused=None, foreach=True)
    for net, o in ((model, optimizer), (other, resumed)):
        o.zero_grad()
        net(batch(1)).square().mean().backward()
        o.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    on_cpu = network().cpu()
    cpu = make(on_cpu.parameters(), foreach=False)
    cpu.load_state_dict(saved)
    assert all(x.device.type == "cpu" for s in cpu.state.values() for x in s.values())


def test_the_default_is_fused_and_explain_says_why_not() -> None:
    plain = nn.Parameter(torch.randn(4, 3, device="cuda"))
    strided = nn.Parameter(torch.randn(8, 3, device="cuda")[::2])
    rows = AdamO([("a", plain), ("b", strided)]).explain()
    assert [row.backend for row in rows] == ["fused", "foreach"]
    assert "strided" in rows[1].note
    with pytest.raises(RuntimeError, match=r"fused=True cannot be honoured for b.*strided"):
        AdamO([("b", strided)], fused=True)


@EVERY_OPTIMIZER
@EVERY_BACKEND
def test_a_graph_outlives_what_eager_steps_replace(backend: dict[str, Any], make: Any) -> None:
    """Numbers and masks of a captured step are the graph's own, whatever comes after it."""
    p, q = (nn.Parameter(torch.randn(64, 32, device="cuda")) for _ in range(2))
    lr = torch.tensor(1e-2, device="cuda")
    optimizer = make([p, q], lr=lr, capturable=True, **backend)
    p.grad, q.grad = torch.randn_like(p), torch.randn_like(q)
    for _ in range(3):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    kept = q.grad
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.3
    q.grad = None
    optimizer.step()  # with other numbers and another mask
    q.grad = kept
    junk = [torch.full((64,), float("nan"), device="cuda", dtype=torch.float64) for _ in range(200)]
    before = p.detach().clone(), q.detach().clone()
    graph.replay()
    torch.cuda.synchronize()
    assert len(junk) == 200
    for new, old in zip((p, q), before, strict=True):
        assert new.isfinite().all()
        assert not torch.equal(new, old)
