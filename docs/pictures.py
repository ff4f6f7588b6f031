"""The pictures of the documentation: python docs/pictures.py [folder]

Curves of optimizers come from real steps of the real optimizers, results and speed from the records
in results/. Everything is seeded; no picture needs more than seconds on one core.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from tables import settled
from torch import Tensor, nn
from torch.nn import functional as F

from adamo_lab.figures.curves import best_by_rate
from adamo_lab.figures.look import DPI, INK, canvas, log_axis, style
from adamo_lab.grids import grids
from adamo_lab.optimizers import REGISTRY
from adamo_lab.records import Record
from adamo_lab.runs import Line, show
from adamo_lab.tables import columns_of
from adamo_lab.tasks.cifar100 import FULL
from adamo_optim import AdamO, AngularAdamW, param_groups

ROOT = Path(__file__).parents[1]
RADIAL, TANGENTIAL = "#009E73", "#CC79A7"
ADAMW, ADAMO, ANGULAR = (REGISTRY[name].colour for name in ("adamw", "adamo", "angular"))


# --- the method


def split() -> Figure:
    """A gradient and its two parts, in the plane."""
    figure, (axes,) = canvas(height=3.5)
    w, g = torch.tensor([2.1, 1.3]), torch.tensor([0.35, 1.55])
    along = (g @ w) / (w @ w) * w
    axes.add_patch(Circle((0, 0), float(w.norm()), fill=False, color="#bbbbbb", linestyle=":"))
    arrow(axes, torch.zeros(2), w, INK, "w", (0.35, -0.22))
    arrow(axes, w, g, ADAMW, "g", (0.12, 0.02))
    arrow(axes, w, along, RADIAL, "φ$^ρ$(g), radial", (0.12, -0.06))
    arrow(axes, w, g - along, TANGENTIAL, "φ$^θ$(g), tangential", (-0.12, -0.05), "right")
    for start in (along, g - along):
        ends = torch.stack((w + start, w + g)).T
        axes.plot(ends[0], ends[1], color="#999999", linewidth=0.8, linestyle="--")
    axes.annotate("same norm as w", (0.0, 2.5), color="#777777", ha="left", va="bottom")
    axes.plot(0, 0, "o", color=INK, markersize=4)
    axes.set(xlim=(-0.3, 4.6), ylim=(-0.3, 3.2), aspect="equal")
    axes.axis("off")
    return figure


def arrow(
    axes: Axes, start: Tensor, step: Tensor, colour: str, label: str,
    offset: tuple[float, float], side: str = "left",
) -> None:  # fmt: skip
    begin, end = tuple(start.tolist()), tuple((start + step).tolist())
    arrowprops = {"arrowstyle": "-|>", "color": colour, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, begin, arrowprops=arrowprops)
    where = (end[0] + offset[0], end[1] + offset[1])
    axes.annotate(label, where, color=colour, fontweight="bold", ha=side, va="center")


def trajectory() -> Figure:
    """Two numbers, one bowl: the paths of AdamW and of AdamO."""
    figure, (axes,) = canvas(height=3.6)
    goal = torch.tensor([1.9, 0.7])
    bowl = torch.tensor([[1.0, 0.6], [0.6, 1.6]])

    def loss(w: Tensor) -> Tensor:
        return ((w - goal) @ bowl * (w - goal)).sum(-1) / 2

    x, y = torch.meshgrid(
        torch.linspace(-1.3, 2.6, 120), torch.linspace(-0.5, 2.2, 90), indexing="xy"
    )
    heights = loss(torch.stack((x, y), -1))
    axes.contour(x, y, heights, levels=10, colors="#c4c4c4", linewidths=0.6)
    start = torch.tensor([-0.6, 1.2])
    axes.add_patch(Circle((0, 0), float(start.norm()), fill=False, color="#999999", linestyle=":"))
    options = {"radial_lr_ratio": 1.0, "curvature_target": None}
    makers: list[tuple[str, str, Callable[[Tensor], torch.optim.Optimizer]]] = [
        ("AdamW", ADAMW, lambda w: torch.optim.AdamW([w], lr=0.05, weight_decay=0.01)),
        ("AdamO", ADAMO, lambda w: AdamO([w], lr=0.05, **options)),
    ]
    for label, colour, make in makers:
        w = start.clone()[None].requires_grad_()  # [1, 2]: a matrix, so that it has a norm to AdamO
        optimizer = make(w)
        path = [w.detach()[0].clone()]
        for _ in range(120):
            optimizer.zero_grad()
            loss(w[0]).backward()
            optimizer.step()
            path.append(w.detach()[0].clone())
        points = torch.stack(path).T
        axes.plot(points[0], points[1], color=colour, label=label)
        axes.plot(points[0][::10], points[1][::10], "o", color=colour, markersize=3)
    axes.plot(*start.tolist(), "o", color=INK, markersize=5)
    axes.plot(*goal.tolist(), "*", color=INK, markersize=10)
    axes.plot(0, 0, "+", color="#777777")
    axes.annotate("start", (-0.68, 1.24), ha="right", va="bottom")
    axes.annotate("minimum", (1.95, 0.8), ha="left", va="bottom")
    axes.annotate("0", (0.06, -0.04), ha="left", va="top", color="#777777")
    axes.set(aspect="equal", xlim=(-1.3, 2.6), ylim=(-0.5, 2.2))
    axes.axis("off")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def guard() -> Figure:
    """The norm of a weight under Algorithm 1 to the letter, and under the guard."""
    figure, (axes,) = canvas(height=3.0)
    for label, guarded, colour in (("guard=False: the paper to the letter", False, "#555555"),
                                   ("guard=True, the default", True, ADAMO)):  # fmt: skip
        norms = guarded_run(guarded)
        axes.plot(range(len(norms)), norms, "-" if guarded else "--", color=colour, label=label)
    axes.set(xlabel="step", ylim=(0.01, 2e4), title="norm of the embedding")
    log_axis(axes, "y")
    figure.legend(loc="outside lower center", ncols=1)
    return figure


def guarded_run(guarded: bool, steps: int = 300, p: int = 23, width: int = 32) -> list[float]:
    """Modular addition in small, with the paper's η = 10⁻³ and λ = 1, and τ_target = 1."""
    torch.manual_seed(0)
    embedding, hidden, head = (
        nn.Embedding(p, width),
        nn.Linear(2 * width, width),
        nn.Linear(width, p),
    )
    numbers = torch.arange(p)
    pairs = torch.cartesian_prod(numbers, numbers)[torch.randperm(p * p)[: int(0.3 * p * p)]]
    parameters = nn.ModuleList([embedding, hidden, head]).parameters()
    options = {"radial_lr": 1e-3, "weight_decay": 1.0, "curvature_target": 1.0, "guard": guarded}
    optimizer = AdamO(parameters, lr=1e-3, **options)
    norms = []
    for _ in range(steps):
        norms.append(embedding.weight.detach().norm().item())
        if not norms[-1] < 1e6:
            break
        output = head(torch.relu(hidden(embedding(pairs).flatten(1))))
        optimizer.zero_grad()
        F.cross_entropy(output, pairs.sum(1) % p).backward()
        optimizer.step()
    return norms


