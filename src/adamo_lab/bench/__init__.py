"""Step time, memory and training speed of our optimizers against torch's AdamW, in one command.

    adamo-lab bench --device cuda --networks resnet18 gpt-124m

Every contender is timed in turn with ``torch.optim.AdamW(fused=True)`` on the same parameters, and
the ratio of the two is what counts: absolute times on shared machines are worth little. All have
their rounds in several passes, so that slow seconds of the machine do not fall on one of them.
With ``-groups`` after a network's name every tensor is a group of its own, and all learning rates
change before every step, as under a scheduler. Writes ``bench-DEVICE.json`` and, where matplotlib
is installed, ``bench-DEVICE.png``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from adamo_optim import AdamO, AngularAdamW

from .. import environment
from ..errors import writing
from ..records import write_atomically
from .models import training
from .shapes import NETWORKS, Turning

Parameters = list[torch.nn.Parameter]
Groups = list[dict[str, Any]]
Pairs = dict[str, list[tuple[float, float]]]  # times of the reference and of a contender, by kind
REFERENCE, APART = "AdamW fused", "-groups"


class Contender(NamedTuple):
    make: Callable[[Groups], torch.optim.Optimizer]
    bytes: int | None = None  # that a step must move per float32 parameter
    small_only: bool = False  # too slow for the large networks
    turning_only: bool = False  # the same as AdamW where nothing turns


def contenders() -> dict[str, Contender]:
    adamw = torch.optim.AdamW
    made = {
        "AngularAdamW": Contender(lambda gs: AngularAdamW(turning(gs)), 28, turning_only=True),
        "AdamO": Contender(lambda gs: AdamO(gs), 60),
        "AdamO bfloat16 g⁻": Contender(lambda gs: AdamO(gs, previous_gradient="bfloat16"), 56),
        "AdamO sampled g⁻": Contender(lambda gs: AdamO(gs, previous_gradient="sampled"), 53),
        "AdamO no curvature": Contender(lambda gs: AdamO(gs, curvature_target=None), 52),
        "AdamO foreach": Contender(lambda gs: AdamO(gs, foreach=True), small_only=True),
        "AdamO for-loop": Contender(lambda gs: AdamO(gs, foreach=False), small_only=True),
        "AdamW foreach": Contender(lambda gs: adamw(gs, foreach=True)),
        "AdamW for-loop": Contender(lambda gs: adamw(gs, foreach=False), small_only=True),
    }
    for label, module, name in (
        ("AdamP (adamp)", "adamp", "AdamP"),
        ("AdamP (pytorch_optimizer)", "pytorch_optimizer", "AdamP"),
        ("AdamW schedule-free", "schedulefree", "AdamWScheduleFree"),
    ):
        try:
            found = getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        made[label] = Contender(lambda gs, found=found: found(gs, lr=1e-3), small_only=True)
    return made


def suited(params: Parameters) -> dict[str, Contender]:
    """Those that make sense on a network of such parameters."""
    small = sum(p.numel() for p in params) < 5e7
    some_turn = any(map(turns, params))
    return {
        name: contender
        for name, contender in contenders().items()
        if (small or not contender.small_only) and (some_turn or not contender.turning_only)
    }


def turns(p: torch.nn.Parameter) -> bool:
    """Whether AngularAdamW turns it: as its shape was declared, else convolutions."""
    return getattr(p, "turns", p.dim() == 4)


def turning(groups: Groups) -> Groups:
    """The groups split by rule."""
    made: Groups = []
    for group in groups:
        these = [p for p in group["params"] if turns(p)]
        others = [p for p in group["params"] if not turns(p)]
        made += [{"params": these, "rule": "scale_invariant"}] if these else []
        made += [{"params": others, "rule": "general"}] if others else []
    return made


class Clock:
    """Times on the device it was made for."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int) -> float:
        """Mean time of a run, on the device's own clock where it has one."""
        self.wait()
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            return (time.perf_counter() - start) / repeats
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    def host_seconds(self, run: Callable[[], Any]) -> float:
        """Time until the call comes back."""
        self.wait()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def device_seconds(self, run: Callable[[], Any], repeats: int = 10) -> float:
        """Time the GPU is busy, launch gaps left out."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            for _ in range(repeats):
                run()
            self.wait()
        return sum(e.device_time_total for e in profile.key_averages()) / 1e6 / repeats

    def extra_peak_bytes(self, run: Callable[[], Any]) -> int:
        """What the GPU holds beside what was there before."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def copy_rate(self, size: int) -> float:
        """Bytes a second of a large copy, read and written."""
        device = "cuda" if self.cuda else "cpu"
        a = torch.ones(size // 4, device=device)
        b = torch.empty_like(a)
        return 2 * size / statistics.median(self.seconds(lambda: b.copy_(a), 3) for _ in range(9))


def parameters(network: str, device: torch.device) -> Parameters:
    torch.manual_seed(0)
    params = []
    for shape in NETWORKS[network]:
        p: Any = torch.nn.Parameter(torch.randn(tuple(shape), device=device) * 0.02)
        p.grad, p.turns = torch.randn_like(p) * 1e-3, isinstance(shape, Turning)
        params.append(p)
    return params


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [x for s in optimizer.state.values() for x in s.values()]
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def grouped(params: Parameters, apart: bool) -> Groups:
    """In one group, or in one each; new ones every time, as an optimizer writes into them."""
    return [{"params": [p]} for p in params] if apart else [{"params": params}]


def step_of(optimizer: torch.optim.Optimizer, scheduled: bool) -> Callable[[], Any]:
    """A step, ``scheduled``: after a change of all learning rates."""

    def step() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 1 - 1e-6
        optimizer.step()

    return step if scheduled else optimizer.step


def compare(
    make: Callable[[Groups], torch.optim.Optimizer],
    params: Parameters,
    clock: Clock,
    rounds: int,
    apart: bool = False,
    pairs: Pairs | None = None,
) -> dict[str, Any]:
    """One contender in turn with the reference; ``apart``: a scheduled group for every tensor.

    ``pairs`` are the times of earlier rounds, which count as well, and takes those of these.
    """
    pairs = {} if pairs is None else pairs
    optimizer = make(grouped(params, apart))
    getattr(optimizer, "train", lambda: None)()  # schedule-free asks for it
    ours = step_of(optimizer, apart)
    theirs = step_of(torch.optim.AdamW(grouped(params, apart), fused=True), apart)
    for _ in range(3):
        theirs()
        ours()
    clock.wait()
    repeats = max(1, min(20, round(0.05 / clock.seconds(ours, 1))))
    measures = {"": lambda step: clock.seconds(step, repeats), "host_": clock.host_seconds}
    if clock.cuda:
        measures["device_"] = clock.device_seconds
    for _ in range(rounds):
        for kind, measure in measures.items():
            pairs.setdefault(kind, []).append((measure(theirs), measure(ours)))
    result: dict[str, Any] = {}
    for kind, found in pairs.items():
        result[f"{kind}seconds"] = statistics.median(time for _, time in found)
        result[f"{kind}ratio"] = statistics.median(time / base for base, time in found)
        result[f"{kind}ratios"] = sorted(round(time / base, 4) for base, time in found)
    result["reference_seconds"] = statistics.median(base for base, _ in pairs[""])
    result["state_bytes"] = state_bytes(optimizer)
    if clock.cuda:
        base = statistics.median(base for base, _ in pairs["device_"])
        result["reference_device_seconds"] = base
        result["extra_peak_bytes"] = clock.extra_peak_bytes(ours)
    return result


def train_speed(
    name: str, device: torch.device, clock: Clock, rounds: int, compiled: bool = False
) -> dict[str, float]:
    """Training steps per second of ours, as shares of those under AdamW fused.

    ``compiled``: the whole step, forward, backward and optimizer, under ``torch.compile``.
    """
    model, loss = training(name, device)
    params = list(model.parameters())
    angular = AngularAdamW(turning([{"params": params}]))
    optimizers = [torch.optim.AdamW(params, fused=True), angular, AdamO(params)]

    def run(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    if compiled:
        run = torch.compile(run)
    for optimizer in optimizers * 3:
        run(optimizer)
    times = [[clock.seconds(lambda o=o: run(o), 10) for o in optimizers] for _ in range(rounds)]
    shares = [statistics.median(row[0] / row[i] for row in times) for i in range(3)]
    return {
        "adamw_fused_steps_per_second": statistics.median(1 / row[0] for row in times),
        "AngularAdamW": shares[1],
        "AdamO": shares[2],
    }


def show(console: Console, network: str, rows: dict[str, dict[str, Any]]) -> None:
    table = Table(title=f"{network}: times of one step, as multiples of {REFERENCE}")
    for heading in (
        "optimizer",
        "ms",
        "step ×",
        "GPU ×",
        "of copy",
        "host µs",
        "host ×",
        "state MB",
    ):
        table.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for name, row in rows.items():
        busy, used = row.get("device_ratio"), row.get("bandwidth_share")
        table.add_row(
            name,
            f"{1e3 * row['seconds']:.3f}",
            f"{row['ratio']:.2f}",
            f"{busy:.2f}" if busy else "",
            f"{used:.0%}" if used else "",
            f"{1e6 * row['host_seconds']:.0f}",
            f"{row['host_ratio']:.2f}",
            f"{row['state_bytes'] / 1e6:.0f}",
        )
    console.print(table)


def count(text: str) -> int:
    """For argparse, which names the option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="adamo-lab bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    networks = [n + suffix for n in NETWORKS for suffix in ("", APART)]
    parser.add_argument("--networks", nargs="+", choices=networks, default=["resnet18"])
    choices = [n + suffix for n in ("resnet18", "gpt-124m") for suffix in ("", "-compiled")]
    parser.add_argument("--train", nargs="*", choices=choices, default=[])
    parser.add_argument("--rounds", type=count, default=5, help="of a contender in one pass")
    parser.add_argument("--passes", type=count, default=3, help="over all networks")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("bench-output"))
    parser.add_argument("--commit", default="", help="what to record where git is not at hand")
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was asked for, but torch sees no CUDA device")
    torch.set_num_threads(arguments.threads)
    device, console = torch.device(arguments.device), Console()
    path = arguments.out / f"bench-{arguments.device}.json"
    with writing(arguments.out):
        arguments.out.mkdir(parents=True, exist_ok=True)
    if path.exists():
        console.print(f"{path} was there and is replaced")
    if slow := environment.slow_backend(device):
        console.print(slow)
    clock = Clock(device)
    copy_rate = clock.copy_rate(2**30 if clock.cuda else 2**28)
    stated = {"commit": arguments.commit} if arguments.commit else {}
    results: dict[str, Any] = {
        "about": environment.describe(device, warnings=[slow] if slow else []) | stated,
        "rounds": arguments.rounds,
        "passes": arguments.passes,
        "copy_bytes_per_second": copy_rate,
        "networks": {},
        "training": {},
    }

    def save() -> None:
        text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
        write_atomically(path, text.encode())

    pairs: dict[tuple[str, str], Pairs] = {}
    turns = [*enumerate(arguments.networks * arguments.passes, start=1)]
    with Progress(console=console) as progress:
        for turn, network in progress.track(turns, description="steps"):
            params = parameters(network.removesuffix(APART), device)
            size = sum(p.numel() for p in params)
            rows = results["networks"].setdefault(network, {"parameters": size, "optimizers": {}})
            for name, contender in suited(params).items():
                row = compare(
                    contender.make, params, clock, arguments.rounds, network.endswith(APART),
                    pairs.setdefault((network, name), {}),
                )  # fmt: skip
                if contender.bytes:
                    busy = row.get("device_seconds", row["seconds"])
                    row["bandwidth_share"] = contender.bytes * size / busy / copy_rate
                rows["optimizers"][name] = row
                gc.collect()
            if turn > len(turns) - len(arguments.networks):
                show(console, network, rows["optimizers"])
            save()
            del params
    for name in arguments.train:
        compiled = name.endswith("-compiled")
        network = name.removesuffix("-compiled")
        rounds = arguments.rounds * arguments.passes
        results["training"][name] = train_speed(network, device, clock, rounds, compiled)
        for ours in ("AngularAdamW", "AdamO"):
            share = results["training"][name][ours]
            console.print(f"training {name}, {ours}: {share:.3f} of the speed under {REFERENCE}")
        save()
        gc.collect()
    console.print(f"written: {path}")
    try:
        from .plot import draw
    except ImportError:
        console.print("no picture: matplotlib is not installed")
    else:
        console.print(f"written: {draw(path)}")
