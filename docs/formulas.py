"""LaTeX to SVG when the site is built: equations need no script and no network in the browser."""

from __future__ import annotations

import re

import matplotlib
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextToPath

EM = TextToPath.FONT_SCALE  # of the SVG's own coordinates
MARGIN = 4.0
LETTERS = {
    Path.MOVETO: "M",
    Path.LINETO: "L",
    Path.CURVE3: "Q",
    Path.CURVE4: "C",
    Path.CLOSEPOLY: "Z",
}
# what docstrings write and mathtext does not know
SPELLING = {r"\tfrac": r"\frac", r"\text{": r"\mathrm{", r"_{target}": r"_{\mathrm{target}}"}


def svg(latex: str, block: bool = False) -> str:
    """One formula as an SVG in the colour of the text around it, for HTML."""
    latex = " ".join(latex.split())
    source = latex
    for theirs, ours in SPELLING.items():
        source = source.replace(theirs, ours)
    if block:
        source = source.replace(r"\frac", r"\dfrac")
    with matplotlib.rc_context({"mathtext.fontset": "stix"}):
        text = TextToPath().get_text_path(FontProperties(), f"${source}$", ismath=True)
    outline = Path(text[0], text[1])
    box = outline.get_extents().padded(MARGIN)
    look = f"width:{box.width / EM:.3f}em;height:{box.height / EM:.3f}em"
    if not block:
        look += f";vertical-align:{box.y0 / EM:.3f}em"
    return (
        f'<svg class="{"formula" if block else "formula-inline"}" role="img" '
        f'viewBox="{box.x0:.0f} {-box.y1:.0f} {box.width:.0f} {box.height:.0f}" style="{look}" '
        f'aria-label="{escaped(latex)}"><path d="{drawn(outline)}"/></svg>'
    )


def block(latex: str) -> str:
    """Displayed lines, as LaTeX separates them, and broken at wide gaps: phones are narrow."""
    lines = re.split(r"\\\\|,?\s*\\qquad", latex.replace("&", ""))
    return '<div class="formulas">\n' + "\n".join(svg(x, block=True) for x in lines) + "\n</div>"


def drawn(path: Path) -> str:
    """The d of an SVG path; y points down there."""
    parts = []
    for points, code in path.iter_segments(simplify=False):
        letter = LETTERS[Path.code_type(code)]
        numbers = [f"{x:.1f} {-y:.1f}" for x, y in points.reshape(-1, 2)]
        parts.append(letter if letter == "Z" else letter + " ".join(numbers))
    return "".join(parts)


def escaped(text: str) -> str:
    """For an attribute inside Markdown: whatever either language could take for its own."""
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)
