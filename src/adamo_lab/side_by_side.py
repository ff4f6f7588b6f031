"""Several runs at a time on one GPU, in one process.

The step of every run is captured into a CUDA graph and replayed on a stream of its own, so that
small kernels of different runs fill the chip together. Runs of one seed read the same augmented
batches, which are made once an epoch: their comparison is paired, and the work is shared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .engines import KNOWN, STOPPED, Outcome, Setup, View, failure, interruptible, resolve_device
from .records import FINISHED, Row, RunConfig, canonical
from .tasks.base import Batch, Phase, Task
from .train import Run, make_task

WARM_UP = 3  # steps before a capture; they are real steps of the run
RECOMPILATIONS = 64


class GraphRun(Run):
    """A run whose step is captured once a phase and replayed."""

    def __init__(
        self, config: RunConfig, task: Task, folder: Path, loss: Callable[..., Tensor]
    ) -> None:
        self.stream = torch.cuda.Stream(task.device)
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self.cursor = torch.zeros(1, dtype=torch.int64, device=task.device)  # which batch is next
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            super().__init__(config, task, folder, graph=True)
        self.loss = loss

    def train(self, stacks: list[Batch]) -> Iterator[None]:
        phase = self.task.phase(self.epoch)
        with torch.cuda.stream(self.stream):
            self.begin(phase)
        for stack in stacks:
            yield from self.replay(stack, phase)
        with torch.cuda.stream(self.stream):
            self.end(phase, sum(len(stack[0]) for stack in stacks))

    def replay(self, stack: Batch, phase: Phase) -> Iterator[None]:
        """All steps of a stack, by the graph that reads it in this phase."""
        key = (phase.label_smoothing, phase.late, *(t.data_ptr() for t in stack))
        steps, done = len(stack[0]), 0
        with torch.cuda.stream(self.stream):
            self.cursor.zero_()
            if key not in self.graphs:
                done = min(WARM_UP, steps)
                for _ in range(done):
                    self.approach()
                    self.indexed_step(stack, phase)
                if done < steps:
                    self.graphs[key] = self.capture(stack, phase)
        for _ in range(done, steps):
            with torch.cuda.stream(self.stream):
                self.approach()
                self.graphs[key].replay()
            yield

    def capture(self, stack: Batch, phase: Phase) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.stream):
            self.indexed_step(stack, phase)
        return graph

    def indexed_step(self, stack: Batch, phase: Phase) -> None:
        """A step on the batch under the cursor: the same addresses whichever batch it is."""
        self.step(tuple(selected(t, self.cursor) for t in stack), phase)
        self.cursor += 1

    def collect(self) -> Row | None:
        with torch.cuda.stream(self.stream):
            return super().collect()


def selected(stack: Tensor, cursor: Tensor) -> Tensor:
    """One batch of a stack in the stack's own memory layout, which index_select alone forgets."""
    order = sorted(range(stack.dim()), key=lambda d: (-stack.stride(d), d))
    batch = stack.permute(order).index_select(order.index(0), cursor)
    return batch.permute([order.index(d) for d in range(stack.dim())]).squeeze(0)


