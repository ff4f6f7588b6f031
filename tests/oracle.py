"""The tables of oracle cases, and the comparison of a backend with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from adamo_optim import AdamO, AngularAdamW
from adamo_optim.reference import ReferenceAdamO, ReferenceAngularAdamW, inner

SHAPES = {"matrix": (7, 5), "conv": (4, 3, 3, 3), "tall": (40, 6), "bias": (9,), "scalar": ()}

# float32 is compared with the float32 reference: only the order of the arithmetic differs, but
# Adam divides by √v, so a weight whose gradients nearly cancel shows it enlarged.
RELATIVE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """One set of options of AdamO."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    rule: str = "auto"
    ill_conditioned: bool = False


PAPER = {"radial_lr": 5e-3, "weight_decay": 2e-4, "curvature_target": 1.0, "guard": False}

CASES = [
    Case("defaults"),
    Case("paper", PAPER),
    Case("paper_invariant", {**PAPER, "wd_ratio": 0.5}, "scale_invariant"),
    Case("paper_low_dim", PAPER, "low_dim"),
    Case("paper_cosine_test", {**PAPER, "delta": 0.5, "wd_ratio": 0.5}),
    Case("paper_isotropic", {**PAPER, "decay_lr": "tangential", "weight_decay": 0.3}),
    Case("paper_no_curvature", {**PAPER, "curvature_target": None}),
    Case("paper_guarded", {**PAPER, "guard": True}),
    Case("no_curvature", {"curvature_target": None}),
    Case("number_target", {"curvature_target": 37.0, "curvature_beta": 0.5}),
    Case("auto_unguarded", {"guard": False}),
    Case("bfloat16_previous", {"previous_gradient": "bfloat16"}),
    Case("sampled_previous", {"previous_gradient": "sampled"}),
    Case("sampled_number", {"previous_gradient": "sampled", "curvature_target": 5.0}),
    Case("isotropic", {"decay_lr": "tangential", "weight_decay": 0.3}),
    Case("general", {}, "general"),
    Case("scale_invariant", {"wd_ratio": 0.5}, "scale_invariant"),
    Case("low_dim", {"low_dim_scale": 0.3}, "low_dim"),
    Case("low_dim_threshold", {"low_dim": 36}),
    Case("no_low_dim", {"low_dim": None}),
    Case("cosine_test", {"delta": 0.5, "wd_ratio": 0.5, "weight_decay": 5e-3}),
    Case("radial_momentum", {"radial_beta": 0.5, "radial_lr": 0.02}),
    Case("no_momentum", {"radial_beta": 0.0, "betas": (0.0, 0.9)}),
    Case("strong_decay", {"weight_decay": 0.5}),
    Case("factor_bound", {"radial_lr_ratio": 3e4}),
    Case("maximize", {"maximize": True}),
    Case("zero_eps", {"eps": 0.0}),
    Case("large_eps", {"eps": 1e-2}),
    Case("stochastic_rounding", {"rounding": "stochastic"}),  # the same bits in every backend
    # β₂ = 0 divides m by single entries of g^θ, however small: rounding grows from step to step,
    # so this one is compared in float64 and over a few steps (5 and 6 have g = 0: the bound)
    Case("update_bound", {"betas": (0.9, 0.0)}, ill_conditioned=True),
]
ROW_CASES = [
    Case("rows", {"block": "row"}),
    Case("rows_paper", {**PAPER, "block": "row"}),
    Case("rows_invariant", {"block": "row", "wd_ratio": 0.5}, "scale_invariant"),
    Case("rows_cosine_test", {"block": "row", "delta": 0.5, "wd_ratio": 0.5}),
    Case("rows_bfloat16", {"block": "row", "previous_gradient": "bfloat16", "maximize": True}),
    Case("rows_no_low_dim", {"block": "row", "low_dim": None, "curvature_target": None}),
    Case("rows_stochastic", {"block": "row", "rounding": "stochastic"}),
]


# What decides about precision; the other options change laws, which are in float64 anyway.
ROUNDED = (
    *("defaults", "paper", "bfloat16_previous", "sampled_previous", "low_dim", "zero_eps"),
    *("cosine_test", "stochastic_rounding", "rows", "rows_stochastic", "bounded", "initial_norm"),
)


