"""The native CPU kernel as a piece of C: bits, layouts, threads, errors.

That it agrees with the reference is in tests/test_oracle.py, its laws in tests/test_laws.py.

With a compiler on the machine the kernel must be there (``pip install -e .`` builds it). The same
tests run on a build with sanitizers: ``ADAMO_NATIVE_LIBRARY`` names it.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from adamo_optim import AdamO, AngularAdamW, native
from adamo_optim.law import RECORD
from adamo_optim.rounding import round_stochastically
from oracle import distance

COMPILER = next(filter(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")), None)
if isinstance(native.kernel(), str) and COMPILER is None:
    pytest.skip("no kernel, and no compiler to build it", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning")

# sizes around a vector of lanes, a tile, a chunk, and beyond what one thread does alone
SIZES = [
    (),
    (0,),
    (1,),
    (7,),
    (8,),
    (33, 31),
    (128, 8),
    (16384,),
    (131, 127),
    (97, 1013),
    (200003,),
    (3, 20001),
    (2, 66000),
]


def kernel() -> ModuleType:
    module = native.kernel()
    assert isinstance(module, ModuleType), f"built with {COMPILER}? {module}"
    return module


def native_works(optimizer: Any, **amp: Any) -> list[Any]:
    """The step of every bucket in the native kernel, whichever backend the optimizer has."""
    kind = native.TurnWork if isinstance(optimizer, AngularAdamW) else native.Work
    works = []
    for bucket in optimizer._buckets():
        grads = bucket.prepare()
        if grads is not None:
            works.append(kind(bucket, grads, bucket.options(), **amp))
    return works


def native_step(optimizer: Any, **amp: Any) -> None:
    for work in native_works(optimizer, **amp):
        work.run()


def loop_step(optimizer: AdamO) -> None:
    optimizer.step()


def parameters(shapes: list[Any], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=source).to(dtype)) for s in shapes]


def optimizer_on(params: list[torch.nn.Parameter], **options: Any) -> AdamO:
    return AdamO(params, **{"lr": 1e-2, "foreach": False, "low_dim": None, **options})


def turning_on(params: list[torch.nn.Parameter]) -> AngularAdamW:
    groups = [{"params": [p for p in params if p.numel() > 1], "rule": "scale_invariant"}]
    return AngularAdamW(groups, lr=1e-2, max_angle=1.0, foreach=False)


def rows_on(params: list[torch.nn.Parameter], **options: Any) -> AdamO:
    return optimizer_on(params, block="row", **options)


MAKERS = pytest.mark.parametrize(
    "make", [optimizer_on, rows_on, turning_on], ids=["adamo", "rows", "turning"]
)
OPTIONS: dict[str, dict[str, Any]] = {
    **{kind: {"previous_gradient": kind} for kind in ("exact", "bfloat16", "sampled")},
    "rows": {"block": "row"},
    "rows_bfloat16": {"block": "row", "previous_gradient": "bfloat16"},
}


def train(
    optimizer: Any, steps: int, step: Callable[[AdamO], Any] = native_step, seed: int = 0
) -> AdamO:
    """Steps on random gradients."""
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in optimizer.param_groups[0]["params"]:
            kind = torch.float32 if p.is_complex() else p.dtype
            real = torch.randn(
                torch.view_as_real(p).shape if p.is_complex() else p.shape, generator=source
            ).to(kind)
            p.grad = torch.view_as_complex(real) if p.is_complex() else real
        step(optimizer)
    return optimizer


def tensors_of(optimizer: AdamO) -> dict[str, Tensor]:
    """Parameters and state, by name."""
    params = optimizer.param_groups[0]["params"]
    found = {f"{i}": p.detach() for i, p in enumerate(params)}
    for i, p in enumerate(params):
        found.update({f"{i}.{key}": x for key, x in optimizer.state[p].items()})
    return found


def assert_same_bits(actual: AdamO, expected: AdamO) -> None:
    left, right = tensors_of(actual), tensors_of(expected)
    assert left.keys() == right.keys()
    for key, x in left.items():
        assert torch.equal(x, right[key]), key


def assert_close(actual: AdamO, expected: AdamO, tolerance: float) -> None:
    left, right = tensors_of(actual), tensors_of(expected)
    assert left.keys() == right.keys()
    for key, x in left.items():
        if x.is_complex():
            x, right[key] = torch.view_as_real(x), torch.view_as_real(right[key])
        assert distance(x, right[key]) < tolerance, key


@pytest.fixture(params=["openmp", "helpers"])
def threads(request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, with torch's threads and with the kernel's own."""
    before = torch.get_num_threads()
    kernel().use(-1, request.param == "helpers")
    yield torch.set_num_threads
    kernel().use()
    torch.set_num_threads(before)


