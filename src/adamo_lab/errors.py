"""Errors that a user can do something about: one sentence, no traceback."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


class LabError(Exception):
    """What went wrong and what to do about it, in one sentence."""


def require(fine: object, sentence: str) -> None:
    """Refuse what is not fine."""
    if not fine:
        raise LabError(sentence)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file and the cause when it cannot be written."""
    try:
        yield
    except OSError as error:
        cause = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise LabError(f"cannot write {path}: {cause}") from error