def in_lower_precision(cases: list[Case]) -> list[Any]:
    """What a test of lower precision is parametrised with; float16 has no stochastic rounding."""
    return [
        pytest.param(case, dtype, id=f"{case.name}-{str(dtype)[6:]}")
        for case in cases
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not case.ill_conditioned
        and (dtype == torch.float32 or case.name in ROUNDED)
        and (case.options.get("rounding") != "stochastic" or dtype != torch.float16)
    ]


def tensors(dtype: torch.dtype, scalar: bool = True) -> list[Tensor]:
    """A block of every shape, one zero-initialised, one with a row of zeros, in a fixed draw.

    Not the 0-D one in float16: under the general rule a single number cannot cross zero, is halved
    towards it, and ends among float16's denormals, where rounding alone decides.
    """
    source = torch.Generator().manual_seed(3)
    blocks = [
        torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
        if name != "scalar" or (scalar and dtype != torch.float16)
    ]
    blocks[2][3] = 0
    return [*blocks, torch.zeros(6, 4, dtype=dtype)]


def gradient(weight: Tensor, step: int, source: torch.Generator) -> Tensor:
    """Noise around a slowly turning direction; steps 5 and 6 are all zeros."""
    real = torch.randn(weight.shape, generator=source, dtype=torch.float64)
    drift = torch.cos(torch.arange(weight.numel()) * 0.7 + 0.02 * step).reshape(weight.shape)
    noisy = (real + drift) * (0.3 + 1 / (1 + 0.05 * step))
    return (noisy * (step not in (5, 6))).to(weight.dtype)


def train(
    optimizer: Any,
    steps: int,
    step: Callable[[Any], Any] = lambda optimizer: optimizer.step(),
) -> Any:
    """A fixed draw of gradients; the fourth block has none in every third step."""
    source = torch.Generator().manual_seed(7)
    params = optimizer.param_groups[0]["params"]
    for t in range(steps):
        for i, p in enumerate(params):
            g = None if i == 3 and t % 3 == 0 else gradient(p.detach().cpu(), t, source)
            p.grad = None if g is None else g.to(p.device)
        step(optimizer)
    return optimizer


def parameters(
    dtype: torch.dtype, device: str = "cpu", scalar: bool = True
) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(x.to(device)) for x in tensors(dtype, scalar)]


def groups_for(case: Case, dtype: torch.dtype, device: str = "cpu") -> list[dict[str, Any]]:
    # across a single number there is nothing but rounding, which only the guard takes as 0
    scalar = case.rule in ("auto", "low_dim") and case.options.get("low_dim", 1) is not None
    scalar = scalar or case.options.get("guard", True)
    return [{"params": parameters(dtype, device, scalar), "rule": case.rule}]


def adamo_for(case: Case, dtype: torch.dtype, device: str = "cpu", **backend: Any) -> AdamO:
    return AdamO(groups_for(case, dtype, device), **case.options, **backend)


def expected_end(case: Case, dtype: torch.dtype, steps: int) -> ReferenceAdamO:
    """What the reference ends with."""
    return train(ReferenceAdamO(groups_for(case, dtype), **case.options), steps)


