"""The studies by name; none of them needs torch to be listed or reported."""

from __future__ import annotations

from ..errors import LabError
from .base import Claim, Metric, Request, Study
from .cosine import TUNING_COSINE
from .defaults import DEFAULTS
from .figures import FIG1, FIG2, FIG3, FIG4, FIG4_DIGITS, FIG4_DIGITS_COSINE, PLAIN_DIGITS
from .premise import PREMISE
from .speed import SPEED
from .tables import LANGUAGE, TABLE1, TABLE2, TABLE3
from .tuning import (
    FINAL_SUMS,
    FINAL_TEXT,
    FINAL_VISION,
    FINAL_WORDS,
    TUNING_SUMS,
    TUNING_TEXT,
    TUNING_VISION,
)

__all__ = ["STUDIES", "Claim", "Metric", "Request", "Study", "study"]

STUDIES = {
    s.name: s
    for s in (
        *(TABLE1, TABLE2, TABLE3, FIG1, FIG2, FIG3),
        *(FIG4, FIG4_DIGITS, FIG4_DIGITS_COSINE, PLAIN_DIGITS, LANGUAGE),
        *PREMISE,
        *SPEED,
        *DEFAULTS,
        *(TUNING_VISION, FINAL_VISION, TUNING_SUMS, FINAL_SUMS),
        *(TUNING_TEXT, FINAL_TEXT, FINAL_WORDS, TUNING_COSINE),
    )
}


def study(name: str) -> Study:
    """A study, or one sentence that names the choices."""
    if name not in STUDIES:
        raise LabError(f"unknown study {name!r}; known are {', '.join(STUDIES)}")
    return STUDIES[name]
