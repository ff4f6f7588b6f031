"""The training loss in the plane that holds most of the paths of several runs; figure 2.

The plane goes through the mean of all weight snapshots, along their first two principal components.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from . import environment
from .engines import Setup
from .errors import LabError
from .measures import rounded
from .records import FINISHED, Record, RunConfig, find
from .tasks.base import Batch, Phase, Task
from .train import SNAPSHOTS, make_task, new_model

MARGIN = 0.15  # of the paths' extent, on each side
EXAMPLES = 5000  # the loss is the mean over the first batches that hold this many
POINTS = 31  # of the grid, in each direction
FLAT = 1e-10  # the second direction's variance over the first's below which there is no plane

Progress = Callable[[int, int], None]  # points of the grid done, and of how many


def draw_for(configs: Sequence[RunConfig], setup: Setup, progress: Progress) -> Record:
    """The landscape of a study's first seed, kept in its file; then the snapshots go."""
    seed = min(config.seed for config in configs)  # one picture will do
    chosen = sorted((c for c in configs if c.seed == seed), key=lambda c: c.id)
    if known := find(setup.file, config_of(chosen, POINTS).id):
        return known
    runs = {setup.folder(config): config for config in chosen}
    for folder, config in runs.items():
        if not (folder / SNAPSHOTS).exists():
            raise LabError(
                f"the snapshots of {config.id}, which the landscape needs, are gone; delete "
                f"{setup.file} to train it again"
            )
    record = landscape(runs, setup.data_dir, torch.device(setup.device), POINTS, progress)
    setup.keep(record)
    for config in configs:
        with setup.holding(config) as folder:
            shutil.rmtree(folder / SNAPSHOTS, ignore_errors=True)
    return record


def config_of(runs: Sequence[RunConfig], points: int) -> RunConfig:
    """A landscape is a record of its own, and names its runs."""
    first, ids = runs[0], [run.id for run in runs]
    options = {"runs": ids, "of": first.task, "points": points}
    options |= {"margin": MARGIN, "examples": EXAMPLES}
    what = ("landscape", "all", first.seed, first.epochs)
    return RunConfig(*what, {}, options, first.scale, first.synthetic)


def landscape(
    runs: Mapping[Path, RunConfig],
    data_dir: Path | None,
    device: torch.device,
    points: int,
    progress: Progress,
) -> Record:
    """Of finished runs with ``snapshots=True`` that differ in their optimizer only, by folder."""
    started = time.monotonic()
    configs = list(runs.values())
    config, task = config_of(configs, points), make_task(configs[0], device, data_dir)
    paths = [read_snapshots(folder) for folder in runs]
    weights = torch.cat(paths).double().numpy()
    plane: Any = PCA(min(2, len(weights)), svd_solver="full").fit(weights)
    shares = plane.explained_variance_ratio_.tolist()
    if len(weights) < 3 or shares[1] <= FLAT * shares[0]:
        raise LabError("the snapshots lie on one line, which makes no plane; train for more epochs")
    coordinates = plane.transform(weights)  # [snapshots, 2]
    low, high = coordinates.min(0), coordinates.max(0)
    low, high = low - MARGIN * (high - low), high + MARGIN * (high - low)
    xs, ys = (np.linspace(a, b, points) for a, b in zip(low, high, strict=True))
    spanned = torch.tensor(np.vstack([plane.mean_, plane.components_]))
    loss = torch.empty(points, points, dtype=torch.float64)
    for done, found in enumerate(losses(task, spanned.float().to(device), xs, ys)):
        loss.view(-1)[done] = found
        progress(done + 1, loss.numel())
    split = np.split(coordinates, np.cumsum([len(path) for path in paths])[:-1])
    arrays = {"loss": loss, "xs": xs, "ys": ys}
    arrays |= {f"path_{c.optimizer}": path for c, path in zip(configs, split, strict=True)}
    return Record(
        config=config,
        status=FINISHED,
        result={"explained_variance": shares, "runs": config.options["runs"]},
        environment=environment.describe(device, time.monotonic() - started),
        arrays={name: rounded(x.tolist()) for name, x in arrays.items()},
    )


def read_snapshots(folder: Path) -> Tensor:
    """A run's weights [epochs, weights], up to where they cease to be finite."""
    path: list[Tensor] = []
    for file in sorted((folder / SNAPSHOTS).glob("*.pt")):
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if not weights.isfinite().all():
            break
        path.append(weights)
    if not path:
        raise LabError(f"{folder} has no finite snapshots; train with the option snapshots=True")
    return torch.stack(path)


@torch.no_grad()
def losses(task: Task, plane: Tensor, xs: np.ndarray, ys: np.ndarray) -> Iterator[Tensor]:
    """The mean training loss at every point of a plane, row by row: its origin and directions."""
    batches, model = evaluation_batches(task), new_model(task)
    freeze(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    mean, across, up = plane
    examples = sum(len(batch[0]) for batch in batches)
    for y in ys.tolist():
        for x in xs.tolist():
            nn.utils.vector_to_parameters(mean + x * across + y * up, parameters)
            sums = (task.loss(model, b, Phase()).double() * len(b[0]) for b in batches)
            yield torch.stack([*sums]).sum() / examples


def evaluation_batches(task: Task) -> list[Batch]:
    """The first batches of the first epoch: the same at every point, on any day."""
    chosen: list[Batch] = []
    for stack in task.batches(0):
        for batch in zip(*stack, strict=True):
            if sum(len(b[0]) for b in chosen) < EXAMPLES:
                chosen.append(batch)
    return chosen


def freeze(model: nn.Module) -> None:
    """No dropout, but BatchNorm with the batch's own statistics: any point has the right ones."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()
