"""Every backend × option × dtype against the reference, state included."""

from __future__ import annotations

import pytest
import torch

from oracle import CASES, CONDITIONED, RELATIVE, Case, applies, compare, expected_end, run

BACKENDS = {
    "fused": {"fused": True},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
}
pytestmark = pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_agrees_after_200_steps(case: Case) -> None:
    steps = 12 if case.ill_conditioned else 200
    expected = expected_end(case, torch.float64, steps)
    for backend in BACKENDS.values():
        compare(run(case, torch.float64, steps, **backend), expected, RELATIVE[torch.float64])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{dtype}")
        for case in CONDITIONED
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        if applies(case, dtype)
    ],
)
def test_lower_precision_agrees_to_rounding(case: Case, dtype: torch.dtype) -> None:
    expected = expected_end(case, dtype, 40)
    for backend in BACKENDS.values():
        compare(run(case, dtype, 40, **backend), expected, RELATIVE[dtype])
