"""The mathematics of a verdict, against numbers worked out by hand and by scipy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from adamo_lab.studies import Claim
from adamo_lab.verdicts import FAILS, HOLDS, OPEN, Summary, after_correction, judge, rank_p

LARGER = Claim("a is larger.", "x", "a > b", "")
SMALLER = Claim("a is smaller.", "x", "a < b", "")
EQUAL = Claim("They are equal.", "x", "a = b", "", margin=1.0)


def test_welch_by_hand() -> None:
    """a: mean 5, variance 1; b: mean 2, variance 4; three each. se² = 5/3, df = 2·25/17."""
    from scipy.stats import t

    verdict = judge(LARGER, [4, 5, 6], [0, 2, 4])
    assert verdict.difference == 3
    assert verdict.p == pytest.approx(t.sf(3 / math.sqrt(5 / 3), 50 / 17))
    half = t.ppf(0.975, 50 / 17) * math.sqrt(5 / 3)
    assert verdict.interval == pytest.approx((3 - half, 3 + half))


CASES = {  # claim, first, second, outcome, a word of the reason
    "larger": (LARGER, [5, 6, 7], [1, 2, 3], HOLDS, "significant"),
    "smaller": (SMALLER, [1, 2, 3], [5, 6, 7], HOLDS, "significant"),
    "opposite": (LARGER, [1, 2, 3], [5, 6, 7], FAILS, "opposite direction significant"),
    "opposite, not claimed": (LARGER, [1, 2, 3], [3, 4, 5], FAILS, "no significant difference"),
    "no difference": (LARGER, [1, 2, 3], [1.1, 2, 2.5], FAILS, "no significant difference"),
    "two runs": (LARGER, [5, 6], [1, 2, 3], OPEN, "at least 3 runs"),
    "no runs": (LARGER, [], [], OPEN, "no runs"),
    "one side": (LARGER, [1, 2, 3], [], OPEN, "one side"),
    "identical": (LARGER, [1, 1, 1], [1, 1, 1], FAILS, "identical"),
    "no variance": (LARGER, [2] * 4, [1] * 4, HOLDS, "significant"),
    "no variance, smaller": (SMALLER, [1] * 4, [2] * 4, HOLDS, "significant"),
    "no variance, opposite": (LARGER, [1] * 4, [2] * 4, FAILS, "opposite direction significant"),
    "no variance, few runs": (LARGER, [2] * 3, [1] * 3, OPEN, "cannot get below p = 0.05"),
    "no variance, few against it": (LARGER, [1] * 3, [2] * 3, FAILS, "no significant difference"),
    "equal": (EQUAL, [1.0, 1.1, 1.2], [1.0, 1.1, 1.3], HOLDS, "within the margin"),
    "equal, identical": (EQUAL, [1, 1, 1], [1, 1, 1], HOLDS, "within the margin"),
    "not equal": (EQUAL, [9, 9.1, 9.2], [1.0, 1.1, 1.3], FAILS, "outside the margin"),
    "too noisy": (EQUAL, [0, 5, 9], [1, 4, 9], FAILS, "beyond the margin"),
    "equal, missing": (EQUAL, [1, 2, None], [1, 2, 3], OPEN, "never got there"),
}


@pytest.mark.parametrize(("claim", "a", "b", "outcome", "reason"), CASES.values(), ids=CASES)
def test_outcome(claim: Claim, a: list, b: list, outcome: str, reason: str) -> None:
    verdict = judge(claim, a, b)
    assert verdict.outcome == outcome
    assert reason in verdict.reason


def test_equal_values_have_no_variance() -> None:
    """A mean by floating-point sums would leave a remainder, and a t-value out of nothing."""
    verdict = judge(LARGER, [0.99] * 3, [0.99] * 7)
    assert (verdict.difference, verdict.p, verdict.test) == (0, 1, "rank test")


def test_without_variance_a_rank_test_decides() -> None:
    """Shares of a grid come in steps, and three equal ones are no proof of no variance."""
    verdict = judge(LARGER, [0.08] * 5, [0.04] * 3)
    assert (verdict.outcome, verdict.test) == (HOLDS, "rank test")
    assert verdict.p == pytest.approx(1 / 56)
    assert verdict.difference == pytest.approx(0.04)
    assert verdict.interval is None


def test_missing_counts_as_worst() -> None:
    """Lower is better: runs that never got there are later than all others."""
    reached, not_all = [100.0, 110, 120, 130], [900.0, None, None, None]
    verdict = judge(SMALLER, reached, not_all, higher_is_better=False)
    assert (verdict.outcome, verdict.test) == (HOLDS, "rank test")
    assert verdict.p == pytest.approx(1 / 70)
    assert verdict.missing == (0, 3)
    assert judge(LARGER, reached, not_all, higher_is_better=False).outcome == FAILS
    not_all[0] = 50.0
    assert judge(LARGER, reached, not_all, higher_is_better=True).outcome == HOLDS


def test_rank_test_with_too_few_runs_is_open() -> None:
    """3 against 3 cannot give less than 1 in 20, however clear it looks."""
    verdict = judge(SMALLER, [1, 2, 3], [None, None, None], higher_is_better=False)
    assert verdict.outcome == OPEN
    assert "0.05" in verdict.reason


def test_rank_test_by_hand_and_by_scipy() -> None:
    from scipy.stats import mannwhitneyu

    assert rank_p([3, 4], [1, 2]) == pytest.approx(1 / 6)
    assert rank_p([1, 1], [1, 1]) == 1
    # ties: of the 10 pairs from (1, 2, 2, 3, 3), with ranks 1, 2.5, 2.5, 4.5, 4.5, the sum of
    # (3, 3) is reached by one
    assert rank_p([3, 3], [1, 2, 2]) == pytest.approx(1 / 10)
    a, b = [3.0, 1.5, 4.2, 9.9, 2.0], [1.0, 2.5, 0.3, 0.7]
    exact = mannwhitneyu(a, b, alternative="greater", method="exact").pvalue
    assert rank_p(a, b) == pytest.approx(exact)


def test_summary() -> None:
    assert Summary.of([1, None, 3]) == Summary((1.0, 3.0), missing=1)
    assert Summary.of([1, 3]).sd == pytest.approx(math.sqrt(2))
    assert Summary.of([5]).sd is None
    assert Summary.of([None]).mean is None


@pytest.mark.parametrize("diverged", [1, 4, 5])
def test_what_diverges_is_less_accurate(diverged: int) -> None:
    claim = Claim("Without it AdamO is less accurate.", "swa_test_accuracy", "a < b", "")
    values = [None] * diverged + [0.7] * (5 - diverged)
    verdict = judge(claim, values, [0.78, 0.77, 0.79, 0.78, 0.77], higher_is_better=True)
    assert verdict.outcome == HOLDS
    assert verdict.p == pytest.approx(1 / 252)


def test_what_never_comes_is_not_late() -> None:
    claim = Claim("AdamO groks later.", "grokking_epoch", "adamo_paper > adamw", "")
    never: list[float | None] = [None] * 5
    verdict = judge(claim, never, [2500.0, 2400.0, 2600.0, 2550.0, 2450.0], higher_is_better=False)
    assert verdict.outcome == FAILS
    assert verdict.reason == "it did not come late, it never came"
    verdict = judge(claim, [2900.0, *never[:4]], [2500.0, 2400.0, 2600.0], higher_is_better=False)
    assert (verdict.outcome, verdict.reason[-12:]) == (FAILS, "in most runs")
    earlier = Claim("AdamO groks earlier.", "grokking_epoch", "adamo < adamw", "")
    verdict = judge(earlier, [1900.0, 1800.0, 2000.0, 1950.0], never, higher_is_better=False)
    assert verdict.outcome == HOLDS


def test_many_claims_at_once() -> None:
    """Benjamini and Hochberg by hand: 0.04 times 20 over 10 is above 0.05."""
    clear = judge(LARGER, [5, 6, 7], [1, 2, 3])
    weak = replace(clear, p=0.04)
    assert clear.outcome == weak.outcome == HOLDS
    found = [replace(clear, p=0.001), *[weak] * 9, *[replace(weak, p=0.5, outcome=FAILS)] * 10]
    assert after_correction(found) == 1
    assert after_correction([weak]) == 1
    assert after_correction([judge(LARGER, [], [])]) == 0