def scale_invariance() -> Figure:
    """The loss when one weight is multiplied by c: before BatchNorm, and in the head."""
    torch.manual_seed(0)
    model = small_network()
    x, y = torch.randn(128, 8), torch.randint(0, 4, (128,))
    factors = torch.logspace(-1, 1, 41)
    figure, (axes,) = canvas(height=3.0)
    rows = (
        ("0.weight", "before BatchNorm: scale_invariant", RADIAL),
        ("3.weight", "the head: general", ADAMO),
    )
    for name, label, colour in rows:
        weight = model.get_parameter(name)
        before, losses = weight.detach().clone(), []
        for c in factors:
            with torch.no_grad():
                weight.copy_(c * before)
                losses.append(F.cross_entropy(model(x), y).item())
                weight.copy_(before)
        axes.plot(factors, losses, color=colour, label=label)
    axes.set(xlabel="factor c on one weight", title="loss of the network")
    log_axis(axes, "x")
    figure.legend(loc="outside lower center", ncols=1)
    return figure


def small_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    )


def diagnostics() -> Figure:
    """What diagnostics() reports along a small run."""
    torch.manual_seed(0)
    model, centres = small_network(), 2 * torch.randn(4, 8)
    optimizer = AdamO(param_groups(model, torch.randn(32, 8)), lr=3e-3)
    rows: dict[str, dict[str, list[float]]] = {}
    for _ in range(400):
        y = torch.randint(0, 4, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(centres[y] + torch.randn(64, 8)), y).backward()
        optimizer.step()
        for name, values in optimizer.diagnostics(synchronize=True).items():
            for quantity, value in values.items():
                rows.setdefault(name, {}).setdefault(quantity, []).append(value)
    figure, panels = canvas(3, 1, height=4.6, sharex=True)
    for axes, quantity in zip(panels, ("norm", "eta_radial", "angle"), strict=True):
        for name, colour in (("0.weight", RADIAL), ("3.weight", ADAMO)):
            axes.plot(smooth(rows[name][quantity]), color=colour, label=name)
        axes.set_title(quantity)
    panels[-1].set_xlabel("step (means over ten)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def smooth(values: list[float], width: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def migration() -> Figure:
    """A run that changes from AdamW to AngularAdamW in the middle, and one that does not."""
    figure, (axes,) = canvas(height=3.0)
    for change, label, colour in (
        (None, "AdamW throughout", ADAMW),
        (200, "AngularAdamW from step 200 on", ANGULAR),
    ):
        axes.plot(smooth(migrating_run(change)), color=colour, label=label)
    axes.axvline(200, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step (means over ten)", title="training loss")
    log_axis(axes, "y")
    figure.legend(loc="outside lower center", ncols=1)
    return figure


def migrating_run(change: int | None, steps: int = 400) -> list[float]:
    torch.manual_seed(0)
    model, centres = small_network(), 2 * torch.randn(4, 8)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=7e-4, weight_decay=0.1
    )
    losses = []
    for step in range(steps):
        if step == change:
            state, groups = optimizer.state_dict(), param_groups(model, torch.randn(32, 8))
            optimizer = AngularAdamW(groups)
            optimizer.load_state_dict(state)
        y = torch.randint(0, 4, (64,))
        loss = F.cross_entropy(model(centres[y] + torch.randn(64, 8)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- from records

FAMILIES = {  # in a picture of all rows of Table 1; the last one lends its colour
    "Adam, AdamW": ("adam", "adamw"),
    "AdamP": ("adamp",),
    "AdamO": ("adamo",),
    "the paper's AdamO, its ablations": (
        *("adamo_isotropic", "adamo_no_projection", "adamo_no_dimension"),
        *("adamo_no_curvature", "adamo_paper"),
    ),
}
COLOURS = {title: REGISTRY[names[-1]].colour for title, names in FAMILIES.items()}


def about(lines: list[Line]) -> str:
    """How many runs a line has."""
    counts = {len(line.runs) for line in lines}
    return f"n = {' to '.join(map(str, sorted({min(counts), max(counts)})))}"


def on_characters() -> list[Line]:
    (group,) = [g for g in settled("language") if g.full and g.options["corpus"] == "shakespeare"]
    return [x for x in group.lines if x.optimizer in ("adamw", "adamo_paper", "adamo")]


def language() -> Figure:
    """Validation loss of the character model: means, and the range over the seeds."""
    chosen = on_characters()
    figure, (axes,) = canvas(height=3.3)
    for line in chosen:
        band(axes, line, "valid_loss")
    axes.set(ylim=(1.5, 2.3), xlabel=f"hundreds of steps   ({about(chosen)})")
    axes.set_title("characters: validation loss")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def language_norms() -> Figure:
    """How the matrices of the character model grow."""
    told, chosen = "matrix_norm", []
    for line in on_characters():
        chosen.append(replace(line, runs=[r for r in line.runs if told in r.metrics[-1]]))
    figure, (axes,) = canvas(height=3.0)
    for line in chosen:
        band(axes, line, told)
    axes.set(ylim=(0, None), xlabel=f"hundreds of steps   ({about(chosen)})")
    axes.set_title("characters: norm of all matrices")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def band(axes: Axes, line: Line, key: str, factor: float = 1.0) -> None:
    """A result over the epochs: the mean of the runs, and their range."""
    curves = [[factor * row[key] for row in run.metrics] for run in line.runs]
    epochs = [row["epoch"] for row in line.runs[0].metrics]
    columns = list(zip(*curves, strict=True))
    means, low, high = (list(map(f, columns)) for f in (statistics.fmean, min, max))
    colour, style = line.colour, line.entry.line
    axes.plot(epochs, means, color=colour, linestyle=style, label=line.title)
    axes.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)


def accuracy() -> Figure:
    """Test accuracy on CIFAR-100 over training, the paper's Figure 3."""
    (group,) = [g for g in settled("table1") if g.full and g.usual]
    shown = ("adamw", "adamw_tuned", "adamp", "adamo_paper")
    chosen = [line for line in group.lines if line.name in shown]
    figure, (axes,) = canvas(height=4.4)
    for line in chosen:
        band(axes, line, "test_accuracy", 100)
        end = statistics.fmean(accuracies(line))
        axes.plot(FULL + 12, end, "D", color=line.colour, markersize=5)
    axes.set(ylim=(60, 80), xlabel=f"epoch   ({about(chosen)})")
    axes.set_title("CIFAR-100: test accuracy, %")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def cifar100() -> Figure:
    """Test accuracy of the averaged weights on CIFAR-100: a row a setting, one dot a run."""
    (group,) = [g for g in settled("table1") if g.full and g.usual]
    order = sorted(group.lines, key=lambda line: statistics.fmean(accuracies(line)))
    figure, (axes,) = canvas(height=1.0 + 0.36 * len(order))
    for i, line in enumerate(order):
        values = accuracies(line)
        colour = COLOURS[family(line.runs[0])]
        axes.plot(values, [i] * len(values), "o", color=colour, markersize=8)
        text = f"{statistics.fmean(values):.2f}"
        axes.annotate(text, (max(values), i), (9, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(order)), [line.label for line in order])
    axes.margins(x=0.15, y=0.04)
    axes.set_xlabel(about(order))
    axes.set_title("test accuracy, %")
    return figure


def family(run: Record) -> str:
    return next(title for title, names in FAMILIES.items() if run.config.optimizer in names)


def accuracies(line: Line) -> list[float]:
    return [100 * value for value in line.values("swa_test_accuracy") if value is not None]


Looks = dict[str, tuple[str, str, str]]


def rates(study: str, looks: Looks, title: str, ylim: tuple[float, float]) -> Figure:
    """Loss over the learning rate, each at its better decay; looks: colour, line, marker."""
    (group,) = settled(study)
    metric = columns_of(group)[0]
    figure, (axes,) = canvas(height=2.8 + 0.2 * len(looks))
    for name, (colour, line, marker) in looks.items():
        curve = best_by_rate(group.named(name), metric)
        losses = [ours.mean or math.nan for _, ours in curve.values()]
        label = next(iter(curve.values()))[0].title
        axes.plot([*curve], losses, linestyle=line, marker=marker, color=colour, label=label)
    log_axis(axes, "x")
    axes.set(xlabel=f"learning rate   ({about(group.lines)})", ylim=ylim)
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=1)
    return figure


def gpt_rates() -> Figure:
    looks = {
        "adamw": (ADAMW, "--", "o"),
        "angular": (ANGULAR, "-", "o"),
        "angular_initial": (ANGULAR, ":", "o"),
        "adamw_turning_10": (ADAMW, "", "D"),
    }
    return rates("evidence-gpt", looks, "enwik8: validation loss", (1.025, 1.185))


def small_gpt_rates() -> Figure:
    looks = {
        "adamw": (ADAMW, "--", "o"),
        "angular": (ANGULAR, "-", "o"),
        "adamw_turning_10": (ADAMW, ":", "D"),
        "angular_all": (ANGULAR, "-.", "s"),
        "angular_all_entry": (ANGULAR, ":", "D"),
        "muon": ("#009E73", "-", "^"),
    }
    return rates("evidence-small-gpt", looks, "A small GPT: test loss", (1.19, 1.85))


def after_rates() -> Figure:
    looks = {
        "adamw": (ADAMW, "--", "o"),
        "angular": (ANGULAR, "-", "o"),
        "angular_row": (ANGULAR, "-.", "s"),
        "angular_entry": (ANGULAR, ":", "D"),
        "muon": ("#009E73", "-", "^"),
    }
    title = "Norms after each part: test loss"
    return rates("evidence-small-gpt-after", looks, title, (1.2, 1.56))


def speed() -> Figure:
    """How long a step keeps the GPU busy, in multiples of fused AdamW, on GPT-124M shapes."""
    bench = json.loads((ROOT / "results" / "bench" / "bench-cuda.json").read_text())
    found = bench["networks"]["gpt-124m"]["optimizers"]
    ratios = {"AdamW fused": 1.0} | {name: row["device_ratio"] for name, row in found.items()}
    rows = [(name.split(" (")[0], ratio) for name, ratio in reversed(ratios.items()) if ratio < 5]
    families = {"AdamW": ADAMW, "AngularAdamW": ANGULAR, "AdamO": ADAMO}
    figure, (axes,) = canvas(height=3.1)
    bars = axes.barh(
        [name for name, _ in rows],
        [ratio for _, ratio in rows],
        color=[families.get(name.split()[0].rstrip(","), "#999999") for name, _ in rows],
    )
    axes.bar_label(bars, [f"{ratio:.2f}×" for _, ratio in rows], padding=3)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.2 * max(ratio for _, ratio in rows))
    facts = bench["about"]
    axes.set_xlabel(f"× AdamW fused, {facts['device'].split()[-1]}")
    figure.suptitle("GPU time of one step", fontsize="medium", fontweight="bold")
    return figure


