"""The picture of a benchmark's record."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, THEIRS = "#0072B2", "#999999"  # Okabe and Ito's blue, for ours, and grey
LONGEST = 5.0  # longer bars are cut off; their numbers stand beside them


def draw(path: Path) -> Path:
    """One panel per network, in multiples of AdamW fused."""
    record = json.loads(path.read_text())
    networks, about = record["networks"], record["about"]
    size = (1.2 + 3.6 * len(networks), 4.4)
    figure, axes = plt.subplots(1, len(networks), figsize=size, squeeze=False)
    shown = "time of one step"
    for axis, (network, found) in zip(axes[0], networks.items(), strict=True):
        ratios = {}
        for name, row in reversed(found["optimizers"].items()):
            ratios[name] = row.get("device_ratio", row["ratio"])
            shown = "time the GPU is busy with one step" if "device_ratio" in row else shown
        colors = [OURS if name.startswith(("AdamO", "Angular")) else THEIRS for name in ratios]
        bars = axis.barh([*ratios], [min(r, LONGEST) for r in ratios.values()], color=colors)
        labels = [f"{r:.2f}×" if r < LONGEST else f"▸ {r:.0f}×" for r in ratios.values()]
        axis.bar_label(bars, labels, padding=2, fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlim(0, 1.25 * min(max(ratios.values()), LONGEST))
        axis.set_title(f"{network}, {found['parameters'] / 1e6:,.0f} M parameters", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    versions = f"{about['device']}, torch {about['torch']}, commit {about['commit']}"
    figure.supxlabel(f"{shown} / torch.optim.AdamW(fused=True)   —   {versions}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=150)
    plt.close(figure)
    return path.with_suffix(".png")
