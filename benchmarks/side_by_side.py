"""Images per second of the lab's CIFAR-100 runs on one GPU, by how many train side by side.

    python benchmarks/side_by_side.py --runs 1 4 8 --out bench-output

Random images of the real number and shape; every count is timed over whole epochs, evaluation
included, after one epoch that captures and compiles.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from adamo_lab.engines import Setup, Views
from adamo_lab.optimizers import settings
from adamo_lab.records import RunConfig
from adamo_lab.side_by_side import Wave
from adamo_lab.tasks import cifar100


def random_images(part: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    count = {"train": 50_000, "test": 10_000}[part]
    images = torch.randint(256, (count, 32, 32, 3), dtype=torch.uint8, device=device)
    return images, torch.arange(count, device=device) % 100


def measure(names: list[str], runs: int, compile: bool, epochs: int) -> dict[str, object]:
    """Seconds of each epoch for ``runs`` runs, the optimizers in turn."""
    chosen = [names[i % len(names)] for i in range(runs)]
    configs = [
        RunConfig("cifar100", name, 0, 300, settings("cifar100", name), {"every": 3})
        for name in chosen
    ]
    with TemporaryDirectory() as folder:
        setup = Setup(Path(folder), device="cuda", workers=runs, compile=compile)
        wave = Wave(configs, setup, Views(), torch.device("cuda"))
        start = time.perf_counter()
        wave.runs = [wave.prepare(config) for config in configs]
        prepared = time.perf_counter() - start
        seconds = []
        for _ in range(epochs + 1):
            start = time.perf_counter()
            wave.epoch()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    mean = sum(seconds[1:]) / epochs
    return {
        "optimizers": chosen,
        "compiled": compile,
        "prepare_seconds": round(prepared, 2),
        "first_epoch_seconds": round(seconds[0], 2),
        "epoch_seconds": [round(s, 3) for s in seconds[1:]],
        "images_per_second": round(runs * 49_920 / mean),
        "failed": [outcome.error for outcome in wave.outcomes],
        "memory_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "adamo"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench-output"))
    arguments = parser.parse_args()
    cifar100.made_images = random_images
    cifar100.data.cifar100 = lambda part, folder, device: random_images(part, device)
    torch.backends.cudnn.deterministic = True
    results = []
    for runs in arguments.runs:
        result = measure(arguments.optimizers, runs, not arguments.no_compile, arguments.epochs)
        results.append({"runs": runs, **result})
        print(json.dumps(results[-1]), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    text = json.dumps({"about": about, "results": results}, indent=1)
    (arguments.out / "side-by-side.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
