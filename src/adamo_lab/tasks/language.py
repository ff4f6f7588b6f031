"""A small GPT on Tiny Shakespeare (characters) or WikiText-2 (words)."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import data
from ..errors import require
from ..records import Row
from .base import Batch, Phase, Task, best

TRAIN_SHARE = 0.9  # of the characters; WikiText-2 brings its own split
# Validation windows at most, whatever the batch: at the usual context all of Tiny Shakespeare's
# 1,742, and the first 60 % of WikiText-2's 3,400.
EVALUATED = 2048
AT_ONCE = 32  # windows in one batch of the evaluation


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width]
        x = x + self.dropped(self.out(self.attention(self.norm1(x))))
        return x + self.dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def attention(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # [batch, heads, context, width / heads]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return y.transpose(1, 2).reshape(batch, context, width)

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Pre-norm, learned positions; a tied head reads the embedding of the tokens."""

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int,
        heads: int,
        width: int,
        context: int,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(initialize)
        for layer in self.layers.children():
            assert isinstance(layer, Layer)
            for projection in (layer.out, layer.down):  # 2 · layers of them add up
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * layers))
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, context] → [batch, context, vocabulary]
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        return self.head(self.norm(self.layers(x)))


def initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Corpus(NamedTuple):
    """Two texts as numbers, on a device."""

    vocabulary: tuple[str, ...]
    train: Tensor  # [tokens] int64
    valid: Tensor


class Language(Task):
    """A round is ``steps`` batches of random windows; ``warmup`` is a share of all rounds.

    The sizes suit one CPU core with characters. Words have 33,278 classes: take a GPU.
    """

    name = "language"
    moment = 0.5
    final_factor = 0.1

    def load(self) -> None:
        width, heads = self.options["width"], self.options["heads"]
        require(width % heads == 0, f"width must be a multiple of heads, got {width} and {heads}")
        where = None if self.config.synthetic else data.folder(self.data_dir)
        self.words = self.options["corpus"] == "wikitext2"
        self.corpus = read(self.options["corpus"], where, self.device)
        self.cut(self.corpus.train, self.corpus.valid, EVALUATED, AT_ONCE)

    def cut(self, train: Tensor, valid: Tensor, evaluated: int, at_once: int) -> None:
        """Take these texts: so many windows to judge by, so many of them in one batch."""
        context = self.options["context"]
        fits = min(len(train), len(valid)) > context
        require(fits, f"context {context} is longer than the text; choose a smaller one")
        self.train, self.at_once = train, max(1, at_once)
        self.valid = windows(valid, context)[: max(1, evaluated)]

    def model(self) -> nn.Module:
        sizes = {k: self.options[k] for k in ("layers", "heads", "width", "context", "dropout")}
        return GPT(len(self.corpus.vocabulary), tied=self.words, **sizes)

    def example(self) -> Any:
        return self.valid[:4, :16].long()

    def batches(self, epoch: int) -> list[Batch]:
        """Windows [steps, batch, context + 1] from anywhere in the text."""
        steps, batch, context = (self.options[k] for k in ("steps", "batch", "context"))
        last = len(self.train) - context
        start = torch.randint(last, (steps, batch, 1), generator=self.generator(epoch))
        offsets = torch.arange(context + 1, device=self.device)
        return [(self.train[start.to(self.device) + offsets],)]

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Tensor:
        return self.cross_entropy(model, batch[0])

    def cross_entropy(self, model: nn.Module, text: Tensor, reduction: str = "mean") -> Tensor:
        """Of every token of the windows but the first, in nats."""
        text = text.long()
        with self.autocast():
            logits = model(text[:, :-1])
        target = text[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), target, reduction=reduction)

    def evaluate(self, model: nn.Module) -> dict[str, Tensor]:
        """On windows of the validation text side by side, each with its next token."""
        total = torch.zeros((), device=self.device)
        for part in self.valid.split(self.at_once):
            total = total + self.cross_entropy(model, part, "sum")
        return self.metrics(total / self.valid[:, 1:].numel())

    def metrics(self, loss: Tensor) -> dict[str, Tensor]:
        found = {"valid_loss": loss, "valid_perplexity": loss.exp()}
        return found if self.words else {**found, "valid_bits": loss / math.log(2)}

    def result(self, rows: list[Row]) -> Row:
        return best(rows, "valid_loss")


def windows(tokens: Tensor, context: int) -> Tensor:
    """[count, context + 1]: windows that share one token, the last of one and first of the next."""
    return tokens.unfold(0, context + 1, context)


# --- texts


@lru_cache(maxsize=4)
def read(corpus: str, where: Path | None, device: torch.device) -> Corpus:
    """A corpus from a folder, or a made one; all runs of a process share it."""
    train, valid = CORPORA[corpus](where)
    vocabulary = tuple(sorted(set(train)))
    unknown = sorted(set(valid) - set(vocabulary))[:1]
    require(
        not unknown,
        f"{', '.join(map(repr, unknown))} of the validation text is not in the training text",
    )
    if where and corpus == "wikitext2":
        known = f"the training text in {where} has {len(vocabulary)} different tokens, WikiText-2 "
        fine = len(vocabulary) == data.VOCABULARY
        require(fine, f"{known}has {data.VOCABULARY}; put a new copy there")
    numbers = {token: i for i, token in enumerate(vocabulary)}
    texts = (torch.tensor([numbers[token] for token in text]) for text in (train, valid))
    return Corpus(vocabulary, *(text.to(device) for text in texts))


def shakespeare(where: Path | None) -> tuple[list[str], list[str]]:
    return divided(list(data.shakespeare(where)) if where else made_text(list(ascii_lowercase)))


def wikitext2(where: Path | None) -> tuple[list[str], list[str]]:
    if where:
        return data.wikitext2("train", where), data.wikitext2("valid", where)
    return divided(made_text([f"w{i}" for i in range(200)]))


def divided(text: list[str]) -> tuple[list[str], list[str]]:
    cut = round(TRAIN_SHARE * len(text))
    return text[:cut], text[cut:]


CORPORA = {"shakespeare": shakespeare, "wikitext2": wikitext2}


def made_text(symbols: list[str], length: int = 40_000, choices: int = 4) -> list[str]:
    """A Markov chain: every symbol has a few that can follow it, with falling probabilities."""
    generator = np.random.default_rng(0)
    following = generator.integers(len(symbols), size=(len(symbols), choices)).tolist()
    picks = np.minimum(generator.geometric(0.5, length) - 1, choices - 1).tolist()
    state, text = 0, []
    for i, pick in enumerate(picks):
        # A jump now and then, so that every symbol occurs
        state = i // 16 % len(symbols) if i % 16 == 0 else following[state][pick]
        text.append(symbols[state])
    return text


TASK = Language
