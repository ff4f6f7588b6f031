"""The training loss in the plane that holds most of the paths of several runs; figure 2.

The plane goes through the mean of all weight snapshots, along their first two principal directions.
Nothing imports torch before it is needed.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import LabError
from .records import FINISHED, Record, Row, RunConfig, canonical, find

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .engines import Setup
    from .tasks.base import Batch, Task

MARGIN = 0.15  # of the paths' extent, on each side
EXAMPLES = 5000  # the loss is the mean over the first batches that hold this many
POINTS = 31  # of the grid, in each direction
FLAT = 1e-10  # the second direction's variance over the first's below which there is no plane

Progress = Callable[[int, int], None]  # points of the grid done, and of how many


@dataclass
class Trajectory:
    """A run, and its weights after some of its epochs."""

    config: RunConfig
    snapshots: list[Tensor]  # [weights] each; read from disk when they are touched


@dataclass
class Plane:
    """``mean + x · across + y · up``, and where the snapshots lie in it."""

    mean: Tensor  # [weights], like the two directions
    across: Tensor
    up: Tensor
    coordinates: Tensor  # [snapshots, 2]
    explained: tuple[float, float]  # shares of the snapshots' variance


def gradient_norm_variation(rows: Sequence[Row]) -> float | None:
    """How much the gradient's norm varies from step to step, relative to its size.

    The coefficient of variation over the steps of an epoch, averaged over the epochs recorded: a
    pure number, as gradients of scale-invariant weights grow when the weights shrink, and their
    standard deviation with them. None where no gradient was watched.
    """
    pairs = [(row.get("gradient_norm"), row.get("gradient_norm_sd")) for row in rows]
    ratios = [sd / mean for mean, sd in pairs if mean and sd is not None]
    return math.fsum(ratios) / len(ratios) if ratios else None


def draw_for(configs: Sequence[RunConfig], setup: Setup, progress: Progress) -> Record:
    """The landscape of a study's first seed, kept in its file; then the snapshots go."""
    from .train import SNAPSHOTS

    seed = min(config.seed for config in configs)  # one picture will do
    runs = {setup.folder(config): config for config in configs if config.seed == seed}
    if known := find(setup.file, config_of([*in_order(runs).values()], POINTS).id):
        return known
    for folder, config in runs.items():
        if not (folder / SNAPSHOTS).exists():
            raise LabError(
                f"the snapshots of {config.id}, which the landscape needs, are gone; delete "
                f"{setup.file} to train it again"
            )
    record = landscape(runs, data_dir=setup.data_dir, device=setup.device, progress=progress)
    setup.keep(record)
    for config in configs:
        with setup.holding(config) as folder:
            shutil.rmtree(folder / SNAPSHOTS, ignore_errors=True)
    return record


def landscape(
    runs: Mapping[Path, RunConfig],
    *,
    data_dir: Path | None = None,
    device: torch.device | str = "cpu",
    points: int = POINTS,
    progress: Progress | None = None,
) -> Record:
    """The landscape of the runs of one seed, as a record of its own.

    Args:
        runs: finished runs with ``snapshots=True``, by the folders in which these lie; they differ
            in their optimizer only.
        data_dir: of the task.
        device: where the loss is evaluated.
        points: of the grid, in each direction.
        progress: called after every point with their number and the total.
    """
    if points < 2:
        raise LabError(f"points must be at least 2, got {points}")
    chosen = in_order(runs)
    config = config_of([*chosen.values()], points)
    paths = [Trajectory(own, read_snapshots(place)) for place, own in chosen.items()]
    return evaluate(config, paths, data_dir, device, points, progress)


def evaluate(
    config: RunConfig,
    runs: list[Trajectory],
    data_dir: Path | None,
    device: torch.device | str,
    points: int,
    progress: Progress | None,
) -> Record:
    from . import environment
    from .engines import resolve_device
    from .measures import rounded
    from .train import make_task, new_model

    started = time.monotonic()
    task = make_task(runs[0].config, resolve_device(str(device)), data_dir)
    plane = plane_of([w for run in runs for w in run.snapshots], task.device)
    xs, ys = (axis_of(coordinate, points) for coordinate in plane.coordinates.unbind(1))
    loss = losses(new_model(task), task, plane, xs, ys, progress)
    paths = plane.coordinates.split([len(run.snapshots) for run in runs])
    return Record(
        config=config,
        status=FINISHED,
        result={"explained_variance": list(plane.explained), "runs": config.options["runs"]},
        environment=environment.describe(task.device, time.monotonic() - started),
        arrays={
            "loss": rounded(loss.tolist()),
            "xs": rounded(xs.tolist()),
            "ys": rounded(ys.tolist()),
            **{
                f"path_{run.config.optimizer}": rounded(path.tolist())
                for run, path in zip(runs, paths, strict=True)
            },
        },
    )


# --- the runs


