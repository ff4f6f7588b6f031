"""Does a claim hold? Means, intervals and tests on the few runs a study has. Needs no torch.

A value is None where a run never reached what the metric measures (a grokking epoch, say). Such
runs are never left out: a claim about them goes to a rank test in which they count as worse than
every value that was reached.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .studies import Claim

HOLDS, FAILS, OPEN = "holds", "does not hold", "not yet measured"
LEVEL = 0.05  # of every test
FEWEST = 3  # runs on either side

RULE = (
    "A claim that one optimizer is above or below another holds if both have at least "
    f"{FEWEST} runs and Welch's one-sided t-test gives p < {LEVEL} in the claimed direction. "
    "A claim that two are equal holds if the 90 % confidence interval of their difference lies "
    "within the stated margin. Where some runs never reached what is measured, an exact one-sided "
    "Mann–Whitney rank test takes the place of the t-test, and those runs rank last; so it does "
    "where neither side has any variance. "
    "Intervals are two-sided, so one may touch zero while the one-sided p is just below "
    f"{LEVEL}. The opposite of a claim, which nobody had claimed, is called significant if p < "
    f"{LEVEL / 2:g}. Each claim is tested on its own, without a correction for their number."
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
class Difference:
    """First mean minus second, its standard error and Welch's degrees of freedom."""

    mean: float
    error: float
    freedom: float

    @classmethod
    def of(cls, first: Summary, second: Summary) -> Difference:
        assert first.mean is not None
        assert second.mean is not None
        parts = [statistics.variance(s.values) / len(s.values) for s in (first, second)]
        total = sum(parts)
        weights = [
            part**2 / (len(s.values) - 1) for part, s in zip(parts, (first, second), strict=True)
        ]
        freedom = total**2 / sum(weights) if sum(weights) > 0 else math.inf
        return cls(first.mean - second.mean, math.sqrt(total), freedom)

    def p_greater(self) -> float:
        """One-sided p for "the first is larger", where there is any variance."""
        from scipy.special import stdtr

        return float(stdtr(self.freedom, -self.mean / self.error))

    def interval(self, confidence: float) -> tuple[float, float]:
        if self.error == 0:
            return self.mean, self.mean
        from scipy.special import stdtrit

        half = float(stdtrit(self.freedom, (1 + confidence) / 2)) * self.error
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Verdict:
    """The answer to a claim, and the numbers behind it."""

    claim: Claim
    outcome: str  # HOLDS, FAILS or OPEN
    reason: str
    n: tuple[int, int]
    test: str = ""
    difference: float | None = None
    interval: tuple[float, float] | None = None
    confidence: int = 95  # of the interval, in per cent
    p: float | None = None  # in the claimed direction
    p_opposite: float | None = None
    missing: tuple[int, int] = (0, 0)


def judge(claim: Claim, first: Values, second: Values, higher_is_better: bool = True) -> Verdict:
    """Decide a claim from the values of its two sides, one a run."""
    a, b = Summary.of(first), Summary.of(second)
    n, missing = (a.n, b.n), (a.missing, b.missing)
    if min(n) == 0:
        return Verdict(claim, OPEN, "no runs yet" if max(n) == 0 else "one side has no runs", n)
    if min(n) < FEWEST:
        return Verdict(claim, OPEN, f"at least {FEWEST} runs a side are needed", n)
    if max(missing) == 0:
        decide = equal if claim.relation == "=" else ordered
        return decide(claim, a, b)
    if claim.relation == "=":
        reason = "some runs never got there, so there is no mean to compare"
        return Verdict(claim, OPEN, reason, n, missing=missing)
    return ranked(claim, first, second, missing, higher_is_better)


