"""Errors that a user can do something about: one sentence, no traceback."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class LabError(Exception):
    """What went wrong and what to do about it, in one sentence."""


def require(fine: object, sentence: str) -> None:
    """Refuse what is not fine."""
    if not fine:
        raise LabError(sentence)


def lookup(kind: str, name: str, known: Mapping[str, T]) -> T:
    """What a table has under a user's word, or one sentence that names the choices."""
    require(name in known, f"unknown {kind} {name!r}; known are {', '.join(known)}")
    return known[name]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file and the cause when it cannot be written."""
    try:
        yield
    except OSError as error:
        cause = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise LabError(f"cannot write {path}: {cause}") from error
