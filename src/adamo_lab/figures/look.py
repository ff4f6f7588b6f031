"""One look for all figures: sizes that stay legible on a phone, and the banner in the picture."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ..runs import Group, slug

WIDTH = 4.8  # inches
TEXT = 12.5  # points: on a phone, 340 pixels across, letters of 12 pixels
LINE = 0.25  # inches, of a legend
DPI = 200
INK, FAINT = "#1c1c1c", "#d9d9d9"

RC: Any = {  # matplotlib.rcParams, whose stub has a type for its keys
    "axes.edgecolor": "#6b6b6b",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # else its place is worked out anew from all tick labels
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "font.size": TEXT,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "text.color": INK,
    "xtick.color": "#4a4a4a",
    "ytick.color": "#4a4a4a",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.fonttype": "none",  # letters stay letters: half of the bytes, and they can be searched
    "svg.hashsalt": "adamo-lab",  # the same file from the same records
}


@dataclass(frozen=True)
class Drawing:
    """A finished figure."""

    name: str
    caption: str
    alt: str
    svg: bytes
    size: tuple[int, int]  # CSS pixels


@contextlib.contextmanager
def style() -> Iterator[None]:
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        # a metric or a layer may have a name in letters that the font lacks
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def canvas(
    rows: int = 1, columns: int = 1, *, width: float = WIDTH, height: float = 3.3, **share: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with its panels, row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    return figure, list(axes.flat)


def finish(figure: Figure, group: Group, what: str, caption: str, alt: str) -> Drawing:
    """Put the banner into the picture and save it."""
    if group.banners:
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#ffe8b3", "edgecolor": "#c98a00"}
        look: Any = {"fontsize": TEXT, "fontweight": "bold", "color": "#5c3a00", "bbox": box}
        figure.suptitle("  ·  ".join(group.banners), **look)
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return Drawing(
        name=slug(f"{group.name}-{what}"),
        caption=caption,
        alt=". ".join([alt.rstrip("."), *group.banners]) + ".",
        svg=svg.getvalue(),
        size=(width, height),
    )


def legend_below(
    figure: Figure, handles: list[Artist], labels: list[str], columns: int = 2
) -> None:
    """A legend outside the data, wrapped for narrow screens."""
    place: Any = {"loc": "outside lower center", "ncols": legend_columns(labels, columns)}
    figure.legend(handles, [plain(label) for label in labels], **place)


def with_legend(height: float, labels: list[str]) -> float:
    """Of a figure whose panel is to stay as high, however long the legend."""
    return height + LINE * math.ceil(len(labels) / legend_columns(labels))


def legend_columns(labels: list[str], most: int = 2) -> int:
    fits = 46 // (max(map(len, labels)) + 5)  # characters in a line, with the lines' samples
    return max(1, min(most, fits, len(labels)))


def log_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """Numbers in plain letters: mathematics takes matplotlib longer than all the rest."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    low, high = sorted(axis.get_view_interval())
    if high < 1000 * low:  # powers of ten alone would be too few
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high > 30 * low else (1.0, 2.0, 5.0)))


def plain(text: str) -> str:
    """Text is text: no mathematics between dollars, no entry hidden by a leading underscore."""
    text = " ".join(str(text).split()).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"
