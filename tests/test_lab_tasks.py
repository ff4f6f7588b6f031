"""The tasks: what their options may be, in one table, and what their metrics mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adamo_lab.errors import LabError
from adamo_lab.optimizers import settings
from adamo_lab.records import RunConfig
from adamo_lab.tasks import LEGAL, TASKS, all_options, base, cifar100, grokking, language
from adamo_lab.tasks.toy2d import boundary_length
from adamo_lab.train import NORMS, make_task

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a word for a switch": ("cifar100", {"swa": "no"}, "swa must be true or false, got 'no'"),
    "a number for a switch": ("digits", {"snapshots": 1}, "snapshots must be true or false, got 1"),
    "another watch": (
        "digits",
        {"watch": "all"},
        "watch must be true, false or norms, got 'all'",
    ),
    "no batch": ("digits", {"batch": 0}, "batch must be a whole number >= 1, got 0"),
    "half a batch": ("digits", {"batch": 2.5}, "batch must be a whole number >= 1, got 2.5"),
    "a switch for a batch": ("digits", {"batch": True}, "a whole number >= 1, got True"),
    "no width": ("digits", {"width": 0}, "width must be a whole number >= 1, got 0"),
    "never": ("toy2d", {"every": 0}, "every must be a whole number >= 1, got 0"),
    "none where there is no default": ("grokking", {"every": None}, "number >= 1, got None"),
    "every model": ("grokking", {"model": "foo"}, "model must be embedding or one-hot, got 'foo'"),
    "all pairs": ("grokking", {"train_share": 1}, "train_share must be above 0 and below 1, got 1"),
    "all dropped": ("language", {"dropout": 1.0}, "dropout must be >= 0 and below 1, got 1.0"),
    "less than no noise": ("toy2d", {"noise": -1}, "noise must be a number >= 0, got -1"),
    "one point": ("toy2d", {"resolution": 1}, "resolution must be a whole number >= 2, got 1"),
}


@pytest.mark.parametrize(("task", "options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused(task: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LabError) as caught:
        all_options(task, options)
    assert sentence in str(caught.value)


def test_every_option_has_a_rule_and_every_default_obeys_it() -> None:
    for name, task in TASKS.items():
        known = {**task.defaults, **task.later}
        assert known.keys() <= LEGAL.keys()
        assert all_options(name, known) == task.defaults


def test_a_whole_number_is_a_fraction_too() -> None:
    """0 and 0.0 are one setting, and must be one run."""
    options = all_options("language", {"dropout": 0})
    assert (options["dropout"], type(options["dropout"])) == (0.0, float)
    for name, key in (("adam", "weight_decay"), ("adamw", "lr"), ("adamo", "radial_lr")):
        assert type(settings("digits", name, {key: 1})[key]) is float
    assert type(settings("digits", "adamo", {"low_dim": 1})["low_dim"]) is int  # of entries
    assert settings("digits", "adamw", {"decay_vectors": True})["decay_vectors"] is True


def test_what_may_be_none_may_also_be_a_number() -> None:
    assert all_options("cifar100", {"every": 3})["every"] == 3
    assert all_options("cifar100", {"every": None})["every"] is None


def test_the_choices_are_those_that_the_tasks_know() -> None:
    for option, known in (
        ("stem", cifar100.STEMS),
        ("precision", base.PRECISIONS),
        ("corpus", language.CORPORA),
        ("model", grokking.MODELS),
        ("watch", (True, False, NORMS)),
    ):
        words, legal = LEGAL[option]
        assert all(legal(choice) for choice in known)
        assert len(words.replace(",", " or").split(" or ")) == len(known)


def test_pairs_are_left_to_test() -> None:
    config = RunConfig("grokking", "adamw", 0, 1, {"lr": 1.0}, {"p": 2, "train_share": 0.9})
    with pytest.raises(LabError, match=r"train_share 0\.9 takes 4 of 4 pairs; leave some"):
        make_task(config, torch.device("cpu"), None)


def test_no_boundary_has_no_length() -> None:
    """A network that says the same everywhere, or nothing at all, is not the smoothest."""
    line = torch.tensor([[-1.0, 1.0], [-1.0, 1.0]])
    assert boundary_length(line).item() == pytest.approx(2 * 2.6)
    assert boundary_length(line.abs()).isnan()
    assert boundary_length(line * torch.nan).isnan()
    assert boundary_length(torch.tensor([[-1.0, 1.0], [-1.0, torch.nan]])).isnan()
