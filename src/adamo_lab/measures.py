"""Numbers about a model in training, and the form in which a record keeps them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .records import Row


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Between two tensors, in radians; by the chord, since the cosine of a small angle is 1."""
    whole = (z.detach() if z.is_complex() else z.detach().float() for z in (a, b))
    x, y = (z / z.norm() for z in whole)
    return 2 * ((x - y).norm() / 2).clamp(max=1).asin()


def spread(total: float, squares: float, steps: int) -> Row:
    """Mean and standard deviation of the gradient's norm over the steps of an epoch."""
    mean = total / max(steps, 1)
    variance = max(squares / max(steps, 1) - mean * mean, 0.0)
    return {"gradient_norm": mean, "gradient_norm_sd": math.sqrt(variance)}


def rounded(value: Any) -> Any:
    """Plain numbers with five digits, at any depth; None where they are not finite."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    number = float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None


def append(dynamics: list[Row], epoch: int, seen: Mapping[str, Row]) -> None:
    """One more entry in the columns of every weight; none where nothing was said of it."""
    if not dynamics:
        dynamics += [{"weight": name, "epoch": []} for name in seen]
    for row in dynamics:
        before = len(row["epoch"])
        row["epoch"].append(epoch)
        for key in {**row, **seen[row["weight"]]}.keys() - {"weight", "epoch"}:
            row.setdefault(key, [None] * before).append(seen[row["weight"]].get(key))


def digest_of(model: nn.Module) -> str:
    """A fingerprint of all weights and buffers: equal exactly when two runs ended alike."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()