def test_it_is_built_where_there_is_a_compiler() -> None:
    assert kernel()


# ---- the same step as everywhere ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_all_sizes_agree_with_the_loop(dtype: torch.dtype, options: dict[str, Any]) -> None:
    actual = train(optimizer_on(parameters(SIZES, dtype), **options), 4)
    expected = train(optimizer_on(parameters(SIZES, dtype), **options), 4, loop_step)
    assert_close(actual, expected, 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16], ids=str)
def test_turns_of_all_sizes_agree_with_torch_calls(dtype: torch.dtype) -> None:
    actual = train(turning_on(parameters(SIZES, dtype)), 4)
    expected = train(turning_on(parameters(SIZES, dtype)), 4, loop_step)
    tolerance = {torch.float64: 1e-12, torch.complex64: 1e-5, torch.bfloat16: 1e-2}
    assert_close(actual, expected, tolerance[dtype])


# ---- the same bits ----------------------------------------------------------------------------


@MAKERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(
    make: Callable[..., Any], dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    ends = []
    for count in (1, 2, 3, 7, 2):
        threads(count)
        ends.append(train(make(parameters([*SIZES, (300, 700)], dtype)), 4))
    for end in ends[1:]:
        assert_same_bits(end, ends[0])


@MAKERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_every_instruction_set_gives_the_same_bits(
    make: Callable[..., Any], dtype: torch.dtype
) -> None:
    best = train(make(parameters(SIZES, dtype)), 4)
    kernel().use(0)
    try:
        portable = train(make(parameters(SIZES, dtype)), 4)
    finally:
        kernel().use()
    assert_same_bits(best, portable)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_resumed_run_continues_to_the_bit(options: dict[str, Any]) -> None:
    whole = train(train(optimizer_on(parameters(SIZES), **options), 3), 3, seed=9)
    first = train(optimizer_on(parameters(SIZES), **options), 3)
    params = [torch.nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]]
    second = optimizer_on(params, **options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_same_bits(train(second, 3, seed=9), whole)


# ---- memory layouts and types -------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "expanded": lambda x: x[:1].expand_as(x),
    "negated": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize(
    ("weight", "options"),
    [
        pytest.param(weight, options, id=f"{weight}-{name}")
        for weight in ("contiguous", "channels_last", "transposed")
        for name, options in OPTIONS.items()
        if weight != "transposed" or "block" not in options  # scattered rows: below
    ],
)
def test_layouts(weight: str, gradient: str, options: dict[str, Any]) -> None:
    ends = []
    for step in (native_step, loop_step):
        source = torch.Generator().manual_seed(4)
        x = torch.randn(20, 6, 3, 5, generator=source, dtype=torch.float64)
        p = torch.nn.Parameter(LAYOUTS[weight](x))
        optimizer = optimizer_on([p], **options)
        for _ in range(4):
            g = torch.randn(p.shape, generator=source, dtype=torch.float64)
            p.grad = LAYOUTS[gradient](g)
            before = p.grad.clone()
            step(optimizer)
            assert torch.equal(p.grad, before)
        ends.append(optimizer)
    assert_close(*ends, tolerance=1e-12)


def test_scattered_rows_go_to_another_backend() -> None:
    p = torch.nn.Parameter(LAYOUTS["transposed"](torch.randn(8, 4, 3, 3)))
    (row,) = AdamO([p], block="row").explain()
    assert row.backend == "for-loop"
    assert "scattered" in row.note
    with pytest.raises(RuntimeError, match=r"fused=True cannot be honoured .* scattered"):
        AdamO([p], block="row", fused=True)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="one piece of memory"):
        native_step(rows_on([p]))


def test_a_state_in_another_layout_is_laid_out_anew() -> None:
    ends = []
    for step in (native_step, loop_step):
        optimizer = train(optimizer_on(parameters([(8, 4, 3, 3)], torch.float64)), 2, step)
        p = optimizer.param_groups[0]["params"][0]
        p.data = p.data.contiguous(memory_format=torch.channels_last)
        ends.append(train(optimizer, 3, step))
        assert optimizer.state[p]["exp_avg"].stride() == p.stride()
    assert_close(*ends, tolerance=1e-12)


def test_a_parameter_that_became_strided_goes_to_another_backend() -> None:
    optimizer = train(optimizer_on(parameters([(8, 4)])), 1)
    p = optimizer.param_groups[0]["params"][0]
    p.data = torch.randn(8, 8)[:, ::2]
    train(optimizer, 1, AdamO.step)
    assert [row.backend for row in optimizer.explain()] == ["for-loop"]
    assert p.isfinite().all()


