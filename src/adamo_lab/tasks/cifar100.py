"""ResNet-18 on CIFAR-100 under the paper's protocol (section 3.1), of any length."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import data
from ..errors import require
from ..records import Row
from .base import PRECISIONS, Batch, Phase, Task, annealed, best

CLASSES = 100
MEAN = (0.5071, 0.4865, 0.4409)  # of the training images, by colour
DEVIATION = (0.2673, 0.2564, 0.2762)
SIDE, PADDING = 32, 4

# In epochs of the full length; a shorter run has all of them in proportion.
FULL = 300
WARMUP, WARMUP_FACTOR = 10, 0.1
LATE = 200  # from here on: averaged weights, label smoothing, the optimizer's late options

CHUNK = 2048  # images augmented at once: their indices take 16 MiB
EVALUATED = 1000  # images in one batch of the evaluation
CALIBRATED = 100  # batches that set BatchNorm's statistics of averaged weights
SPLIT_SEED = 100  # of the held-out images: the same for every run


class Block(nn.Module):
    """relu(x + BN(conv(relu(BN(conv(x)))))), with a 1x1 convolution where the shape changes."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != width:
            conv = nn.Conv2d(inside, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


STEMS = {"3x3": (3, 1), "7x7": (7, 2)}  # size and stride: the usual one for 32 x 32, ImageNet's


def first_layer(kind: str, width: int) -> nn.Sequential:
    """The first layer. 3x3 keeps the size of the images, of 7x7 a quarter of the side is left."""
    size, stride = STEMS[kind]
    conv = nn.Conv2d(3, width, size, stride, size // 2, bias=False)
    pool = [nn.MaxPool2d(3, 2, 1)] if stride > 1 else []
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU(), *pool)


class ResNet18(nn.Module):
    """Four stages of two blocks; initialized as torchvision does."""

    def __init__(self, width: int = 64, stem: str = "3x3", classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = first_layer(stem, width)
        blocks, inside = [], width
        for stage in range(4):
            outside = width << stage
            blocks += [Block(inside, outside, 2 if stage else 1), Block(outside, outside, 1)]
            inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inside, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:  # [batch, 3, 32, 32] → [batch, classes]
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


class Cifar100(Task):
    """Metrics are of the test set, or of training images held out for it (``holdout``).

    ``every``: epochs between two evaluations; None makes about a hundred a run.
    """

    name = "cifar100"

    def load(self) -> None:
        self.dtype = PRECISIONS[self.options["precision"]]
        # (x / 255 - mean) / deviation as one multiplication and one addition
        mean, deviation = (torch.tensor(v, device=self.device) for v in (MEAN, DEVIATION))
        self.factor, self.offset = 1 / (255 * deviation), -mean / deviation

        self.images, self.labels = self.read("train")
        count, held = len(self.images), self.options["holdout"]
        self.train = torch.arange(count)
        if held:
            chosen, self.train = split(self.labels.cpu(), held)
            chosen = chosen.to(self.device)
            self.judged = "valid", self.images[chosen], self.labels[chosen]
        else:
            self.judged = "test", *self.read("test")
        self.steps = len(self.train) // self.options["batch"]
        sizes = f"batch {self.options['batch']} is larger than the {len(self.train)} images"
        require(self.steps, f"{sizes}; choose a smaller one")

    def read(self, part: str) -> tuple[Tensor, Tensor]:
        if self.config.synthetic:
            return made_images(part, self.device)
        return data.cifar100(part, data.folder(self.data_dir), self.device)

    def model(self) -> nn.Module:
        model = ResNet18(self.options["width"], self.options["stem"])
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return model

    @property
    def channels_last(self) -> bool:
        """On GPUs alone: torch 2.13 corrupts memory with it on CPUs without AVX-512."""
        return self.options.get("channels_last", False) and self.device.type == "cuda"

    def example(self) -> Any:
        return self.normalized(self.images[:8]).float().permute(0, 3, 1, 2)

    # --- training

    def batches(self, epoch: int) -> list[Batch]:
        """Random crops and flips of all training images in a random order; the rest is dropped."""
        return [self.augmented(epoch, self.steps)]

    def calibration(self) -> list[Batch]:
        """The first of the last epoch's batches: augmented, as weight averaging is usually done."""
        return [self.augmented(self.config.epochs - 1, min(CALIBRATED, self.steps))]

    def augmented(self, epoch: int, steps: int) -> Batch:
        """The first batches of an epoch; all chance comes from the CPU, for any device the same."""
        generator, batch = self.generator(epoch), self.options["batch"]
        order = self.train[torch.randperm(len(self.train), generator=generator)]
        shifts = torch.randint(2 * PADDING + 1, (2, len(order)), generator=generator) - PADDING
        flips = torch.randint(2, (len(order),), generator=generator)
        plan = torch.stack((order, *shifts, flips))[:, : steps * batch].to(self.device)

        shape = (SIDE, SIDE, 3)
        images = torch.empty(steps * batch, *shape, dtype=self.dtype, device=self.device)
        for out, part in zip(images.split(CHUNK), plan.split(CHUNK, 1), strict=True):
            out.copy_(self.normalized(crops(self.images, *part)))
        images = images.view(steps, batch, *shape).permute(0, 1, 4, 2, 3)
        if not self.channels_last:
            images = images.contiguous()
        return images, self.labels[plan[0]].view(steps, batch)

    def normalized(self, images: Tensor) -> Tensor:  # [..., 3] uint8 → float32
        return images.float().mul_(self.factor).add_(self.offset)

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Tensor:
        images, labels = batch
        with self.autocast():
            logits = model(images)
        return F.cross_entropy(logits.float(), labels, label_smoothing=phase.label_smoothing)

    # --- the protocol

    def phase(self, epoch: int) -> Phase:
        elapsed = epoch * FULL / self.config.epochs
        warmup = min(1.0, WARMUP_FACTOR + (1 - WARMUP_FACTOR) * elapsed / WARMUP)
        late = passed(LATE, epoch, self.config.epochs)
        return Phase(
            lr_factor=warmup * annealed(self.options["schedule"], epoch, self.config.epochs),
            swa=late and self.options["swa"],
            late=late,
            label_smoothing=self.options["smoothing"] if late else 0.0,
        )

    # --- evaluation

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        name, images, labels = self.judged
        loss = correct = torch.zeros((), device=self.device)
        for x, y in zip(images.split(EVALUATED), labels.split(EVALUATED), strict=True):
            with self.autocast():
                logits = model(self.normalized(x).to(self.dtype).permute(0, 3, 1, 2))
            loss = loss + F.cross_entropy(logits.float(), y, reduction="sum")
            correct = correct + (logits.argmax(-1) == y).sum()
        return {f"{name}_accuracy": correct / len(labels), f"{name}_loss": loss / len(labels)}

    def result(self, rows: list[Row]) -> Row:
        return best(rows, f"{self.judged[0]}_accuracy")


def passed(milestone: int, epoch: int, epochs: int) -> bool:
    """Is a milestone of the full length behind, in a run of this length? In whole numbers."""
    return epoch * FULL >= milestone * epochs


def split(labels: Tensor, held: int) -> tuple[Tensor, Tensor]:
    """Indices of ``held`` images with every class alike, and of the others; always the same."""
    count = len(labels)
    require(0 < held < count, f"holdout must lie between 0 and {count - 1}, got {held}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SPLIT_SEED))
    by_class = order[labels[order].argsort(stable=True)]
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[by_class[torch.arange(held) * count // held]] = True
    return chosen.nonzero().flatten(), (~chosen).nonzero().flatten()


def crops(images: Tensor, chosen: Tensor, down: Tensor, right: Tensor, flips: Tensor) -> Tensor:
    """Windows of the images, black outside, some mirrored: [n, 32, 32, 3], by one gather.

    The window of image ``chosen[i]`` is moved by ``down[i]`` and ``right[i]`` pixels, and then
    mirrored where ``flips[i]`` is 1.
    """
    line = torch.arange(SIDE, device=images.device)
    y = line + down[:, None]  # [n, 32], where each pixel comes from
    x = torch.where(flips[:, None] == 1, SIDE - 1 - line, line) + right[:, None]
    seen_y, seen_x = (y >= 0) & (y < SIDE), (x >= 0) & (x < SIDE)
    y, x = y.clamp_(0, SIDE - 1), x.clamp_(0, SIDE - 1)
    index = ((chosen[:, None] * SIDE + y) * SIDE)[:, :, None] + x[:, None, :]
    found = images.view(-1, 3).index_select(0, index.flatten()).view(*index.shape, 3)
    return found.mul_((seen_y[:, :, None] & seen_x[:, None, :])[..., None])


@lru_cache(maxsize=4)
def made_images(part: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """A small set that a few steps can learn: a coarse symmetric pattern for each class, and noise.

    Ten of the classes occur, so that an image of each is in every batch.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(CLASSES, 3, 4, 2, generator=generator)
    patterns = F.interpolate(torch.cat((half, half.flip(-1)), -1), scale_factor=8)
    labels = torch.arange({"train": 2000, "test": 500}[part]) % 10 * 10
    generator.manual_seed({"train": 1, "test": 2}[part])
    noise = torch.randn(len(labels), 3, SIDE, SIDE, generator=generator)
    images = (128 + 30 * patterns[labels] + 60 * noise).clamp_(0, 255).to(torch.uint8)
    return images.permute(0, 2, 3, 1).contiguous().to(device), labels.to(device)


TASK = Cifar100
