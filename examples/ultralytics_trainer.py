"""Ultralytics: YOLO's convolutions turn, its own trainer does the rest.

    python examples/ultralytics_trainer.py [--epochs 3] [--out lab-output/yolo]

Ultralytics sorts the parameters into three groups; `with_rules` splits these by rule and keeps
their options. Say optimizer="AdamW": "auto" may choose groups for Muon.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils.torch_utils import unwrap_model

from adamo_optim import AngularAdamW
from adamo_optim.integrations import with_rules


class Trainer(DetectionTrainer):
    def build_optimizer(self, model: nn.Module, *args: Any, **kwargs: Any) -> AngularAdamW:
        theirs = super().build_optimizer(model, *args, **kwargs)
        images = torch.rand(2, 3, 160, 160, device=next(model.parameters()).device)
        return AngularAdamW(with_rules(theirs.param_groups, unwrap_model(model), images))


def make_data(folder: Path) -> Path:
    """White squares on a dark ground."""
    random = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 4)):
        images, labels = folder / "images" / split, folder / "labels" / split
        images.mkdir(parents=True, exist_ok=True)
        labels.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture = random.integers(0, 60, (64, 64, 3), dtype=np.uint8)
            x, y = random.integers(0, 48, 2)
            picture[y : y + 16, x : x + 16] = 255
            cv2.imwrite(str(images / f"{i}.png"), picture)
            (labels / f"{i}.txt").write_text(f"0 {(x + 8) / 64} {(y + 8) / 64} 0.25 0.25\n")
    config = folder / "squares.yaml"
    lines = [f"path: {folder.absolute()}", "train: images/train", "val: images/val"]
    config.write_text("\n".join([*lines, "names:", "  0: square", ""]))
    return config


def make_trainer(out: Path, epochs: int) -> Trainer:
    settings = {
        "model": "yolo11n.yaml",
        "data": str(make_data(out / "data")),
        "imgsz": 64,
        "epochs": epochs,
        "batch": 8,
        "nbs": 8,
        "workers": 0,
        "device": "0" if torch.cuda.is_available() else "cpu",
        "optimizer": "AdamW",
        "lr0": 2e-3,
        "warmup_bias_lr": 0.0,  # 0.1 is meant for SGD
        "amp": False,
        "plots": False,
        "project": str(out.absolute()),
        "name": "run",
        "exist_ok": True,
    }
    return Trainer(overrides=settings)


def main() -> None:
    parser = argparse.ArgumentParser(description="AngularAdamW in Ultralytics' trainer.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("lab-output/yolo"))
    flags = parser.parse_args()
    trainer = make_trainer(flags.out, flags.epochs)
    trainer.train()
    print(Counter(row.rule for row in trainer.optimizer.explain()))


if __name__ == "__main__":
    main()
