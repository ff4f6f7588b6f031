"""The studies by name; none of them needs torch to be listed or reported."""

from __future__ import annotations

from ..errors import lookup
from .base import Arm, Claim, Metric, Runs, Study
from .evidence import EVIDENCE
from .paper import PAPER
from .tuning import TUNING

__all__ = ["STUDIES", "Arm", "Claim", "Metric", "Runs", "Study", "study"]

STUDIES = {s.name: s for s in (*PAPER, *TUNING, *EVIDENCE)}


def study(name: str) -> Study:
    return lookup("study", name, STUDIES)