class Feed:
    """The batches of one task, at addresses that do not change, for all runs that train on it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.epoch = -1
        self.stacks: list[Batch] = []

    def fill(self, epoch: int, readers: Sequence[torch.cuda.Stream]) -> list[Batch]:
        """Bring the batches of an epoch; readers wait for them, and they for the readers."""
        if epoch != self.epoch:
            fresh = list(self.task.batches(epoch))
            main = torch.cuda.current_stream()
            for reader in readers:
                main.wait_stream(reader)
            if self.stacks:
                for old, new in zip(self.stacks, fresh, strict=True):
                    for a, b in zip(old, new, strict=True):
                        a.copy_(b)
            else:
                self.stacks = fresh
            for reader in readers:
                reader.wait_stream(main)
            self.epoch = epoch
        return self.stacks


def run_cuda(configs: Sequence[RunConfig], setup: Setup, view: View) -> list[Outcome]:
    """Train ``setup.workers`` runs at a time on one GPU, those that share batches together."""
    device = resolve_device(setup.device)
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    ordered = sorted(configs, key=lambda c: (c.seed, batches_key(c)))
    outcomes: list[Outcome] = []
    with torch.cuda.device(device), interruptible() as stop:
        for start in range(0, len(ordered), setup.workers):
            chosen = ordered[start : start + setup.workers]
            if stop():
                outcomes += [Outcome(config, STOPPED) for config in chosen]
            else:
                outcomes += Wave(chosen, setup, view, device).train(stop)
    return outcomes


def batches_key(config: RunConfig) -> str:
    """What decides the batches: runs with the same key can share them."""
    return canonical([config.task, config.options, config.seed, config.epochs, config.synthetic])


class Wave:
    """Runs that train side by side, epoch by epoch in step."""

    def __init__(
        self, configs: Sequence[RunConfig], setup: Setup, view: View, device: torch.device
    ) -> None:
        self.setup, self.view, self.device = setup, view, device
        self.configs = configs
        self.outcomes: dict[str, Outcome] = {}  # by the id of a run that has ended
        self.feeds: dict[str, Feed] = {}
        self.compiled: dict[str, Callable[..., Tensor]] = {}
        self.runs: list[GraphRun] = []

    def train(self, stop: Callable[[], bool]) -> list[Outcome]:
        with contextlib.ExitStack() as locks:
            for config in self.configs:
                self.view.started(config)
                with self.safely(config):
                    locks.enter_context(self.setup.holding(config))
                    if self.setup.done(config):  # another process was faster
                        self.end(Outcome(config, KNOWN))
                    else:
                        self.runs.append(self.prepare(config))
            saved = time.monotonic()
            while self.running() and not stop():
                self.epoch()
                if time.monotonic() - saved > self.setup.checkpoint_seconds:
                    self.checkpoint()
                    saved = time.monotonic()
            self.checkpoint()
            for run in self.running():
                self.end(Outcome(run.config, STOPPED))
        return list(self.outcomes.values())

    def running(self) -> list[GraphRun]:
        """Those that have not ended; the others' memory is let go."""
        self.runs = [run for run in self.runs if run.config.id not in self.outcomes]
        return self.runs

    def prepare(self, config: RunConfig) -> GraphRun:
        key = batches_key(config)
        if key not in self.feeds:
            task = make_task(config, self.device, self.setup.data_dir)
            self.feeds[key] = Feed(task)
            self.compiled[key] = compiled(task) if self.setup.compile else task.loss
        return GraphRun(config, self.feeds[key].task, self.setup.folder(config), self.compiled[key])

    def epoch(self) -> None:
        """One epoch of every run; one that lags behind its feed's others catches up first."""
        started = time.monotonic()
        working: list[tuple[GraphRun, Iterator[None]]] = []
        for key, feed in self.feeds.items():
            sharing = [run for run in self.runs if batches_key(run.config) == key]
            if not sharing:
                continue
            epoch = min(run.epoch for run in sharing)
            stacks = feed.fill(epoch, [run.stream for run in sharing])
            working += [(run, run.train(stacks)) for run in sharing if run.epoch == epoch]
        trained = [run for run, _ in working]
        while working:  # a step of each in turn, so that no stream runs dry
            working = [(run, steps) for run, steps in working if self.advance(run, steps)]
        seconds = (time.monotonic() - started) / len(trained)
        for run in trained:
            if run.config.id not in self.outcomes:
                with self.safely(run.config):
                    self.collect(run, seconds)

    def advance(self, run: GraphRun, steps: Iterator[None]) -> bool:
        with self.safely(run.config):
            return next(steps, StopIteration) is None
        return False

    def collect(self, run: GraphRun, seconds: float) -> None:
        row = run.collect()
        run.seconds += seconds
        self.view.progressed(run.config, run.epoch, row or {})
        if run.over:
            torch.cuda.synchronize()
            with torch.cuda.stream(run.stream):
                self.setup.keep(run.finish())
            self.end(Outcome(run.config, FINISHED))

    def checkpoint(self) -> None:
        torch.cuda.synchronize()
        for run in self.running():
            with self.safely(run.config):
                run.checkpoint()

    @contextlib.contextmanager
    def safely(self, config: RunConfig) -> Iterator[None]:
        """An error ends this run, and no other."""
        try:
            yield
        except Exception as error:
            self.end(failure(config, error, self.setup))

    def end(self, outcome: Outcome) -> None:
        self.outcomes[outcome.config.id] = outcome
        self.view.ended(outcome)


def compiled(task: Task) -> Callable[..., Tensor]:
    """The task's loss, fused by torch.compile; one compilation serves all runs of the task."""
    torch._dynamo.config.recompile_limit = RECOMPILATIONS
    return torch.compile(task.loss, dynamic=False)
