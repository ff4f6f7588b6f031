"""The table of oracle cases, and the comparison of a backend with ``reference_step``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from adamo_optim import AdamO
from adamo_optim.options import RADIAL_SGD
from adamo_optim.reference import inner, reference_step
from adamo_optim.rules import needs_previous_gradient, rule_of

SHAPES = {"matrix": (7, 5), "conv": (4, 3, 3, 3), "tall": (40, 6), "bias": (9,), "scalar": ()}

# float32 is compared with the float32 reference: only the order of the arithmetic differs, but
# Adam divides by √v, so a weight whose gradients nearly cancel shows it enlarged.
RELATIVE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """One set of options, beside those of ``base``: the paper's form unless told otherwise."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    rule: str = "auto"
    ill_conditioned: bool = False
    base: dict[str, Any] = field(default_factory=lambda: RADIAL_SGD)

    @property
    def options(self) -> dict[str, Any]:
        return {**self.base, **self.changes}


CASES = [
    Case("defaults", base={}),
    Case("defaults_general", rule="general", base={}),
    Case("defaults_invariant", rule="scale_invariant", base={}),
    Case("defaults_cosine_test", {"delta": 0.5, "wd_ratio": 0.5, "weight_decay": 30.0}, base={}),
    Case("defaults_sampled", {"previous_gradient": "sampled", "maximize": True}, base={}),
    Case("defaults_unguarded", {"guard": False}, base={}),
    Case("radial_sgd"),
    Case("paper", {"radial_lr": 5e-3, "curvature_target": 1.0, "guard": False}),
    Case("paper_guarded", {"radial_lr": 5e-3, "curvature_target": 1.0}),
    Case("no_curvature", {"curvature_target": None}),
    Case("number_target", {"curvature_target": 37.0, "curvature_beta": 0.5}),
    Case("auto_unguarded", {"guard": False}),
    Case("bfloat16_previous", {"previous_gradient": "bfloat16"}),
    Case("sampled_previous", {"previous_gradient": "sampled"}),
    Case("sampled_number", {"previous_gradient": "sampled", "curvature_target": 5.0}),
    Case("isotropic", {"decay_lr": "tangential", "weight_decay": 0.3}),
    Case("angular", {"tangential": "angular"}),
    Case("angular_unguarded", {"tangential": "angular", "guard": False, "radial_lr": 1e-3}),
    Case("angular_invariant", {"tangential": "angular"}, "scale_invariant"),
    Case("angular_rms", {"tangential": "angular", "angular_rms": 0.3}),
    Case("equilibrium", {"tangential": "angular", "angular_rms": "equilibrium"}),
    Case("equilibrium_no_decay", {"angular_rms": "equilibrium", "weight_decay": 0.0}, base={}),
    Case(
        "equilibrium_auto",
        {"angular_rms": "equilibrium", "wd_ratio": 0.5, "radial_lr": 1e-3, "delta": 0.5},
        base={},
    ),
    Case(
        "equilibrium_isotropic",
        {"angular_rms": "equilibrium", "decay_lr": "tangential", "betas": (0.5, 0.9)},
        "scale_invariant",
        base={},
    ),
    Case(
        "equilibrium_at_rest",
        {"angular_rms": "equilibrium", "lr": 0.0, "radial_lr": 1e-3},
        "scale_invariant",
        base={},
    ),
    Case("angular_auto", {"tangential": "auto", "angular_rms": 0.3, "delta": 0.5}),
    Case("radial_adam", {"radial": "adam", "radial_lr_ratio": 3.0, "weight_decay": 0.1}),
    Case("radial_adam_unguarded", {"radial": "adam", "radial_lr_ratio": 1.0, "guard": False}),
    Case(
        "radial_adam_angular",
        {"radial": "adam", "radial_lr": 1e-2, "tangential": "angular", "angular_rms": 0.1},
        "general",
    ),
    Case("block", {"second_moment": "block"}),
    Case("block_adam", {"second_moment": "block", "guard": False, "eps": 1e-3}, base={}),
    Case("entry_invariant", {"second_moment": "entry"}, "scale_invariant", base={}),
    Case("block_auto", {"second_moment": "auto", "delta": 0.5, "maximize": True}, base={}),
    Case("general", {}, "general"),
    Case("scale_invariant", {"wd_ratio": 0.5}, "scale_invariant"),
    Case("low_dim", {"low_dim_scale": 0.3}, "low_dim"),
    Case("low_dim_decay", {"low_dim_scale": 0.3, "low_dim_decay": 2.0}),
    Case("low_dim_as_others", {"low_dim_decay": None, "weight_decay": 0.3}, "low_dim"),
    Case("low_dim_decay_unguarded", {"low_dim_decay": 2.0, "guard": False}, "low_dim"),
    Case("low_dim_decay_bound", {"low_dim_decay": 1e4}, "low_dim"),
    Case("low_dim_threshold", {"low_dim": 36}),
    Case("no_low_dim", {"low_dim": None}),
    Case("cosine_test", {"delta": 0.5, "wd_ratio": 0.5, "weight_decay": 5e-3}),
    Case("radial_momentum", {"radial_beta": 0.5, "radial_lr": 0.02}),
    Case("no_momentum", {"radial_beta": 0.0, "betas": (0.0, 0.9)}),
    Case("strong_decay", {"weight_decay": 0.5}),
    Case("factor_bound", {"radial_lr_ratio": 3e4}),
    Case("maximize", {"maximize": True}),
    Case("maximize_angular", {"maximize": True, "tangential": "angular", "delta": 0.3}),
    Case("zero_eps", {"eps": 0.0}),
    Case("large_eps", {"eps": 1e-2}),
    Case("stochastic_rounding", {"rounding": "stochastic"}),  # the same bits in every backend
    # β₂ = 0 divides m by single entries of g^θ, however small: rounding grows from step to step,
    # so these two are compared in float64 and over a few steps (5 and 6 have g = 0: the bound)
    Case("update_bound", {"betas": (0.9, 0.0)}, ill_conditioned=True),
    Case("update_bound_angular", {"betas": (0.9, 0.0), "tangential": "angular"}, "auto", True),
]
CONDITIONED = [case for case in CASES if not case.ill_conditioned]
# what a test of lower precision is parametrised with; stochastic rounding is not for float16
LOWER_PRECISION = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for case in CONDITIONED
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if case.name != "stochastic_rounding" or dtype != torch.float16
]


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """A block of every shape, one zero-initialised, in a fixed draw.

    Not the 0-D one in float16: under the general rule a single number cannot cross zero, is halved
    towards it, and ends among float16's denormals, where rounding alone decides.
    """
    source = torch.Generator().manual_seed(3)
    blocks = [
        torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
        if not (name == "scalar" and dtype == torch.float16)
    ]
    return [*blocks, torch.zeros(6, 4, dtype=dtype)]


