"""Docstrings are written in reStructuredText's few roles; the site's API page reads Markdown."""

from __future__ import annotations

import re
from typing import Any

import formulas
import griffe


class Roles(griffe.Extension):
    """:func:`…` becomes code, :math:`…` and ``.. math::`` become MathML, doctest options go."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    directive = re.compile(r"^\.\. math::[ \t]*(.*(?:\n+[ \t]+\S.*)*)", re.MULTILINE)
    text = directive.sub(lambda found: formulas.block(found[1]), text)
    text = re.sub(r":math:`([^`]+)`", lambda found: formulas.inline(found[1]), text)
    text = re.sub(r":(?:func|class|meth|mod):`[~.]?([^`]+)`", r"`\1`", text)
    text = text.replace("\\|", "|")
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # the section griffe knows
    return re.sub(r" +# doctest: .*$", "", text, flags=re.MULTILINE)
