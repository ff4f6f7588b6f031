"""The benchmark: what it writes and says, with made times in place of a GPU's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from adamo_lab import environment
from adamo_lab.bench import contenders, measure, models
from adamo_lab.bench.clock import Clock
from adamo_lab.bench.contenders import Contender
from adamo_lab.cli import app
from adamo_lab.errors import LabError

SGD = Contender(lambda ps: torch.optim.SGD(ps, lr=0.1), 12)
ADAMW = Contender(lambda ps: torch.optim.AdamW(ps, fused=True), 28)


class MadeClock(Clock):
    """A GPU's clock with made times: the reference takes 1, 2, 3 seconds, the other 2, 8, 6."""

    def __init__(self) -> None:
        self.cuda = True
        self.asked: list[str] = []

    def wait(self) -> None:
        pass

    def seconds(self, run: Callable[[], Any], repeats: int) -> float:
        return 1.0

    def device_seconds(self, run: Any, repeats: int) -> float:
        ours = not isinstance(run.__self__, torch.optim.AdamW)
        self.asked.append("ours" if ours else "theirs")
        turn = (len(self.asked) - 1) // 2 % 3
        return [2.0, 8.0, 6.0][turn] if ours else [1.0, 2.0, 3.0][turn]

    def extra_bytes(self, run: Callable[[], Any]) -> int:
        return 7


def made_parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes or [(3, 2)]]
    for p in params:
        p.grad = torch.linspace(-1, 1, p.numel()).reshape(p.shape)
    return params


def compared(clock: Clock, rounds: int, pairs: Any = None) -> dict[str, Any]:
    params = made_parameters()
    return measure.compare(
        SGD, ADAMW.make(params), params, clock, rounds, {} if pairs is None else pairs
    )


def test_times_on_the_device_are_taken_in_turn_in_every_round() -> None:
    clock = MadeClock()
    found = compared(clock, 3)
    assert clock.asked == ["theirs", "ours"] * 3
    assert found["device_ratio"] == 2.0
    assert found["device_ratios"] == [2.0, 2.0, 4.0]
    assert found["device_seconds"] == 6.0
    assert found["extra_bytes"] == 7
    assert found["bytes_per_parameter"] == 12


def test_rounds_of_earlier_passes_count_as_well() -> None:
    theirs, ours = [1.0, 1.0, 2.0], [9.0, 2.0, 6.0, 9.0, 8.0]  # 9: before the rounds of a pass

    class Rounds(Clock):
        def seconds(self, run: Any, repeats: int) -> float:
            return (theirs if isinstance(run.__self__, torch.optim.AdamW) else ours).pop(0)

    clock, pairs = Rounds(torch.device("cpu")), {}
    compared(clock, 2, pairs)
    found = compared(clock, 1, pairs)
    assert found["ratios"] == [2.0, 4.0, 6.0]
    assert found["ratio"] == 4.0
    assert found["seconds"] == 6.0
    assert not [key for key in found if "device" in key]


def test_the_memory_of_a_step_is_its_largest_sum_of_live_tensors() -> None:
    def step() -> None:
        a = torch.empty(1000)  # 4,000 bytes
        del a
        b, c = torch.empty(500), torch.empty(2000)
        del b, c

    assert Clock(torch.device("cpu")).extra_bytes(step) == pytest.approx(10_000, abs=300)


def test_state_is_counted_inside_of_dictionaries_and_tensor_subclasses() -> None:
    class Pair:
        def __init__(self) -> None:
            self.codes, self.scale = torch.ones(8, dtype=torch.uint8), torch.ones(1)

        def __tensor_flatten__(self) -> Any:
            return ["codes", "scale"], None

    assert measure.bytes_of({"a": torch.ones(3), 0: {"b": [Pair(), 5]}}) == 12 + 8 + 4


def test_turning_weights_save_their_second_moments() -> None:
    params: Any = made_parameters((4, 3, 3, 3), (4,), (5, 4))
    params[0].turns = True
    angular = contenders.contenders()["AngularAdamW"].make(params)
    assert [group["rule"] for group in angular.param_groups] == ["scale_invariant", "general"]
    assert angular.param_groups[0]["params"] == params[:1]
    adamw = ADAMW.make(params)
    angular.step()
    adamw.step()
    saved = measure.bytes_of([*adamw.state.values()]) - measure.bytes_of([*angular.state.values()])
    assert 4 * 108 - 32 <= saved < 4 * 108  # a buffer, but for a few numbers in its place


