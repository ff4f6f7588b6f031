"""Step time, memory and training speed of our optimizers beside AdamW and others.

    adamo-lab bench resnet18 gpt-124m

Every contender is timed in turn with ``torch.optim.AdamW(fused=True)`` on the same parameters, and
the ratio of the two is what counts: absolute times on shared machines are worth little. All have
their rounds in several passes, so that slow seconds of the machine do not fall on one of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main(words: list[str] | None = None) -> None:
    """The command where Typer, which ``adamo-lab`` needs, is not installed."""
    from .measure import measure

    parser = argparse.ArgumentParser(description=__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--peer", action="append")
    parser.add_argument("--device")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--passes", type=int)
    parser.add_argument("--out", type=Path)
    measure(**vars(parser.parse_args(words)))
