"""Every figure, drawn from records alone: no torch, no GPU, no display."""

from __future__ import annotations

from ..grids import Grid
from ..groups import Group
from . import curves, dynamics, maps
from .look import Drawing, style

__all__ = ["Drawing", "draw"]


def draw(group: Group, grids: list[Grid], seen: set[str]) -> tuple[list[Drawing], list[Drawing]]:
    """A group's figures: those to show at once, and layer by layer those of runs not yet seen.

    Trials have none: what counts is the table of all of them.
    """
    if group.study and group.study.kind == "trials":
        return [], []
    with style():
        main = [*maps.boundaries(group), *maps.landscapes(group), *maps.heat_maps(group, grids)]
        return [*main, *curves.draw(group)], dynamics.draw(group, seen)
