"""Records: whole or not at all, damage named, nothing silently used."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import multiprocessing
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from adamo_lab.disk import locked, write_atomically
from adamo_lab.errors import LabError
from adamo_lab.optimizers import legal_arguments
from adamo_lab.records import (
    FAILED,
    FINISHED,
    HEADER,
    KINDS,
    SUFFIX,
    Record,
    RunConfig,
    find,
    forget,
    line_of,
    load,
    load_all,
    save,
)
from adamo_lab.studies import STUDIES, Study

RESULTS = Path(__file__).parents[1] / "results"
CONFIG = RunConfig("digits", "adamw", 0, 3, {"lr": 1e-3}, {"batch": 50})


def record(seed: int = 0, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "config": replace(CONFIG, seed=seed),
        "status": FINISHED,
        "result": {"test_accuracy": 0.5, "grokking_epoch": None},
        "metrics": [{"epoch": 1, "train_loss": 2.0}, {"epoch": 2, "train_loss": float("nan")}],
        "arrays": {"grid": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]},
    }
    return Record(**{**values, **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / f"fig2{SUFFIX}"


def test_a_record_comes_back_as_it_was_saved(file: Path) -> None:
    save(record(), file)
    ((back,), problems) = load(file)
    assert problems == []
    assert back.metrics == [{"epoch": 1, "train_loss": 2.0}, {"epoch": 2, "train_loss": None}]
    assert replace(back, metrics=[]) == replace(record(), metrics=[], study="fig2")
    assert find(file, CONFIG.id) == replace(back, study="")
    assert find(file, record(1).id) is None


@pytest.mark.parametrize(
    "change",
    [
        {"task": "toy2d"},
        {"optimizer": "adamo"},
        {"seed": 1},
        {"epochs": 4},
        {"hyper": {"lr": 2e-3}},
        {"options": {"batch": 51}},
        {"scale": 0.1},
        {"synthetic": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_id_depends_on_all_of_the_config(change: dict[str, Any]) -> None:
    assert replace(CONFIG, **change).id != CONFIG.id


def test_the_id_does_not_depend_on_the_order_of_options() -> None:
    first, second = {"lr": 1e-3, "eps": 1e-8}, {"eps": 1e-8, "lr": 1e-3}
    assert replace(CONFIG, hyper=first).id == replace(CONFIG, hyper=second).id


def test_a_run_is_replaced_and_the_others_stay_as_they_are(file: Path) -> None:
    for seed in range(3):
        save(record(seed, status=FAILED, error="no memory"), file)
    before = file.read_bytes().split(HEADER)
    save(record(1), file)
    after = file.read_bytes().split(HEADER)
    assert [after[1], after[2]] == [before[1], before[3]]
    assert {r.config.seed: r.status for r in load(file)[0]} == {0: FAILED, 1: FINISHED, 2: FAILED}
    forget(file, {record(0).id, record(2).id})
    assert [r.config.seed for r in load(file)[0]] == [1]


# --- damage


def damaged(file: Path, change: str) -> None:
    """Three runs, the second of them hurt."""
    for seed in range(3):
        save(record(seed), file)
    data = bytearray(file.read_bytes())
    second, third = [m.start() for m in re.finditer(re.escape(HEADER), data)][1:]
    if change == "flipped":
        data[(second + third) // 2] ^= 1
    elif change == "cut":
        del data[(second + third) // 2 : third]
    elif change == "overwritten":
        data[second:third] = os.urandom(third - second)
    elif change == "header":
        data[second] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("change", ["flipped", "cut", "overwritten", "header"])
def test_damage_is_named_and_takes_no_other_run_with_it(file: Path, change: str) -> None:
    damaged(file, change)
    found, problems = load(file)
    assert {2} <= {r.config.seed for r in found} <= {0, 2}
    number = 1 if change in ("overwritten", "header") else 2  # these have joined the run before
    assert [p.removeprefix(str(file)) for p in problems] == [
        f", line {number} is left out: it is damaged"
    ]
    save(record(1), file)  # trained again
    found, problems = load(file)
    assert {1, 2} <= {r.config.seed for r in found}
    assert problems == []


def test_a_file_that_was_cut_off_keeps_what_is_whole(file: Path) -> None:
    damaged(file, "none")
    file.write_bytes(file.read_bytes()[:-20])
    found, problems = load(file)
    assert [r.config.seed for r in found] == [0, 1]
    assert problems == [f"{file}, line 3 is left out: it is damaged"]


WRONG: dict[str, Any] = {
    "id": ["x", 3],
    "seed": [-1, 1.5, True, "0"],
    "epochs": [0, None],
    "hyper": [[], None],
    "scale": [0, -1, "1"],
    "status": ["done", None, ["finished"]],
    "result": [[], "good"],
    "environment": [None, {"seconds": "long"}, {"warnings": "many"}],
    "metrics": [
        {},
        [3],
        [{"train_loss": 1.0}],
        [{"epoch": 1, "loss": "low"}],
        [{"epoch": 10**400}],
    ],
    "arrays": [[], {"grid": [[1], [1, 2]]}, {"grid": "x"}],
}


@pytest.mark.parametrize(
    ("column", "value"), [(column, value) for column, values in WRONG.items() for value in values]
)
def test_a_column_of_another_kind_is_named(file: Path, column: str, value: Any) -> None:
    columns = {**json.loads(line_of(record())), column: value}
    save(record(5), file)
    with file.open("ab") as end:
        end.write(gzip.compress(json.dumps(columns).encode() + b"\n"))
    found, (problem,) = load(file)
    assert [r.config.seed for r in found] == [5]
    assert problem.startswith(f"{file}, line 2 is left out: its {column}")


@pytest.mark.parametrize("column", KINDS)
def test_a_column_that_is_missing_is_named(file: Path, column: str) -> None:
    columns = json.loads(line_of(record()))
    del columns[column]
    file.write_bytes(gzip.compress(json.dumps(columns).encode()))
    assert load(file) == ([], [f"{file}, line 1 is left out: it has no {column}"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[]\n", "it is no JSON object"),
        (b"nothing\n", "Expecting value"),
        (b'{"id": NaN}\n', "NaN is no JSON"),
        (b"[" * 100_000 + b"\n", "recursion"),
        (line_of(record()).replace(b'"seed":0', b'"seed":1'), "its id is"),
        (b"\xff\xfe\n", "codec"),
    ],
    ids=["list", "text", "NaN", "deep", "another's id", "bytes"],
)
def test_what_is_no_record_is_named(file: Path, text: bytes, reason: str) -> None:
    file.write_bytes(gzip.compress(text))
    found, (problem,) = load(file)
    assert found == []
    assert problem.startswith(f"{file}, line 1 is left out: ")
    assert reason in problem


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"a{SUFFIX}")
    (tmp_path / f"b{SUFFIX}").mkdir()
    (tmp_path / f"c{SUFFIX}").write_bytes(b"plain text")
    (tmp_path / f"d{SUFFIX}").symlink_to("/dev/zero")
    save(record(), tmp_path / f"e{SUFFIX}")
    found, problems = load_all(tmp_path)
    assert [r.study for r in found] == ["e"]
    assert [Path(p.split()[0].rstrip(",")).name[0] for p in problems] == ["a", "b", "c", "d"]
    with pytest.raises(LabError, match="is no file"):
        save(record(), tmp_path / f"a{SUFFIX}")


def test_a_run_that_stands_twice_in_a_file_counts_once(file: Path) -> None:
    save(record(), file)
    file.write_bytes(2 * file.read_bytes())
    found, problems = load(file)
    assert len(found) == 1
    assert problems == [f"{file}, line 2 is left out: it repeats {CONFIG.id}"]


def test_a_file_that_another_program_has_packed_is_read_too(file: Path) -> None:
    text = b"".join(line_of(record(seed)) for seed in range(3))
    with gzip.open(file, "wb") as packed:
        packed.write(text)
    save(record(1, status=FAILED), file)
    assert {r.config.seed: r.status for r in load(file)[0]} == {0: FINISHED, 2: FINISHED, 1: FAILED}


# --- writing


def save_some(file: Path, first: int) -> None:
    for seed in range(first, first + 8):
        save(record(seed), file)


def test_several_processes_write_one_file(file: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=save_some, args=(file, 8 * k)) for k in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    found, problems = load(file)
    assert {r.config.seed for r in found} == {*range(24)}
    assert problems == []
    assert [p.name for p in file.parent.iterdir()] == [file.name]  # no lock, no half file


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save(record(), file)
    before = file.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LabError, match=r"cannot write .*fig2.*: the disk is full"):
        save(record(1), file)
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    assert file.read_bytes() == before


def test_a_write_that_breaks_off_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "kept").write_text("old")
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "kept", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "old"


def test_a_lock_that_its_owner_has_just_removed_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, calls = fcntl.flock, []

    def slow(handle: int, operation: int) -> None:
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(operation)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    busy = pytest.raises(LabError, match="another process")
    with locked(tmp_path / "lock"), busy, locked(tmp_path / "lock"):
        pass
    assert len(calls) == 3
    assert not (tmp_path / "lock").exists()


def test_records_and_studies_need_no_torch() -> None:
    code = (
        "import sys, adamo_lab.records, adamo_lab.studies, adamo_lab.engines, adamo_lab.cli\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the records in results/


@cache
def kept(name: str) -> dict[str, Record]:
    found, problems = load(RESULTS / f"{name}{SUFFIX}")
    assert problems == []
    return {r.id: r for r in found}


def test_results_are_few_files() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert len(files) <= 60
    assert sum(path.stat().st_size for path in files) <= 25e6


# declared before their runs, some of which are made
UNDER_WAY = {"constants", *(f"evidence-{x}" for x in ("cifar100", "gpt", "gpt-verdict", "vit"))}
UNDER_WAY |= {"evidence-small-resnet", "evidence-gpt-after"}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_todays_code_can_rerun_all_of_a_study(study: Study) -> None:
    """Every record is one of its runs, and nothing would be trained again."""
    runs = [r.config for r in kept(study.name).values() if r.config.task != "landscape"]
    seeds = {config.seed for config in runs} | {*study.seeds}
    assert {c.id for c in runs} <= {c.id for c in study.configs(tuple(seeds))}
    for config in runs:
        assert {*config.hyper} <= legal_arguments(config.optimizer), config.id
        assert study.arm(config), config.id
    missing = [c for c in study.configs(study.seeds) if c.id not in kept(study.name)]
    if study.name in UNDER_WAY:
        assert missing  # else it is no longer
        return
    # the one row without seed 0 was chosen on it
    arms = [(arm.name, c.seed) for c in missing if (arm := study.arm(c))]
    assert arms == ([("adamw_best", 0)] if study.name == "table1" else [])


def test_a_landscape_is_of_runs_that_are_there() -> None:
    (plane,) = [r.config for r in kept("fig2").values() if r.config.task == "landscape"]
    runs = STUDIES["fig2"].configs((0,))
    assert {*plane.options["runs"]} == {run.id for run in runs} <= {*kept("fig2")}


@pytest.mark.parametrize("library", ["pandas", "polars", "duckdb"])
def test_the_lines_of_the_readme_run(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library counts the runs of Table 2 by optimizer, and so do we."""
    pytest.importorskip(library)
    monkeypatch.chdir(RESULTS.parent)
    text = (RESULTS / "README.md").read_text()
    code = re.search(rf"```python\n(import {library}.*?)```", text, re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    table = names["table"]
    rows = table.fetchall() if library == "duckdb" else table.rows() if library == "polars" else (
        [*table.reset_index().itertuples(index=False, name=None)]
    )  # fmt: skip
    ours: dict[str, list[float]] = {}
    for r in kept("table2").values():
        ours.setdefault(r.config.optimizer, []).append(r.result["test_accuracy"])
    assert {name: pytest.approx(mean) for name, mean in rows} == {
        name: sum(values) / len(values) for name, values in ours.items()
    }


def test_the_readme_tells_every_column() -> None:
    told = re.findall(r"^\| `(\w+)` \|", (RESULTS / "README.md").read_text(), re.MULTILINE)
    assert told == [*KINDS]