def test_gradients_may_be_wider_than_the_parameter() -> None:
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = optimizer_on(parameters([(33, 31)], torch.bfloat16))
        train(optimizer, 1, lambda _: None)
        (work,) = native_works(optimizer)
        work.lists["g"][0] = work.lists["slices"][0] = work.lists["g"][0].to(dtype)
        work.run()
        ends.append(optimizer)
    assert_same_bits(*ends)


def all_numbers(dtype: torch.dtype) -> Tensor:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    return bits[torch.isfinite(bits)].clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_low_precision_is_read_and_rounded_as_torch_does(
    dtype: torch.dtype,
) -> None:
    numbers = all_numbers(dtype)
    numbers = numbers[numbers.float().abs() < 1e15]  # their squares are finite
    p = torch.nn.Parameter(numbers.clone())
    p.grad = numbers.clone()
    options = {"lr": 0.0, "radial_lr": 1e-3, "weight_decay": 0.3, "curvature_target": 1e40}
    optimizer = optimizer_on([p], guard=False, **options)
    native_step(optimizer)
    assert torch.equal(optimizer.state[p]["previous_grad"], numbers.float())
    a1 = optimizer._buckets()[0].record()["a1"].float()
    assert float(a1) < -1e-4
    w = numbers.float()
    assert torch.equal(p.detach(), (w + w * a1).to(dtype))


@pytest.mark.parametrize("shape", [(97, 1013), (4, 5)])
def test_stochastic_rounding_draws_the_bits_of_the_other_backends(shape: tuple[int, ...]) -> None:
    params = parameters([(3, 3), shape], torch.bfloat16)
    params[1].data = params[1].data.t().contiguous().t()
    options = {"lr": 0.0, "radial_lr": 1e-3, "weight_decay": 1.0, "curvature_target": None}
    optimizer = optimizer_on(params, rounding="stochastic", **options)
    for step in (1, 2, 3):
        before = [p.detach().float() for p in params]
        train(optimizer, 1)
        a1 = optimizer._buckets()[0].record()["a1"].float()
        for i, (p, w) in enumerate(zip(params, before, strict=True)):
            places = torch.arange(p.numel()).as_strided(p.shape, p.stride())
            expected = round_stochastically(w + w * a1[i], torch.tensor(step), i, places)
            assert torch.equal(p.detach(), expected)
            assert not torch.equal(p.detach(), (w + w * a1[i]).bfloat16())


def test_a_bfloat16_previous_gradient_is_rounded_as_torch_does() -> None:
    source = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(40, 50, generator=source))
    g = torch.randint(-(2**31), 2**31 - 1, p.shape, generator=source, dtype=torch.int32)
    p.grad = g.view(torch.float32)
    p.grad[~torch.isfinite(p.grad)] = torch.nan
    optimizer = optimizer_on([p], previous_gradient="bfloat16", curvature_target=1.0, guard=False)
    native_step(optimizer)
    previous, expected = optimizer.state[p]["previous_grad"], p.grad.bfloat16()
    torch.testing.assert_close(previous, expected, rtol=0, atol=0, equal_nan=True)


# ---- gradients that are absent or not finite ----------------------------------------------------


def test_blocks_without_a_gradient_keep_everything() -> None:
    optimizer = train(optimizer_on(parameters(SIZES)), 2)
    before = {key: x.clone() for key, x in tensors_of(optimizer).items()}
    params = optimizer.param_groups[0]["params"]
    for i, p in enumerate(params):
        p.grad = None if i % 2 else torch.ones_like(p)
    native_step(optimizer)
    for key, x in tensors_of(optimizer).items():
        if int(key.split(".")[0]) % 2:
            assert torch.equal(x, before[key]), key
    assert optimizer.diagnostics().keys() == {f"group0.param{i}" for i in range(0, len(params), 2)}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_guard_leaves_a_block_with_a_bad_gradient_alone(value: float) -> None:
    optimizer = train(optimizer_on(parameters([(33, 31), (97, 1013)])), 2)
    before = {key: x.clone() for key, x in tensors_of(optimizer).items()}
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
        p.grad.view(-1)[-1] = value
    native_step(optimizer)
    for key, x in tensors_of(optimizer).items():
        assert torch.equal(x, before[key]), key
    for row in optimizer.diagnostics(synchronize=True).values():
        assert row["guard_skipped"] == 1


