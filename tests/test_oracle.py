"""Every backend × option × dtype against the reference, state included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adamo_optim import native
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
    expected_end,
    expected_turns,
    in_lower_precision,
    train,
)

BACKENDS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
if not isinstance(native.kernel(), str):  # built; tests/test_native.py insists where it can be
    BACKENDS.append({"fused": True})
pytestmark = [
    pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning"),
    pytest.mark.filterwarnings("ignore:lr=.*asks weights to turn:UserWarning"),
]


@pytest.mark.parametrize("case", [*CASES, *ROW_CASES], ids=lambda case: case.name)
def test_adamo_agrees_in_float64(case: Case) -> None:
    by_row = case.options.get("block") == "row"  # whose reference goes over the rows one by one
    steps = 12 if case.ill_conditioned else 100 if by_row else 200
    expected = expected_end(case, torch.float64, steps)
    for backend in BACKENDS:
        actual = train(adamo_for(case, torch.float64, **backend), steps)
        compare(actual, expected, RELATIVE[torch.float64])


@pytest.mark.parametrize(("case", "dtype"), in_lower_precision([*CASES, *ROW_CASES]))
def test_adamo_agrees_to_rounding_in_lower_precision(case: Case, dtype: torch.dtype) -> None:
    expected = expected_end(case, dtype, 40)
    for backend in BACKENDS:
        compare(train(adamo_for(case, dtype, **backend), 40), expected, RELATIVE[dtype])


@pytest.mark.parametrize("case", TURNS, ids=lambda case: case.name)
def test_turns_agree_in_float64_after_200_steps(case: Case) -> None:
    expected = expected_turns(case, torch.float64, 200)
    for backend in BACKENDS:
        actual = train(angular_for(case, torch.float64, **backend), 200)
        compare_turns(actual, expected, RELATIVE[torch.float64])


@pytest.mark.parametrize(("case", "dtype"), in_lower_precision(TURNS))
def test_turns_agree_to_rounding_in_lower_precision(case: Case, dtype: torch.dtype) -> None:
    expected = expected_turns(case, dtype, 40)
    for backend in BACKENDS:
        actual = train(angular_for(case, dtype, **backend), 40)
        compare_turns(actual, expected, RELATIVE[dtype])