def ordered(claim: Claim, a: Summary, b: Summary) -> Verdict:
    """Welch's t-test for ">" and "<"; without any variance it would be sure of everything."""
    difference = Difference.of(a, b)
    if difference.error == 0:
        verdict = replace(by_rank(claim, a.values, b.values), difference=difference.mean)
        return verdict if difference.mean else replace(verdict, reason="all values are identical")
    greater = difference.p_greater()
    claimed, opposite = greater, 1 - greater
    if claim.relation == "<":
        claimed, opposite = opposite, claimed
    outcome, reason = direction(claimed, opposite)
    return Verdict(
        claim, outcome, reason, (a.n, b.n), "Welch's t-test",
        difference.mean, difference.interval(0.95), p=claimed, p_opposite=opposite,
    )  # fmt: skip


def equal(claim: Claim, a: Summary, b: Summary) -> Verdict:
    """ "=" holds if the 90 % interval lies within the margin: two one-sided tests at 5 %."""
    difference = Difference.of(a, b)
    low, high = difference.interval(0.90)
    margin = claim.margin
    if -margin <= low and high <= margin:
        outcome, reason = HOLDS, "the interval lies within the margin"
    elif low > margin or high < -margin:
        outcome, reason = FAILS, "the interval lies outside the margin"
    else:
        outcome, reason = FAILS, "the interval reaches beyond the margin"
    return Verdict(
        claim, outcome, reason, (a.n, b.n), "interval", difference.mean, (low, high), 90
    )  # fmt: skip


def ranked(
    claim: Claim, first: Values, second: Values, missing: tuple[int, int], higher_is_better: bool
) -> Verdict:
    """A rank test where some runs have no value: they rank as the worst."""
    n = (len(first), len(second))
    if claim.relation == ">" and not higher_is_better and 2 * missing[0] > n[0]:
        # a rank test would call that significantly later
        reason = "it did not come late, it never came"
        reason += "" if missing[0] == n[0] else " in most runs"
        return Verdict(claim, FAILS, reason, n, "most runs never got there", missing=missing)
    worst = -math.inf if higher_is_better else math.inf
    a, b = ([worst if v is None else float(v) for v in side] for side in (first, second))
    return replace(by_rank(claim, a, b), missing=missing)


def by_rank(claim: Claim, a: Sequence[float], b: Sequence[float]) -> Verdict:
    """Mann–Whitney, exact. Open where the runs are as claimed and too few for this test."""
    claimed, opposite = rank_p(a, b), rank_p(b, a)
    if claim.relation == "<":
        claimed, opposite = opposite, claimed
    smallest = 1 / math.comb(len(a) + len(b), len(a))
    outcome, reason = direction(claimed, opposite)
    if smallest >= LEVEL and claimed < opposite:
        outcome, reason = OPEN, f"too few runs: this rank test cannot get below p = {smallest:.2g}"
    n = (len(a), len(b))
    return Verdict(claim, outcome, reason, n, "rank test", p=claimed, p_opposite=opposite)


def direction(claimed: float, opposite: float) -> tuple[str, str]:
    if claimed < LEVEL:
        return HOLDS, "significant"
    if opposite < LEVEL / 2:  # nobody claimed it, so that both directions were looked at
        return FAILS, "opposite direction significant"
    return FAILS, "no significant difference"


def rank_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Exact one-sided p of the rank sum for "a is larger", ties sharing their mean rank.

    Counts, over all ways to pick len(a) of the pooled values, how often the rank sum is at least
    the observed one. scipy's exact method ignores ties, and runs that never got there are ties.
    """
    pooled = sorted([*a, *b])
    # twice the mean rank, to stay with whole numbers
    rank = {v: 2 * pooled.index(v) + pooled.count(v) + 1 for v in set(pooled)}
    observed = sum(rank[v] for v in a)
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in a)]  # ways[k][s]: k values with rank sum s
    for value in pooled:
        for k in range(len(a), 0, -1):
            for total, count in ways[k - 1].items():
                reached = total + rank[value]
                ways[k][reached] = ways[k].get(reached, 0) + count
    all_ways = math.comb(len(pooled), len(a))
    return sum(count for total, count in ways[-1].items() if total >= observed) / all_ways
