"""AdamW and AdamO side by side on real images, in about two minutes on one CPU core.

Run it with ``make demo``, or, in an environment that has the ``lab`` extra,

    python examples/demo.py [--epochs 20] [--seeds 3] [--out demo-output] [--quick]

A small BatchNorm network learns scikit-learn's handwritten digits (1,797 images, nothing is
downloaded) with each optimizer. For a given seed all of them start from the same weights and see
the same batches. The result is a table and a picture.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from adamo_optim import AdamO, param_groups

TRAIN_SIZE = 1000  # of 1,797; the other 797 are the test set, the same for every seed
BATCH_SIZE = 50


class Digits(NamedTuple):
    train_x: Tensor  # [1000, 1, 8, 8], values in [0, 1]
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def build_adamw(model: nn.Module, example: Tensor) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def build_adamo(model: nn.Module, example: Tensor) -> torch.optim.Optimizer:
    return AdamO(param_groups(model, example), lr=1e-3)


def build_adamo_by_habit(model: nn.Module, example: Tensor) -> torch.optim.Optimizer:
    """A weight decay that some use with AdamW; for AdamO it is far too strong."""
    return AdamO(param_groups(model, example), lr=1e-3, weight_decay=1.0)


class Contender(NamedTuple):
    """One line of the table and of the picture."""

    label: str
    colour: str  # of the Okabe-Ito palette, which colour-blind readers can tell apart
    line: str
    build: Callable[[nn.Module, Tensor], torch.optim.Optimizer]


CONTENDERS = (
    Contender("AdamW", "#0072B2", "--", build_adamw),
    Contender("AdamO", "#D55E00", "-", build_adamo),
    Contender("AdamO, decay 1.0", "#009E73", ":", build_adamo_by_habit),
)

LAYER_STYLES = (
    {"label": "first convolution", "color": "#E69F00", "ls": ":"},
    {"label": "second convolution", "color": "#CC79A7", "ls": "--"},
    {"label": "third convolution", "color": "#000000", "ls": "-"},
)


@dataclass
class Run:
    """What one training run leaves behind; the lists have one entry an epoch."""

    accuracy: list[float] = field(default_factory=list)
    conv_norm: list[float] = field(default_factory=list)
    eta_radial: dict[str, list[float]] = field(default_factory=dict)  # by parameter; AdamO only
    notes: list[str] = field(default_factory=list)  # warnings given when the optimizer was built
    train_loss: float = math.nan
    total_norm: float = math.nan
    seconds: float = 0.0


def load_data() -> Digits:
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).div(16).view(-1, 1, 8, 8)
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN_SIZE], order[TRAIN_SIZE:]
    return Digits(x[train], y[train], x[test], y[test])


def make_model() -> nn.Module:
    def block(channels_in: int, channels_out: int) -> nn.Module:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(channels_out), nn.ReLU())

    return nn.Sequential(
        block(1, 32),
        block(32, 64),
        nn.MaxPool2d(2),
        block(64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Digits, generator: torch.Generator
) -> float:
    """One pass over the shuffled training images; returns their mean loss."""
    model.train()
    losses = []
    for batch in torch.randperm(TRAIN_SIZE, generator=generator).split(BATCH_SIZE):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.train_x[batch]), data.train_y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


@torch.no_grad()
def test_accuracy(model: nn.Module, data: Digits) -> float:
    """Percentage of test images classified correctly."""
    model.eval()
    return 100 * (model(data.test_x).argmax(1) == data.test_y).float().mean().item()


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(tensor.detach().square().sum().item() for tensor in tensors))


def conv_weights(model: nn.Module) -> dict[str, Tensor]:
    modules = model.named_modules()
    return {f"{name}.weight": m.weight for name, m in modules if isinstance(m, nn.Conv2d)}


def measure(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, data: Digits) -> None:
    """Append this epoch's measurements to the run."""
    run.accuracy.append(test_accuracy(model, data))
    weights = conv_weights(model)
    run.conv_norm.append(norm(weights.values()))
    if isinstance(optimizer, AdamO):
        diagnostics = optimizer.diagnostics(synchronize=True)
        for name in weights:
            run.eta_radial.setdefault(name, []).append(diagnostics[name]["eta_radial"])


