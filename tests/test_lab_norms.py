"""What the laboratory counts about norms: against paths and gradients whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from adamo_lab.engines import Setup, View, train_safely
from adamo_lab.errors import LabError
from adamo_lab.measures import WINDOW, Norms
from adamo_lab.optimizers import settings
from adamo_lab.records import FINISHED, RunConfig, load
from adamo_lab.side_by_side import run_cuda
from adamo_lab.studies import STUDIES
from adamo_lab.train import NORMS, Stopped, train


def model(*norms: float) -> nn.Module:
    """Matrices of these norms, and a vector that does not count."""
    made = nn.ParameterDict({f"m{i}": nn.Parameter(torch.eye(2)) for i in range(len(norms))})
    made["vector"] = nn.Parameter(torch.ones(3))
    set_norms(made, *norms)
    return made


def set_norms(made: nn.Module, *norms: float) -> None:
    for i, norm in enumerate(norms):
        p = made.get_parameter(f"m{i}")
        with torch.no_grad():
            p.copy_(torch.eye(2) * norm / math.sqrt(2))


def walk(*paths: list[float]) -> Norms:
    """Norms that take these values, one list a matrix, with no gradient."""
    made = model(*(path[0] for path in paths))
    norms = Norms(made)
    for values in zip(*paths, strict=True):
        set_norms(made, *values)
        norms.observe()
    return norms


def test_a_norm_that_only_grows_undoes_nothing() -> None:
    found = walk([1.01**k for k in range(350)]).result()
    assert found["way_undone"] == pytest.approx(0, abs=1e-6)
    assert found["way_a_step"] == pytest.approx(math.log(1.01), rel=1e-5)


def test_a_norm_that_goes_to_and_fro_undoes_everything() -> None:
    found = walk([1 + 0.1 * (k % 2) for k in range(2 * WINDOW + 1)])
    assert found.result()["way_undone"] == pytest.approx(1, abs=1e-6)


def test_windows_are_told_apart() -> None:
    """Up for a whole window and down for the next: nothing is undone within either."""
    up = [1.01**k for k in range(WINDOW + 1)]
    assert walk(up + up[-2::-1]).result()["way_undone"] == pytest.approx(0, abs=1e-6)
    half = up[: WINDOW // 2 + 1]
    assert walk(half + half[-2::-1]).result()["way_undone"] == pytest.approx(1, abs=1e-6)


def test_a_random_walk_undoes_what_the_page_says() -> None:
    torch.manual_seed(0)
    paths = torch.randn(200, 3 * WINDOW).cumsum(1).mul(1e-3).exp()
    assert walk(*paths.tolist()).result()["way_undone"] == pytest.approx(0.9, abs=0.01)


def test_ways_are_added_up() -> None:
    up, still = [1.01**k for k in range(50)], [1 + 0.001 * (k % 2) for k in range(50)]
    found = walk(up, still)
    way = 49 * math.log(1.01), 49 * math.log(1.001)
    expected = 1 - (way[0] + math.log(1.001)) / sum(way)
    assert found.result()["way_undone"] == pytest.approx(expected, rel=1e-4)


def test_the_radial_share_is_that_of_the_squared_gradients() -> None:
    """Added up, the larger gradient decides; of a single step, each step counts alike."""
    made = model(1.0, 2.0, 3.0)
    norms = Norms(made)
    along, across = torch.eye(2), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    for one, other in ((along, across + along), (2 * across, across + along), (None, along)):
        made.get_parameter("m0").grad = one
        made.get_parameter("m1").grad = other
        norms.observe()  # m2 never has a gradient, and m0 none in the last step
    found = norms.result()
    assert found["radial_share"] == pytest.approx((2 + 6) / (10 + 10))
    assert found["radial_share_of_a_step"] == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_a_matrix_that_starts_at_zero_is_left_out() -> None:
    made = model(1.0, 0.0)
    norms = Norms(made)
    made.get_parameter("m0").grad = torch.eye(2)
    norms.observe()
    norms.observe()
    assert list(norms.weights) == ["m0"]
    assert math.isfinite(norms.result()["radial_share"])


def test_a_model_without_a_matrix_is_one_sentence() -> None:
    with pytest.raises(LabError, match="needs a model with a matrix that is not zero"):
        Norms(model())


def watched(epochs: int = 3) -> RunConfig:
    options = {"width": 4, "watch": NORMS}
    return RunConfig("digits", "adamw", 0, epochs, settings("digits", "adamw"), options)


def test_a_watched_run_is_the_same_run(tmp_path: Path) -> None:
    what = watched()
    plain = RunConfig("digits", "adamw", 0, 3, what.hyper, {"width": 4})
    a, b = train(what, tmp_path / "a"), train(plain, tmp_path / "b")
    assert a.result["weights_sha256"] == b.result["weights_sha256"]
    assert 0 <= a.result["way_undone"] < 1
    assert 0 < a.result["radial_share"] < 1
    assert "way_undone" not in b.result


def test_what_was_counted_survives_a_stop(tmp_path: Path) -> None:
    whole = train(watched(), tmp_path / "whole")
    with pytest.raises(Stopped):
        train(watched(), tmp_path / "parts", stop=lambda: True)
    parts = train(watched(), tmp_path / "parts")
    assert parts.result == whole.result


def test_there_is_nothing_else_to_watch(tmp_path: Path) -> None:
    what = RunConfig("digits", "adamw", 0, 1, settings("digits", "adamw"), {"watch": "norm"})
    with pytest.raises(LabError, match="watch must be true, false or norms, got 'norm'"):
        train(what, tmp_path)


def test_the_studies_watch_every_run() -> None:
    found = [study for name, study in STUDIES.items() if name.startswith("premise-")]
    assert len(found) == 3
    for study in found:
        assert all(run.options["watch"] == NORMS for run in study.configs((0,)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_counts_too(tmp_path: Path) -> None:
    captured, plain = (Setup(tmp_path, engine, device="cuda") for engine in ("cuda", "serial"))
    assert train_safely(watched(6), plain, lambda *_: None).status == FINISHED
    run_cuda([watched(6)], captured, View())
    (a,), (b,) = ([r.result for r in load(setup.file)[0]] for setup in (captured, plain))
    assert a["way_a_step"] == pytest.approx(b["way_a_step"], rel=0.05)
    assert a["radial_share"] == pytest.approx(b["radial_share"], rel=0.05)