def in_order(runs: Mapping[Path, RunConfig]) -> dict[Path, RunConfig]:
    """The runs by their folders, in an order that does not depend on the caller's."""
    if not runs:
        raise LabError("a landscape needs at least one run, got none; give the folders of runs")
    first = next(iter(runs.values()))
    for folder, config in runs.items():
        if shared(config) != shared(first):
            raise LabError(f"{folder} differs from the first run in more than its optimizer")
    names = [config.optimizer for config in runs.values()]
    if len({*names}) < len(names):
        raise LabError(f"a landscape takes one run of each optimizer, got {', '.join(names)}")
    return dict(sorted(runs.items(), key=lambda item: item[1].id))


def shared(config: RunConfig) -> str:
    """What runs in one plane must have in common: all but the optimizer."""
    same = (config.task, config.seed, config.epochs, config.options, config.scale, config.synthetic)
    return canonical(same)


def read_snapshots(folder: Path) -> list[Tensor]:
    """A run's weights in the order of its epochs, up to where they cease to be finite."""
    import torch

    from .train import SNAPSHOTS

    path: list[Tensor] = []
    for file in sorted((folder / SNAPSHOTS).glob("*.pt")):
        try:
            weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise LabError(
                f"{file} cannot be read ({error}); delete the folder of its run"
            ) from error
        if not weights.isfinite().all():
            break
        path.append(weights)
    if not path:
        raise LabError(f"{folder} has no finite snapshots; train with the option snapshots=True")
    return path


def config_of(runs: Sequence[RunConfig], points: int) -> RunConfig:
    first = runs[0]
    return RunConfig(
        task="landscape",
        optimizer="all",
        seed=first.seed,
        epochs=first.epochs,
        hyper={},
        options={
            "runs": [run.id for run in runs],
            "of": first.task,
            "points": points,
            "margin": MARGIN,
            "examples": EXAMPLES,
        },
        scale=first.scale,
        synthetic=first.synthetic,
    )


# --- the plane


def plane_of(snapshots: Sequence[Tensor], device: torch.device) -> Plane:
    """The first two principal directions of the snapshots."""
    import torch

    if len({len(weights) for weights in snapshots}) > 1:
        raise LabError("the runs' models differ in size; one plane needs one model")
    rows = torch.stack([*snapshots]).to(device).double()  # [snapshots, weights]
    mean = rows.mean(0)
    left, values, directions = torch.linalg.svd(rows - mean, full_matrices=False)
    if len(rows) < 3 or values[1] ** 2 <= FLAT * values[0] ** 2:
        raise LabError("the snapshots lie on one line, which makes no plane; train for more epochs")
    # a direction has no sign: let the snapshot that is farthest out lie on its positive side
    signs = left[:, :2].gather(0, left[:, :2].abs().argmax(0, keepdim=True)).sign()
    across, up = (signs.T * directions[:2]).float()
    first, second = (values.square() / values.square().sum())[:2].tolist()
    coordinates = (signs * left[:, :2] * values[:2]).cpu()
    return Plane(mean.float(), across, up, coordinates, (first, second))


def axis_of(coordinate: Tensor, points: int) -> Tensor:
    import torch

    low, high = coordinate.min().item(), coordinate.max().item()
    margin = MARGIN * (high - low)
    return torch.linspace(low - margin, high + margin, points, dtype=torch.float64)


# --- the loss


def losses(
    model: nn.Module, task: Task, plane: Plane, xs: Tensor, ys: Tensor, progress: Progress | None
) -> Tensor:
    """The mean training loss at every point, [ys, xs]."""
    import torch

    batches = evaluation_batches(task)
    freeze(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = sum(p.numel() for p in parameters)
    if expected != len(plane.mean):
        raise LabError(f"the model has {expected} weights, the snapshots {len(plane.mean)}")
    found = torch.empty(len(ys), len(xs), dtype=torch.float64, device=task.device)
    with torch.no_grad():
        for row, y in enumerate(ys.tolist()):
            for column, x in enumerate(xs.tolist()):
                weights = plane.mean + x * plane.across + y * plane.up
                set_weights(parameters, weights)
                found[row, column] = mean_loss(model, task, batches)
                if progress:
                    progress(row * len(xs) + column + 1, found.numel())
    return found.cpu()


def evaluation_batches(task: Task) -> list[Batch]:
    """The first batches of the first epoch: the same at every point, on any day."""
    chosen: list[Batch] = []
    examples = 0
    for stack in task.batches(0):
        for batch in zip(*stack, strict=True):
            if examples < EXAMPLES:
                chosen.append(batch)
                examples += len(batch[0])
    return chosen


def freeze(model: nn.Module) -> None:
    """No dropout, but BatchNorm with the batch's own statistics: any point has the right ones."""
    from torch.nn.modules.batchnorm import _BatchNorm

    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()


def set_weights(parameters: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat.split([p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.copy_(part.view_as(p))


def mean_loss(model: nn.Module, task: Task, batches: Sequence[Batch]) -> Tensor:
    from .tasks.base import Phase

    examples = sum(len(batch[0]) for batch in batches)
    total = sum(task.loss(model, batch, Phase()).double() * len(batch[0]) for batch in batches)
    return total / examples  # type: ignore[return-value]  # there is at least one batch