def sensitivity() -> Figure:
    """Accuracy in % on CIFAR-100 over two hyper-parameters, in one colour scale."""
    (group,) = settled("fig4")
    low, high, ink_above = 40, 70, 58
    maps = grids(group)
    figure, panels = canvas(len(maps), height=2.9 * len(maps))
    for axes, grid in zip(panels, maps, strict=True):
        values = (100 * grid.values).tolist()
        axes.set_facecolor("#ececec")
        axes.pcolormesh(values, cmap="cividis", vmin=low, vmax=high, edgecolors="white")
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                good = bool(grid.good[i, j])
                axes.text(
                    j + 0.5, i + 0.5, "–" if math.isnan(value) else f"{value:.1f}",
                    color=INK if value > ink_above or math.isnan(value) else "white", ha="center",
                    va="center", fontweight="bold" if good else "normal",
                )  # fmt: skip
        rows, columns = grid.ticks
        axes.set_xticks([j + 0.5 for j in range(len(columns))], [show(x) for x in columns])
        axes.set_yticks([i + 0.5 for i in range(len(rows))], [show(x) for x in rows])
        axes.set(title=grid.line.title, xlabel=grid.axes[1], ylabel="lr")
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "split": split,
    "trajectory": trajectory,
    "guard": guard,
    "scale-invariance": scale_invariance,
    "diagnostics": diagnostics,
    "migration": migration,
    "language": language,
    "language-norms": language_norms,
    "cifar100": cifar100,
    "accuracy": accuracy,
    "gpt-rates": gpt_rates,
    "small-gpt-rates": small_gpt_rates,
    "small-gpt-after-rates": after_rates,
    "sensitivity-cifar100": sensitivity,
    "speed": speed,
}


def draw(name: str, folder: Path) -> Path:
    """One picture as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    with style(), torch.random.fork_rng(devices=[]):
        PICTURES[name]().savefig(path, dpi=DPI, metadata={"Date": None, "Creator": None})
    return path


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    for picture in PICTURES:
        print(draw(picture, target))