def gradient(weight: Tensor, step: int, source: torch.Generator) -> Tensor:
    """Noise around a slowly turning direction; steps 5 and 6 are all zeros."""
    real = torch.randn(weight.shape, generator=source, dtype=torch.float64)
    drift = torch.cos(torch.arange(weight.numel()) * 0.7 + 0.02 * step).reshape(weight.shape)
    noisy = (real + drift) * (0.3 + 1 / (1 + 0.05 * step))
    return (noisy * (step not in (5, 6))).to(weight.dtype)


def gradients(case: Case, dtype: torch.dtype, steps: int) -> list[list[Tensor | None]]:
    """One list per step; the fourth block has none in every third step: its own step count."""
    source = torch.Generator().manual_seed(7)
    blocks = tensors(dtype)
    return [
        [
            None if i == 3 and step % 3 == 0 else gradient(block, step, source)
            for i, block in enumerate(blocks)
        ]
        for step in range(steps)
    ]


def optimizer_for(case: Case, dtype: torch.dtype, device: str = "cpu", **backend: Any) -> AdamO:
    parameters = [torch.nn.Parameter(x.to(device)) for x in tensors(dtype)]
    return AdamO([{"params": parameters, "rule": case.rule}], **case.options, **backend)


def expected_end(case: Case, dtype: torch.dtype, steps: int) -> list[tuple[Tensor, dict[str, Any]]]:
    """The parameters and states the reference ends with."""
    group = optimizer_for(case, dtype).param_groups[0]
    ends: list[tuple[Tensor, dict[str, Any]]] = [(x, {}) for x in tensors(dtype)]
    for grads in gradients(case, dtype, steps):
        for i, g in enumerate(grads):
            if g is not None:
                p, state = ends[i]
                rule, _ = rule_of(p, group)
                ends[i] = reference_step(p, g, state, group, rule=rule, seed=i), state
    return ends


