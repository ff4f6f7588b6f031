"""Draw a benchmark's JSON: python -m adamo_lab.bench.plot results/bench/bench-cuda.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, THEIRS = "#0072B2", "#999999"  # Okabe and Ito's blue, for ours, and grey
LONGEST = 5.0  # longer bars are cut off; their numbers stand beside them


def draw(path: Path) -> Path:
    """One panel per network, in multiples of AdamW fused."""
    results = json.loads(path.read_text())
    networks = results["networks"]
    figure, axes = plt.subplots(
        1, len(networks), figsize=(1.2 + 3.6 * len(networks), 3.6), squeeze=False
    )
    for axis, (network, found) in zip(axes[0], networks.items(), strict=True):
        rows = found["optimizers"]
        names = list(rows)[::-1]
        ratios = [rows[name].get("device_ratio", rows[name]["ratio"]) for name in names]
        colors = [OURS if name.startswith(("AdamO", "AngularAdamW")) else THEIRS for name in names]
        bars = axis.barh(names, [min(r, LONGEST) for r in ratios], color=colors)
        labels = [f"{r:.2f}×" if r < LONGEST else f"▸ {r:.0f}×" for r in ratios]
        axis.bar_label(bars, labels, padding=2, fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlim(0, 1.25 * min(max(ratios), LONGEST))
        count = found["parameters"] / 1e6
        axis.set_title(f"{network}, {count:.{0 if count > 10 else 1}f} M parameters", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    about = results["about"]
    figure.supxlabel(
        f"{what_is_shown(networks)} / torch.optim.AdamW(fused=True)   —   {about['device']}, "
        f"torch {about['torch']}, commit {about['commit']}",
        fontsize=8,
    )
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target


def what_is_shown(networks: dict[str, Any]) -> str:
    on_gpu = any(
        "device_ratio" in row for n in networks.values() for row in n["optimizers"].values()
    )
    return "time the GPU is busy with one step" if on_gpu else "time of one step"


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