def test_the_guard_leaves_a_row_with_a_bad_gradient_alone_and_no_other() -> None:
    optimizer = train(rows_on(parameters([(33, 31)])), 2)
    p = optimizer.param_groups[0]["params"][0]
    before = {key: x.clone() for key, x in tensors_of(optimizer).items()}
    p.grad = torch.ones_like(p)
    p.grad[7, -1] = torch.nan
    native_step(optimizer)
    for key, x in tensors_of(optimizer).items():
        assert torch.equal(x[7], before[key][7]), key
    assert bool((p != before["0"]).any(1)[torch.arange(33) != 7].all())
    assert optimizer.state[p]["step"].tolist() == [2.0 if row == 7 else 3.0 for row in range(33)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_without_the_guard_bad_gradients_flow_as_in_the_loop(value: float) -> None:
    ends = []
    for step in (native_step, loop_step):
        optimizer = train(optimizer_on(parameters([(6, 5), (9,)]), guard=False), 2, step)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
            p.grad.view(-1)[-1] = value
        step(optimizer)
        ends.append(tensors_of(optimizer))
    for key, x in ends[0].items():
        torch.testing.assert_close(x, ends[1][key], rtol=1e-5, atol=0, equal_nan=True, msg=key)


def test_an_infinite_quotient_does_not_reach_the_weight() -> None:
    p = torch.nn.Parameter(torch.randn(8, 4))
    optimizer = optimizer_on([p], betas=(0.9, 0.0), eps=0.0, curvature_target=None, weight_decay=0)
    p.grad = torch.full_like(p, 1e18) * torch.randn(8, 4)
    native_step(optimizer)
    p.grad = torch.zeros_like(p)  # v = 0, m is not: u = ∞
    native_step(optimizer)
    assert bool(torch.isfinite(p).all())
    assert optimizer.diagnostics(synchronize=True)["group0.param0"]["guard_update"] == 1


# ---- what torch's own optimizers do --------------------------------------------------------------


@MAKERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_scale_divides_the_gradients(make: Callable[..., Any], dtype: torch.dtype) -> None:
    plain = train(make(parameters(SIZES, dtype)), 3)

    def scaled_step(optimizer: AdamO) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad *= 1024
        before = [p.grad.clone() for p in optimizer.param_groups[0]["params"]]
        scale = torch.tensor(1024.0)
        native_step(optimizer, grad_scale=scale, found_inf=torch.tensor(0.0))
        for p, g in zip(optimizer.param_groups[0]["params"], before, strict=True):
            assert torch.equal(p.grad, g)

    assert_same_bits(train(make(parameters(SIZES, dtype)), 3, scaled_step), plain)


def pass_by_pass(work: Any) -> None:
    """A step as of sharded weights, in a world of one."""
    sums = work.begin()
    while sums is not None:
        sums = work.proceed(sums, torch.ones(len(sums)))


@pytest.mark.parametrize("run", [lambda work: work.run(), pass_by_pass], ids=["whole", "sharded"])
@pytest.mark.parametrize("make", [optimizer_on, turning_on])
def test_found_inf_skips_the_step(make: Any, run: Any) -> None:
    optimizer = train(make(parameters(SIZES)), 2)
    before = {key: x.clone() for key, x in tensors_of(optimizer).items()}
    for work in native_works(optimizer, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(1.0)):
        run(work)
    for key, x in tensors_of(optimizer).items():
        assert torch.equal(x, before[key]), key


def test_autograd_notices_the_changed_weight() -> None:
    optimizer = train(optimizer_on(parameters([(4, 4)])), 1)
    p = optimizer.param_groups[0]["params"][0]
    loss = (p * p).sum()
    native_step(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("block", ["tensor", "row"])
def test_diagnostics_are_those_of_the_loop(block: str) -> None:
    shapes = [(33, 31), (9,), (4, 3, 3), ()]
    ends = []
    for step in (native_step, loop_step):
        options = {"delta": 0.5, "weight_decay": 0.5, "low_dim": "auto", "radial_lr_ratio": 1e4}
        options |= {"block": block}
        optimizer = train(optimizer_on(parameters(shapes, torch.float64), **options), 5, step)
        ends.append(optimizer.diagnostics(synchronize=True))
    assert ends[0].keys() == ends[1].keys()
    for name, row in ends[0].items():
        assert row == pytest.approx(ends[1][name], rel=1e-9, nan_ok=True)


# ---- threads, processes, errors -----------------------------------------------------------------


def test_two_python_threads_may_step_at_once(threads: Callable[[int], None]) -> None:
    threads(2)
    expected = train(optimizer_on(parameters(SIZES)), 10)
    optimizers = [optimizer_on(parameters(SIZES)) for _ in range(3)]
    workers = [threading.Thread(target=train, args=(o, 10)) for o in optimizers]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for optimizer in optimizers:
        assert_same_bits(optimizer, expected)


@pytest.fixture
def without_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A second kernel, loaded by a torch that looks like one older than DLPack's table."""
    file = kernel().__file__
    assert file is not None
    monkeypatch.delattr(Tensor, "__dlpack_c_exchange_api__", raising=False)
    monkeypatch.setenv("ADAMO_NATIVE_LIBRARY", shutil.copy(file, tmp_path))
    native.kernel.cache_clear()
    assert kernel().__file__ != file
    yield
    native.kernel.cache_clear()


@MAKERS
def test_an_older_torch_steps_to_the_same_bits(
    make: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    usual = train(make(parameters(SIZES)), 3)
    request.getfixturevalue("without_the_table")
    assert_same_bits(train(make(parameters(SIZES)), 3), usual)
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        kernel().laws(1, 2, 3, 4, [], False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_second_import_does_not_make_fork_hang() -> None:
    code = """
import os, sys
import adamo_optim.native as first
first.kernel()
for name in [n for n in sys.modules if n.startswith("adamo_optim")]:
    del sys.modules[name]
import adamo_optim.native as second
assert not isinstance(second.kernel(), str)
if os.fork() == 0:
    os._exit(0)
os.wait()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own(threads: Callable[[int], None]) -> None:
    threads(2)
    optimizer = train(optimizer_on(parameters(SIZES)), 1)
    expected = train(copy.deepcopy(optimizer), 1, seed=3)
    train(optimizer, 1, lambda _: None, seed=3)  # gradients only
    (work,) = native_works(optimizer)
    child = os.fork()
    if child == 0:  # no exception may leave this branch, and torch's OpenMP hangs in it
        signal.alarm(60)
        try:
            work.run()
            torch.set_num_threads(1)
            assert_same_bits(optimizer, expected)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    work.run()  # and the parent has kept its own
    assert_same_bits(optimizer, expected)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_threads_come_and_go(threads: Callable[[int], None]) -> None:
    optimizer = optimizer_on(parameters([(1000, 1000)]))
    threads(5)
    train(optimizer, 3)
    many = len(os.listdir("/proc/self/task"))
    threads(2)
    for _ in range(100):  # they leave when they wake up, not at once
        train(optimizer, 1)
        if len(os.listdir("/proc/self/task")) <= many - 3:
            return
        time.sleep(0.05)
    pytest.fail(f"{many} threads before, {len(os.listdir('/proc/self/task'))} after")


def test_what_it_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Tensor):
        pass

    assert native.unsupported(torch.zeros(3)) == ""
    assert native.unsupported(torch.zeros(3, 4).t()) == ""
    assert "int64" in native.unsupported(torch.zeros(3, dtype=torch.int64))
    assert "strided" in native.unsupported(torch.zeros(3, 4)[:, ::2])
    assert "Odd" in native.unsupported(torch.zeros(3).as_subclass(Odd))
    monkeypatch.setenv("ADAMO_NATIVE_LIBRARY", "/nowhere/_kernel.so")
    native.kernel.cache_clear()
    try:
        assert "not available" in native.unsupported(torch.zeros(3))
    finally:
        monkeypatch.undo()
        native.kernel.cache_clear()
    assert kernel()


def break_slots(work: Any) -> None:
    work.lists["columns"][0] = 99


def break_kind(work: Any) -> None:
    work.lists["w"][0] = "no tensor"


def break_state(work: Any) -> None:
    work.lists["m"][0] = work.lists["m"][0].double()


def break_memory(work: Any) -> None:
    work.bucket.memory = torch.zeros(1, 2, dtype=torch.float64)


def break_record(work: Any) -> None:
    work.plan.record = torch.zeros(len(RECORD), 3, dtype=torch.float64)


@pytest.mark.parametrize(
    "breakage",
    [break_slots, break_kind, break_state, break_memory, break_record],
    ids=lambda breakage: breakage.__name__,
)
def test_wrong_arguments_raise_instead_of_crashing(breakage: Callable[[Any], None]) -> None:
    optimizer = optimizer_on(parameters([(8, 4), (3,)]))
    train(optimizer, 1, lambda _: None)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    (work,) = native_works(optimizer)
    breakage(work)
    with pytest.raises((IndexError, TypeError, ValueError)):
        work.run()
    for p, x in zip(optimizer.param_groups[0]["params"], before, strict=True):
        assert torch.equal(p, x)
