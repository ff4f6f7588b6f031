"""One seeded loop for every task: train an epoch, evaluate, record; stop and go on at any moment.

Everything random in an epoch follows from the seed and the epoch's number. A checkpoint at the end
of an epoch therefore holds the weights, the optimizer, the rows so far, and no random state: a run
that was killed goes on from its last checkpoint and ends with the same weights and the same record
(bit for bit on the CPU, with as many threads as it began with).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from . import environment, optimizers
from .disk import write_atomically as write
from .engines import CHECKPOINT, logger
from .measures import Norms, digest_of, gradient_norm_variation, rounded, spread
from .records import FINISHED, Record, Row, RunConfig, canonical, finite
from .tasks import task_class
from .tasks.base import Batch, Phase, Task

SNAPSHOTS = "snapshots"
CHECKPOINT_SECONDS = 30.0  # between two checkpoints; an epoch that takes longer gets one each
MOST_SNAPSHOTS = 40  # a run
SWA_LR = 1e-4  # the paper's
# Of a run, in its checkpoint; another number of a CPU's threads would round otherwise.
KEPT = ("epoch", "late", "average", "averaged", "seconds", "threads")
NORMS = "norms"  # what "watch" may also be told to look at

Progress = Callable[[RunConfig, int, Row], None]  # epoch, and the last row


class Stopped(Exception):
    """The run was asked to stop, and left a checkpoint."""


class Run:
    """A model in training, with its optimizer and what has been recorded so far."""

    def __init__(self, config: RunConfig, task: Task, folder: Path, *, graph: bool = False) -> None:
        self.config, self.task, self.folder = config, task, folder
        self.loss = task.loss
        self.model = new_model(task)
        self.optimizer, self.warnings = optimizers.build(
            config.optimizer, config.hyper, self.model, task.example(), graph=graph
        )
        self.base_lr = float(config.hyper["lr"])
        self.epoch = 0  # epochs done
        self.rows: list[Row] = []
        self.average: list[Tensor] = []  # of the weights, under SWA
        self.averaged = 0
        self.seconds = 0.0
        self.total = torch.zeros((), device=task.device)  # of this epoch's losses
        self.gradients = torch.zeros(2, device=task.device)  # sum of ‖g‖ and ‖g‖² over its steps
        self.watch = task.options.get("watch", False)
        self.norms = Norms(self.model) if self.watch == NORMS else None
        self.steps = 0
        self.pending: dict[str, Any] = {}  # what the device has not computed yet
        self.late = False
        self.threads = torch.get_num_threads()
        self.resume()

    # --- training

    @property
    def over(self) -> bool:
        return self.epoch >= self.config.epochs or self.diverged

    @property
    def diverged(self) -> bool:
        return bool(self.rows) and self.rows[-1]["train_loss"] is None

    def train(self, stacks: Iterable[Batch]) -> Iterator[None]:
        """One epoch, step by step, and what is due after it; nothing here waits for a device."""
        phase, steps = self.task.phase(self.epoch), 0
        self.begin(phase)
        for stack in stacks:
            for batch in zip(*stack, strict=True):
                self.approach()
                self.step(batch, phase)
                steps += 1
                yield
        self.end(phase, steps)

    def begin(self, phase: Phase) -> None:
        """Set the stage of an epoch: learning rate, options, random numbers, sums."""
        if self.epoch == 0:
            self.snapshot()
        torch.manual_seed(self.task.seed_of(self.epoch, purpose=1))  # dropout
        self.model.train()
        self.set_lr(self.swa_lr() if phase.swa else self.base_lr * phase.lr_factor)
        if phase.late and not self.late:
            for group in self.optimizer.param_groups:
                group.update(self.config.hyper.get("late", {}))
        self.late = phase.late
        self.total.zero_()
        self.gradients.zero_()

    def approach(self) -> None:
        """Before a step: its own learning rate, where the task has one."""
        if (factor := self.task.step_factor()) is not None:
            self.set_lr(self.base_lr * factor)

    def step(self, batch: Batch, phase: Phase) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, batch, phase)
        loss.backward()
        if self.watch:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            self.gradients += torch.stack((norm, norm * norm))
        if self.norms:
            self.norms.observe()
        if limit := self.task.options.get("clip"):
            nn.utils.clip_grad_norm_(self.parameters(), limit)
        self.optimizer.step()
        self.total += loss.detach()

    @torch.no_grad()
    def end(self, phase: Phase, steps: int) -> None:
        """Queue what is due after an epoch; :meth:`collect` reads it."""
        self.epoch += 1
        self.steps = steps
        if phase.swa:
            self.update_average()
        if self.epoch == self.config.epochs or self.task.due(self.epoch, self.rows):
            self.pending["metrics"] = self.evaluate(self.model)
            self.pending["metrics"] |= self.norms_of_weights()
        if self.epoch % max(1, self.config.epochs // MOST_SNAPSHOTS) == 0:
            self.snapshot()

    def collect(self) -> Row | None:
        """Wait for the epoch and write its row, if one is due."""
        loss = self.total.item() / max(self.steps, 1)
        if not math.isfinite(loss) and "metrics" not in self.pending:
            self.pending["metrics"] = self.evaluate(self.model)
        if "metrics" not in self.pending:
            return None
        row = {"epoch": self.epoch, "train_loss": loss, "lr": self.lr()}
        row |= {name: value.item() for name, value in self.pending.pop("metrics").items()}
        if self.watch:
            total, squares = self.gradients.tolist()
            row |= spread(total, squares, self.steps)
        self.rows.append(finite(row))
        return self.rows[-1]

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        model.eval()
        with torch.no_grad():
            return self.task.evaluate(model)

    def parameters(self) -> Iterator[Tensor]:
        return (p for p in self.model.parameters() if p.requires_grad)

    # --- the learning rate

    def swa_lr(self) -> float:
        return float(self.config.hyper.get("swa_lr", SWA_LR))

    def set_lr(self, value: float) -> None:
        """A tensor learning rate is written in place: a captured step reads it from there."""
        for group in self.optimizer.param_groups:
            rate = value * group.get(optimizers.LR_FACTOR, 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # --- averaged weights

    def update_average(self) -> None:
        weights = [p.detach() for p in self.parameters()]
        self.averaged += 1
        if not self.average:
            self.average = [w.clone() for w in weights]
        else:
            torch._foreach_lerp_(self.average, weights, 1 / self.averaged)

    @torch.no_grad()
    def averaged_model(self) -> nn.Module:
        model = copy.deepcopy(self.model)
        for p, mean in zip(model.parameters(), self.average, strict=True):
            p.copy_(mean)
        if batches := self.task.calibration():
            with self.task.autocast():  # BatchNorm has never seen these weights
                update_bn((inputs for stack in batches for inputs in stack[0]), model)
        return model

    # --- observation

    def norms_of_weights(self) -> dict[str, Tensor]:
        """Of all weights, and of matrices alone: gains of norm layers may hide how these grow."""
        weights = list(self.parameters())
        some = {"weight_norm": weights, "matrix_norm": [w for w in weights if w.dim() > 1]}
        return {name: torch.nn.utils.get_total_norm(found) for name, found in some.items() if found}

    def snapshot(self) -> None:
        """Keep the weights for the loss landscape, where the task asks for it."""
        if self.task.options.get("snapshots"):
            flat = torch.cat([p.detach().float().flatten() for p in self.parameters()])
            buffer = io.BytesIO()
            torch.save(flat.cpu(), buffer)
            write(self.folder / SNAPSHOTS / f"{self.epoch:06d}.pt", buffer.getvalue())

    # --- on disk

    def checkpoint(self) -> None:
        """Put the run on disk as it is between two epochs."""
        state = {
            "id": self.config.id,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "norms": self.norms.state_dict() if self.norms else {},
            **{name: getattr(self, name) for name in KEPT},
            "rows": canonical(self.rows),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getvalue()
        write(self.folder / CHECKPOINT, hashlib.sha256(data).digest() + data)

    def resume(self) -> None:
        """Go on where the last checkpoint left off, if there is one of this run."""
        state = self.read_checkpoint()
        if not state:
            return
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr  # the tensor that a captured step will read
        for name in KEPT:
            setattr(self, name, state[name])
        self.rows = json.loads(state["rows"])
        if self.norms:
            self.norms.load_state_dict(state["norms"])

    def read_checkpoint(self) -> dict[str, Any]:
        """What the run's checkpoint holds; one that is damaged or another run's is none."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return {}
        data = path.read_bytes()
        odd = "is damaged"
        if hashlib.sha256(data[32:]).digest() == data[:32]:
            place = self.task.device
            state = torch.load(io.BytesIO(data[32:]), map_location=place, weights_only=True)
            if state["id"] == self.config.id:
                return state
            odd = f"is one of {state['id']}"
        logger.warning("%s %s: %s starts from its beginning", path, odd, self.config.id)
        return {}

    def finish(self) -> Record:
        """The record of the run as it ended."""
        result = {**self.rows[-1], **self.task.result(self.rows)}
        if self.average and not self.diverged:
            averaged = self.evaluate(self.averaged_model())
            result |= {f"swa_{name}": value.item() for name, value in averaged.items()}
        if self.diverged:
            result["diverged_at"] = self.epoch
        if self.watch:
            result["gradient_norm_variation"] = gradient_norm_variation(self.rows)
        if self.norms:
            result |= finite(self.norms.result())
        result["weights_sha256"] = digest_of(self.model)
        return Record(
            config=self.config,
            status=FINISHED,
            result=result,
            environment=environment.describe(self.task.device, self.seconds, self.warnings),
            metrics=self.rows,
            arrays={k: rounded(v.tolist()) for k, v in self.task.arrays(self.model).items()},
        )


