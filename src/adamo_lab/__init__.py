"""The laboratory: every experiment of the AdamO paper as one command, on real data.

``adamo-lab --help`` lists the commands. From Python, :func:`compare` puts AdamW and AdamO side by
side on a model of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .yours import compare

__all__ = ["compare"]


def __getattr__(name: str) -> Any:
    if name == "compare":  # imports torch; the command line must answer before that
        from .yours import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
