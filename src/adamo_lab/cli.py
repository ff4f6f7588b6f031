"""The command ``adamo-lab``. Heavy imports wait inside the commands, so that help is instant."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import LabError, require
from .words import configs_of, pairs, parse_list, parse_seeds, split_pair

if TYPE_CHECKING:
    from .engines import Outcome, Setup
    from .records import RunConfig
    from .studies import Study

INTERRUPTED = 130  # the exit status that shells use for it

app = typer.Typer(
    name="adamo-lab",
    help="Rerun the AdamO paper on real data, or compare AdamO and AngularAdamW with AdamW.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)

Out = Annotated[Path, typer.Option(help="Folder for the records.")]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the data are. Default: $ADAMO_DATA or ~/.cache/adamo-lab."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU if there is one.")]
EngineName = Annotated[str, typer.Option(help="auto, serial, processes, cuda or ray.")]
Workers = Annotated[
    int, typer.Option(min=0, help="Runs at a time. 0: one per core, or 8 on a GPU.")
]
Seeds = Annotated[str, typer.Option(help="How many (3), or which (0,1,2 or 5-9).")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Default: the task's.")]
Scale = Annotated[float, typer.Option(help="0.1 runs a tenth of every run's epochs.")]
Synthetic = Annotated[bool, typer.Option(help="Use small made-up data, and say so everywhere.")]
Compile = Annotated[bool, typer.Option(help="On a GPU: compile the loss, once a task.")]
RayAddress = Annotated[str | None, typer.Option(help="Of a Ray cluster; without it, a local one.")]
Options = Annotated[
    list[str], typer.Option("--option", help="Of the task, as name=value; may be given again.")
]
NETWORKS = "resnet18 (the default), gpt-124m, gpt-350m, gpt-1.3b, 200-small."
PEERS = "adamp, pytorch_optimizer, schedulefree (these three are the default), heavyball, torchao."


def told_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"adamo-lab {version('adamo-optim')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=told_version, is_eager=True, help="And leave.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="studies, tasks or optimizers: more of each.")] = "",
) -> None:
    """Studies, tasks and optimizers.

    Example: adamo-lab list optimizers
    """
    from . import catalogue

    catalogue.show(what)


@app.command("sweep", short_help="The same, by the name of what --grid does.")
@app.command("run")
def run(
    task: Annotated[str, typer.Argument(help="A task, as `adamo-lab list` shows them.")],
    optimizer: Annotated[
        list[str],
        typer.Option(
            "--optimizer",
            "-o",
            help="Which; again for more. Default: adamw, adamo and angular; of a grid adamw.",
        ),
    ] = [],  # noqa: B006
    grid: Annotated[
        list[str], typer.Option(help="name=value,value,…; the product of all is run.")
    ] = [],  # noqa: B006
    seeds: Seeds = "1",
    epochs: Epochs = None,
    set_: Annotated[
        list[str], typer.Option("--set", help="Of the optimizers, as name=value; again for more.")
    ] = [],  # noqa: B006
    option: Options = [],  # noqa: B006
    out: Out = Path("lab-output"),
    data_dir: DataDir = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    workers: Workers = 0,
    synthetic: Synthetic = False,
    compile: Compile = True,
    ray_address: RayAddress = None,
) -> None:
    """Train a task with one or more optimizers, or over a grid of their hyper-parameters.

    Example: adamo-lab run digits -o adamw -o adamo --seeds 3 --set lr=3e-3

    Example: adamo-lab sweep digits --grid lr=1e-3,3e-3 --grid weight_decay=0.01,0.1
    """
    axes: dict[str, list[Any]] = {}
    for name, values in map(split_pair, grid):
        axes.setdefault(name, []).extend(parse_list(values))
    points = itertools.product(*axes.values())  # without a grid there is one
    changes = [{**pairs(set_), **dict(zip(axes, point, strict=True))} for point in points]
    names = optimizer or (["adamw"] if grid else ["adamw", "adamo", "angular"])
    configs = configs_of(task, names, parse_seeds(seeds), epochs, changes, pairs(option), synthetic)
    name = f"{'sweep' if grid else 'run'}-{task}"
    setup = make_setup(out, name, data_dir, device, workers, ray_address, compile)
    conclude(train(configs, setup, engine), setup)


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="table1, table2, …: see `adamo-lab list`.")],
    optimizer: Annotated[
        list[str], typer.Option("--optimizer", "-o", help="Only these rows; may be given again.")
    ] = [],  # noqa: B006
    seeds: Seeds = "",
    scale: Scale = 1.0,
    option: Options = [],  # noqa: B006
    out: Out = Path("lab-output"),
    data_dir: DataDir = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    workers: Workers = 0,
    synthetic: Synthetic = False,
    compile: Compile = True,
    ray_address: RayAddress = None,
) -> None:
    """Rerun one table or figure of the paper. The same command goes on after an interruption.

    Example: adamo-lab study table2 --seeds 3 -o adamw -o adamo
    """
    from .studies import study as find

    chosen = find(name)
    require(0 < scale <= 1, f"--scale must be above 0 and at most 1, got {scale:g}")
    numbers = parse_seeds(seeds) if seeds else chosen.seeds
    configs = chosen.configs(numbers, scale, synthetic, pairs(option))
    rows = [arm.name if (arm := chosen.arm(c)) else c.optimizer for c in configs]
    for row in optimizer:
        known = ", ".join(dict.fromkeys(rows))
        require(row in rows, f"{name} has no row {row!r}; it has {known}")
    zipped = zip(configs, rows, strict=True)
    configs = [config for config, row in zipped if not optimizer or row in optimizer]
    setup = make_setup(out, name, data_dir, device, workers, ray_address, compile)
    outcomes = train(configs, setup, engine)
    draw_landscape(chosen, configs, setup, outcomes)
    conclude(outcomes, setup)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder of records.")] = Path("lab-output"),
    out: Annotated[Path | None, typer.Option(help="Default: RESULTS/report.")] = None,
) -> None:
    """Make one page with every table and figure from the records alone.

    Example: adamo-lab report results --out report
    """
    from .report import write_report

    print(write_report(results, out or results / "report"))


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="cifar100, enwik8 or shakespeare.")],
    data_dir: DataDir = None,
) -> None:
    """Download a data set and check it.

    Example: adamo-lab data cifar100 --data-dir ~/data
    """
    from .data import download

    print(download(name, data_dir))


@app.command()
def bench(
    networks: Annotated[list[str], typer.Argument(help=NETWORKS)] = [],  # noqa: B006
    train: Annotated[bool, typer.Option("--train", help="Whole training steps instead.")] = False,
    peer: Annotated[list[str], typer.Option(help=PEERS)] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if any.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Of every optimizer in a pass.")] = 3,
    passes: Annotated[int, typer.Option(min=1, help="Over all networks.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = Path("bench-output"),
) -> None:
    """Time both optimizers beside AdamW and others on this machine: a table, JSON and a picture.

    Example: adamo-lab bench resnet18 200-small --peer schedulefree
    """
    from .bench.measure import measure

    measure(networks, train, peer, device, rounds, passes, out)


@app.command()
def demo(
    out: Out = Path("demo-output"),
    quick: Annotated[bool, typer.Option(help="A fraction of it, to see that it works.")] = False,
    workers: Workers = 0,
) -> None:
    """AdamW, AdamO and AngularAdamW side by side in minutes, then a page of what happened.

    Example: adamo-lab demo --quick
    """
    from .demo import demo_runs, write_page

    started = time.monotonic()
    # a quick look does not mix with the demo
    setup = make_setup(out / "quick" if quick else out, "demo", None, "cpu", workers)
    outcomes = train(demo_runs(quick), setup, "processes")
    if not status_of(outcomes):
        write_page(setup)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    print(f"It took {minutes} min {seconds} s.")
    raise typer.Exit(status_of(outcomes))


def main() -> None:
    """Run the command; what a user can mend is one sentence and a non-zero exit."""
    try:
        app()
    except LabError as error:
        print(f"adamo-lab: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


# --- training, and what is said about it


def make_setup(
    out: Path,
    name: str,
    data_dir: Path | None,
    device: str,
    workers: int,
    ray_address: str | None = None,
    compiled: bool = True,
) -> Setup:
    from .engines import Setup, resolve_device
    from .processes import cores

    kind = str(resolve_device(device))
    many, seconds = (8, 120.0) if kind.startswith("cuda") else (cores(), 30.0)
    return Setup(out, name, data_dir, kind, workers or many, seconds, compiled, ray_address)


def train(configs: list[RunConfig], setup: Setup, engine: str) -> list[Outcome]:
    """Train with a display that suits the terminal."""
    from rich.console import Console

    from .engines import run_all
    from .progress import Display

    console = Console()
    if any(config.synthetic for config in configs):
        console.print("[yellow]Made-up data: the numbers say nothing about the real task.")
    if configs[0].scale != 1:
        console.print(f"[yellow]Shortened to {configs[0].scale:.3g} of every run's length.")
    without = [] if engine == "ray" else without_data(configs, setup)  # its nodes have their own
    for said in dict.fromkeys(outcome.error for outcome in without):
        if len(without) == len(configs):
            raise LabError(said)
        console.print(f"[red]✗[/] {sum(o.error == said for o in without)} runs left out: {said}")
    left_out = {outcome.config.id for outcome in without}
    configs = [config for config in configs if config.id not in left_out]
    with Display(console, configs) as shown:
        return [*run_all(configs, setup, engine, shown), *without]


def without_data(configs: list[RunConfig], setup: Setup) -> list[Outcome]:
    """The runs that would all fail alike for want of their data; those that are done need none."""
    from . import data
    from .engines import Outcome
    from .records import FAILED, FINISHED, load_all
    from .tasks import data_of

    needs = {c.id: data_of(c.task, c.options) for c in configs if not c.synthetic}
    missing: dict[str | None, str] = {}
    for name in dict.fromkeys(needs.values()):
        try:
            data.check(name, setup.data_dir)
        except LabError as error:
            missing[name] = str(error)
    lacking = [config for config in configs if needs.get(config.id) in missing]
    found = load_all(setup.out)[0] if lacking else []
    done = {record.id for record in found if record.status == FINISHED}
    return [Outcome(c, FAILED, missing[needs[c.id]]) for c in lacking if c.id not in done]


def draw_landscape(
    chosen: Study, configs: list[RunConfig], setup: Setup, outcomes: list[Outcome]
) -> None:
    """Figure 2 needs more than its runs: the loss on the plane that their paths span."""
    if chosen.kind != "landscape" or status_of(outcomes):
        return
    from rich.console import Console

    from .landscape import draw_for
    from .progress import counting

    with counting(Console(), "landscape") as progress:
        print(f"landscape: {draw_for(configs, setup, progress).id}")


def conclude(outcomes: list[Outcome], setup: Setup) -> None:
    """What the runs came to, where their records are, and what to do next; then leave."""
    from .catalogue import summarize

    summarize(outcomes, setup)
    raise typer.Exit(status_of(outcomes))


def status_of(outcomes: list[Outcome]) -> int:
    """What the command exits with: 1 when a run failed, 130 when it was stopped."""
    found = {outcome.status for outcome in outcomes}
    return 1 if "failed" in found else INTERRUPTED if "stopped" in found else 0
