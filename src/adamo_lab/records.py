"""What a run leaves behind, and how it reaches the disk whole or not at all. Needs no torch.

A study is one file of gzipped JSON lines, a run a line::

    results/table2.jsonl.gz     id, task, optimizer, seed, …, result, environment, metrics, …

pandas, polars and DuckDB read it as it is; ``results/README.md`` says what each column holds. Every
line is a gzip member of its own: its CRC tells damage, and a damaged line takes no other with it.

Whoever trains does not save: ``train()`` returns a record, and ``engines.Setup.keep`` puts it into
the study's file and takes the run's folder of checkpoints away.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from .disk import locked, write_atomically
from .errors import LabError

SUFFIX = ".jsonl.gz"
FINISHED, FAILED = "finished", "failed"
HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00"  # how a member begins that has neither name nor date

Row = dict[str, Any]


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's result, and nothing else."""

    task: str
    optimizer: str  # a name in the registry
    seed: int
    epochs: int
    hyper: Mapping[str, Any]  # the optimizer's arguments, complete
    options: Mapping[str, Any] = field(default_factory=dict)  # the task's, complete
    scale: float = 1.0  # 0.1: a tenth of the study's full length
    synthetic: bool = False  # made data in place of the real ones

    @cached_property
    def id(self) -> str:
        """A readable name with a digest of the whole config."""
        digest = hashlib.sha256(canonical(asdict(self)).encode()).hexdigest()[:8]
        return f"{self.task}-{self.optimizer}-s{self.seed}-{digest}"


@dataclass
class Record:
    """One run, finished or failed."""

    config: RunConfig
    status: str
    result: dict[str, Any] = field(default_factory=dict)  # final numbers: {"test_accuracy": 0.99}
    environment: dict[str, Any] = field(default_factory=dict)  # versions, hardware, commit, seconds
    error: str = ""  # of a failed run
    metrics: list[Row] = field(default_factory=list)  # one row an evaluation
    arrays: dict[str, Any] = field(default_factory=dict)  # lists of numbers, or of lists
    study: str = ""  # the name of the file it was read from

    @property
    def id(self) -> str:
        return self.config.id


# --- a record as a line


