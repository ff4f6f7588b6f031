"""Records: whole or not at all, damage named, nothing silently used."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adamo_lab import records
from adamo_lab.errors import LabError
from adamo_lab.optimizers import legal_arguments
from adamo_lab.records import (
    ARRAYS,
    DYNAMICS,
    METRICS,
    RUN,
    Record,
    RunConfig,
    load,
    load_all,
    read_document,
    save,
    write_atomically,
)
from adamo_lab.studies import STUDIES, Request, Study

RESULTS = Path(__file__).parents[1] / "results"
CONFIG = RunConfig("digits", "adamw", 0, 3, {"lr": 1e-3}, {"batch": 50})


def record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "config": CONFIG,
        "status": "finished",
        "result": {"test_accuracy": 0.5, "grokking_epoch": None},
        "metrics": [{"epoch": 1, "train_loss": 2.0}, {"epoch": 2, "train_loss": float("nan")}],
        "dynamics": [{"epoch": 1, "weights": {"0.weight": {"norm": 1.0, "guard": ["scale"]}}}],
        "arrays": {"grid": np.arange(6.0).reshape(2, 3)},
    }
    return Record(**{**values, **changes})


def test_a_record_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    save(record(), tmp_path / CONFIG.id)
    back = load(tmp_path / CONFIG.id)
    assert (back.config, back.status, back.result) == (CONFIG, "finished", record().result)
    assert back.metrics == [{"epoch": 1, "train_loss": 2.0}, {"epoch": 2, "train_loss": None}]
    assert back.dynamics == record().dynamics
    np.testing.assert_array_equal(back.arrays["grid"], record().arrays["grid"])


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


@pytest.mark.parametrize("name", [RUN, METRICS, DYNAMICS, ARRAYS])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damage_to_any_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / CONFIG.id
    save(record(), folder)
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        at = data.index(b"1") if name != ARRAYS else len(data) // 2
        data[at] ^= 1
        path.write_bytes(data)
    with pytest.raises(LabError, match=name.replace(".", r"\.")):
        load(folder)
    found, problems = load_all(tmp_path)
    assert found == {}
    assert len(problems) == (0 if (name, damage) == (RUN, "gone") else 1)


def test_a_folder_without_run_json_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / METRICS).write_text('{"epoch": 1}\n')
    assert load_all(tmp_path) == ({}, [])


def test_a_save_that_breaks_off_over_a_failed_record_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(record(status="failed", error="no memory", metrics=[]), tmp_path / CONFIG.id)

    def killed(path: Path, data: bytes) -> None:
        if path.name == RUN:
            raise KeyboardInterrupt
        write_atomically(path, data)

    monkeypatch.setattr(records, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        save(record(), tmp_path / CONFIG.id)
    assert load_all(tmp_path) == ({}, [])


def test_a_finished_record_is_preferred_to_a_failed_one(tmp_path: Path) -> None:
    save(record(status="failed", error="no memory"), tmp_path / "a" / CONFIG.id)
    save(record(), tmp_path / "b" / CONFIG.id)
    found, _ = load_all(tmp_path)
    assert found[CONFIG.id].status == "finished"


@pytest.mark.parametrize("config", [{}, {"tusk": "digits"}])
def test_a_document_of_another_kind_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / RUN).write_text("[]")
    with pytest.raises(LabError, match="is damaged"):
        load(tmp_path)
    with pytest.raises(LabError, match="a config is not of this version"):
        RunConfig.from_json(config)


def test_a_record_of_another_format_is_named(tmp_path: Path) -> None:
    from adamo_lab.records import canonical, digest

    save(record(), tmp_path)
    document = json.loads((tmp_path / RUN).read_text())
    del document["sha256"]
    document["format"] = 99
    document["sha256"] = digest(canonical(document).encode())
    (tmp_path / RUN).write_text(json.dumps(document))
    with pytest.raises(LabError, match="format 99"):
        load(tmp_path)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "kept").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LabError, match=r"cannot write .*kept: the disk is full"):
        write_atomically(tmp_path / "kept", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "old"


def test_records_and_studies_need_no_torch() -> None:
    code = (
        "import sys, adamo_lab.records, adamo_lab.studies, adamo_lab.optimizers, adamo_lab.cli\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the records in results/


@cache
def kept() -> dict[str, RunConfig]:
    """The config of every record by its id, read without curves and layers."""
    found = {}
    for path in sorted(RESULTS.rglob(RUN)):
        config = RunConfig.from_json(read_document(path)["config"])
        assert path.parent.name == config.id, path
        found[config.id] = config
    return found


def test_todays_optimizers_take_the_settings_of_all_records() -> None:
    for config in kept().values():
        if config.task != "landscape":
            assert {*config.hyper} <= legal_arguments(config.optimizer), config.id


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_a_study_finds_its_runs(study: Study) -> None:
    """Nothing is trained again; the one row without seed 0 was chosen on it."""
    runs = study.runs(Request(tuple(range(study.seeds))))
    missing = [(run.optimizer, run.seed) for run in runs if run.id not in kept()]
    assert missing == ([("adamw_best", 0)] if study.name == "table1" else [])


def test_a_landscape_is_of_runs_that_are_there() -> None:
    (plane,) = [config for config in kept().values() if config.task == "landscape"]
    runs = STUDIES["fig2"].runs(Request((0,)))
    assert {*plane.options["runs"]} == {run.id for run in runs} <= {*kept()}
