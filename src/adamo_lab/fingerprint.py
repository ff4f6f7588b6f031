"""Has the experiment changed? Digests of a user's model, batches and code answer it.

Code counts as what Python runs: comments do not matter, the version of Python does. What is
installed (torch, numpy, the standard library) counts by its name, and so do objects of classes from
there, unless ``KINDS`` says what is in them: a logger or a writer would tell when it was made.
Of what is very long or large, a sample counts.
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
from torch.utils.data import DataLoader, Dataset, Sampler

LONGEST = 10_000  # of a list that is longer at most so many values, evenly spread
ENTRIES = 1 << 22  # of a tensor, in
BLOCKS = 1 << 10  # pieces: every column of a table is in them, and little of a file is read
VALUES = 300_000  # of one part; beyond, and deeper than DEEPEST, types alone
DEEPEST = 100
PARTS = 100_000  # the first so many, those that are used directly before those that these use
MAIN = "__main__"


def fingerprint(roots: Mapping[str, Any]) -> dict[str, str]:
    """Digests by path: of these values, and of all that functions and objects in them use.

    A global of a function and an attribute of an object have digests of their own, so that one that
    changes while the code runs, such as a list of results, can be told from the rest.
    """
    walk = Walk()
    waiting = deque(roots.items())
    parts: dict[str, Any] = {}
    while waiting and len(parts) < PARTS:
        path, value = waiting.popleft()
        parts.setdefault(path, hashlib.sha256()).update(walk.part(value, path))
        waiting += walk.used
        walk.used.clear()
    return {path: part.hexdigest() for path, part in parts.items()}


class Walk:
    """One way through values, each of them described once, where it is first met."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, bytes]] = {}  # the value, too, so that its id stays its
        self.used: list[tuple[str, Any]] = []  # what those met so far use, by path
        self.left = 0  # values that this part may still have

    def part(self, value: Any, path: str) -> bytes:
        self.left = VALUES  # each part its own: a large one must not hide what comes after it
        return self.digest(value, path)

    def digest(self, value: Any, path: str) -> bytes:
        if id(value) in self.known:
            return self.known[id(value)][1]
        whole = hashlib.sha256(name_of(value).encode())
        if path.count(".") >= DEEPEST or not self.left:
            return whole.digest()
        self.left -= 1
        self.known[id(value)] = value, path.encode()  # where it is met inside itself
        kind = FOREIGN if is_foreign(value) else kind_of(type(value))
        inside = kind.inside(value)
        if not isinstance(inside, bytes):
            digests = [self.digest(part, f"{path}.{i}") for i, part in enumerate(inside)]
            inside = b"".join(sorted(digests) if isinstance(value, Set) else digests)
        whole.update(inside)
        if uses := kind.uses(value):
            whole.update(path.encode())  # met again, it is this one, and not its like elsewhere
            self.used += [(f"{path}.{key}", part) for key, part in uses.items()]
        self.known[id(value)] = value, whole.digest()
        return whole.digest()


# --- what is in a value


class Kind(NamedTuple):
    types: Any  # for issubclass
    inside: Callable[[Any], bytes | Iterable[Any]]  # what it is made of
    uses: Callable[[Any], Mapping[Any, Any]] = lambda value: {}  # by name, digested on their own


def spread(values: Iterable[Any]) -> list[Any]:
    found = list(values)
    step = -(-len(found) // LONGEST) or 1  # rounded up
    return [len(found), *found[::step]]


def sample(flat: Any) -> Any:
    """Of a vector, torch's or numpy's: all of it, or blocks of neighbours, evenly spread."""
    if len(flat) <= ENTRIES:
        return flat
    width = len(flat) // BLOCKS
    return flat[: BLOCKS * width].reshape(BLOCKS, width)[:, : ENTRIES // BLOCKS]


def entries(tensor: Tensor) -> Iterator[Any]:
    yield from (str(tensor.dtype), str(tensor.layout))
    if is_lazy(tensor) or tensor.is_nested:
        return
    yield tuple(tensor.shape)
    if tensor.is_meta:
        return
    if tensor.layout == torch.strided:
        flat = tensor.detach().resolve_conj().resolve_neg().flatten()
        data = sample(flat).cpu().contiguous()
        yield data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    elif str(tensor.layout).startswith("torch.sparse"):
        listed = tensor.detach().to_sparse_coo().coalesce()
        yield from (listed.indices(), listed.values())


def array_entries(array: np.ndarray) -> list[Any]:
    flat = array.ravel()
    if array.dtype == object:  # its bytes are addresses
        return [array.shape, flat.tolist()]
    return [str(array.dtype), array.shape, sample(flat).tobytes()]


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
    defaults = {"(defaults)": function.__defaults__, "(keywords)": function.__kwdefaults__}
    held = {f"(attribute) {name}": value for name, value in vars(function).items()}
    return {**dict(sorted(found.items())), **defaults, **held}  # no name of one hides another's


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
READING = {"_iterator", "_IterableDataset_len_called"}  # what a loader notes while it is read


def module_parts(module: nn.Module) -> dict[str, Any]:
    """One by one: the statistics of a teacher in training change, its weights and code do not."""
    own = {k: v for k, v in attributes(module).items() if k not in INTERNAL}
    parameters = {k: (p, p.requires_grad) for k, p in module.named_parameters(recurse=False)}
    buffers = dict(module.named_buffers(recurse=False))
    children = dict(module._modules.items())  # named_children() leaves out one that comes again
    return {**own, **parameters, **buffers, **children}


def loader_parts(loader: Any) -> dict[str, Any]:
    """What a loader, a data set or a sampler holds, be its class torch's or one's own."""
    return {k: v for k, v in attributes(loader).items() if k not in READING}


def partial_parts(partial: functools.partial[Any]) -> dict[Any, Any]:
    return {"": partial.func, **dict(enumerate(partial.args)), **partial.keywords}


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
    Kind(Set, lambda x: sorted(x, key=name_of)),  # so that classes have the same paths every time
    Kind((argparse.Namespace, types.SimpleNamespace), lambda x: [vars(x)]),
    Kind(functools.partial, lambda x: b"", partial_parts),
    Kind(types.MethodType, lambda x: b"", lambda x: {"": x.__func__, "self": x.__self__}),
    Kind((classmethod, staticmethod), lambda x: [x.__func__]),
    Kind(property, lambda x: [x.fget, x.fset, x.fdel]),
    Kind(functools.cached_property, lambda x: [x.func]),
    Kind(types.CodeType, code_parts),
    Kind(types.FunctionType, lambda x: [x.__code__], used_by),
    Kind(types.ModuleType, lambda x: b""),  # its name will do: see used_by
    Kind(type, lambda x: x.__bases__, members),
    Kind(nn.Module, lambda x: [type(x)], module_parts),
    Kind((DataLoader, Dataset, Sampler), lambda x: [type(x)], loader_parts),
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
        return value.__name__ != MAIN and is_installed(place_of(value))
    if isinstance(value, type):
        return is_foreign(sys.modules.get(value.__module__))
    return kind_of(type(value)).types is object and is_foreign(type(value))


def place_of(module: types.ModuleType) -> str | None:
    """Its file; a package without ``__init__.py`` has none, but a folder."""
    folders = [] if getattr(module, "__file__", None) else vars(module).get("__path__", [])
    return next(iter(folders), getattr(module, "__file__", None))


@functools.cache
def is_installed(file: str | None) -> bool:
    """Built in, of the standard library, or of a package that was installed."""
    if file is None:
        return True
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts) or any(
        Path(file).is_relative_to(library) for library in libraries
    )