def canonical(data: Any) -> str:
    """The one JSON text of a value; refuses what is not JSON, NaN included."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def line_of(record: Record) -> bytes:
    """The id first, so that a line can be found without reading it."""
    columns = {"id": record.id, **asdict(record.config)}
    columns |= {name: getattr(record, name) for name in KINDS if name not in columns}
    text = json.dumps(finite(columns), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def is_row(value: Any) -> bool:
    return isinstance(value, dict) and all(v is None or is_number(v) for v in value.values())


def shape(value: Any) -> tuple[int, ...] | None:
    """Of nested lists of numbers, all rows alike and none empty; else None."""
    if not isinstance(value, list):
        return () if value is None or is_number(value) else None
    inner = {shape(v) for v in value}
    only = inner.pop() if len(inner) == 1 else None
    return None if only is None else (len(value), *only)


TEXT = ("a text", lambda v: isinstance(v, str))
OBJECT = ("an object", lambda v: isinstance(v, dict))
KINDS = {  # a column: how it must be, in words and as a test
    **dict.fromkeys(("id", "task", "optimizer"), TEXT),
    "seed": ("a whole number >= 0", lambda v: type(v) is int and v >= 0),
    "epochs": ("a whole number >= 1", lambda v: type(v) is int and v >= 1),
    **dict.fromkeys(("hyper", "options"), OBJECT),
    "scale": ("a number above 0", lambda v: is_number(v) and v > 0),
    "synthetic": ("true or false", lambda v: isinstance(v, bool)),
    "status": (f"{FINISHED} or {FAILED}", lambda v: v in (FINISHED, FAILED)),
    "error": TEXT,
    "result": OBJECT,
    "environment": (
        "an object whose seconds are a number and whose warnings are texts",
        lambda v: (
            isinstance(v, dict)
            and is_number(v.get("seconds", 0))
            and isinstance(v.get("warnings", []), list)
        ),
    ),
    "metrics": (
        "a list of objects with an epoch, all of numbers",
        lambda v: isinstance(v, list) and all(is_row(r) and is_number(r.get("epoch")) for r in v),
    ),
    "arrays": (
        "an object of numbers in lists, all rows alike",
        lambda v: isinstance(v, dict) and None not in map(shape, v.values()),
    ),
}


def refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def parse(text: bytes | None) -> Record:
    """The record in a line; ValueError says what is wrong with one that holds none."""
    if text is None:
        raise ValueError("it is damaged")
    columns = json.loads(text, parse_constant=refuse)
    if not isinstance(columns, dict):
        raise ValueError("it is no JSON object")
    for name, (words, fits) in KINDS.items():
        if name not in columns:
            raise ValueError(f"it has no {name}")
        if not fits(columns[name]):
            raise ValueError(f"its {name} must be {words}")
    names = RunConfig.__dataclass_fields__
    config = RunConfig(**{name: columns[name] for name in names})
    if columns["id"] != config.id:
        raise ValueError(f"its id is {columns['id']} and its config's {config.id}")
    return Record(config, **{k: columns[k] for k in KINDS if k not in names and k != "id"})


# --- files


@dataclass(frozen=True)
class Line:
    number: int
    packed: bytes
    text: bytes | None  # None: damaged

    def is_of(self, ids: Container[str]) -> bool:
        found = re.match(rb'\{"id":"([^"\\]+)"', self.text or b"")
        return bool(found) and found[1].decode(errors="replace") in ids


def pack(text: bytes) -> bytes:
    return gzip.compress(text, mtime=0)


def read_lines(file: Path) -> Iterator[Line]:
    """Every line of a file; what is between two headers and cannot be unpacked is one, too."""
    if not file.exists():
        return
    if not file.is_file():  # to open a FIFO would wait for ever
        raise LabError(f"{file} is no file; move it away")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise LabError(f"{file} cannot be read ({error.strerror})") from error
    starts = {0, len(data), *(found.start() for found in re.finditer(re.escape(HEADER), data))}
    number = 0
    for start, end in pairwise(sorted(starts)):
        try:
            texts: list[Any] = gzip.decompress(data[start:end]).splitlines(keepends=True)
        except (OSError, EOFError, zlib.error):
            texts = [None]
        for text in texts:  # several where another program has packed the file anew
            number += 1
            yield Line(number, data[start:end] if len(texts) == 1 else pack(text), text)


def load(file: Path) -> tuple[list[Record], list[str]]:
    """All runs of a file, and a sentence for each line that is damaged or odd."""
    found: dict[str, Record] = {}
    problems: list[str] = []
    try:
        for line in read_lines(file):
            try:
                record = parse(line.text)
                if record.id in found:
                    raise ValueError(f"it repeats {record.id}")
            except (ValueError, RecursionError) as error:
                problems.append(f"{file}, line {line.number} is left out: {error}")
                continue
            record.study = file.name.removesuffix(SUFFIX)
            found[record.id] = record
    except LabError as error:
        problems.append(str(error))
    return [*found.values()], problems


def load_all(folder: Path) -> tuple[list[Record], list[str]]:
    """The runs of all files in a folder and below, and what is wrong with the others."""
    found: list[Record] = []
    problems: list[str] = []
    for file in sorted(folder.rglob(f"*{SUFFIX}")):
        records, odd = load(file)
        found += records
        problems += odd
    return found, problems


def find(file: Path, id: str) -> Record | None:
    """A run of a file; one that cannot be read is none."""
    for line in read_lines(file):
        if line.is_of({id}):
            with contextlib.suppress(ValueError, RecursionError):
                return parse(line.text)
    return None


def save(record: Record, file: Path) -> None:
    """Add a run, or put it in the place of the line with its id; other lines stay as they are.

    Damaged ones go: nobody can read them, and pandas stops where one begins.
    """
    rewrite(file, {record.id}, pack(line_of(record)))


def forget(file: Path, ids: Container[str]) -> None:
    """Take runs out."""
    if file.exists():
        rewrite(file, ids, b"")


def rewrite(file: Path, without: Container[str], added: bytes) -> None:
    with locked(file.with_name(f".{file.name}.lock"), wait=True):
        whole = [line for line in read_lines(file) if line.text is not None]
        kept = [line.packed for line in whole if not line.is_of(without)]
        write_atomically(file, b"".join([*kept, added]))