def distance(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖/‖expected‖ in float64."""
    expected = expected.detach().double()
    size = float(expected.norm())
    return float((actual.detach().cpu().double() - expected).norm()) / (size if size > 0 else 1.0)


def compare(optimizer: AdamO, reference: ReferenceAdamO, tolerance: float) -> None:
    """Parameters and the whole state."""
    group = optimizer.param_groups[0]
    for p, expected in zip(group["params"], reference.param_groups[0]["params"], strict=True):
        assert distance(p, expected) < tolerance, tuple(p.shape)
        state, end = optimizer.state[p], reference.state[expected]
        rows, w = end.get("rows", [end]), expected.detach().double()
        stacked = {
            key: torch.stack([row[key] for row in rows]).view(state["exp_avg"].shape)
            for key in ("m_tangential", "v_tangential")
        }
        assert distance(state["exp_avg"], stacked["m_tangential"]) < tolerance
        assert distance(state["exp_avg_sq"], stacked["v_tangential"]) < tolerance
        assert state["step"].flatten().tolist() == [row["t"] for row in rows]
        norms = torch.tensor([row["initial_norm"] for row in rows], dtype=torch.float64)
        assert distance(state["initial_norm"].flatten(), norms) < 1e-6
        # an average of ⟨g, w⟩/‖w‖: its rounding is relative to ‖g‖, not to what cancels
        momenta = [
            radial_momentum(r, x) for r, x in zip(rows, w if len(rows) > 1 else [w], strict=True)
        ]
        error = (
            state["radial_momentum"].cpu().flatten() - torch.tensor(momenta, dtype=torch.float64)
        ).norm()
        sizes = [gradient_size(row, group["betas"][1]) for row in rows]
        assert float(error) < tolerance * float(torch.tensor(sizes).norm())
        if all(row["tau"] is None for row in rows):
            continue
        tau = torch.tensor(
            [-1.0 if r["tau"] is None else r["tau"] for r in rows], dtype=torch.float64
        )
        assert distance(state["tau"].flatten(), tau) < tolerance
        slow = torch.tensor([row["reference"] for row in rows], dtype=torch.float64)
        assert distance(state["tau_reference"].flatten(), slow) < tolerance
        counts = [row["nonzero_gradients"] for row in rows]
        assert state["curvature_step"].flatten().tolist() == counts
        kept = [row["g_previous"] for row in rows]
        previous = torch.stack(kept) if len(kept) > 1 else kept[0]
        moving = torch.tensor([row["tau"] is not None for row in rows])
        if len(rows) > 1:  # a row of zeros follows Adam, whose g⁻ nobody reads
            previous, actual = previous[moving], state["previous_grad"].cpu()[moving]
        else:
            actual = state["previous_grad"]
        assert distance(actual, previous) < tolerance


def radial_momentum(row: dict[str, Any], w: Tensor) -> float:
    """c = ⟨m^ρ, w⟩/‖w‖."""
    norm = float(w.norm())
    return float(inner(row["m_radial"], w)) / norm if norm > 0 else 0.0


def gradient_size(row: dict[str, Any], beta2: float) -> float:
    """‖g‖ as v and m^ρ remember it."""
    across = (row["v_tangential"].sum() / (1 - beta2 ** row["t"])).sqrt()
    return float(across + row["m_radial"].norm())


# ---- weights that turn -------------------------------------------------------------------------

TURNS = [
    Case("defaults"),
    Case("initial_norm", {"angular_rms": None, "lr": 3e-3}),
    Case("bounded", {"lr": 0.1}),
    Case("large_angle", {"lr": 0.1, "max_angle": 1.2}),
    Case("betas", {"betas": (0.5, 0.9), "eps": 1e-3}),
    Case("no_momentum", {"betas": (0.0, 0.95)}),
    Case("maximize", {"maximize": True, "lr": 5e-4}),
    Case("zero_eps", {"eps": 0.0}),
    Case("zero_lr", {"lr": 0.0}),
    Case("rows", {"second_moment": "row"}),
    Case("rows_initial_norm", {"second_moment": "row", "angular_rms": None, "lr": 3e-3}),
    Case("rows_zero_eps", {"second_moment": "row", "eps": 0.0, "maximize": True}),
]


def angular_for(case: Case, dtype: torch.dtype, device: str = "cpu", **backend: Any) -> Any:
    groups = [{"params": parameters(dtype, device), "rule": "scale_invariant"}]
    return AngularAdamW(groups, **case.options, **backend)


def expected_turns(case: Case, dtype: torch.dtype, steps: int) -> ReferenceAngularAdamW:
    groups = [{"params": parameters(dtype), "rule": "scale_invariant"}]
    return train(ReferenceAngularAdamW(groups, **case.options), steps)


def compare_turns(optimizer: AngularAdamW, reference: Any, tolerance: float) -> None:
    """Parameters and the whole state."""
    params = zip(
        optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True
    )
    for p, expected in params:
        state, end = optimizer.state[p], reference.state[expected]
        assert int(state["step"]) == end["t"]
        if p.dtype in (torch.bfloat16, torch.float16) and not end["turns"]:
            assert "mean_square" not in state
            continue  # torch's AdamW computes in low precision, in an order of its own
        assert distance(p, expected) < tolerance, tuple(p.shape)
        assert distance(state["exp_avg"], end["m"]) < tolerance
        if end["turns"]:
            assert set(state) == {"step", "exp_avg", "mean_square", "initial_norm"}
            assert (
                distance(state["mean_square"], end["v"].view_as(state["mean_square"])) < tolerance
            )
            norm = torch.tensor(end["initial_norm"], dtype=torch.float64)
            assert distance(state["initial_norm"], norm) < 1e-6
        else:
            assert "mean_square" not in state
            assert distance(state["exp_avg_sq"], end["v"]) < tolerance
