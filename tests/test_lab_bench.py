"""The benchmark: what it writes and says, with made times in place of a GPU's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adamo_lab import bench, environment
from adamo_lab.bench import Clock, compare, main
from adamo_lab.errors import LabError
from adamo_lab.train import threads

SMALL = {"resnet18": [(4, 3), (4,)]}
RECORDS = Path(__file__).parents[1] / "results" / "bench"


class MadeClock(Clock):
    """A GPU's clock with made times: the reference takes 1, 2, 3 seconds, the other 2, 8, 6."""

    def __init__(self) -> None:
        self.cuda = True
        self.asked: list[str] = []

    def wait(self) -> None:
        pass

    def seconds(self, run: Callable[[], Any], repeats: int) -> float:
        return 1.0

    def host_seconds(self, run: Callable[[], Any]) -> float:
        return 1.0

    def device_seconds(self, run: Any, repeats: int = 10) -> float:
        ours = not isinstance(run.__self__, torch.optim.AdamW)
        self.asked.append("ours" if ours else "theirs")
        turn = (len(self.asked) - 1) // 2 % 3
        return [2.0, 8.0, 6.0][turn] if ours else [1.0, 2.0, 3.0][turn]

    def extra_peak_bytes(self, run: Callable[[], Any]) -> int:
        return 7


def made_parameters() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.ones(3, 2))]
    params[0].grad = torch.ones(3, 2)
    return params


def test_times_on_the_device_are_taken_in_turn_in_every_round() -> None:
    clock = MadeClock()
    found = compare(lambda p: torch.optim.SGD(p, lr=0.1), made_parameters(), clock, rounds=3)
    assert clock.asked == ["theirs", "ours"] * 3
    assert found["device_ratio"] == 2.0
    assert found["device_ratios"] == [2.0, 2.0, 4.0]
    assert found["device_seconds"] == 6.0
    assert found["reference_device_seconds"] == 2.0
    assert found["extra_peak_bytes"] == 7


def test_rounds_of_earlier_passes_count_as_well() -> None:
    theirs, ours = [1.0, 1.0, 2.0], [9.0, 2.0, 6.0, 9.0, 8.0]  # 9: before the rounds of a pass

    class Rounds(Clock):
        def seconds(self, run: Any, repeats: int) -> float:
            return (theirs if isinstance(run.__self__, torch.optim.AdamW) else ours).pop(0)

    clock, pairs = Rounds(torch.device("cpu")), {}
    for rounds in (2, 1):
        found = compare(
            lambda p: torch.optim.SGD(p, lr=0.1), made_parameters(), clock, rounds, pairs=pairs
        )
    assert found["ratios"] == [2.0, 4.0, 6.0]
    assert found["ratio"] == 4.0
    assert found["seconds"] == 6.0


def test_without_a_gpu_there_are_no_times_on_it() -> None:
    clock = Clock(torch.device("cpu"))
    found = compare(lambda p: torch.optim.SGD(p, lr=0.1), made_parameters(), clock, rounds=2)
    assert found.keys() >= {"seconds", "ratio", "ratios", "host_seconds", "host_ratio"}
    assert not [key for key in found if "device" in key or "peak" in key]


def test_in_groups_every_tensor_has_one_and_every_step_another_learning_rate() -> None:
    made: list[torch.optim.Optimizer] = []

    def make(groups: bench.Groups) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(groups, lr=0.1))
        return made[-1]

    params = [*made_parameters(), *made_parameters()]
    compare(make, params, Clock(torch.device("cpu")), rounds=1, apart=True)
    assert [group["params"] for group in made[0].param_groups] == [[p] for p in params]
    assert all(0.09 < group["lr"] < 0.1 for group in made[0].param_groups)
    compare(make, params, Clock(torch.device("cpu")), rounds=1)
    assert made[1].param_groups[0]["params"] == params
    assert made[1].param_groups[0]["lr"] == 0.1


