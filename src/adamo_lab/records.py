"""What a run leaves behind, and how it reaches the disk whole or not at all. Needs no torch.

A record is a folder::

    results/table2/grokking-adamw-s0-1f3a9c02/
      run.json        config, status, result, environment, and the digests of the other files
      metrics.jsonl   one line an evaluation: {"epoch": 10, "train_loss": ..., "test_accuracy": ...}
      dynamics.jsonl  one line a snapshot: norms, radial step sizes and guard activity per weight
      arrays.npz      optional: decision boundaries, landscapes

``run.json`` is written last, by rename: a folder without it is a run that has not ended, and one
whose digests do not match is damaged. Both are told apart from a finished run and named.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import LabError, writing

if TYPE_CHECKING:
    import numpy as np

FORMAT = 1
RUN, METRICS, DYNAMICS, ARRAYS = "run.json", "metrics.jsonl", "dynamics.jsonl", "arrays.npz"
FINISHED, FAILED = "finished", "failed"

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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunConfig:
        try:
            return cls(**data)
        except TypeError as error:
            raise LabError(f"a config is not of this version ({error})") from error


@dataclass
class Record:
    """One run, finished or failed."""

    config: RunConfig
    status: str
    result: dict[str, Any] = field(default_factory=dict)  # final numbers: {"test_accuracy": 0.99}
    environment: dict[str, Any] = field(default_factory=dict)  # versions, hardware, commit, seconds
    error: str = ""  # of a failed run
    metrics: list[Row] = field(default_factory=list)
    dynamics: list[Row] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    folder: Path | None = None  # where it was read from

    @property
    def id(self) -> str:
        return self.config.id


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


def save(record: Record, folder: Path) -> None:
    """Write a record; ``run.json``, which vouches for the rest, goes first and comes last."""
    files = {METRICS: lines(record.metrics)}
    if record.dynamics:
        files[DYNAMICS] = lines(record.dynamics)
    if record.arrays:
        files[ARRAYS] = packed(record.arrays)
    with writing(folder / RUN):
        (folder / RUN).unlink(missing_ok=True)
    for name, data in files.items():
        write_atomically(folder / name, data)
    document = {
        "format": FORMAT,
        "config": asdict(record.config),
        "status": record.status,
        "result": finite(record.result),
        "environment": record.environment,
        "error": record.error,
        "files": {name: digest(data) for name, data in files.items()},
    }
    document["sha256"] = digest(canonical(document).encode())
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(folder / RUN, text.encode())


def load(folder: Path) -> Record:
    """Read a record; ``LabError`` names whatever is damaged."""
    document = read_document(folder / RUN)
    contents = {name: read_checked(folder / name, sha) for name, sha in document["files"].items()}
    return Record(
        config=RunConfig.from_json(document["config"]),
        status=document["status"],
        result=document["result"],
        environment=document["environment"],
        error=document["error"],
        metrics=[json.loads(line) for line in contents[METRICS].splitlines()],
        dynamics=[json.loads(line) for line in contents.get(DYNAMICS, b"").splitlines()],
        arrays=unpacked(contents[ARRAYS]) if ARRAYS in contents else {},
        folder=folder,
    )


def read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        claimed = document.pop("sha256")
        sound = claimed == digest(canonical(document).encode())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise LabError(f"{path} is damaged ({type(error).__name__}); delete its folder") from error
    if not sound:
        raise LabError(f"{path} was changed after it was written; delete its folder")
    if document["format"] != FORMAT:
        raise LabError(f"{path} has format {document['format']}, this version reads {FORMAT}")
    return document


def read_checked(path: Path, sha256: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LabError(f"{path} is missing or unreadable; delete its folder") from error
    if digest(data) != sha256:
        raise LabError(f"{path} does not match its checksum in {RUN}; delete its folder")
    return data


def load_all(root: Path) -> tuple[dict[str, Record], list[str]]:
    """All records below a folder by id, and a sentence for each that is damaged."""
    found, damaged = load_folders(root)
    return found, [problem for _, problem in damaged]


def load_folders(root: Path) -> tuple[dict[str, Record], list[tuple[str, str]]]:
    """All records below a folder by id; of each that is damaged its folder's name, and how."""
    found: dict[str, Record] = {}
    problems: list[tuple[str, str]] = []
    for path in sorted(root.rglob(RUN)):
        try:
            record = load(path.parent)
        except LabError as error:
            problems.append((path.parent.name, str(error)))
            continue
        known = found.get(record.id)
        if known is None or (known.status == FAILED and record.status == FINISHED):
            found[record.id] = record
    return found, problems


def lines(rows: Iterable[Row]) -> bytes:
    return "".join(canonical(finite(row)) + "\n" for row in rows).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpacked(data: bytes) -> dict[str, np.ndarray]:
    import numpy as np

    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
