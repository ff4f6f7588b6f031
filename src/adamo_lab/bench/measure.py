"""The measurements of ``adamo-lab bench``, their record and their table."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import environment
from ..disk import write_atomically
from ..errors import LabError, writing
from .clock import Clock
from .contenders import (
    MANY,
    NETWORKS,
    PEERS,
    QUICK,
    Contender,
    Parameters,
    contenders,
    parameters,
    peers,
)
from .models import MODELS, train_speed

Pairs = dict[str, list[tuple[float, float]]]  # times of the reference and of a contender, by kind


def measure(
    networks: Sequence[str] = (),
    train: bool = False,
    peer: Sequence[str] = (),
    device: str = "auto",
    rounds: int = 3,
    passes: int = 2,
    out: Path = Path("bench-output"),
) -> Path:
    """Write ``bench-DEVICE.json`` and its picture, of trainings ``bench-DEVICE-training.json``."""
    known = MODELS if train else [*NETWORKS]
    names = checked(networks, known) or (known if train else ["resnet18"])
    asked = checked(peer, [*PEERS]) or QUICK
    here = ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    where = torch.device(here[-1] if device == "auto" else checked([device], here)[0])
    console, path = Console(), out / f"bench-{where.type}{'-training' if train else ''}.json"
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    if path.exists():
        console.print(f"{path} was there and is replaced")
    if slow := environment.slow_backend(where):
        console.print(slow)
    about = environment.describe(where, warnings=[slow] if slow else [])
    record: dict[str, Any] = {"about": about, "rounds": rounds, "passes": passes}
    for _ in (trainings if train else steps)(record, names, where, asked):
        write_atomically(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    tell(record, console)
    console.print(f"written: {path}")
    if not train:
        from .plot import draw

        console.print(f"written: {draw(path)}")
    return path


def checked(names: Sequence[str], known: list[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise LabError(f"there is no {name!r} here; choose from {', '.join(known)}")
    return list(names)


def trainings(
    record: dict[str, Any], names: list[str], device: torch.device, _: list[str]
) -> Iterator[None]:
    record["training"] = {}
    for name in track(names, "trainings"):
        rounds = record["rounds"] * record["passes"]
        record["training"][name] = train_speed(name, device, Clock(device), rounds)
        yield


def steps(
    record: dict[str, Any], names: list[str], device: torch.device, asked: list[str]
) -> Iterator[None]:
    """All contenders on all networks, in several passes."""
    clock = Clock(device)
    others, absent = peers(asked)
    rate = clock.copy_rate()
    record |= {"copy_bytes_per_second": rate, "networks": {}, "absent": absent}
    pairs: dict[tuple[str, str], Pairs] = {}
    for network in track(names * record["passes"], "steps"):
        params = parameters(network, device)
        size = sum(p.numel() for p in params)
        rows = record["networks"].setdefault(network, {"parameters": size, "optimizers": {}})
        reference = torch.optim.AdamW(params, fused=True)
        for name, contender in (contenders() | others).items():
            if (contender.slow and size > MANY) or name in absent:
                continue
            times = pairs.setdefault((network, name), {})
            try:
                row = compare(contender, reference, params, clock, record["rounds"], times)
            except Exception as error:
                if name not in others:
                    raise
                absent[name] = f"{type(error).__name__}: {error}"[:200]
                continue
            busy = row.get("device_seconds", row["seconds"])
            row["bandwidth_share"] = contender.bytes * size / busy / rate
            rows["optimizers"][name] = row
            gc.collect()
        del params, reference
        yield


def compare(
    contender: Contender,
    reference: torch.optim.Optimizer,
    params: Parameters,
    clock: Clock,
    rounds: int,
    pairs: Pairs,
) -> dict[str, Any]:
    """One contender in turn with the reference; ``pairs`` has the times of earlier passes, too."""
    optimizer = contender.make(params)
    ours, theirs = optimizer.step, reference.step
    for _ in range(3):
        theirs()
        ours()
    repeats = max(1, min(20, round(0.05 / clock.seconds(ours, 1))))
    measures = {"": lambda step: clock.seconds(step, repeats), "host_": clock.host_seconds}
    if clock.cuda:
        measures["device_"] = lambda step: clock.device_seconds(step, min(repeats, 5))
    for _ in range(rounds):
        for kind, timed in measures.items():
            pairs.setdefault(kind, []).append((timed(theirs), timed(ours)))
    result: dict[str, Any] = {"bytes_per_parameter": contender.bytes}
    for kind, found in pairs.items():
        result[f"{kind}seconds"] = statistics.median(time for _, time in found)
        result[f"{kind}ratio"] = statistics.median(time / base for base, time in found)
        result[f"{kind}ratios"] = sorted(round(time / base, 4) for base, time in found)
    result["state_bytes"] = bytes_of(list(optimizer.state.values()))
    result["extra_bytes"] = clock.extra_bytes(ours)
    return result


def bytes_of(state: Any) -> int:
    """What the tensors in it hold, those of tensor subclasses included."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        return sum(map(bytes_of, state))
    if hasattr(state, "__tensor_flatten__"):
        return sum(bytes_of(getattr(state, name)) for name in state.__tensor_flatten__()[0])
    return state.nbytes if isinstance(state, torch.Tensor) else 0


COLUMNS = {
    "ms": lambda row: f"{1e3 * row['seconds']:.3g}",
    "step ×": lambda row: f"{row['ratio']:.2f}",
    "GPU ×": lambda row: f"{row['device_ratio']:.2f}" if "device_ratio" in row else "",
    "bytes": lambda row: f"{row['bytes_per_parameter']:g}",
    "of copy": lambda row: f"{row['bandwidth_share']:.0%}",
    "host ×": lambda row: f"{row['host_ratio']:.2f}",
    "extra MB": lambda row: f"{row['extra_bytes'] / 1e6:.0f}",
    "state MB": lambda row: f"{row['state_bytes'] / 1e6:.0f}",
}


def tell(record: dict[str, Any], console: Console) -> None:
    for network, found in record.get("networks", {}).items():
        title = f"{network}: one step, as multiples of AdamW fused"
        table = Table(title=title, box=None, pad_edge=False)  # all of it fits into 80 columns
        table.add_column("optimizer", no_wrap=True)
        rows = {
            name: [column(row) for column in COLUMNS.values()]
            for name, row in found["optimizers"].items()
        }
        told = [any(cells) for cells in zip(*rows.values(), strict=True)]  # a CPU has no GPU column
        for heading in compress(COLUMNS, told):
            table.add_column(heading, justify="right")
        for name, cells in rows.items():
            table.add_row(name, *compress(cells, told))
        console.print(table)
    for name, speed in record.get("training", {}).items():
        console.print(f"{name}: {', '.join(f'{key} {x:.3f}' for key, x in speed.items())}")
    for name, reason in record.get("absent", {}).items():
        console.print(f"left out: {name} ({reason})")
