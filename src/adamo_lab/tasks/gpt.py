"""A modern GPT on bytes: enwik8, or a text that every Python has.

RMSNorm before each part, or after it, QK-norm, rotary positions, ReLU², untied. The bytes lie on
the device, and windows are cut out of them there.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import data
from ..errors import require
from ..records import Row
from .base import best
from .language import Language, made_text
from .transformer import Layer, initialize, norm, rotary

BYTES = 256
SPLIT = (0.9, 0.95)  # where validation and test begin
PARTS = ("valid", "test")  # what ``judge`` may be: trials leave the test text alone
EVALUATED = 1 << 20  # bytes of the text that judges at most
AT_ONCE = 1 << 15  # of them in one batch


class GPT(nn.Module):
    """Bytes [batch, context] → logits [batch, context, 256]."""

    def __init__(
        self, *, layers: int, heads: int, width: int, context: int, norms: str = "before"
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Layer(width, heads, norms == "after") for _ in range(layers))
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


class Text(Language):
    """A round is ``steps`` batches of random windows; ``warmup`` is a share of all rounds."""

    name = "gpt"
    final_factor = 0.0
    evaluations = 10

    def load(self) -> None:
        width, heads, context = (self.options[k] for k in ("width", "heads", "context"))
        fits = width % (2 * heads) == 0
        require(fits, f"width must be a multiple of 2 · heads, got {width} and {heads}")
        text = "made" if self.config.synthetic else self.options["text"]
        where = data.folder(self.data_dir) if text == "enwik8" else None
        train, *judged = read(text, where, self.device)
        self.measure = f"{self.options['judge']}_loss"
        judged_by = judged[PARTS.index(self.options["judge"])]
        self.cut(train, judged_by, EVALUATED // context, AT_ONCE // context)

    def model(self) -> nn.Module:
        sizes = {k: self.options[k] for k in ("layers", "heads", "width", "context")}
        return GPT(**sizes, norms=self.options["norms"])

    def metrics(self, loss: Tensor) -> dict[str, Tensor]:
        return {self.measure: loss}

    def result(self, rows: list[Row]) -> Row:
        return best(rows, self.measure)


@lru_cache(maxsize=2)
def read(text: str, where: Path | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Training, validation and test bytes on the device; all runs of a process share them."""
    if text == "enwik8":
        content = data.enwik8(where)
    elif text == "topics":
        content = topics()
    else:
        content = "".join(made_text([chr(i) for i in range(97, 123)])).encode()
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    first, second = (round(share * len(whole)) for share in SPLIT)
    return whole[:first], whole[first:second], whole[second:]


def topics() -> bytes:
    """The language reference that Python's ``help()`` shows: about 0.5 MB of English and code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


TASK = Text