def test_convolutions_turn_and_save_their_second_moments() -> None:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 3, 3, 3), (4,), (5, 4))]
    for p in params:
        p.grad = torch.ones_like(p)
    groups = bench.turning([{"params": params[:1]}, {"params": params[1:]}])
    assert groups == bench.turning([{"params": params}])
    optimizer = bench.contenders()["AngularAdamW"].make([{"params": params}])
    assert optimizer.param_groups[0]["rule"] == "scale_invariant"
    assert optimizer.param_groups[0]["params"] == params[:1]
    optimizer.step()
    plain = bench.contenders()["AdamW foreach"].make([{"params": params}])
    plain.step()
    buffer, numbers = 4 * params[0].numel(), 32  # bytes; a few numbers take its place
    saved = bench.state_bytes(plain) - bench.state_bytes(optimizer)
    assert buffer - numbers <= saved < buffer


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def one() -> dict[str, Any]:
        return {"AdamO": bench.Contender(lambda p: torch.optim.SGD(p, lr=0.1), 56)}

    monkeypatch.setattr(bench, "contenders", one)
    monkeypatch.setattr(bench, "NETWORKS", SMALL)
    monkeypatch.setattr(Clock, "copy_rate", lambda clock, size: 1e9)
    with threads(torch.get_num_threads()):  # which the program sets
        yield


@pytest.mark.usefixtures("small")
def test_a_record_names_the_commit_of_the_source_and_replaces_an_older_one_in_so_many_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)  # of no repository
    words = ["--device", "cpu", "--rounds", "1", "--threads", "1", "--out", "made"]
    main(words)
    assert "is replaced" not in capsys.readouterr().out
    path = tmp_path / "made" / "bench-cpu.json"
    about = json.loads(path.read_text())["about"]
    assert about["commit"] == environment.commit()
    assert about["threads"] == 1
    main([*words, "--commit", "abc"])
    assert "bench-cpu.json was there and is replaced" in " ".join(capsys.readouterr().out.split())
    assert json.loads(path.read_text())["about"]["commit"] == "abc"
    assert path.with_suffix(".png").exists()


@pytest.mark.usefixtures("small")
def test_every_network_has_its_rounds_in_every_pass_and_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def one(groups: bench.Groups) -> torch.optim.Optimizer:
        made.append(len(groups))
        return torch.optim.SGD(groups, lr=0.1)

    monkeypatch.setattr(bench, "contenders", lambda: {"AdamO": bench.Contender(one)})
    words = ["--device", "cpu", "--rounds", "3", "--passes", "2", "--threads", "1"]
    main([*words, "--out", str(tmp_path), "--networks", "resnet18", "resnet18-groups"])
    assert made == [1, 2, 1, 2]
    record = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert (record["rounds"], record["passes"]) == (3, 2)
    for name in ("resnet18", "resnet18-groups"):
        network = record["networks"][name]
        assert network["parameters"] == 16
        assert len(network["optimizers"]["AdamO"]["ratios"]) == 6
        assert network["optimizers"]["AdamO"]["reference_seconds"] > 0


def test_angular_is_timed_where_something_turns() -> None:
    matrix, kernel = (
        torch.nn.Parameter(torch.ones(5, 4)),
        torch.nn.Parameter(torch.ones(4, 3, 3, 3)),
    )
    assert "AngularAdamW" in bench.suited([matrix, kernel])
    assert "AngularAdamW" not in bench.suited([matrix])
    assert "AdamO for-loop" in bench.suited([matrix])
    large = torch.nn.Parameter(torch.empty(1).expand(10**4, 10**4))
    assert "AdamO for-loop" not in bench.suited([large])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("option", ["--rounds", "--passes", "--threads"])
def test_a_count_of_nothing_is_one_sentence(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        main([option, "0"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"argument {option}: must be a whole number of at least 1, got '0'")


@pytest.mark.usefixtures("small")
def test_a_file_where_the_folder_should_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match=r"cannot write .*file: File exists"):
        main(["--device", "cpu", "--out", str(tmp_path / "file")])


@pytest.mark.parametrize(
    ("name", "label"),
    [("bench-cuda", "time the GPU is busy with one step"), ("bench-cpu", "time of one step")],
)
def test_the_picture_says_which_time_it_shows(tmp_path: Path, name: str, label: str) -> None:
    """Of the records that are there, too."""
    pytest.importorskip("matplotlib")
    from adamo_lab.bench.plot import draw, what_is_shown

    text = (RECORDS / f"{name}.json").read_text()
    path = tmp_path / f"{name}.json"
    path.write_text(text)
    assert draw(path).exists()
    assert what_is_shown(json.loads(text)["networks"]) == label
