"""Files that are there whole or not at all, and locks that die with their owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import LabError, writing


def write_atomically(path: Path, data: bytes) -> None:
    """All of it under its name, or nothing: write beside it, flush to disk, rename."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class Busy(LabError):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Keep other processes out; the system lets go when this one dies."""
    handle = opened(path)
    try:
        while not held(handle, path, wait):  # its last owner removed it while we waited
            os.close(handle)
            handle = opened(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def opened(path: Path) -> int:
    while True:
        with writing(path), contextlib.suppress(FileNotFoundError):  # its folder was taken away
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def held(handle: int, path: Path, wait: bool) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        raise Busy(f"{path.parent.name} is being trained by another process") from error
    try:
        return os.fstat(handle).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
