"""The studies by name; none of them needs torch to be listed or reported."""

from __future__ import annotations

from ..errors import LabError
from .base import Claim, Metric, Request, Study
from .figures import FIG1, FIG2, FIG3, FIG4, FIG4_DIGITS, FIG4_DIGITS_COSINE
from .premise import PREMISE
from .tables import LANGUAGE, TABLE1, TABLE2, TABLE3
from .tuning import TUNING_SUMS, TUNING_TEXT, TUNING_VISION

__all__ = ["STUDIES", "Claim", "Metric", "Request", "Study", "study"]

STUDIES = {
    s.name: s
    for s in (
        *(TABLE1, TABLE2, TABLE3, FIG1, FIG2, FIG3),
        *(FIG4, FIG4_DIGITS, FIG4_DIGITS_COSINE, LANGUAGE),
        *PREMISE,
        *(TUNING_VISION, TUNING_SUMS, TUNING_TEXT),
    )
}


def study(name: str) -> Study:
    """A study, or one sentence that names the choices."""
    if name not in STUDIES:
        raise LabError(f"unknown study {name!r}; known are {', '.join(STUDIES)}")
    return STUDIES[name]
