"""Smaller SVG: what matplotlib writes, without what no eye can see."""

from __future__ import annotations

import re

DIGITS = 1  # of a point: a tenth is below a pixel
NUMBER = re.compile(r"-?\d+\.\d+")
PLACE = re.compile(r'(?<= x=")[^"]*|(?<= y=")[^"]*|(?<=translate\()[^)]*')


def slim(svg: str) -> str:
    """The same picture with shorter numbers and names, and without metadata, comments, blanks."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r">\s+<", "><", svg)
    svg = re.sub(r'(?<= d=")[^"]*', path, svg)
    svg = PLACE.sub(lambda found: rounded(found[0]), svg)
    svg = re.sub(r'(?<= style=")[^"]*', lambda found: re.sub(r"([:;,]) ", r"\1", found[0]), svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    before = ""
    while svg != before:  # a group of one thing, with nothing to say about it, is that thing
        before, svg = svg, re.sub(r"<g>(<(?:path|use|image) [^<>]*/>)?</g>", r"\1", svg)
    return short_names(svg)


def path(found: re.Match[str]) -> str:
    text = rounded(" ".join(found[0].split()))
    return re.sub(r" ?([A-Za-z]) ?", r"\1", text)


def rounded(text: str) -> str:
    return NUMBER.sub(lambda found: short(float(found[0])), text)


def short(value: float) -> str:
    text = f"{value:.{DIGITS}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def short_names(svg: str) -> str:
    """Letters and markers are defined once and used often: i0, i1, … in place of their names."""
    names = dict.fromkeys(re.findall(r' id="([^"]+)"', svg))
    short = {name: f"i{number:x}" for number, name in enumerate(names)}
    svg = re.sub(r'(?<= id=")[^"]+', lambda found: short[found[0]], svg)
    return re.sub(r'(?<=href="#)[^"]+|(?<=url\(#)[^)]+', lambda found: short[found[0]], svg)