def test_every_contender_takes_a_step() -> None:
    for contender in contenders.contenders().values():
        params: Any = made_parameters((4, 3), (4,))
        params[0].turns = True
        contender.make(params).step()
        assert not torch.equal(params[0], torch.ones(4, 3))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One contender, one network, and a peer that exists."""
    monkeypatch.setattr(measure, "contenders", lambda: {"AdamW fused": ADAMW, "AdamO": SGD})
    monkeypatch.setitem(contenders.NETWORKS, "resnet18", [(4, 3), (4,)])
    monkeypatch.setattr(Clock, "copy_rate", lambda clock: 1e9)
    module: Any = ModuleType("made_peer")
    module.Good, module.Bad = torch.optim.Adam, lambda ps, lr: torch.optim.LBFGS(ps, lr=lr)
    monkeypatch.setitem(sys.modules, "made_peer", module)
    made = {name: ("made_peer", name, {}, 28) for name in ("Good", "Bad")}
    monkeypatch.setattr(contenders, "PEERS", {**made, "gone": ("no_such_module", "X", {}, 28)})
    monkeypatch.setattr(measure, "PEERS", contenders.PEERS)
    monkeypatch.setattr(measure, "QUICK", ["gone"])


@pytest.mark.usefixtures("small")
def test_a_record_has_rounds_of_every_pass_and_names_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # of no repository
    words = ["bench", "resnet18", "--device", "cpu", "--rounds", "3", "--out", "made"]
    first = CliRunner().invoke(app, words)
    said = " ".join(first.output.split())
    assert "is replaced" not in said
    assert "left out: gone (No module named 'no_such_module')" in said
    path = tmp_path / "made" / "bench-cpu.json"
    assert path.with_suffix(".png").stat().st_size > 0
    record = json.loads(path.read_text())
    assert record["about"]["commit"] == environment.commit()
    network = record["networks"]["resnet18"]
    assert network["parameters"] == 16
    row = network["optimizers"]["AdamO"]
    assert len(row["ratios"]) == 6
    assert row["bandwidth_share"] == pytest.approx(12 * 16 / row["seconds"] / 1e9)
    again = CliRunner().invoke(app, words)
    assert "bench-cpu.json was there and is replaced" in " ".join(again.output.split())


@pytest.mark.usefixtures("small")
def test_a_peer_that_fails_is_left_out_and_named(tmp_path: Path) -> None:
    words = ["bench", "--device", "cpu", "--peer", "Good", "--peer", "Bad", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert [*record["networks"]["resnet18"]["optimizers"]][2:] == ["Good (Good)"]
    assert "closure" in record["absent"]["Bad (Bad)"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"networks": ["resnet"]}, r"there is no 'resnet' here; choose from resnet18, gpt-124m"),
        ({"networks": ["200-small"], "train": True}, r"choose from resnet18, resnet18-compiled"),
        ({"peer": ["adam"]}, r"there is no 'adam' here; choose from Good"),
        ({"device": "tpu"}, r"there is no 'tpu' here; choose from cpu"),
    ],
)
def test_a_wrong_name_is_one_sentence(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(LabError, match=said):
        measure.measure(**wrong)


@pytest.mark.usefixtures("small")
def test_a_file_where_the_folder_should_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match=r"cannot write .*file: File exists"):
        measure.measure(device="cpu", out=tmp_path / "file")


def test_training_steps_are_timed_with_weights_that_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small GPT in place of the large one."""
    large, asked = models.GPT, []
    made = {"layers": 1, "heads": 2, "width": 768, "context": 1024}
    monkeypatch.setattr(models, "GPT", lambda **_: large(**made))
    monkeypatch.setattr(models, "VOCABULARY", 50)
    monkeypatch.setattr(models, "TOKENS", (2, 8))
    monkeypatch.setattr(Clock, "seconds", lambda clock, run, repeats: asked.append(run()) or 1.0)
    path = measure.measure(["gpt-124m"], train=True, device="cpu", passes=1, rounds=1, out=tmp_path)
    assert path.name == "bench-cpu-training.json"
    (speed,) = json.loads(path.read_text())["training"].values()
    assert speed == dict.fromkeys(speed, 1.0)
    assert len(asked) == 4
    assert [*speed] == ["adamw_fused_steps_per_second", "AngularAdamW", "AdamO", "AdamO rows"]
