"""LaTeX to MathML when the site is built: browsers draw it, without script or network."""

from __future__ import annotations

import re

from latex2mathml.converter import convert


def inline(latex: str) -> str:
    return convert(" ".join(latex.split()))


def block(latex: str) -> str:
    """Displayed lines, as LaTeX separates them, and broken at wide gaps: phones are narrow."""
    lines = re.split(r"\\\\|,?\s*\\qquad", " ".join(latex.replace("&", "").split()))
    return f'<div class="formulas">{"".join(convert(x, display="block") for x in lines)}</div>'
