"""PyTorch's optimizer suite, the part that needs a CUDA device."""

from __future__ import annotations

import gc
import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from adamo_optim import AdamO, AngularAdamW
from torch_kit import (
    ADAMO_ENTRY,
    ENTRIES,
    TURNING_ENTRY,
    Case,
    Entry,
    Regression,
    build,
    clones,
    error_inputs,
    flat,
    gradients,
    over_backends,
    over_entries,
    over_inputs,
    set_gradients,
    slug,
    steps_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch tells those who run a capturable optimizer without a graph; these tests do so
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable:UserWarning"),
]

eager = over_backends(skip=("differentiable",), device="cuda")
every_input = over_inputs(device="cuda")
not_rows = over_inputs(device="cuda", skip=("rows",))  # which the fused kernels do not know


def on_cuda(params: list[Any]) -> list[Tensor]:
    return [p.detach().to("cuda", copy=True).requires_grad_() for p in params]


def train(optimizer: Any, params: list[Tensor], seeds: range) -> None:
    for seed in seeds:
        set_gradients(params, gradients(params, seed))
        optimizer.step()


def states(optimizer: Any, params: list[Tensor]) -> Tensor:
    return flat(optimizer.state[p][key].cpu() for p in params for key in sorted(optimizer.state[p]))


@eager
def test_a_step_on_cuda_equals_one_on_the_cpu(case: Case) -> None:
    host: list[Tensor] = list(Regression(dtype=torch.float64).params)
    device = on_cuda(host)
    on_host = build(host, case, foreach=False, fused=False, capturable=False)
    on_device = build(device, case)
    train(on_host, host, range(5))
    train(on_device, device, range(5))
    assert_close([p.detach().cpu() for p in device], clones(host))
    assert_close(states(on_device, device), states(on_host, host))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@over_inputs(device="cuda", skip=("rows",), entries=[ADAMO_ENTRY, TURNING_ENTRY])
def test_fused_matches_the_for_loop(case: Case, dtype: torch.dtype) -> None:
    """With a 0-D, an empty and a long tensor, and a block without a gradient in one step."""
    if case.kwargs.get("rounding") == "stochastic" and dtype == torch.float16:
        pytest.skip("stochastic rounding is for bfloat16, and refused for float16")
    source, ends = torch.Generator().manual_seed(4), []
    shapes: list[tuple[int, ...]] = [(40, 30), (7,), (), (0, 3), (70_001,), (16, 3, 3, 3)]
    start = [torch.randn(shape, generator=source).to(dtype) for shape in shapes]
    if case.entry.cls is AngularAdamW and dtype != torch.float32:
        # torch's forms of AdamW differ: in low precision, and in float64 by a float32 step or lr
        start = [p for p in start if p.dim() > 1]
    for flags in ({"foreach": False, "fused": False}, {"fused": True}):
        params = on_cuda(start)
        optimizer = build(params, case, **flags)
        for seed in range(4):
            grads: list[Tensor | None] = list(gradients(params, seed))
            set_gradients(params, [None if seed == 2 else grads[0], *grads[1:]])
            optimizer.step()
        ends.append(params)
    wide = {torch.float64: 1e-10, torch.float32: 1e-4}
    rounding = wide.get(dtype, 4 * torch.finfo(dtype).eps)
    for ours, theirs in zip(*reversed(ends), strict=True):
        assert_close(ours, theirs, rtol=rounding, atol=rounding)


@not_rows
@pytest.mark.parametrize("scale", [None, 8.0], ids=["no-scale", "scale"])
def test_fused_skips_the_step_when_an_infinity_was_found(case: Case, scale: float | None) -> None:
    """What a GradScaler tells a fused optimizer; it unscales by itself, too."""
    params, plain = on_cuda(Regression().params), on_cuda(Regression().params)
    before = clones(params)
    optimizer = build(params, case, fused=True)
    set_gradients(params, [g * (scale or 1.0) for g in gradients(params, 0)])
    optimizer.grad_scale = None if scale is None else torch.full((1,), scale, device="cuda")
    optimizer.found_inf = torch.ones((), device="cuda")
    optimizer.step()
    assert_close(clones(params), before, rtol=0, atol=0)
    assert all(steps_of(optimizer, p) == 0 for p in params)
    optimizer.found_inf.zero_()
    optimizer.step()
    train(build(plain, case, fused=True), plain, range(1))
    assert_close(clones(params), clones(plain))


@not_rows
def test_the_default_on_cuda_is_fused(case: Case) -> None:
    rows = build(on_cuda(Regression().params), case).explain()
    assert {row.backend for row in rows} <= {"fused", "torch fused"}


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        pytest.param(entry, error, id=slug(f"{entry.name} & {error.optimizer_error_input.desc}"))
        for entry in ENTRIES
        for error in (
            error_inputs(entry, "cuda", torch.float32) if torch.cuda.is_available() else []
        )
    ],
)
def test_errors(entry: Entry, error: Any) -> None:
    case = error.optimizer_error_input
    params = on_cuda(Regression().params) if case.params is None else case.params
    with pytest.raises(error.error_type, match=error.error_regex):
        entry.make(params, **case.kwargs).step()


@eager
def test_a_state_of_the_cpu_continues_on_cuda(case: Case) -> None:
    host: list[Tensor] = list(Regression(dtype=torch.float64).params)
    optimizer = build(host, case, foreach=False, fused=False, capturable=False)
    train(optimizer, host, range(3))
    device = on_cuda(host)
    other = build(device, case)
    state = deepcopy(optimizer.state_dict())
    flags = {key: case.kwargs.get(key, False) for key in ("foreach", "fused", "capturable")}
    state["param_groups"][0].update(flags)
    other.load_state_dict(state)
    assert all(x.device.type == "cpu" for s in state["state"].values() for x in s.values())
    train(optimizer, host, range(3, 6))
    train(other, device, range(3, 6))
    assert_close([p.detach().cpu() for p in device], clones(host))
    # as in torch, AdamW's count of steps stays on the host unless it is fused or capturable
    own = [s for s in other.state.values() if case.entry.cls is AdamO or "mean_square" in s]
    assert all(x.is_cuda for s in own for x in s.values())


@over_inputs(
    device="cuda", skip=("sampled previous", "capturable", "capturable tensor lr")
)  # its slice depends on the parameter's place in the list
def test_parameters_of_different_devices_step_as_if_alone(case: Case) -> None:
    host, device = Regression().params, on_cuda(Regression(seed=1).params)
    together: list[Tensor] = [*host, *device]
    apart: list[Tensor] = [*(p.detach().clone().requires_grad_() for p in host), *on_cuda(device)]
    optimizers = [build(together, case), *(build([p], case) for p in apart)]
    for seed in range(3):
        grads = gradients(together, seed)
        set_gradients(together, grads)
        set_gradients(apart, grads)
        for optimizer in optimizers:
            optimizer.step()
    assert_close([p.detach() for p in together], [p.detach() for p in apart])


@every_input
def test_a_captured_step_replays_like_an_eager_one(case: Case) -> None:
    """The learning rate is a tensor on the device, changed between replays as a schedule does."""
    start, ends = Regression().params, []
    for captured in (True, False):
        params = on_cuda(start)
        lr = torch.tensor(1e-3, device="cuda")
        optimizer = build(params, case, lr=lr, capturable=True)
        set_gradients(params, gradients(params, 0))
        for _ in range(3):  # warm up, on the stream that captures
            optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for seed in range(1, 5):
            for p, g in zip(params, gradients(params, seed), strict=True):
                p.grad.copy_(g)
            lr.fill_(1e-3 * seed)
            if captured:
                graph.replay()
            else:
                optimizer.step()
        ends.append((clones(params), states(optimizer, params)))
    assert_close(*ends)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # it is
@over_entries()
def test_capturing_without_capturable_is_refused(entry: Entry) -> None:
    params = on_cuda(Regression().params)
    optimizer = entry.make(params)
    train(optimizer, params, range(2))
    with (
        pytest.raises(RuntimeError, match="capturable"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@every_input
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_step_does_not_wait_for_the_device(case: Case) -> None:
    params = on_cuda(Regression().params)
    optimizer = build(params, case)
    train(optimizer, params, range(2))
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 120 * 2**30,
    reason="needs 120 GiB of device memory",
)
@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_a_tensor_of_more_than_two_to_the_31_entries(flag: str) -> None:
    """Past 32-bit indices: the last entry moves, the others do not."""
    rows, columns = 2**16 + 1, 2**15
    p = torch.ones(rows, columns, device="cuda", dtype=torch.bfloat16)
    p.grad = torch.zeros_like(p)
    p.grad[-1, -1] = 1.0
    # a step that bfloat16 resolves
    optimizer = AdamO([p], lr=0.1, radial_lr=0.0, curvature_target=None, **{flag: True})
    optimizer.step()
    assert optimizer.state[p]["initial_norm"].item() == pytest.approx(math.sqrt(rows * columns))
    assert optimizer.state[p]["exp_avg"][-1, -1].item() == pytest.approx(0.1, rel=1e-4)
    assert p[0, 0].item() == 1.0
    assert p[-1, -1].item() == pytest.approx(0.9, abs=0.01)


@over_inputs(entries=[ADAMO_ENTRY])
def test_foreach_needs_a_bounded_number_of_temporaries(case: Case) -> None:
    """In units of all parameters in float32: u, √v̂, g^θ and the step at once, at most."""
    number, size, peaks = 10, 2**18, []
    for foreach in (False, True):
        params = [torch.rand(2**9, 2**9, device="cuda") for _ in range(number)]
        optimizer = build(params, case, foreach=foreach)
        train(optimizer, params, range(1))
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del params, optimizer
    loop, at_once = (peak / (4 * number * size) for peak in peaks)
    assert at_once <= loop + 4