def train(
    config: RunConfig,
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    make: Callable[..., Task] | None = None,
    progress: Progress = lambda *_: None,
    stop: Callable[[], bool] = lambda: False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Record:
    """Train one run to its end, with checkpoints on the way, or to the moment of a stop."""
    run = Run(config, (make or make_task)(config, torch.device(device), data_dir), folder)
    saved = time.monotonic()
    with threads(run.threads), warnings.catch_warnings(record=True) as caught:
        while not run.over:
            row = train_epoch(run)
            progress(config, run.epoch, row or {})
            stopping = stop() and not run.over  # asked once: a signal may come at any moment
            if stopping or time.monotonic() - saved > checkpoint_seconds:
                run.checkpoint()
                saved = time.monotonic()
            if stopping:
                raise Stopped(config.id)
        # in its record, and not across the bars of all runs
        run.warnings += dict.fromkeys(str(warning.message) for warning in caught)
        return run.finish()


def train_epoch(run: Run) -> Row | None:
    started = time.monotonic()
    with no_denormals():
        for _ in run.train(run.task.batches(run.epoch)):
            pass
        row = run.collect()
    run.seconds += time.monotonic() - started
    return row


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many of torch's on the CPU, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def no_denormals() -> Iterator[None]:
    """Count numbers below 10⁻³⁸ as 0: where gradients vanish they slow a CPU down several times."""
    before = torch.tensor([1e-40]).mul(1.0).item() == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def make_task(config: RunConfig, device: torch.device, data_dir: Path | None) -> Task:
    return task_class(config.task)(config, device, data_dir)


def new_model(task: Task) -> nn.Module:
    """The same weights for every optimizer of a seed, on any device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed_of(-1, purpose=2))
        return task.model().to(task.device)
