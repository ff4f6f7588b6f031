"""The demo: its runs, and sentences that are true for the records at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adamo_lab import demo
from adamo_lab.demo import demo_runs, spirals, sums, text
from adamo_lab.engines import Setup
from adamo_lab.records import FINISHED, Record, RunConfig, save


def test_the_runs() -> None:
    runs = demo_runs()
    assert len({run.id for run in runs}) == len(runs)
    rates: dict[str, list[float]] = {}
    for run in (run for run in runs if run.task == "gpt"):
        rates.setdefault(run.optimizer, []).append(run.hyper["lr"])
        assert run.options["text"] == "topics"
    assert rates == {"adamw": [*demo.LRS], "angular": [*demo.LRS]}
    assert {run.optimizer for run in runs} == {"adamw", "adamo", "angular"}
    assert all(run.epochs < whole.epochs for run, whole in zip(demo_runs(True), runs, strict=True))


def record(task: str, optimizer: str, lr: float = 1e-3, **result: Any) -> Record:
    return Record(RunConfig(task, optimizer, 0, 2, {"lr": lr}), FINISHED, result=result)


def grokked(adamo: int | None, adamw: int | None) -> str:
    epochs = {"adamo": adamo, "adamw": adamw}
    return sums(
        [record("grokking", n, grokking_epoch=e, weight_norm=20.4) for n, e in epochs.items()]
    )


@pytest.mark.parametrize(
    ("adamo", "adamw", "sentence"),
    [
        (1200, 3000, "AdamO generalizes at epoch 1,200 and AdamW at epoch 3,000"),
        (1200, None, "AdamO generalizes at epoch 1,200, AdamW not in the time given"),
        (None, 3000, "AdamW generalizes at epoch 3,000, AdamO not in the time given"),
        (None, None, "neither AdamO nor AdamW generalizes in the time given"),
    ],
)
def test_sums(adamo: int | None, adamw: int | None, sentence: str) -> None:
    said = grokked(adamo, adamw)
    assert said == f"On modular addition {sentence} (norm of the weights 20 and 20)."


def test_text() -> None:
    losses = {"adamw": [2.0, 1.5, None], "angular": [1.9, 1.6, 1.7]}
    made = [
        record("gpt", name, lr, valid_loss=loss)
        for name, values in losses.items()
        for lr, loss in zip((1e-3, 2e-3, 4e-3), values, strict=True)
    ]
    assert text(made) == (
        "On text AngularAdamW ends below AdamW at 1 of 2 learning rates; at its best it reaches a "
        "validation loss of 1.600 (lr 0.002), AdamW 1.500 (lr 0.002)."
    )


def test_spirals() -> None:
    def said(length: float | None) -> str:
        pairs = (("adamw", 7.21, 21.9), ("adamo", length, 9.7))
        return spirals(
            [record("toy2d", n, boundary_length=x, weight_norm=norm) for n, x, norm in pairs]
        )

    assert said(6.98).startswith(
        "Between two spirals AdamO and AdamW draw a boundary of length 7.0"
    )
    assert said(6.98).endswith("with weights of norm 9.7 and 21.9.")
    assert "have no boundary to compare" in said(None)


@pytest.mark.slow
def test_the_page_opens_with_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From runs of a few epochs, which are real."""
    from adamo_lab.train import train

    setup = Setup(tmp_path, "demo")
    for run in demo_runs(quick=True):
        if run.task != "gpt" or run.hyper["lr"] == demo.LRS[0]:
            save(train(run, tmp_path / run.id), setup.file)
    page = demo.write_page(setup).read_text()
    said = capsys.readouterr().out.splitlines()
    head = page[page.index("<header>") : page.index("</header>")]
    for sentence in said[1:4]:
        assert sentence in head
        assert page.count(sentence) == 2  # and where its story is
    assert page.index("Modular addition: when") < page.index("A small GPT on Python")
