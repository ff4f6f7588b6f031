"""Has the experiment changed? A digest of a user's model, batches and code answers it."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def absorb(digest: Any, value: Any) -> None:
    """Take a batch, weights or texts into a digest; of other objects, only the type."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            data = leaf.detach().cpu().contiguous().flatten()
            digest.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            digest.update(data.view(torch.uint8).numpy().tobytes() if len(data) else b"")
        elif isinstance(leaf, np.ndarray):
            digest.update(leaf.tobytes())
        elif isinstance(leaf, (str, bytes, int, float, type(None))):
            digest.update(repr(leaf).encode())
        else:
            digest.update(type(leaf).__name__.encode())


def repr_of(value: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", repr(value))  # an address says nothing


def source_of(part: Any, known: set[Any]) -> str:
    """The text of a function or class, with the functions and numbers it uses."""
    if isinstance(part, type):
        part = part if not part.__module__.startswith("torch.") else None
    elif not isinstance(part, types.FunctionType):
        part = getattr(part, "func", None) or (type(part) if callable(part) else None)
    if part is None or part in known:
        return ""
    known.add(part)
    try:
        text = inspect.getsource(part)
    except (OSError, TypeError):  # typed in at a prompt
        code = getattr(part, "__code__", None)
        text = code.co_code.hex() if code else part.__qualname__
    if not isinstance(part, types.FunctionType):
        return text
    try:
        used = inspect.getclosurevars(part)
    except ValueError:  # it uses a name that has no value yet
        return text
    for name, value in sorted({**used.globals, **used.nonlocals}.items()):
        if isinstance(value, types.FunctionType) and not value.__module__.startswith("torch."):
            text += source_of(value, known)
        elif isinstance(value, (str, int, float, tuple, type(None))):
            text += f"{name} = {repr_of(value)}\n"
    return text


def leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch
