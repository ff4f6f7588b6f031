"""Has the experiment changed? Digests of a user's model, batches and code answer it.

Code counts as what Python runs: comments do not matter, the version of Python does. What is
installed (torch, numpy, the standard library) counts by its name, and so do objects of classes from
there, unless ``KINDS`` says what is in them: a logger or a writer would tell when it was made.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import functools
import hashlib
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

LONGEST = 10_000  # of a list that is longer so many values, evenly spread
ENTRIES = 1 << 22  # of a tensor
VALUES = 300_000  # of all there is; beyond, and deeper than DEEPEST, types alone
DEEPEST = 100
MAIN = "__main__"


def fingerprint(roots: Mapping[str, Any]) -> dict[str, str]:
    """Digests by name: of these values, and of all that functions and objects in them use.

    A global of a function and an attribute of an object have digests of their own, so that one that
    changes while the code runs, such as a list of results, can be told from the rest.
    """
    walk = Walk()
    waiting = deque(roots.items())
    parts: dict[str, Any] = {}
    while waiting:
        name, value = waiting.popleft()
        parts.setdefault(name, hashlib.sha256()).update(walk.digest(value))
        waiting += walk.used
        walk.used.clear()
    return {name: part.hexdigest() for name, part in parts.items()}


class Walk:
    """One way through values, each of them described once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, bytes]] = {}  # the value, too, so that its id stays its
        self.used: list[tuple[str, Any]] = []  # what those met so far use, by name

    def digest(self, value: Any, depth: int = 0) -> bytes:
        if id(value) in self.known:
            return self.known[id(value)][1]
        name = name_of(value)
        self.known[id(value)] = value, name.encode()  # where it is met inside itself
        whole = hashlib.sha256(name.encode())
        if depth < DEEPEST and len(self.known) < VALUES:
            kind = FOREIGN if is_foreign(value) else kind_of(type(value))
            inside = kind.inside(value)
            if not isinstance(inside, bytes):
                digests = [self.digest(part, depth + 1) for part in inside]
                inside = b"".join(sorted(digests) if isinstance(value, Set) else digests)
            whole.update(inside)
            self.used += [(f"{name}.{key}", part) for key, part in kind.uses(value).items()]
        self.known[id(value)] = value, whole.digest()
        return whole.digest()


# --- what is in a value


class Kind(NamedTuple):
    types: Any  # for issubclass
    inside: Callable[[Any], bytes | Iterable[Any]]  # what it is made of
    uses: Callable[[Any], Mapping[str, Any]] = lambda value: {}  # by name, digested on their own


def spread(values: Iterable[Any]) -> list[Any]:
    found = list(values)
    return [len(found), *found[:: len(found) // LONGEST + 1]]


def entries(tensor: Tensor) -> Iterator[Any]:
    yield from (str(tensor.dtype), str(tensor.layout))
    if is_lazy(tensor) or tensor.is_nested:
        return
    yield tuple(tensor.shape)
    if tensor.layout == torch.strided and not tensor.is_meta:
        flat = tensor.detach().resolve_conj().resolve_neg().flatten()
        data = flat[:: len(flat) // ENTRIES + 1].cpu().contiguous()
        yield data.view(torch.uint8).numpy().tobytes() if len(data) else b""


def array_entries(array: np.ndarray) -> list[Any]:
    flat = array.ravel()
    if array.dtype == object:  # its bytes are addresses
        return [array.shape, flat.tolist()]
    return [str(array.dtype), array.shape, flat[:: len(flat) // ENTRIES + 1].tobytes()]


def code_parts(code: types.CodeType) -> list[Any]:
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return [code.co_code, code.co_consts, *names]


def used_by(function: types.FunctionType) -> dict[str, Any]:
    """Globals, also those of other modules, variables of outer functions, defaults."""
    found: dict[str, Any] = {}
    for name, *further in loads(function.__code__):
        if name in function.__globals__:
            value = function.__globals__[name]
            while isinstance(value, types.ModuleType) and further and not is_foreign(value):
                name = f"{name}.{further[0]}"
                value = getattr(value, further.pop(0), None)
            found[name] = value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    defaults = {"defaults": function.__defaults__, "kwdefaults": function.__kwdefaults__}
    return {**dict(sorted(found.items())), **defaults, **vars(function)}


def loads(code: types.CodeType) -> Iterator[list[str]]:
    """Every global that is read, with the attributes that are read of it: ["config", "scale"]."""
    chain: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(step.argval)
        elif step.opname != "EXTENDED_ARG":
            if chain:
                yield chain
            chain = [step.argval] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from loads(inner)


def members(cls: type) -> dict[str, Any]:
    """Methods and class attributes; what Python itself keeps under names like __doc__ is left."""
    methods = (types.FunctionType, classmethod, staticmethod)
    kept = {k: v for k, v in vars(cls).items() if not k.startswith("__") or isinstance(v, methods)}
    return dict(sorted(kept.items()))


def attributes(value: Any) -> dict[str, Any]:
    slots = [getattr(cls, "__slots__", ()) for cls in type(value).__mro__]
    names = {name for some in slots for name in ([some] if isinstance(some, str) else some)}
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(sorted({**held, **getattr(value, "__dict__", {})}.items()))


INTERNAL = {*vars(nn.Module())}  # parameters, buffers, modules, hooks, training


def module_parts(module: nn.Module) -> list[Any]:
    parameters = dict(module.named_parameters(recurse=False))
    trained = [p.requires_grad for p in parameters.values()]
    buffers = dict(module.named_buffers(recurse=False))
    return [type(module), parameters, trained, buffers, dict(module.named_children())]


def module_attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in attributes(module).items() if k not in INTERNAL}


PLAIN = (
    *(str, int, float, complex, type(None), type(...), range, slice, PurePath),
    *(np.generic, np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
KINDS = (  # the first that fits
    Kind(Enum, lambda x: [type(x).__qualname__, x.name, x.value]),
    Kind((bytes, bytearray), bytes),
    Kind(PLAIN, lambda x: repr(x).encode()),
    Kind(Tensor, entries),
    Kind(np.ndarray, array_entries),
    Kind(Mapping, lambda x: spread(x.items())),
    Kind((list, tuple, deque), spread),
    Kind(Set, list),  # in no order: the digests are sorted
    Kind((argparse.Namespace, types.SimpleNamespace), lambda x: [vars(x)]),
    Kind(functools.partial, lambda x: [x.func, x.args, x.keywords]),
    Kind(types.MethodType, lambda x: [x.__func__, x.__self__]),
    Kind((classmethod, staticmethod), lambda x: [x.__func__]),
    Kind(property, lambda x: [x.fget, x.fset, x.fdel]),
    Kind(functools.cached_property, lambda x: [x.func]),
    Kind(types.CodeType, code_parts),
    Kind(types.FunctionType, lambda x: [x.__code__], used_by),
    Kind(types.ModuleType, lambda x: b""),  # its name will do: see used_by
    Kind(type, lambda x: x.__bases__, members),
    Kind(nn.Module, module_parts, module_attributes),
    Kind(object, lambda x: [type(x)], attributes),
)
FOREIGN = Kind(object, lambda x: [getattr(x, "__dict__", {}).get("__wrapped__")])  # a decorator's


@functools.cache
def kind_of(cls: type) -> Kind:
    return next(kind for kind in KINDS if issubclass(cls, kind.types))


# --- whose it is


def name_of(value: Any) -> str:
    """Of a function, class or module its own, of other values that of their type."""
    named = isinstance(value, (type, types.FunctionType, types.ModuleType)) or is_foreign(value)
    own = getattr(value, "__qualname__", getattr(value, "__name__", None)) if named else None
    return own if isinstance(own, str) else type(value).__qualname__


def is_foreign(value: Any) -> bool:
    """Is a name all that counts of it?"""
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
        if file.startswith("<"):  # frozen, or made by a program: it goes by its module
            return is_foreign(sys.modules.get(value.__module__))
        return is_installed(file)
    if isinstance(value, types.ModuleType):
        return value.__name__ != MAIN and is_installed(getattr(value, "__file__", None))
    if isinstance(value, type):
        return is_foreign(sys.modules.get(value.__module__))
    return kind_of(type(value)).types is object and is_foreign(type(value))


@functools.cache
def is_installed(file: str | None) -> bool:
    """Built in, of the standard library, or of a package that was installed."""
    if file is None:
        return True
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts) or any(
        Path(file).is_relative_to(library) for library in libraries
    )
