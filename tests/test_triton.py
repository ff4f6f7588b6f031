"""The fused CUDA kernels in Triton's interpreter, against the reference and the law."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO, AngularAdamW
from oracle import (
    CASES,
    RELATIVE,
    TURNS,
    Case,
    adamo_for,
    angular_for,
    compare,
    compare_turns,
    expected_end,
    expected_turns,
    train,
)

cuda = pytest.importorskip("adamo_optim.cuda")
if cuda.missing:
    pytest.skip(cuda.missing, allow_module_level=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py runs them for real"),
]

# The interpreter runs programs one after another: the options that change a kernel, and few
# steps; the laws are fuzzed in tests/test_laws.py.
STEPS = 3
KERNELS = (
    "defaults",
    "no_curvature",
    "sampled_previous",
    "bfloat16_previous",
    "low_dim",
    "maximize",
)
BY_NAME = {case.name: case for case in CASES}


def fused_step(optimizer: Any, **amp: Any) -> None:
    """A step with the CUDA kernels on CPU tensors; what follows AdamW is left alone."""
    kind = cuda.TurnWork if isinstance(optimizer, AngularAdamW) else cuda.Work
    with torch.no_grad():
        for bucket in optimizer._buckets():
            grads = bucket.prepare()
            if grads is not None:
                kind(bucket, grads, bucket.options(), **amp).run()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_kernels_agree_with_the_reference(name: str, dtype: torch.dtype) -> None:
    check(BY_NAME[name], dtype, STEPS)


def test_zero_and_absent_gradients_on_the_way() -> None:
    check(BY_NAME["defaults"], torch.float32, 8)


def test_state_that_moves_between_steps() -> None:
    """As where it is offloaded: the tensors stay, and their memory is another."""

    def step(optimizer: Any) -> None:
        for state in optimizer.state.values():
            for key in state.keys() & {"exp_avg", "exp_avg_sq", "previous_grad"}:
                state[key].data = state[key].data.clone()
        fused_step(optimizer)

    check(BY_NAME["defaults"], torch.float32, STEPS, step)


def check(
    case: Case, dtype: torch.dtype, steps: int, step: Callable[[Any], None] = fused_step
) -> None:
    optimizer = train(adamo_for(case, dtype, foreach=False), steps, step)
    compare(optimizer, expected_end(case, dtype, steps), RELATIVE[dtype])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_turns_agree_with_the_reference(dtype: torch.dtype) -> None:
    for case in (*TURNS[:3], TURNS[-1]):
        optimizer, expected = (
            angular_for(case, dtype, foreach=False),
            expected_turns(case, dtype, 4),
        )
        followers = {p for p in optimizer.param_groups[0]["params"] if p.numel() < 2 or not p.any()}
        train(optimizer, 4, lambda o: (fused_step(o), adamw_step(o)))
        assert followers
        compare_turns(optimizer, expected, RELATIVE[dtype])


def adamw_step(optimizer: AngularAdamW) -> None:
    """Torch's part of a step."""
    with torch.no_grad():
        for group, following in zip(
            optimizer.param_groups, optimizer._layout.following, strict=True
        ):
            following.step(group, optimizer)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("defaults", torch.bfloat16),
        ("sampled_previous", torch.bfloat16),
        ("stochastic_rounding", torch.bfloat16),
        ("defaults", torch.float16),
    ],
    ids=str,
)
def test_low_precision_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    check(BY_NAME[name], dtype, STEPS)


@pytest.mark.parametrize("previous", ["exact", "sampled", None])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_complex_weight_is_one_of_real_numbers(dtype: torch.dtype, previous: str | None) -> None:
    """None: of AngularAdamW. A gradient may be a lazy conjugate, and laid out otherwise."""
    source = torch.Generator().manual_seed(2)
    start, *grads = torch.randn(4, 40, 36, dtype=dtype, generator=source)
    p, twin = nn.Parameter(start.clone()), nn.Parameter(torch.view_as_real(start).clone())
    options = {"foreach": False, "lr": 0.01}
    for x in (p, twin):
        rule = [{"params": [x], "rule": "scale_invariant"}]
        options |= {} if previous is None else {"previous_gradient": previous}
        optimizer: Any = (AngularAdamW if previous is None else AdamO)(rule, **options)
        for g in grads:
            lazy = g.T.contiguous().T.conj()
            x.grad = lazy if x is p else torch.view_as_real(lazy.resolve_conj()).clone()
            fused_step(optimizer)
    assert not torch.equal(torch.view_as_real(start), twin)
    torch.testing.assert_close(torch.view_as_real(p.detach()), twin.detach(), rtol=0, atol=0)


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    source = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=source) * scale).to(p.dtype)


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=source)) for shape in shapes]


