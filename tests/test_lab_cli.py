"""The command line: instant help, one clear sentence for every mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adamo_lab.catalogue import summarize
from adamo_lab.cli import train
from adamo_lab.engines import STOPPED, Outcome, Setup
from adamo_lab.errors import LabError
from adamo_lab.optimizers import settings
from adamo_lab.records import FINISHED, Record, RunConfig, load_all, save
from adamo_lab.words import parse, parse_list, parse_seeds


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "adamo_lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; sys.argv = ['adamo-lab', '--help']\n"
        "from adamo_lab.cli import app\n"
        "app(standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'jinja2', 'scipy'} & set(sys.modules)\n"
        "sys.exit(' '.join(heavy) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Rerun the AdamO paper" in result.stdout


@pytest.mark.parametrize("command", ["list", "run", "study", "sweep", "report", "data", "demo"])
def test_every_command_has_an_example_in_its_help(command: str) -> None:
    from typer.testing import CliRunner

    from adamo_lab.cli import app

    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: adamo-lab {command}" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run nonsense", "unknown task 'nonsense'"),
        ("run digits -o nonsense", "unknown optimizer 'nonsense'"),
        ("run digits --set learning=3", "adamw has no hyper-parameter 'learning'"),
        ("run digits --set lr", "expected name=value, got 'lr'"),
        ("run digits --option size=3", "digits has no option 'size'"),
        ("run digits --seeds x", "--seeds takes a count"),
        ("run digits --device abacus", "unknown device 'abacus'"),
        ("run digits --engine steam", "unknown engine 'steam'"),
        ("run digits --engine cuda --device cpu", "--engine cuda needs a CUDA device"),
        ("run digits --set lr=abc", "lr must be a number, got 'abc'"),
        ("run digits --set lr=true", "lr must be a number, got True"),
        ("run digits -o adamp --set compiled=true", "adamp has no hyper-parameter 'compiled'"),
        ("run digits --set fused=false", "adamw has no hyper-parameter 'fused'"),
        ("run digits -o muon", "'muon' has no settings of its own on digits"),
        ("run digits -o adamo --set radial=sgd", "adamo has no hyper-parameter 'radial'"),
        ("run digits --set lr=NaN", "NaN is not a value that a run can have"),
        ("sweep digits --grid lr=1e-3,Infinity", "Infinity is not a value that a run can have"),
        ("run digits --set lr=1e400", "1e400 is not a value that a run can have"),
        ("run digits --seeds 0-100000000000", "--seeds asks for more than 10000 seeds"),
        ("run cifar100 --set swa_lr=abc", "swa_lr must be a number >= 0, got 'abc'"),
        (
            "run digits -o adamw --set decay_vectors=no",
            "decay_vectors must be true or false, got 'no'",
        ),
        ("run cifar100 --option swa=no", "swa must be true or false, got 'no'"),
        ("run digits --option batch=0", "batch must be a whole number >= 1, got 0"),
        ("run grokking --option model=foo", "model must be embedding or one-hot, got 'foo'"),
        ("study table2 --option every=0", "every must be a whole number >= 1, got 0"),
        ("run cifar100 --set late=3", "late must be a dictionary, got 3"),
        (
            'run cifar100 -o adamo --set late={"dleta":0.1}',
            "adamo has no hyper-parameter 'dleta' for its late phase",
        ),
        ("study nonsense", "unknown study 'nonsense'"),
        ("study fig1 -o sgd", "fig1 has no row 'sgd'; it has adam, adamw"),
        # rows, not optimizers
        ("study evidence-gpt -o adamw_turning_3", "it has adamw, angular, angular_initial, ada"),
        ("study table2 --scale 2", "--scale must be above 0 and at most 1"),
        ("report nowhere", "nowhere"),
        ("data nonsense", "nonsense"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, arguments: str, sentence: str) -> None:
    words = arguments.split()
    out = [] if words[0] in ("report", "data") else ["--out", str(tmp_path)]
    result = lab(*words, *out)
    assert result.returncode == 1
    assert sentence in result.stderr
    assert result.stderr.startswith("adamo-lab: ")
    assert result.stderr.count("\n") == 1


def test_missing_data_is_one_sentence(tmp_path: Path) -> None:
    result = lab("run", "cifar100", "--data-dir", str(tmp_path / "none"), "--out", str(tmp_path))
    assert result.returncode == 1
    assert "CIFAR-100 is not in" in result.stdout + result.stderr


def test_missing_data_of_a_study_are_named_once_and_leave_no_records(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    result = lab("study", "table1", "--data-dir", str(tmp_path / "none"), *out)
    assert result.returncode == 1
    assert (result.stdout + result.stderr).count("CIFAR-100 is not in") == 1
    assert not (tmp_path / "out").exists()


def test_what_has_its_data_runs(tmp_path: Path) -> None:
    """Of the two texts of the study only one can be downloaded."""
    configs = [
        RunConfig("digits", "adamw", 0, 1, settings("digits", "adamw"), {"width": 4}),
        RunConfig("cifar100", "adamw", 0, 1, settings("cifar100", "adamw")),
        RunConfig("cifar100", "adam", 0, 1, settings("cifar100", "adam")),
    ]
    setup = Setup(tmp_path, "mine", data_dir=tmp_path / "none")
    save(Record(configs[1], FINISHED), setup.file)  # needs no data any more
    outcomes = train(configs, setup, "serial")
    assert [o.status for o in outcomes] == ["finished", "known", "failed"]
    assert "CIFAR-100 is not in" in outcomes[2].error
    assert {r.id for r in load_all(tmp_path)[0]} == {c.id for c in configs[:2]}


@pytest.mark.slow
def test_run_then_sweep_then_report(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    first = lab("run", "toy2d", "--epochs", "4", "--seeds", "2", "--engine", "serial", *out)
    assert first.returncode == 0, first.stderr
    grid = ("--grid", "lr=1e-3,1e-2", "--grid", "weight_decay=0,0.2")
    second = lab("sweep", "toy2d", "--epochs", "4", *grid, "--engine", "serial", *out)
    assert second.returncode == 0, second.stderr
    found, problems = load_all(tmp_path)
    assert (len(found), problems) == (10, [])
    assert {r.config.hyper["lr"] for r in found} == {1e-3, 1e-2}
    page = lab("report", str(tmp_path))
    assert page.returncode == 0, page.stderr
    assert Path(page.stdout.strip()).read_text().startswith("<!doctype html>")


def test_a_study_is_shortened_and_marked(tmp_path: Path) -> None:
    result = lab(
        *("study", "fig1", "--scale", "0.01", "--seeds", "1", "--engine", "serial"),
        *("-o", "adam", "-o", "adamo"),
        *("--out", str(tmp_path)),
    )
    assert result.returncode == 0, result.stderr
    found, _ = load_all(tmp_path)
    assert {(r.config.scale, r.config.epochs) for r in found} == {(0.01, 10)}
    assert {r.config.optimizer for r in found} == {"adam", "adamo"}
    said = " ".join(result.stdout.split())
    assert said.startswith("Shortened to 0.01 of every run's length.")
    assert "toy2d, 10 epochs Shortened to 1 % of its length" in said
    assert f"Records: {tmp_path / 'fig1.jsonl.gz'}" in said
    assert said.endswith(f"Next: adamo-lab report {tmp_path}")


def test_what_a_user_compares_unless_told_otherwise(tmp_path: Path) -> None:
    options = "--synthetic --epochs 1 --engine serial --out"
    result = lab("run", "digits", *options.split(), str(tmp_path))
    assert result.returncode == 0, result.stderr
    found = [record.config for record in load_all(tmp_path)[0]]
    assert {c.optimizer for c in found} == {"adamw", "adamo", "angular"}
    assert "AngularAdamW" in result.stdout


def test_made_up_data_are_announced(tmp_path: Path) -> None:
    result = lab(
        *("run", "digits", "--synthetic", "--epochs", "1", "--engine", "serial", "-o", "adamw"),
        *("--out", str(tmp_path)),
    )
    assert result.returncode == 0, result.stderr
    assert "Made-up data: the numbers say nothing" in result.stdout
    assert "Made-up data, not the real data set" in result.stdout
    (record,) = load_all(tmp_path)[0]
    assert record.config.synthetic


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", (0, 1, 2)), ("0,4", (0, 4)), ("5-7", (5, 6, 7)), ("7,", (7,))]
)
def test_seeds_are_a_count_a_list_or_a_range(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "3-", "9-5"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(LabError, match="--seeds"):
        parse_seeds(text)


def test_values_are_numbers_where_they_can_be() -> None:
    assert [parse(t) for t in ("1e-3", "true", "null", "auto")] == [1e-3, True, None, "auto"]


def test_python_may_be_spoken_too() -> None:
    assert [parse(t) for t in ("True", "False", "None")] == [True, False, None]
    assert parse_list("True,False,None") == [True, False, None]


def test_values_of_a_grid() -> None:
    assert parse_list("1e-3,3e-3") == [1e-3, 3e-3]
    assert parse_list("[0.9,0.95],[0.8,0.9]") == [[0.9, 0.95], [0.8, 0.9]]
    assert parse_list("adam,sgd,null") == ["adam", "sgd", None]


def test_axes_add_up_and_one_setting_is_one_run(tmp_path: Path) -> None:
    grid = ["--grid", "lr=1e-3", "--grid", "lr=2e-3", "--grid", "weight_decay=0,0.0"]
    result = lab(
        *("sweep", "toy2d", "-o", "adamw", "--epochs", "1", "--engine", "serial", *grid),
        *("--out", str(tmp_path)),
    )
    assert result.returncode == 0, result.stderr
    records = load_all(tmp_path)[0]
    assert sorted(r.config.hyper["lr"] for r in records) == [1e-3, 2e-3]


def test_a_demo_that_was_stopped_before_its_first_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from adamo_lab import cli

    monkeypatch.setattr(cli, "train", lambda runs, *_: [Outcome(run, STOPPED) for run in runs])
    result = CliRunner().invoke(cli.app, ["demo", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == cli.INTERRUPTED
    assert result.output.startswith("It took 0 min")


def test_stopped_runs_do_not_count_as_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [RunConfig("toy2d", "adamw", seed, 1, {"lr": 0.1}) for seed in range(3)]
    setup = Setup(tmp_path, "mine")
    summarize([Outcome(c, STOPPED) for c in configs], setup)
    said = "3 runs: 3 stopped or not begun: the same command goes on.\n"
    assert capsys.readouterr().out == said
    save(Record(configs[0], FINISHED, result={"test_accuracy": 0.5}), setup.file)
    outcomes = [Outcome(configs[0], FINISHED), *(Outcome(c, STOPPED) for c in configs[1:])]
    summarize(outcomes, setup)
    told = capsys.readouterr().out
    assert "3 runs: 1 finished, 2 stopped or not begun" in told
    assert "50.00" in told


def test_the_list_fits_a_screen() -> None:
    result = lab("list")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 80
    for kind, word in (("optimizers", "weight_decay=0.1"), ("tasks", "context=512")):
        assert word in lab("list", kind).stdout
    assert "say studies, tasks, optimizers, or nothing" in lab("list", "everything").stderr


def test_the_version() -> None:
    from importlib.metadata import version

    assert lab("--version").stdout == f"adamo-lab {version('adamo-optim')}\n"