def run(
    case: Case,
    dtype: torch.dtype,
    steps: int,
    step: Callable[[AdamO], Any] = lambda optimizer: optimizer.step(),
    **backend: Any,
) -> AdamO:
    """A backend on the same gradients."""
    optimizer = optimizer_for(case, dtype, **backend)
    for grads in gradients(case, dtype, steps):
        for p, g in zip(optimizer.param_groups[0]["params"], grads, strict=True):
            p.grad = None if g is None else g.to(p.device)
        step(optimizer)
    return optimizer


def distance(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖/‖expected‖ in float64."""
    expected = expected.detach().double()
    size = float(expected.norm())
    return float((actual.detach().cpu().double() - expected).norm()) / (size if size > 0 else 1.0)


def gradient_size(reference: dict[str, Any], optimizer: AdamO) -> float:
    """‖g‖ as v and m^ρ remember it."""
    beta2 = optimizer.param_groups[0]["betas"][1]
    across = (reference["v_tangential"].sum() / (1 - beta2 ** reference["t"])).sqrt()
    return float(across + reference["m_radial"].norm())


def compare(optimizer: AdamO, ends: list[tuple[Tensor, dict[str, Any]]], tolerance: float) -> None:
    """Parameters and the whole state."""
    for p, (expected, reference) in zip(optimizer.param_groups[0]["params"], ends, strict=True):
        state = optimizer.state[p]
        rule, _ = rule_of(p, optimizer.param_groups[0])
        assert distance(p, expected) < tolerance, (tuple(p.shape), rule)
        assert int(state["step"]) == reference["t"]
        assert distance(state["exp_avg"], reference["m_tangential"]) < tolerance
        assert distance(state["exp_avg_sq"], reference["v_tangential"]) < tolerance
        assert distance(state["mean_square"], reference["v_tangential"].double().mean()) < tolerance
        assert (
            distance(
                state["initial_norm"], torch.tensor(reference["initial_norm"], dtype=torch.float64)
            )
            < 1e-6
        )
        if rule == "low_dim" or reference["initial_norm"] == 0:
            continue
        # an average of ⟨g, w⟩/‖w‖: its rounding is relative to ‖g‖, not to what cancels
        w = expected.double()
        error = float(state["radial_momentum"].cpu() - inner(reference["m_radial"], w) / w.norm())
        assert abs(error) < tolerance * gradient_size(reference, optimizer)
        if not needs_previous_gradient(rule, optimizer.param_groups[0]):
            assert "previous_grad" not in state
            assert reference["tau"] is None
            continue
        assert (
            distance(state["tau"], torch.tensor(reference["tau"], dtype=torch.float64)) < tolerance
        )
        assert (
            distance(
                state["tau_reference"], torch.tensor(reference["reference"], dtype=torch.float64)
            )
            < tolerance
        )
        assert int(state["curvature_step"]) == reference["nonzero_gradients"]
        assert distance(state["previous_grad"], reference["g_previous"]) < tolerance
