"""Records with made numbers, for tests of the report alone: they say nothing about an optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adamo_lab.records import FAILED, FINISHED, SUFFIX, Record, RunConfig, line_of, pack
from adamo_lab.studies import STUDIES

ENVIRONMENT = {
    "adamo_optim": "0.2.0",
    "torch": "2.11.0",
    "python": "3.11.7",
    "commit": "abc1234",
    "date": "2026-03-01",
    "device": "a processor",
    "threads": 1,
    "seconds": 12.5,
}
# How good each optimizer is in the made numbers.
SKILL = {"adam": 0.2, "adamw": 0.35, "adamp": 0.45, "adamo_paper": 0.9}


def noise(config: RunConfig, salt: int = 0) -> np.random.Generator:
    return np.random.default_rng([*config.id.encode(), salt])


def skill(config: RunConfig) -> float:
    return SKILL.get(config.optimizer, 0.6)


def record(
    config: RunConfig, *, rows: int = 60, result: Mapping[str, Any] | None = None, **changes: Any
) -> Record:
    """A finished run with curves, arrays and a result that fit its task."""
    metrics = curves(config, rows)
    values = {
        "finished": {
            "config": config,
            "status": FINISHED,
            "result": {**metrics[-1], **outcome(config, metrics), **(result or {})},
            "environment": dict(ENVIRONMENT),
            "metrics": metrics,
            "arrays": boundary(config) if config.task == "toy2d" else {},
        }
    }["finished"]
    return Record(**{**values, **changes})


def curves(config: RunConfig, rows: int) -> list[dict[str, Any]]:
    g, s = noise(config), skill(config)
    made = []
    for k in range(1, min(rows, config.epochs) + 1):
        t = k / min(rows, config.epochs)
        rise = 1 / (1 + math.exp(-(t - 0.75 + 0.4 * s) * 14)) if config.task == "grokking" else (
            1 - math.exp(-4 * t)
        )  # fmt: skip
        row = {
            "epoch": max(1, round(t * config.epochs)),
            "lr": 1e-3,
            "train_loss": 4 * math.exp(-6 * t) + 0.01 * (1 + g.random()),
            "weight_norm": 20 + 30 * (1 - s) * t + g.random(),
        }
        if config.task in ("language", "yours"):
            row["valid_loss"] = 1.4 + 2 * math.exp(-4 * t) - 0.1 * s + 0.01 * g.standard_normal()
            row["valid_perplexity"] = math.exp(row["valid_loss"])
        else:
            accuracy = min(1.0, rise * (0.72 + 0.08 * s) + 0.004 * g.standard_normal())
            accuracy += 0.19 * rise if config.task == "grokking" else 0
            row[f"{judged_by(config)}_accuracy"] = accuracy
        if config.options.get("watch"):
            row["gradient_norm"] = 1 + (1 - s) * math.exp(-t) + 0.1 * g.random()
            row["gradient_norm_sd"] = 0.4 * (1 - 0.5 * s)
        made.append(row)
    return made


def judged_by(config: RunConfig) -> str:
    return "valid" if config.options.get("holdout") else "test"


def outcome(config: RunConfig, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    g = noise(config, 1)
    found: dict[str, Any] = {}
    if config.task == "cifar100":
        near = [math.log10(config.hyper["lr"] / 8e-4)]
        near += [math.log10(config.hyper.get("radial_lr", 5e-3) / 5e-3) / 3]
        part = judged_by(config)
        last = metrics[-1][f"{part}_accuracy"]
        found[f"swa_{part}_accuracy"] = last + 0.01 - 0.05 * math.hypot(*near)
        found[f"swa_{part}_loss"] = 2 * (1 - last)
        found[f"best_{part}_accuracy"] = max(row[f"{part}_accuracy"] for row in metrics)
    if config.task == "grokking":
        passed = [row["epoch"] for row in metrics if row["test_accuracy"] > 0.95]
        late = config.optimizer == "adamw" and config.seed >= 3
        found["grokking_epoch"] = None if late or not passed else passed[0] + int(40 * g.random())
    if config.task == "toy2d":
        found["boundary_length"] = 14 - 6 * skill(config) + g.random()
    if config.task == "digits":
        found["gradient_norm_variation"] = 0.5 - 0.2 * skill(config) + 0.02 * g.random()
    if config.options.get("watch") == "norms":
        found |= {"way_undone": 0.8 - 0.2 * skill(config) + 0.02 * g.random(), "way_a_step": 1e-3}
        found |= {"radial_share": 0.02, "radial_share_of_a_step": 0.1}
    return found


def boundary(config: RunConfig, size: int = 48) -> dict[str, Any]:
    g, s = noise(config, 3), skill(config)
    x, y = np.meshgrid(*[np.linspace(-1.3, 1.3, size)] * 2)
    margin = y - 0.5 * np.sin(4 * x) - (1 - s) * 0.4 * np.sin(11 * x)
    points = g.uniform(-1.1, 1.1, (120, 2))
    return {
        "grid": (1 / (1 + np.exp(-8 * margin))).tolist(),
        "extent": [-1.3, 1.3, -1.3, 1.3],
        "points": points.tolist(),
        "labels": (points[:, 1] > 0.5 * np.sin(4 * points[:, 0])).astype(int).tolist(),
    }


def landscape(runs: list[Record]) -> Record:
    """The plane through the ends of two paths."""
    xs, ys = np.linspace(-4, 4, 40), np.linspace(-3, 3, 30)
    x, y = np.meshgrid(xs, ys)
    paths = {
        f"path_{run.config.optimizer}": np.column_stack(
            [np.linspace(-3, 2, 30), 2 * (skill(run.config) - 0.4) * np.sin(np.linspace(0, 3, 30))]
        ).tolist()
        for run in runs
    }
    ids, first = [run.id for run in runs], runs[0].config
    config = RunConfig("landscape", "all", first.seed, first.epochs, {}, {"runs": ids})
    loss = 0.05 + 0.2 * (x - 2) ** 2 + 0.5 * y**2
    return Record(
        config,
        FINISHED,
        result={"explained_variance": [0.71, 0.18], "runs": ids},
        environment=dict(ENVIRONMENT),
        arrays={"loss": loss.tolist(), "xs": xs.tolist(), "ys": ys.tolist(), **paths},
        study="fig2",
    )


def put(root: Path, *records: Record) -> None:
    """Into the files of their studies; runs that belong to none, as if made by hand."""
    files: dict[str, list[bytes]] = {}
    for made in records:
        name = made.study or f"run-{made.config.task}"
        files.setdefault(name, []).append(pack(line_of(made)))
    root.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        with (root / f"{name}{SUFFIX}").open("ab") as file:
            file.write(b"".join(lines))


def study_records(
    name: str, *, seeds: tuple[int, ...] = (0, 1, 2), rows: int = 60, **request: Any
) -> list[Record]:
    """All runs of a study."""
    configs = STUDIES[name].configs(seeds=seeds, **request)
    made = [record(config, rows=rows, study=name) for config in configs]
    if name == "fig2":
        first = [r for r in made if r.config.seed == seeds[0]]
        made.append(landscape(first))
    return made


def everything(root: Path) -> None:
    """All kinds of record at once: the page to look at."""
    for name in ("table1", "table2", "table3", "fig1", "fig2", "fig3"):
        put(root, *study_records(name, seeds=(0, 1, 2, 3) if name == "table2" else (0, 1, 2)))
    put(root, *study_records("fig4", seeds=(0,), rows=20))
    put(root, *study_records("fig1", seeds=(0, 1), scale=0.1))
    put(root, *study_records("table1", seeds=(0,), scale=0.1, synthetic=True))
    language = study_records("language", seeds=(0, 1, 2))
    put(root, *(r for r in language if r.config.options["corpus"] == "shakespeare"))
    for optimizer in ("adamw", "adamo"):
        for seed in range(3):
            mine = RunConfig("yours", optimizer, seed, 30, {"lr": 1e-3})
            put(root, record(mine, study="yours"))
        for lr in (1e-3, 3e-3):
            put(root, record(RunConfig("digits", optimizer, 0, 20, {"lr": lr})))
    broken = RunConfig("grokking", "sgd", 0, 5000, {"lr": 0.1})
    put(root, Record(broken, FAILED, environment={}, error="RuntimeError: out of memory"))
    warned = record(RunConfig("digits", "sgd", 0, 20, {"lr": 0.1}))
    warned.environment["warnings"] = ["2 weights start at zero and follow Adam"]
    put(root, warned)