CHANNELS_LAST = torch.channels_last


@pytest.mark.parametrize("previous", ["exact", "sampled"])
@pytest.mark.parametrize("how", ["loaded", "converted"])
def test_a_state_in_another_layout_is_laid_out_anew(how: str, previous: str) -> None:
    """Kernels see addresses only: moments of one layout must not meet weights of another."""
    ends = []
    for step in (fused_step, AdamO.step):
        (p,) = parameters((32, 6, 3, 3))
        optimizer = AdamO([p], foreach=False, fused=False, previous_gradient=previous)
        for seed in range(5):
            if seed == 2:
                p.data = p.data.contiguous(memory_format=CHANNELS_LAST)
                if how == "loaded":
                    saved = optimizer.state_dict()
                    optimizer = AdamO([p], foreach=False, fused=False, previous_gradient=previous)
                    optimizer.load_state_dict(saved)
            give_gradients([p], seed)
            step(optimizer)
        ends.append((p.detach(), *optimizer.state[p].values()))
        assert optimizer.state[p]["exp_avg"].stride() == p.stride()
    for x, y in zip(*ends, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


def test_chunks_tails_and_layouts() -> None:
    """Tensors larger than a chunk, odd tails, channels_last, another layout of the gradient."""
    make = [(70, 67), (3, 1024), (16, 8, 3, 3), (33,), (0, 4)]
    ends = []
    for fused in (False, True):
        params = parameters(*make)
        params[2] = nn.Parameter(params[2].detach().contiguous(memory_format=torch.channels_last))
        optimizer = AdamO(params, foreach=False)
        for seed in range(3):
            give_gradients(params, seed)
            params[0].grad = params[0].grad.T.contiguous().T
            optimizer.step() if not fused else fused_step(optimizer)
        ends.append(params)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def no_gradient(p: nn.Parameter, _: AdamO) -> None:
    p.grad = None


def broken_gradient(p: nn.Parameter, _: AdamO) -> None:
    p.grad = torch.full_like(p, torch.nan)


def reloaded(p: nn.Parameter, optimizer: AdamO) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    p.grad = None


# What somebody does between two steps, before the second of them.
TOUCHED: dict[str, Callable[[nn.Parameter, AdamO], Any]] = {
    "weight": lambda p, _: p.detach().add_(torch.linspace(-1, 1, 108).reshape(12, 9)),
    "data": lambda p, _: p.data.mul_(1.5),
    "moment": lambda p, o: o.state[p]["exp_avg"].add_(torch.linspace(0, 1, 108).reshape(12, 9)),
    "no gradient": no_gradient,
    "broken gradient": broken_gradient,
    "reloaded": reloaded,
}


@pytest.mark.parametrize("touch", TOUCHED.values(), ids=TOUCHED)
def test_what_happens_between_steps_is_noticed(touch: Callable[..., Any]) -> None:
    ends = []
    for step in (AdamO.step, fused_step):
        params = parameters((12, 9), (7, 5))
        optimizer = AdamO(params, foreach=False, lr=0.05)
        for seed in range(4):
            give_gradients(params, seed)
            if seed == 2:
                touch(params[0], optimizer)
            step(optimizer)
        ends.append([(p.detach(), optimizer.state[p]["exp_avg"]) for p in params])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_another_default_device_changes_nothing() -> None:
    ends = []
    for context in (nullcontext(), torch.device("meta")):
        params = parameters((12, 9))
        optimizer = AdamO(params, foreach=False)
        for seed in range(2):
            give_gradients(params, seed)
            with context:
                fused_step(optimizer)
        ends.append(params[0].detach())
    assert torch.equal(*ends)


def test_a_gradient_in_its_parameters_layout_is_not_copied() -> None:
    """The stride of a dimension with one place means nothing: 1×1 convolutions have odd ones."""
    (p,) = parameters((6, 5, 1, 1))
    optimizer = AdamO([p], foreach=False)
    g = p.grad = torch.randn(6, 5, 1, 1).as_strided((6, 5, 1, 1), (5, 1, 5, 5))
    (bucket,) = optimizer._buckets()
    assert cuda.Work(bucket, bucket.prepare(), bucket.options()).kept[0] is g


@pytest.mark.parametrize("shape", [(), (1,), (3, 4)], ids=str)
def test_a_lazy_minus_sign_of_a_gradient_counts(shape: tuple[int, ...]) -> None:
    p, twin = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    p.grad = torch._neg_view(torch.full(shape, -0.5))
    twin.grad = torch.full(shape, 0.5)
    fused_step(AdamO([p, twin], foreach=False, lr=0.1))
    assert torch.equal(p, twin)
    assert p.max() < 1


def test_steps_count_as_writes_for_autograd() -> None:
    (p,) = parameters((4, 3))
    before = p._version
    give_gradients([p], 0)
    fused_step(AdamO([p], foreach=False))
    assert p._version > before


def test_gradient_scaling_inside_the_kernels() -> None:
    ends = []
    for scale in (None, 1024.0):
        params = parameters((6, 5), (9,))
        optimizer = AdamO(params, foreach=False)
        for seed in range(3):
            give_gradients(params, seed, scale or 1.0)
            kept = [p.grad.clone() for p in params]
            amp = {} if scale is None else {"grad_scale": torch.tensor(scale)}
            fused_step(optimizer, **amp, found_inf=torch.tensor(0.0))
            assert all(torch.equal(p.grad, k) for p, k in zip(params, kept, strict=True))
        ends.append([(p.detach(), *optimizer.state[p].values()) for p in params])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_found_inf_skips_the_whole_step() -> None:
    params = parameters((6, 5), (9,))
    optimizer = AdamO(params, foreach=False)
    give_gradients(params, 0)
    fused_step(optimizer)
    before = [
        [p.detach().clone(), *(x.clone() for x in optimizer.state[p].values())] for p in params
    ]
    give_gradients(params, 1)
    fused_step(optimizer, grad_scale=torch.tensor(4.0), found_inf=torch.tensor(1.0))
    for p, old in zip(params, before, strict=True):
        assert all(map(torch.equal, [p.detach(), *optimizer.state[p].values()], old))
    skipped = optimizer.diagnostics(synchronize=True).values()
    assert all(math.isnan(x) for row in skipped for x in row.values())
    give_gradients(params, 2)
    fused_step(optimizer)
    assert all(row["norm"] > 0 for row in optimizer.diagnostics(synchronize=True).values())
    assert all(int(optimizer.state[p]["step"]) == 2 for p in params)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_moments_that_are_not_finite_do_not_reach_the_weight(bad: float, moment: str) -> None:
    params = parameters((6, 5), (9,))
    optimizer = AdamO(params, foreach=False)
    for seed in range(2):
        give_gradients(params, seed)
        fused_step(optimizer)
        assert all(p.isfinite().all() for p in params)
        for p in params:
            optimizer.state[p][moment].view(-1)[0] = bad


def test_non_finite_gradients_leave_a_block_alone() -> None:
    params = parameters((6, 5), (9,), (4, 4))
    optimizer = AdamO(params, foreach=False)
    give_gradients(params, 0)
    fused_step(optimizer)
    before = [
        [p.detach().clone(), *(x.clone() for x in optimizer.state[p].values())] for p in params
    ]
    give_gradients(params, 1)
    params[0].grad[2, 3] = float("nan")
    params[1].grad[0] = float("inf")
    fused_step(optimizer)
    for p, old in zip(params[:2], before, strict=False):
        assert all(map(torch.equal, [p.detach(), *optimizer.state[p].values()], old))
    assert not torch.equal(params[2], before[2][0])
    found = optimizer.diagnostics(synchronize=True)
    assert [row["guard_skipped"] for row in found.values()] == [1.0, 1.0, 0.0]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_weight_without_a_norm_is_left_alone() -> None:
    params = parameters((6, 5), (9,))
    with torch.no_grad():
        params[0][0, 0] = params[1][0] = -float("inf")
    before = [p.detach().clone() for p in params]
    optimizer = AdamO(params, foreach=False)
    give_gradients(params, 0)
    fused_step(optimizer)
    assert all(map(torch.equal, params, before))
    assert all(x.isfinite().all() for p in params for x in optimizer.state[p].values())
    found = optimizer.diagnostics(synchronize=True)
    assert [row["guard_skipped"] for row in found.values()] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("p", "reason"),
    [
        (torch.zeros(3, 3), ""),
        (torch.zeros(3, 4).T, ""),
        (torch.zeros(3, 3, dtype=torch.float64), ""),
        (torch.zeros(3, 3, dtype=torch.complex64), ""),
        (torch.zeros(3, 3, dtype=torch.complex64).conj(), "lazy"),
        (torch.zeros(3, 3, dtype=torch.int32), "int32"),
        (torch.zeros(6, 6)[::2], "strided"),
    ],
)
def test_what_the_kernels_refuse(p: torch.Tensor, reason: str) -> None:
    found = cuda.unsupported(p)
    assert (reason in found) if reason else not found


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """The interpreter forgives what the compiler does not."""
    script = Path(__file__).with_name("compile_kernels.py")
    places = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    environment = {**os.environ, **places}
    command = [sys.executable, str(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in ("before_moments", "before_weights", "turn_apply"))
