"""Verdicts in words: what a group's runs say about the claims of its study. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .grids import GRID_METRICS, grid_values
from .runs import Group, capitalized, value
from .studies import Claim, Metric
from .tables import number, p_value, spread
from .verdicts import LEVEL, OPEN, Summary, Values, Verdict, judge


@dataclass(frozen=True)
class Judged:
    """A claim, what became of it in a group, and why, in words."""

    group: Group
    verdict: Verdict
    means: list[tuple[str, str, int]]
    evidence: str

    @property
    def claim(self) -> Claim:
        return self.verdict.claim

    @property
    def outcome(self) -> str:
        return self.verdict.outcome


def judged(group: Group) -> list[Judged]:
    """All claims of a group's study: means ± standard deviations, then the test's numbers."""
    made = []
    for claim in group.study.claims if group.study else ():
        verdict, sides = decide(claim, group), means(claim, group)
        told = f"{capitalized(numbers(verdict, group))}."
        if sides:
            each = ", ".join(f"{name} {mean}" for name, mean, _ in sides)
            told = f"{capitalized(metric_of(claim, group).label)}: {each}. {told}"
        made.append(Judged(group, verdict, sides, told))
    return made


def in_brief(groups: Iterable[Group]) -> list[Judged]:
    """Every claim with its verdict from full runs on real data."""
    return [found for group in groups if group.full for found in judged(group)]


def decide(claim: Claim, group: Group) -> Verdict:
    names = (claim.first, claim.second)
    first, second = (side(claim, name, group) for name in names)
    n = (len(first), len(second))
    if claim.metric in GRID_METRICS:
        begun = [bool(group.named(name)) for name in names]
        if any(b and not count for b, count in zip(begun, n, strict=True)):
            reason = "no seed has run all settings of both heat maps yet"
            return Verdict(claim, OPEN, reason, n)
    if any(n) and not measured(claim, group):
        return Verdict(claim, OPEN, "not measured in these runs", n)
    return judge(claim, first, second, metric_of(claim, group).higher_is_better)


def measured(claim: Claim, group: Group) -> bool:
    """Could runs of both sides have got there? Where SWA is off, say, none has."""
    key = claim.metric
    for name in (claim.first, claim.second):
        runs = [run for line in group.named(name) for run in line.runs]
        told = any(key in r.result or value(r, key) is not None for r in runs)
        if runs and not told and key not in GRID_METRICS:
            return False
    return True


def side(claim: Claim, name: str, group: Group) -> Values:
    """One value a run, or for a claim about heat maps one a seed."""
    if claim.metric in GRID_METRICS:
        return grid_values(group, name, claim.metric)
    return [v for line in group.named(name) for v in line.values(claim.metric)]


def metric_of(claim: Claim, group: Group) -> Metric:
    assert group.study is not None
    return next(m for m in group.study.metrics if m.key == claim.metric)


def numbers(verdict: Verdict, group: Group) -> str:
    """The reason for a verdict and the numbers behind it, in one line."""
    claim, metric = verdict.claim, metric_of(verdict.claim, group)
    sizes = together(f"n = {verdict.n[0]} and {verdict.n[1]}")
    if verdict.outcome == OPEN and verdict.p is None:
        return f"{verdict.reason}; {sizes}"
    unit = " points" if metric.percent else ""
    facts = []
    if verdict.difference is not None and verdict.interval is not None:
        gap = together(number(verdict.difference, metric, signed=True) + unit)
        low, high = (number(v, metric, signed=True) for v in verdict.interval)
        level = 90 if claim.relation == "=" else 95
        facts.append(f"{gap} ({together(f'{level} % CI {low} to {high}')})")
    if claim.relation == "=":
        facts.append(together(f"margin ±{number(claim.margin, metric)}{unit}"))
    if any(verdict.missing):
        for name, n, k in zip((claim.first, claim.second), verdict.n, verdict.missing, strict=True):
            title = group.named(name)[0].title
            facts.append(f"{together(f'{n - k} of {n} runs')} of {title} got there")
    if verdict.p is not None and verdict.p_opposite is not None:
        told = [together(p_value(verdict.p))]
        if verdict.p_opposite < LEVEL / 2:
            told.append(f"in the opposite direction {together(p_value(verdict.p_opposite))}")
        facts.append(", ".join(told))
    return f"{verdict.reason}: {'; '.join([*facts, sizes])}"


def means(claim: Claim, group: Group) -> list[tuple[str, str, int]]:
    """Of both sides that have runs: the optimizer, mean ± standard deviation, how many runs."""
    metric, made = metric_of(claim, group), []
    for name in (claim.first, claim.second):
        found = Summary.of(side(claim, name, group))
        if found.n and measured(claim, group):
            text = spread(found.mean, found.sd, metric) + (" %" if metric.percent else "")
            text += f" ({len(found.values)} of {found.n} runs)" if found.missing else ""
            title = group.named(name)[0].title
            made.append((title, together(text) if found.values else "never", found.n))
    return made


def together(text: str) -> str:
    """Not to be broken over two lines."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")
