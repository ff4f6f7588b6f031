"""On a real GPU: every backend against the reference, no synchronisation, graphs, AMP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO
from oracle import CASES, LOWER_PRECISION, RELATIVE, Case, compare, expected_end, run

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


@pytest.mark.parametrize(("case", "dtype"), LOWER_PRECISION)
def test_fused_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    expected = expected_end(case, dtype, 40)
    compare(run(case, dtype, 40, device="cuda", fused=True), expected, RELATIVE[dtype])


@pytest.mark.parametrize("name", ["defaults", "paper", "sampled_previous", "cosine_test"])
def test_foreach_agrees_with_the_reference_in_float64(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    optimizer = run(case, torch.float64, 60, device="cuda", foreach=True)
    compare(optimizer, expected_end(case, torch.float64, 60), RELATIVE[torch.float64])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 10)]
    return nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)


def batch(seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, 8, 8, generator=source).cuda()
    return x.contiguous(memory_format=torch.channels_last)


@EVERY_BACKEND
def test_a_step_does_not_synchronise(backend: dict[str, Any]) -> None:
    model = network()
    optimizer = AdamO(model.parameters(), **backend)
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


@EVERY_BACKEND
def test_captured_graphs_see_new_learning_rates(backend: dict[str, Any]) -> None:
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(s, device="cuda")) for s in ((33, 17), (9,), (300, 40))]
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = AdamO(params, lr=lr, capturable=True, **backend)
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
        ends.append([[p.detach(), *optimizer.state[p].values()] for p in params])
    for a, b in zip(*ends, strict=True):
        assert int(a[1]) == 8
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@EVERY_BACKEND
def test_capture_needs_capturable(backend: dict[str, Any]) -> None:
    p = nn.Parameter(torch.randn(4, 3, device="cuda"))
    p.grad = torch.randn_like(p)
    optimizer = AdamO([p], **backend)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturable"), torch.cuda.graph(graph):
        optimizer.step()


def test_fused_runs_are_bit_identical() -> None:
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(s, device="cuda")) for s in ((1000, 701), (64, 33, 3, 3))
        ]
        optimizer = AdamO(params, fused=True)
        for _ in range(10):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        ends.append([[p.detach(), *optimizer.state[p].values()] for p in params])
    for a, b in zip(*ends, strict=True):
        assert all(map(torch.equal, a, b))


def test_the_number_of_launches_does_not_depend_on_the_number_of_tensors() -> None:
    counts = []
    for copies in (2, 40):
        params = [nn.Parameter(torch.randn(50, 30, device="cuda")) for _ in range(copies)]
        optimizer = AdamO(params, fused=True)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        counts.append(sum(e.count for e in profile.key_averages() if e.device_time_total > 0))
    assert counts[0] == counts[1] <= 6


@EVERY_BACKEND
def test_gradscaler_skips_and_unscales(backend: dict[str, Any]) -> None:
    model, twin = network(), network()
    optimizer, other = AdamO(model.parameters(), **backend), AdamO(twin.parameters(), **backend)
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
        assert int(optimizer.state[p]["step"]) == 5


def test_gradients_that_are_unaligned_or_laid_out_otherwise() -> None:
    ends = []
    for fused in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(s, device="cuda")) for s in ((37, 41), (16, 8, 3, 3))]
        optimizer = AdamO(params, fused=fused, foreach=None if fused else True)
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


def test_checkpoints_move_between_devices_and_backends() -> None:
    model = network()
    optimizer = AdamO(model.parameters(), fused=True)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = network()
    other.load_state_dict(model.state_dict())
    resumed = AdamO(other.parameters(), foreach=True)
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
    cpu = AdamO(on_cpu.parameters(), foreach=False)
    cpu.load_state_dict(saved)
    assert all(x.device.type == "cpu" for s in cpu.state.values() for x in s.values())


def test_the_default_is_fused_and_explain_says_why_not() -> None:
    plain = nn.Parameter(torch.randn(4, 3, device="cuda"))
    double = nn.Parameter(torch.randn(4, 3, device="cuda", dtype=torch.float64))
    rows = AdamO([("a", plain), ("b", double)]).explain()
    assert [row.backend for row in rows] == ["fused", "foreach"]
    assert "float64" in rows[1].note
    with pytest.raises(RuntimeError, match=r"fused=True cannot be honoured for b.*float64"):
        AdamO([("b", double)], fused=True)


@EVERY_BACKEND
def test_a_graph_outlives_what_eager_steps_replace(backend: dict[str, Any]) -> None:
    """Numbers and masks of a captured step are the graph's own, whatever comes after it."""
    p, q = (nn.Parameter(torch.randn(64, 32, device="cuda")) for _ in range(2))
    lr = torch.tensor(1e-2, device="cuda")
    optimizer = AdamO([p, q], lr=lr, capturable=True, **backend)
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
