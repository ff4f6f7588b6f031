"""Every figure, drawn from records alone: no torch, no GPU, no display."""

from __future__ import annotations

from ..runs import Group
from . import curves, maps
from .look import Drawing, style

__all__ = ["Drawing", "draw"]


def draw(group: Group) -> list[Drawing]:
    kind = group.study.kind if group.study else ""
    if kind == "numbers":
        return []
    with style():
        if kind == "trials":
            return curves.draw_rates(group)
        planes = [*maps.boundaries(group), *maps.landscapes(group)]
        tuning = maps.heat_maps(group) or curves.draw_rates(group)
        return [*planes, *tuning, *curves.draw(group)]
