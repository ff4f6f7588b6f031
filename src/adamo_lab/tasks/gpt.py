"""A modern GPT on bytes: enwik8, or a text that every Python has.

RMSNorm before each part, QK-norm, rotary positions, ReLU², untied. The bytes lie on the device, and
windows are cut out of them there.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import data
from ..errors import LabError
from ..records import Row
from .base import Batch, Phase, Task
from .language import made_text, windows
from .transformer import Layer, initialize, norm, rotary

BYTES = 256
SPLIT = (0.9, 0.95)  # where validation and test begin; nothing here reads the test text
EVALUATED = 1 << 20  # bytes of the validation text at most
AT_ONCE = 1 << 15  # of them in one batch


class GPT(nn.Module):
    """Bytes [batch, context] → logits [batch, context, 256]."""

    def __init__(self, *, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, BYTES, bias=False)
        self.turns: Tensor
        self.register_buffer("turns", rotary(context, width // heads), persistent=False)
        initialize(self.layers)
        for module in (self.token, self.head):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.head(norm(x))


class Text(Task):
    """A round is ``steps`` batches of random windows; ``warmup`` is a share of all rounds."""

    name = "gpt"
    moment = 0.5

    def load(self) -> None:
        width, heads, context = (self.options[k] for k in ("width", "heads", "context"))
        if width % (2 * heads):
            raise LabError(f"width must be a multiple of 2 · heads, got {width} and {heads}")
        where = data.folder(self.data_dir)
        text = "made" if self.config.synthetic else self.options["text"]
        self.train, valid = read(text, where if text == "enwik8" else None, self.device)
        if min(len(self.train), len(valid)) <= context:
            raise LabError(f"context {context} is longer than the text; choose a smaller one")
        self.valid = windows(valid, context)[: max(1, EVALUATED // context)]

    def model(self) -> nn.Module:
        return GPT(**{k: self.options[k] for k in ("layers", "heads", "width", "context")})

    def example(self) -> Any:
        return self.valid[:4, :16].long()

    def batches(self, epoch: int) -> list[Batch]:
        """Windows [steps, batch, context + 1] from anywhere in the text, as bytes."""
        steps, batch, context = (self.options[k] for k in ("steps", "batch", "context"))
        last = len(self.train) - context
        start = torch.randint(last, (steps, batch, 1), generator=self.generator(epoch))
        offsets = torch.arange(context + 1, device=self.device)
        return [(self.train[start.to(self.device) + offsets],)]

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Tensor:
        return self.cross_entropy(model, batch[0])

    def cross_entropy(self, model: nn.Module, text: Tensor, reduction: str = "mean") -> Tensor:
        text = text.long()
        with self.autocast():
            logits = model(text[:, :-1])
        target = text[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), target, reduction=reduction)

    def due(self, epoch: int, rows: list[Row]) -> bool:
        return epoch % (self.options["every"] or max(1, self.config.epochs // 10)) == 0

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        """In nats, on windows of the validation text side by side, each with its next byte."""
        total = torch.zeros((), device=self.device)
        for part in self.valid.split(max(1, AT_ONCE // self.options["context"])):
            total = total + self.cross_entropy(model, part, "sum")
        return {"valid_loss": total / self.valid[:, 1:].numel()}

    def result(self, rows: list[Row]) -> Row:
        losses = [row["valid_loss"] for row in rows if row["valid_loss"] is not None]
        return {"best_valid_loss": min(losses, default=None)}


@lru_cache(maxsize=2)
def read(text: str, where: Path | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Training and validation bytes on the device; all runs of a process share them."""
    if text == "enwik8":
        content = data.enwik8(where)
    elif text == "topics":
        content = topics()
    else:
        content = "".join(made_text([chr(i) for i in range(97, 123)])).encode()
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    first, second = (round(share * len(whole)) for share in SPLIT)
    return whole[:first], whole[first:second]


def topics() -> bytes:
    """The language reference that Python's ``help()`` shows: about 0.5 MB of English and code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


TASK = Text
