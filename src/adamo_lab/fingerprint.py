"""Has the experiment changed? A digest of a user's model, batches and code answers it."""

from __future__ import annotations

import hashlib
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from functools import partial
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
    """The text of a function or class, with the functions and numbers it uses.

    Of an object its class and its numbers, of a ``functools.partial`` what it was given.
    """
    if isinstance(part, partial):
        given = [*enumerate(part.args), *sorted(part.keywords.items())]
        told = (f"{key} = {text_of(x) or source_of(x, known)}\n" for key, x in given)
        return source_of(part.func, known) + "".join(told)
    if part is None:
        return ""
    if not isinstance(part, types.FunctionType | type):
        inside = sorted(getattr(part, "__dict__", {}).items())
        return source_of(type(part), known) + "".join(f"{k} = {text_of(v)}\n" for k, v in inside)
    if part in known or (isinstance(part, type) and part.__module__.startswith("torch.")):
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
        elif isinstance(value, (str, int, float, tuple, type(None))):  # lists may collect results
            text += f"{name} = {repr_of(value)}\n"
    return text


def text_of(value: Any) -> str:
    """Numbers, words, tensors and what is made of them; nothing of other objects."""
    if isinstance(value, (Tensor, np.ndarray)):
        digest = hashlib.sha256()
        absorb(digest, value)
        return digest.hexdigest()
    if isinstance(value, Mapping):
        return "".join(f"{key}: {text_of(x)}, " for key, x in value.items())
    if isinstance(value, (list, tuple)):
        return "".join(f"{text_of(x)}, " for x in value)
    return repr_of(value) if isinstance(value, (str, bytes, int, float, type(None))) else ""


def leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch
