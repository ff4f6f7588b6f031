"""``adamo-lab bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NETWORKS = "resnet18 (the default), gpt-124m, gpt-350m, gpt-1.3b, 200-small."
PEER = "adamp, pytorch_optimizer, schedulefree (these three are the default), heavyball, torchao."


def bench(
    networks: Annotated[list[str], typer.Argument(help=NETWORKS)] = [],  # noqa: B006
    train: Annotated[bool, typer.Option("--train", help="Whole training steps instead.")] = False,
    peer: Annotated[list[str], typer.Option(help=PEER)] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if any.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Of every optimizer in a pass.")] = 3,
    passes: Annotated[int, typer.Option(min=1, help="Over all networks.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = Path("bench-output"),
) -> None:
    """Time both optimizers beside AdamW and others on this machine: a table, JSON and a picture.

    Example: adamo-lab bench resnet18 200-small --peer schedulefree
    """
    from .measure import measure

    measure(networks, train, peer, device, rounds, passes, out)
