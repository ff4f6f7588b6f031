"""Every figure, drawn from records alone: no torch, no GPU, no display."""

from __future__ import annotations

from ..grids import Grid
from ..groups import Group
from . import curves, dynamics, maps
from .look import Drawing, style

__all__ = ["Drawing", "draw"]


def draw(group: Group, grids: list[Grid], seen: set[str]) -> tuple[list[Drawing], list[Drawing]]:
    """A group's figures: those to show at once, and layer by layer those of runs not yet seen."""
    with style():
        if group.study and group.study.kind == "trials":
            return curves.draw_rates(group), []
        main = [*maps.boundaries(group), *maps.landscapes(group)]
        main += maps.heat_maps(group, grids) if grids else curves.draw_rates(group)
        return [*main, *curves.draw(group)], dynamics.draw(group, seen)
