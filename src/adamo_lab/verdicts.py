"""Does a claim hold? Means, intervals and tests on the few runs a study has. Needs no torch.

A value is None where a run never reached what the metric measures (a grokking epoch, say). Such
runs are never left out: a claim about them goes to a rank test in which they count as worse than
every value that was reached.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .studies import Claim

HOLDS, FAILS, OPEN = "holds", "does not hold", "not yet measured"
LEVEL = 0.05  # of every test
FEWEST = 3  # runs on either side
PERMUTATIONS = 200_000  # all of them where there are no more, which is up to ten runs a side

RULE = (
    "A claim that one optimizer is above or below another holds if both have at least "
    f"{FEWEST} runs and Welch's one-sided t-test gives p < {LEVEL} in the claimed direction. "
    "A claim that two are equal holds if the 90 % confidence interval of their difference lies "
    "within the stated margin. Where some runs never reached what is measured, a one-sided "
    "permutation test of the ranks takes the place of the t-test, and those runs rank last; so it "
    "does where neither side has any variance. "
    "Intervals are two-sided, so one may touch zero while the one-sided p is just below "
    f"{LEVEL}. The opposite of a claim, which nobody had claimed, is called significant if p < "
    f"{LEVEL / 2:g}."
)

Values = Sequence["float | None"]


@dataclass(frozen=True)
class Summary:
    """What some runs amount to in one metric."""

    values: tuple[float, ...]  # of the runs that have one
    missing: int = 0

    @classmethod
    def of(cls, values: Values) -> Summary:
        present = tuple(float(v) for v in values if v is not None)
        return cls(present, len(values) - len(present))

    @property
    def n(self) -> int:
        return len(self.values) + self.missing

    @cached_property
    def mean(self) -> float | None:
        # exact sums: equal values have that value as their mean, and no variance at all
        return statistics.mean(self.values) if self.values else None

    @cached_property
    def sd(self) -> float | None:
        """Of the sample; one run has none."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Verdict:
    """The answer to a claim, and the numbers behind it."""

    claim: Claim
    outcome: str = OPEN  # HOLDS, FAILS or OPEN
    reason: str = ""
    n: tuple[int, int] = (0, 0)
    test: str = ""
    difference: float | None = None
    interval: tuple[float, float] | None = None  # of 95 %, for "=" of 90 %
    p: float | None = None  # in the claimed direction
    p_opposite: float | None = None
    missing: tuple[int, int] = (0, 0)


def judge(claim: Claim, first: Values, second: Values, higher_is_better: bool = True) -> Verdict:
    """Decide a claim from the values of its two sides, one a run."""
    a, b = Summary.of(first), Summary.of(second)
    made = Verdict(claim, n=(a.n, b.n), missing=(a.missing, b.missing))
    if min(made.n) < FEWEST:
        few = f"at least {FEWEST} runs a side are needed"
        none = "no runs yet" if max(made.n) == 0 else "one side has no runs"
        return replace(made, reason=few if min(made.n) else none)
    if not any(made.missing):
        made = replace(made, difference=statistics.mean(a.values) - statistics.mean(b.values))
        return (equal if claim.relation == "=" else ordered)(made, a, b)
    if claim.relation == "=":
        return replace(made, reason="some runs never got there, so there is no mean to compare")
    if claim.relation == ">" and not higher_is_better and 2 * a.missing > a.n:
        # a rank test would call that significantly later
        reason = "it did not come late, it never came" + ("" if not a.values else " in most runs")
        return replace(made, outcome=FAILS, reason=reason, test="most runs never got there")
    worst = -math.inf if higher_is_better else math.inf  # as such rank runs without a value
    return by_rank(made, *([worst if v is None else v for v in side] for side in (first, second)))


def ordered(made: Verdict, a: Summary, b: Summary) -> Verdict:
    """Welch's t-test for ">" and "<"; without any variance it would be sure of everything."""
    if a.sd == b.sd == 0:
        found = by_rank(made, a.values, b.values)
        return found if made.difference else replace(found, reason="all values are identical")
    claimed = float(welch(a, b, "greater" if made.claim.relation == ">" else "less").pvalue)
    found = decided(made, "Welch's t-test", claimed, 1 - claimed)
    return replace(found, interval=interval(a, b, 0.95))


def equal(made: Verdict, a: Summary, b: Summary) -> Verdict:
    """ "=" holds if the 90 % interval lies within the margin: two one-sided tests at 5 %."""
    gap, margin = made.difference or 0.0, made.claim.margin
    low, high = (gap, gap) if a.sd == b.sd == 0 else interval(a, b, 0.90)
    inside, outside = -margin <= low and high <= margin, low > margin or high < -margin
    where = "lies within" if inside else "lies outside" if outside else "reaches beyond"
    outcome, reason = HOLDS if inside else FAILS, f"the interval {where} the margin"
    return replace(made, outcome=outcome, reason=reason, test="interval", interval=(low, high))


def interval(a: Summary, b: Summary, confidence: float) -> tuple[float, float]:
    low, high = welch(a, b).confidence_interval(confidence)
    return float(low), float(high)


def welch(a: Summary, b: Summary, alternative: str = "two-sided") -> Any:
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():  # one side may have no variance
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        return ttest_ind(a.values, b.values, equal_var=False, alternative=alternative)


def by_rank(made: Verdict, a: Sequence[float], b: Sequence[float]) -> Verdict:
    """By rank. Open where the runs are as claimed and too few for this test."""
    larger, smaller = (a, b) if made.claim.relation == ">" else (b, a)
    claimed, opposite = rank_p(larger, smaller), rank_p(smaller, larger)
    found = decided(made, "rank test", claimed, opposite)
    least = 1 / math.comb(len(a) + len(b), len(a))
    if least >= LEVEL and claimed < opposite:
        reason = f"too few runs: this rank test cannot get below p = {least:.2g}"
        return replace(found, outcome=OPEN, reason=reason)
    return found


def decided(made: Verdict, test: str, claimed: float, opposite: float) -> Verdict:
    outcome, reason = FAILS, "no significant difference"
    if claimed < LEVEL:
        outcome, reason = HOLDS, "significant"
    elif opposite < LEVEL / 2:  # nobody claimed it, so that both directions were looked at
        reason = "opposite direction significant"
    found = replace(made, outcome=outcome, reason=reason, test=test)
    return replace(found, p=claimed, p_opposite=opposite)


def rank_p(a: Sequence[float], b: Sequence[float]) -> float:
    """One-sided p for "a is larger". mannwhitneyu's exact method knows no ties, and runs that
    never got there are ties; a permutation of ranks does.
    """
    from scipy.stats import permutation_test, rankdata

    ranks = rankdata([*a, *b])
    found = permutation_test(
        (ranks[: len(a)], ranks[len(a) :]),
        lambda x, y, axis: x.sum(axis=axis),
        vectorized=True,
        alternative="greater",
        n_resamples=PERMUTATIONS,
        batch=20_000,
        rng=0,
    )
    return float(found.pvalue)


def after_correction(verdicts: Iterable[Verdict]) -> int:
    """How many of those that hold by a test still do when all tests are taken together."""
    from scipy.stats import false_discovery_control

    with_p = [v for v in verdicts if v.p is not None]
    if not with_p:
        return 0
    adjusted = false_discovery_control([v.p for v in with_p])
    both = zip(with_p, adjusted, strict=True)
    return sum(v.outcome == HOLDS and p < LEVEL for v, p in both)
