"""AdamP against its authors' package, and what a CUDA graph and a checkpoint ask of it."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adamo_lab.adamp import AdamP

SHAPES = {
    "bias": (7,),
    "scalar": (),
    "linear": (5, 7),
    "conv": (4, 3, 3, 3),
    "one row": (1, 9),
    "one column": (6, 1),
    "rows of one": (3, 1, 1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "betas": {"betas": (0.5, 0.9), "lr": 0.1, "eps": 1e-4},
    "always": {"delta": 1e6, "wd_ratio": 0.5, "weight_decay": 0.1},
    "never": {"delta": 0.0, "weight_decay": 0.1},
    "often": {"delta": 0.7, "weight_decay": 0.1, "wd_ratio": 0.0},
}


def weights(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in SHAPES.values()]


def gradient(p: Tensor, kind: int) -> Tensor:
    """Orthogonal to every row, to the whole weight only, or to neither: all branches."""
    g = torch.randn_like(p)
    if p.dim() > 1 and kind == 0:
        rows, w = g.flatten(1), p.detach().flatten(1)
        g = (rows - w * ((rows * w).sum(1) / (w * w).sum(1)).unsqueeze(1)).view_as(p)
    if p.dim() > 1 and kind == 1:
        w = p.detach()
        g = g - w * (g * w).sum() / (w * w).sum()
    return g


def run(optimizers: list[torch.optim.Optimizer], lists: list[list[Tensor]], steps: int) -> None:
    """The same gradients for both, made from the first one's weights."""
    torch.manual_seed(1)
    for t in range(steps):
        for i, ps in enumerate(zip(*lists, strict=True)):
            g = None if (t + i) % 11 == 10 else gradient(ps[0], (t + i) % 3)
            for p in ps:
                p.grad = None if g is None else g.to(p.dtype)
        for optimizer in optimizers:
            optimizer.step()


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    pairs = zip(left, right, strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_the_package(options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    package = pytest.importorskip("adamp")
    ours, theirs = weights(dtype), weights(dtype)
    first, second = AdamP(ours, **options), package.AdamP(theirs, **options)
    fired: list[Tensor] = []
    count = package.AdamP._projection
    second._projection = lambda *a: (lambda r: (fired.append(r[1]), r)[1])(count(second, *a))
    run([first, second], [ours, theirs], 200)
    assert distance(ours, theirs) < tolerance
    for p, q in zip(ours, theirs, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(first.state[p][key], second.state[q][key])
        assert first.state[p]["step"].item() == second.state[q]["step"]
    share = sum(kept == options.get("wd_ratio", 0.1) for kept in fired) / len(fired)
    expected = {0.0: share == 0, 1e6: share == 1}.get(options.get("delta", 0.1), 0.2 < share < 0.95)
    assert expected, f"the projection fired on {share:.0%} of the steps"


def test_without_projection_it_is_adamw() -> None:
    ours, theirs = weights(), weights()
    first = AdamP(ours, delta=0.0, weight_decay=0.1)
    second = torch.optim.AdamW(theirs, weight_decay=0.1)
    run([first, second], [ours, theirs], 100)
    assert distance(ours, theirs) < 1e-12


def test_projected_updates_are_orthogonal() -> None:
    p = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    before = p.detach().clone()
    p.grad = gradient(p, 0)
    AdamP([p], lr=0.1).step()
    change = p.detach() - before
    assert change.norm() > 0.1
    assert (change * before).sum(1).abs().max() < 1e-8  # ε in the norm leaves that much


def test_a_tensor_learning_rate_and_groups() -> None:
    ours, theirs = weights(), weights()
    groups = [
        {"params": ours[:3], "lr": torch.tensor(0.02, dtype=torch.float64)},
        {"params": ours[3:]},
    ]
    first = AdamP(groups, lr=0.01, weight_decay=0.1)
    second = AdamP(
        [{"params": theirs[:3], "lr": 0.02}, {"params": theirs[3:]}], lr=0.01, weight_decay=0.1
    )
    run([first, second], [ours, theirs], 50)
    assert distance(ours, theirs) < 1e-12
    scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    first.step()
    scheduler.step()
    assert first.param_groups[0]["lr"].item() == pytest.approx(0.01)


def test_channels_last_and_mixed_dtypes() -> None:
    torch.manual_seed(0)
    p = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    last = p.clone(memory_format=torch.channels_last).requires_grad_()
    plain, small = p.clone().requires_grad_(), torch.randn(3, 2, requires_grad=True)
    first, second = AdamP([last, small], weight_decay=0.1), AdamP([plain], weight_decay=0.1)
    small.grad = torch.randn(3, 2)
    run([first, second], [[last], [plain]], 30)
    assert distance([last], [plain]) < 1e-12
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_empty_and_zero_weights() -> None:
    empty = torch.zeros(0, 3, requires_grad=True)
    zero = torch.zeros(3, 3, requires_grad=True)
    empty.grad, zero.grad = torch.zeros(0, 3), torch.ones(3, 3)
    AdamP([empty, zero], lr=0.1).step()
    torch.testing.assert_close(zero.detach(), torch.full((3, 3), -0.1))


def test_a_nan_gradient_reaches_the_weight_it_belongs_to() -> None:
    good, bad = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    good.grad, bad.grad = torch.ones(2, 2), torch.full((2, 2), math.nan)
    AdamP([good, bad]).step()
    assert good.isfinite().all()
    assert bad.isnan().all()


class NoTransfers(TorchDispatchMode):
    """Refuse what a CUDA graph cannot hold: reading the device, or copying from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "lift_fresh", "nonzero"), name
        assert name != "_to_copy" or (kwargs or {}).get("device") in (None, args[0].device)
        return func(*args, **(kwargs or {}))


def test_no_step_reads_the_device() -> None:
    """Tensors without data: whoever asks for a value fails."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES.values()]
    optimizer = AdamP(params, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    assert all(optimizer.state[p]["step"].is_meta for p in params)
    with NoTransfers():
        optimizer.step()


@pytest.mark.slow
def test_a_compiled_step_equals_an_eager_one() -> None:
    """One compilation serves all weights of these shapes, learning rates and decays."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    settings: list[dict[str, Any]] = [{"weight_decay": 0.1}, {"weight_decay": 2.0, "wd_ratio": 1.0}]
    for options in settings:
        compiled, eager = weights(), weights()
        lr = torch.tensor(1e-3, dtype=torch.float64)
        first = AdamP(compiled, lr=lr, compiled=True, **options)
        run([first, AdamP(eager, lr=lr, **options)], [compiled, eager], 4)  # all have gradients
        lr.fill_(1e-2)
        assert distance(compiled, eager) < 1e-12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_copy_of_a_compiled_one_still_steps() -> None:
    """Uncompiled: torch keeps no more of an optimizer than its groups and its state."""
    p = torch.ones(2, 2, requires_grad=True)
    optimizer = pickle.loads(pickle.dumps(AdamP([p], compiled=True)))
    (q,) = optimizer.param_groups[0]["params"]
    q.grad = torch.ones_like(q)
    optimizer.step()
    assert (q < 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_step_equals_an_eager_one(compiled: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ours = [p.detach().cuda().requires_grad_() for p in weights(torch.float32)]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad
    lr = torch.tensor(1e-2, device="cuda")
    first, second = (AdamP(ps, lr=lr, weight_decay=0.1, compiled=compiled) for ps in (ours, theirs))
    for optimizer in (first, second):
        optimizer.step()  # makes the state
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.step()
    for value in (1e-2, 3e-3):
        lr.fill_(value)
        graph.replay()
        second.step()
    assert distance(ours, theirs) == 0


def test_a_checkpoint_goes_on_exactly() -> None:
    straight, stopped = weights(), weights()
    first, second = AdamP(straight, weight_decay=0.1), AdamP(stopped, weight_decay=0.1)
    run([first, second], [straight, stopped], 20)
    saved = copy.deepcopy(second.state_dict())
    resumed = [p.detach().clone().requires_grad_() for p in stopped]
    third = AdamP(resumed)
    third.load_state_dict(saved)
    run([first, third], [straight, resumed], 20)
    assert distance(straight, resumed) == 0
    assert third.param_groups[0]["weight_decay"] == 0.1
    fourth = pickle.loads(pickle.dumps(third))
    assert fourth.state_dict()["state"][0]["step"].item() == third.state[resumed[0]]["step"].item()


ILLEGAL = {
    "lr": (-1.0, r"lr must be >= 0 and finite, got -1.0"),
    "eps": (math.nan, r"eps must be >= 0 and finite, got nan"),
    "weight_decay": (-0.1, r"weight_decay must be >= 0 and finite, got -0.1"),
    "delta": (math.inf, r"delta must be >= 0 and finite, got inf"),
    "wd_ratio": (-2, r"wd_ratio must be >= 0 and finite, got -2"),
    "betas": ((0.9, 1.0), r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_arguments(name: str) -> None:
    value, message = ILLEGAL[name]
    with pytest.raises(ValueError, match=message):
        AdamP(weights(), **{name: value})


def test_complex_weights_are_refused() -> None:
    whole = torch.zeros(2, 2, dtype=torch.complex64, requires_grad=True)
    whole.grad = torch.ones_like(whole)
    with pytest.raises(RuntimeError, match="real parameters"):
        AdamP([whole]).step()