def train(
    contender: Contender, seed: int, epochs: int, data: Digits, tick: Callable[[], None]
) -> Run:
    """Train once; the seed fixes the first weights and the batches, whatever the optimizer."""
    run = Run()
    torch.manual_seed(seed)
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = contender.build(model, data.train_x[:BATCH_SIZE])
    run.notes = [str(warning.message) for warning in caught]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        start = time.perf_counter()
        run.train_loss = train_epoch(model, optimizer, data, generator)
        run.seconds += time.perf_counter() - start
        measure(run, model, optimizer, data)
        scheduler.step()
        tick()
    run.total_norm = norm(model.parameters())
    return run


def train_all(
    seeds: int, epochs: int, data: Digits, console: Console
) -> dict[Contender, list[Run]]:
    """Every contender with every seed; seed by seed, so that a busy machine slows all alike."""
    runs: dict[Contender, list[Run]] = {contender: [] for contender in CONTENDERS}
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("training", total=seeds * len(CONTENDERS) * epochs)
        for seed in range(seeds):
            for contender in CONTENDERS:
                bar.update(task, description=f"{contender.label}, seed {seed}")
                run = train(contender, seed, epochs, data, tick=lambda: bar.advance(task))
                runs[contender].append(run)
    return runs


def mean_and_sd(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def make_table(runs: dict[Contender, list[Run]], epochs: int) -> Table:
    seeds = len(next(iter(runs.values())))
    spread = " (mean ± sd over seeds)" if seeds > 1 else ""
    table = Table(title=f"Handwritten digits, {epochs} epochs, n = {seeds}{spread}")
    table.add_column("optimizer")
    for heading in ("test acc., %", "train loss", "weight norm", "s/run"):
        table.add_column(heading, justify="right")
    for contender, results in runs.items():
        table.add_row(
            contender.label,
            mean_and_sd([run.accuracy[-1] for run in results], 2),
            mean_and_sd([run.train_loss for run in results], 3),
            mean_and_sd([run.total_norm for run in results], 1),
            f"{statistics.mean(run.seconds for run in results):.1f}",
        )
    return table


def print_notes(runs: dict[Contender, list[Run]], console: Console) -> None:
    """The warnings the optimizers gave, each once."""
    for contender, results in runs.items():
        for note in dict.fromkeys(note for run in results for note in run.notes):
            text = f"\n[bold]{contender.label}[/bold] was built with a warning: {escape(note)}"
            console.print(text, highlight=False)


def plot(axes: Axes, series: list[list[float]], **style: Any) -> None:
    """The mean over seeds as a line, the range from the lowest to the highest seed as a band."""
    epochs = range(1, len(series[0]) + 1)
    columns = list(zip(*series, strict=True))
    lowest, highest = [min(column) for column in columns], [max(column) for column in columns]
    (line,) = axes.plot(epochs, [statistics.mean(column) for column in columns], **style)
    axes.fill_between(epochs, lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)


def draw(runs: dict[Contender, list[Run]], path: Path) -> None:
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for contender, results in runs.items():
        style = {"label": contender.label, "color": contender.colour, "ls": contender.line}
        plot(left, [run.accuracy for run in results], **style)
        plot(middle, [run.conv_norm for run in results], **style)
    results = runs[CONTENDERS[1]]
    for name, style in zip(results[0].eta_radial, LAYER_STYLES, strict=True):
        plot(right, [run.eta_radial[name] for run in results], **style)
    worst = min(run.accuracy[-1] for results in runs.values() for run in results)
    left.set(title="Test accuracy", ylabel="%", ylim=(max(0, worst - 5), 100.5))
    middle.set(title="Norm of all convolution weights", ylabel="‖w‖", ylim=(0, None))
    right.set(title="AdamO: radial step size", ylabel=r"$\eta_{\rho,t}$", yscale="log")
    for axes in (left, middle, right):
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare AdamW and AdamO on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="output folder")
    parser.add_argument("--quick", action="store_true", help="one seed and three epochs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.epochs = 1, 3
    for name in ("epochs", "seeds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    # The tensors are small: a second thread gains little, and loses much on a busy machine.
    torch.set_num_threads(1)
    runs = train_all(arguments.seeds, arguments.epochs, load_data(), console)
    console.print(make_table(runs, arguments.epochs))
    print_notes(runs, console)
    picture = arguments.out / "demo.png"
    draw(runs, picture)
    console.print(f"\nThe picture: {escape(str(picture))}", highlight=False)
    seeds = "One seed" if arguments.seeds == 1 else f"{arguments.seeds} seeds"
    console.print(f"{seeds} on a tiny data set: a demonstration, not evidence.")


if __name__ == "__main__":
    main()
