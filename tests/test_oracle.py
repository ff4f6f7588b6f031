"""Every backend × option × dtype against the reference, state included."""

from __future__ import annotations

import pytest
import torch

from adamo_optim import native
from oracle import CASES, LOWER_PRECISION, RELATIVE, Case, compare, expected_end, run

BACKENDS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
}
if not isinstance(native.kernel(), str):  # built; tests/test_native.py insists where it can be
    BACKENDS["fused"] = {"fused": True}
pytestmark = pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_agrees_after_200_steps(case: Case) -> None:
    steps = 12 if case.ill_conditioned else 200
    expected = expected_end(case, torch.float64, steps)
    for backend in BACKENDS.values():
        compare(run(case, torch.float64, steps, **backend), expected, RELATIVE[torch.float64])


@pytest.mark.parametrize(("case", "dtype"), LOWER_PRECISION)
def test_lower_precision_agrees_to_rounding(case: Case, dtype: torch.dtype) -> None:
    expected = expected_end(case, dtype, 40)
    for backend in BACKENDS.values():
        compare(run(case, dtype, 40, **backend), expected, RELATIVE[dtype])
