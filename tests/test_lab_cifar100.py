"""The CIFAR-100 task: augmentation, protocol, split, evaluation, and a small run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adamo_lab import data
from adamo_lab.errors import LabError
from adamo_lab.records import RunConfig
from adamo_lab.tasks import cifar100
from adamo_lab.tasks.base import Phase
from adamo_lab.tasks.cifar100 import Cifar100, ResNet18, crops, split
from adamo_lab.train import Stopped, new_model, train

CPU = torch.device("cpu")
SMALL = {"batch": 50, "width": 8, "stem": "7x7", "precision": "float32"}


def config(epochs: int = 3, seed: int = 0, optimizer: str = "adamw", **options: Any) -> RunConfig:
    hyper = {"lr": 0.02, "swa_lr": 1e-3}
    return RunConfig("cifar100", optimizer, seed, epochs, hyper, {**SMALL, **options}, 1.0, True)


def task(**arguments: Any) -> Cifar100:
    return Cifar100(config(**arguments), CPU, None)


# --- data


def naive_crop(image: Tensor, down: int, right: int, flip: int) -> Tensor:
    """As torchvision: pad with black, cut, mirror. [32, 32, 3]"""
    padded = F.pad(image.permute(2, 0, 1), (4, 4, 4, 4))
    window = padded[:, 4 + down : 36 + down, 4 + right : 36 + right]
    return (window.flip(2) if flip else window).permute(1, 2, 0)


def test_crops_equal_the_naive_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (7, 32, 32, 3), generator=generator, dtype=torch.uint8)
    moves = torch.cartesian_prod(torch.arange(-4, 5), torch.arange(-4, 5), torch.arange(2))
    down, right, flip = moves.unbind(1)
    chosen = torch.arange(len(moves)) % 7
    found = crops(images, chosen, down, right, flip)
    assert found.dtype == torch.uint8
    for i, (image, move) in enumerate(zip(chosen, moves.tolist(), strict=True)):
        assert torch.equal(found[i], naive_crop(images[image], *move)), move


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_batches(precision: str) -> None:
    it = task(batch=128, precision=precision)
    ((images, labels),) = it.batches(5)
    assert images.shape == (15, 128, 3, 32, 32)  # of 2,000: the last 80 images are dropped
    assert images.dtype == getattr(torch, precision)
    assert labels.shape == (15, 128)
    assert labels.dtype == torch.int64
    assert all(batch.is_contiguous() for batch in images)  # channels last is for GPUs


def test_images_are_normalized_crops_of_their_own_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made images are replaced by flat ones that carry their index, so that each is recognized."""
    it = task()
    count = len(it.images)
    number = torch.arange(count)
    colours = torch.stack((number % 250 + 1, number // 250 + 1, torch.full_like(number, 255)), -1)
    it.images = colours[:, None, None].expand(-1, 32, 32, -1).to(torch.uint8).contiguous()
    it.labels = number * 7
    monkeypatch.setattr(cifar100, "CHUNK", 300)  # not a divisor of anything
    ((images, labels),) = it.batches(0)
    mean, deviation = torch.tensor(cifar100.MEAN), torch.tensor(cifar100.DEVIATION)
    middle = images[..., 16, 16].flatten(0, 1)  # never in the padding
    seen = ((middle * deviation + mean) * 255).round().long()
    found = (seen[:, 0] - 1) + 250 * (seen[:, 1] - 1)
    assert torch.equal(found * 7, labels.flatten())
    assert torch.equal(found.sort().values, number)
    black = (images[:, :, 2] - (-mean[2] / deviation[2])).abs() < 1e-5
    assert 0.1 < black.float().mean() < 0.2  # 1 - (1 - 20/9/32)² = 0.134 of the pixels


def test_batches_follow_from_seed_and_epoch() -> None:
    first, other = task(seed=1), task(seed=2)
    ((images, labels),) = first.batches(3)
    ((again, same),) = task(seed=1).batches(3)
    assert torch.equal(images, again)
    assert torch.equal(labels, same)
    for ((images2, _),) in (first.batches(4), other.batches(3)):
        assert not torch.equal(images, images2)


def test_calibration_is_the_start_of_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    it = task(epochs=9)
    monkeypatch.setattr(cifar100, "CALIBRATED", 4)
    ((images, labels),) = it.calibration()
    ((all_images, all_labels),) = it.batches(8)
    assert torch.equal(images, all_images[:4])
    assert torch.equal(labels, all_labels[:4])


# --- held-out images


@pytest.mark.parametrize("held", [1, 50, 500, 777, 1999])
def test_the_split_is_complete_balanced_and_fixed(held: int) -> None:
    labels = torch.arange(2000) % 100
    chosen, rest = split(labels, held)
    assert len(chosen) == held
    assert torch.equal(torch.cat((chosen, rest)).sort().values, torch.arange(2000))
    counts = labels[chosen].bincount(minlength=100)
    assert counts.max() - counts.min() <= 1
    torch.manual_seed(held)
    assert torch.equal(split(labels, held)[0], chosen)


def test_held_out_images_are_not_trained_on_and_the_test_set_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    def watched(part: str, device: torch.device) -> tuple[Tensor, Tensor]:
        read.append(part)
        return made(part, device)

    made = cifar100.made_images
    monkeypatch.setattr(cifar100, "made_images", watched)
    it = task(holdout=400)
    assert read == ["train"]
    name, images, labels = it.judged
    assert (name, len(images)) == ("valid", 400)
    held, rest = split(it.labels, 400)
    assert torch.equal(it.train, rest)
    assert torch.equal(it.images[held], images)
    assert torch.equal(it.labels[held], labels)
    it.labels = torch.arange(2000)  # labels that tell which image it was
    assert not set(it.batches(0)[0][1].flatten().tolist()) & set(held.tolist())
    metrics = it.evaluate(new_model(it))
    assert set(metrics) == {"valid_accuracy", "valid_loss"}
    assert it.result([{"valid_accuracy": 0.5}, {"valid_accuracy": 0.3}]) == {
        "best_valid_accuracy": 0.5
    }


REFUSED = {
    "precision": ({"precision": "half"}, "precision must be bfloat16 or float32, got 'half'"),
    "stem": ({"stem": "5x5"}, "stem must be 3x3 or 7x7, got '5x5'"),
    "holdout": ({"holdout": 2000}, "holdout must lie between 0 and 1999, got 2000"),
    "negative": ({"holdout": -1}, "holdout must be a whole number >= 0, got -1"),
    "batch": ({"batch": 2001}, "batch 2001 is larger than the 2000 images"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        task(**options)


def test_missing_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=f"CIFAR-100 is not in {tmp_path}"):
        Cifar100(RunConfig("cifar100", "adamw", 0, 1, {"lr": 1e-3}), CPU, tmp_path)


# --- model


def test_the_model_has_the_usual_size() -> None:
    assert sum(p.numel() for p in ResNet18().parameters()) == 11_220_132


@pytest.mark.parametrize(("stem", "side"), [("3x3", 32), ("7x7", 8)])
def test_stems(stem: str, side: int) -> None:
    model = ResNet18(8, stem)
    x = torch.randn(2, 3, 32, 32)
    assert model.stem(x).shape == (2, 8, side, side)
    assert model(x).shape == (2, 100)


def test_initial_convolutions_keep_the_variance_of_gradients() -> None:
    torch.manual_seed(0)
    weight = ResNet18().blocks.get_parameter("7.conv2.weight")
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_layout_of_the_model(device: str, channels_last: bool) -> None:
    it = task(channels_last=channels_last)
    it.device = torch.device(device)
    there = channels_last and device == "cuda"  # on CPUs torch 2.13 has a bug with it
    layout = torch.channels_last if there else torch.contiguous_format
    convolutions = [p for p in it.model().parameters() if p.dim() == 4]
    assert all(p.is_contiguous(memory_format=layout) for p in convolutions)


# --- the protocol: E, epoch, learning rate, late

PROTOCOL = [
    (300, 0, 0.1, False),
    (300, 1, 0.19, False),
    (300, 5, 0.55, False),
    (300, 9, 0.91, False),
    (300, 10, 1.0, False),
    (300, 49, 1.0, False),
    (300, 50, 0.2, False),
    (300, 99, 0.2, False),
    (300, 100, 0.04, False),
    (300, 150, 0.008, False),
    (300, 199, 0.008, False),
    (300, 200, 0.0016, True),
    (300, 249, 0.0016, True),
    (300, 250, 0.00032, True),
    (300, 299, 0.00032, True),
    (60, 0, 0.1, False),
    (60, 1, 0.55, False),
    (60, 2, 1.0, False),
    (60, 9, 1.0, False),
    (60, 10, 0.2, False),
    (60, 39, 0.008, False),
    (60, 40, 0.0016, True),
    (60, 50, 0.00032, True),
    (24, 0, 0.1, False),
    (24, 1, 1.0, False),
    (24, 3, 1.0, False),
    (24, 4, 0.2, False),
    (24, 8, 0.04, False),
    (24, 12, 0.008, False),
    (24, 15, 0.008, False),
    (24, 16, 0.0016, True),
    (24, 20, 0.00032, True),
]


@pytest.mark.parametrize("swa", [True, False])
@pytest.mark.parametrize(("epochs", "epoch", "factor", "late"), PROTOCOL)
def test_protocol(epochs: int, epoch: int, factor: float, late: bool, swa: bool) -> None:
    phase = task(epochs=epochs, swa=swa).phase(epoch)
    assert phase.lr_factor == pytest.approx(factor, rel=1e-12)
    assert phase == Phase(phase.lr_factor, late and swa, late, 0.1 if late else 0.0)


COSINE = [(0, 0.1), (1, 0.549623), (2, 0.997261), (20, 0.75), (30, 0.5), (59, 0.000685)]


@pytest.mark.parametrize(("epoch", "factor"), COSINE)
@pytest.mark.parametrize("swa", [True, False])
def test_a_cosine_instead_of_drops(epoch: int, factor: float, swa: bool) -> None:
    """Warm-up times the cosine; all else is the protocol's."""
    phase = task(epochs=60, schedule="cosine", swa=swa).phase(epoch)
    assert phase.lr_factor == pytest.approx(factor, rel=1e-3)
    usual = task(epochs=60, swa=swa).phase(epoch)
    assert phase == replace(usual, lr_factor=phase.lr_factor)


def test_a_constant_rate_instead() -> None:
    factors = [task(epochs=60, schedule="constant").phase(e).lr_factor for e in (0, 2, 30, 59)]
    assert factors == [0.1, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("epochs", "every", "expected"), [(300, None, 3), (24, None, 1), (24, 5, 5)]
)
def test_evaluations(epochs: int, every: int | None, expected: int) -> None:
    it = task(epochs=epochs, every=every)
    assert [e for e in range(1, 20) if it.due(e, [])] == list(range(expected, 20, expected))


# --- loss and evaluation


def test_label_smoothing_reaches_the_loss() -> None:
    it = task()
    model = new_model(it).eval()
    ((images, labels),) = it.batches(0)
    batch = images[0], labels[0]
    logits = model(images[0])
    smooth = 0.9 * F.cross_entropy(logits, labels[0]) - 0.1 * logits.log_softmax(-1).mean()
    torch.testing.assert_close(it.loss(model, batch, Phase(label_smoothing=0.1)), smooth)
    plain = it.loss(model, batch, Phase())
    torch.testing.assert_close(plain, F.cross_entropy(logits, labels[0]))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_precision(precision: str) -> None:
    it = task(precision=precision)
    seen: list[torch.dtype] = []
    model = new_model(it)
    classifier = model.get_submodule("classifier")
    classifier.register_forward_hook(lambda _, __, logits: seen.append(logits.dtype))
    ((images, labels),) = it.batches(0)
    loss = it.loss(model, (images[0], labels[0]), Phase())
    loss.backward()
    assert seen == [getattr(torch, precision)]
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@torch.no_grad()
def test_evaluation_equals_a_naive_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar100, "EVALUATED", 150)  # 500 images: a smaller last batch
    it = task()
    model = new_model(it).eval()
    metrics = it.evaluate(model)
    pixels, labels = cifar100.made_images("test", CPU)
    mean, deviation = torch.tensor(cifar100.MEAN), torch.tensor(cifar100.DEVIATION)
    losses, hits = [], []
    for image, label in zip(pixels, labels, strict=True):
        x = ((image / 255 - mean) / deviation).permute(2, 0, 1)[None]
        logits = model(x)
        losses.append(F.cross_entropy(logits, label[None]))
        hits.append(logits.argmax() == label)
    torch.testing.assert_close(metrics["test_loss"], torch.stack(losses).mean())
    assert metrics["test_accuracy"].item() == pytest.approx(torch.stack(hits).float().mean().item())
    assert all(value.dim() == 0 for value in metrics.values())


# --- whole runs


def test_a_run_on_made_images_learns(tmp_path: Path) -> None:
    record = train(config(), tmp_path)
    assert [row["epoch"] for row in record.metrics] == [1, 2, 3]
    assert record.metrics[1]["train_loss"] < record.metrics[0]["train_loss"]
    assert record.result["best_test_accuracy"] > 0.5  # chance: 0.1
    assert record.result["swa_test_accuracy"] > 0.5
    assert record.metrics[2]["lr"] == 1e-3  # of the averaging


class StopAfter:
    """Asks to stop once, after some epochs."""

    def __init__(self, epochs: int) -> None:
        self.left = epochs

    def progress(self, *_: object) -> None:
        self.left -= 1

    def __call__(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ("adamw", "float32"),
        ("adamo", "float32"),
        pytest.param("adamo", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_ends_the_same(tmp_path: Path, optimizer: str, precision: str) -> None:
    run = config(optimizer=optimizer, precision=precision, batch=200, width=4)
    whole = train(run, tmp_path / "whole")
    stop = StopAfter(1)
    with pytest.raises(Stopped):
        train(run, tmp_path / "halves", progress=stop.progress, stop=stop)
    halves = train(run, tmp_path / "halves")
    assert halves.metrics == whole.metrics
    assert halves.result == whole.result


def test_a_run_on_files_in_the_official_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "IMAGES", {"train": 2000, "test": 500})
    for part in ("train", "test"):
        images, labels = cifar100.made_images(part, CPU)
        planes = images.permute(0, 3, 1, 2).reshape(len(images), -1)
        columns = (torch.zeros_like(labels)[:, None], labels[:, None], planes)
        content = torch.cat([c.to(torch.uint8) for c in columns], 1)
        (tmp_path / f"{part}.bin").write_bytes(content.numpy().tobytes())
    real = RunConfig("cifar100", "adamw", 0, 1, {"lr": 0.02}, SMALL)
    from_files = train(real, tmp_path / "real", data_dir=tmp_path)
    made = train(replace(real, synthetic=True), tmp_path / "made")
    assert from_files.metrics == made.metrics
