"""What a user is told while runs train."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adamo_lab import cli, landscape
from adamo_lab.engines import FINISHED, STOPPED, Outcome, Setup
from adamo_lab.progress import Display, titles
from adamo_lab.records import Record, RunConfig
from adamo_lab.studies import STUDIES


def config(
    optimizer: str = "adamw", seed: int = 0, task: str = "digits", **hyper: Any
) -> RunConfig:
    return RunConfig(task, optimizer, seed, 5, {"lr": 1e-3, **hyper})


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_that_diverged_is_not_ticked_off(terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=terminal, color_system=None)
    bad, good = config(), config(task="language")
    with Display(console, [bad, good]) as view:
        for one, loss in ((bad, None), (good, 0.5)):
            view.started(one)
            view.progressed(one, 1, {"epoch": 1, "train_loss": 1.5})
            view.progressed(one, 2, {"epoch": 2, "train_loss": loss, "valid_loss": None})
            view.ended(Outcome(one, FINISHED))
    assert "! digits, AdamW, seed 0: diverged at epoch 2" in text.getvalue()
    assert "✓ language, AdamW, seed 0: train loss 0.5" in text.getvalue()
    assert ("digits, AdamW, seed 0: started" in text.getvalue()) is not terminal


def test_what_varies_is_named() -> None:
    sweep = [config(seed=seed, lr=lr, weight_decay=0.1) for lr in (1e-3, 2e-3) for seed in (0, 1)]
    assert list(titles(sweep).values()) == [
        f"digits, AdamW, lr {lr}, seed {seed}" for lr in (0.001, 0.002) for seed in (0, 1)
    ]
    assert [*titles([config(), config("adamo")]).values()] == [
        "digits, AdamW, seed 0",
        "digits, AdamO, seed 0",
    ]
    both = titles(STUDIES["language"].configs(seeds=(0,))).values()
    assert "language, AdamW, corpus shakespeare, seed 0" in both
    lengths = titles(STUDIES["tuning-cifar100"].configs(seeds=(0,))).values()
    assert any("epochs 300" in title for title in lengths)
    assert len({*lengths}) == len([*lengths])


# --- the loss landscape


def test_a_landscape_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quick(configs: Any, setup: Setup, progress: Any) -> Record:
        progress(961, 961)
        return Record(config(), FINISHED)

    monkeypatch.setattr(landscape, "draw_for", quick)
    outcomes = [Outcome(config(), FINISHED)]
    cli.draw_landscape(STUDIES["fig2"], [config()], Setup(tmp_path, "fig2"), outcomes)
    assert "961/961" in capsys.readouterr().out


def test_stopped_runs_do_not_fill_the_bar() -> None:
    shown = Display(Console(quiet=True), [config(), config(seed=1)])
    for status in (FINISHED, STOPPED):
        shown.ended(Outcome(config(), status))
    assert shown.progress.tasks[0].completed == 1
