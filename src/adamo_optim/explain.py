"""The table that says which rule every parameter follows, why, and what computes its step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One parameter in the explanation."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str
    backend: str
    note: str = ""  # why it is not a faster backend


class Explanation(list[Parameter]):
    """The rule and backend of every parameter; prints as a table."""

    def __str__(self) -> str:
        header = ("parameter", "shape", "rule", "backend", "why")
        cells = [
            (
                p.name,
                "×".join(map(str, p.shape)),
                p.rule,
                f"{p.backend} ({p.note})" if p.note else p.backend,
                p.reason,
            )
            for p in self
        ]
        widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in [header, tuple("-" * width for width in widths), *cells]
        ]
        return "\n".join(lines)
