"""Verdicts in words: what a group's runs say about the claims of its study. Needs no torch."""

from __future__ import annotations

from .derived import value
from .grids import GRID_METRICS, grid_values
from .groups import Group
from .studies import Claim, Metric
from .tables import number, p_value, spread
from .verdicts import LEVEL, OPEN, Summary, Values, Verdict, judge


def verdicts(group: Group) -> list[Verdict]:
    return [decide(claim, group) for claim in group.study.claims] if group.study else []


def decide(claim: Claim, group: Group) -> Verdict:
    first, second = (side(claim, name, group) for name in (claim.first, claim.second))
    begun, n = {line.name for line in group.lines}, (len(first), len(second))
    if claim.metric in GRID_METRICS and (
        (not first and claim.first in begun) or (not second and claim.second in begun)
    ):
        return Verdict(claim, OPEN, "no seed has run all settings of both heat maps yet", n)
    if (first or second) and not measured(claim, group):
        return Verdict(claim, OPEN, "not measured in these runs", n)
    return judge(claim, first, second, metric_of(claim, group).higher_is_better)


def measured(claim: Claim, group: Group) -> bool:
    """Could runs of both sides have got there? Where SWA is off, say, none has."""
    key = claim.metric
    for name in (claim.first, claim.second):
        runs = [run for line in group.lines if line.name == name for run in line.runs]
        told = any(key in r.result or value(r, key) is not None for r in runs)
        if runs and not told and key not in GRID_METRICS:
            return False
    return True


def side(claim: Claim, name: str, group: Group) -> Values:
    """One value a run, or for a claim about heat maps one a seed."""
    if claim.metric in GRID_METRICS:
        return grid_values(group, name, claim.metric)
    return [v for x in group.lines if x.name == name for v in x.values(claim.metric)]


def metric_of(claim: Claim, group: Group) -> Metric:
    assert group.study is not None
    return next(m for m in group.study.metrics if m.key == claim.metric)


def numbers(verdict: Verdict, group: Group, brief: bool = False) -> str:
    """The reason for a verdict and the numbers behind it, in one line."""
    claim = verdict.claim
    sizes = together(f"n = {verdict.n[0]} and {verdict.n[1]}")
    if verdict.outcome == OPEN and verdict.p is None:
        return f"{verdict.reason}; {sizes}"
    metric = metric_of(claim, group)
    names = {x.name: x.title for x in group.lines}
    unit = " points" if metric.percent else ""
    facts = []
    if verdict.difference is not None and verdict.interval is not None:
        gap = together(number(verdict.difference, metric, signed=True) + unit)
        low, high = (number(v, metric, signed=True) for v in verdict.interval)
        interval = together(f"{verdict.confidence} % CI {low} to {high}")
        sides = "" if brief else f"{names[claim.first]} minus {names[claim.second]} = "
        facts.append(f"{sides}{gap} ({interval})")
    if claim.relation == "=":
        facts.append(together(f"margin ±{number(claim.margin, metric)}{unit}"))
    if any(verdict.missing):
        for name, n, k in zip((claim.first, claim.second), verdict.n, verdict.missing, strict=True):
            facts.append(f"{together(f'{n - k} of {n} runs')} of {names[name]} got there")
    facts += [p_values(verdict), sizes]
    if not brief and verdict.test != "interval":
        last = ", runs that never got there rank last" if any(verdict.missing) else ""
        facts.append(f"{verdict.test}{last}")
    return f"{verdict.reason}: {'; '.join(filter(None, facts))}"


def means(claim: Claim, group: Group) -> list[tuple[str, str, int]]:
    """Of both sides that have runs: the optimizer, mean ± standard deviation, how many runs."""
    metric = metric_of(claim, group)
    names = {x.name: x.title for x in group.lines}
    if not measured(claim, group):
        return []
    made = []
    for name in (claim.first, claim.second):
        found = Summary.of(side(claim, name, group))
        if found.n:
            text = spread(found.mean, found.sd, metric) + (" %" if metric.percent else "")
            if found.missing:
                text += f" ({len(found.values)} of {found.n} runs)"
            text = text if found.values else "never"
            made.append((names[name], together(text), found.n))
    return made


def p_values(verdict: Verdict) -> str:
    if verdict.p is None:
        return ""
    claimed = together(p_value(verdict.p))
    if verdict.p_opposite is None or verdict.p_opposite >= LEVEL / 2:
        return claimed
    return f"{claimed}, in the opposite direction {together(p_value(verdict.p_opposite))}"


def together(text: str) -> str:
    """Not to be broken over two lines."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")
