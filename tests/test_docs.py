"""The documentation tells the truth: its code runs, its pictures draw, its tables are the records'.

The ```python blocks of a page run in order, in one namespace. What a block needs and a reader does
not want to see stands before it in a comment, ``<!-- prelude … -->``. A block that cannot run here
says why in its first line: ```python no-run: the reason.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib", reason="the pictures need the extra [lab]")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:```python(?P<mark>[^\n]*)\n(?P<code>.*?)^```$|<!-- prelude\n(?P<prelude>.*?)^-->$)",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text()))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The programs beside the pages, as modules."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))

    def load(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return load


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what it writes stays there
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    text = page.read_text()
    for block in blocks(page):
        mark = (block["mark"] or "").strip()
        if mark:
            assert re.fullmatch(r"no-run: .+", mark), f"{page.name}: unknown mark {mark!r}"
            continue
        code = block["prelude"] if block["code"] is None else block["code"]
        line = text.count("\n", 0, block.start()) + 1
        exec(compile("\n" * line + code, str(page), "exec"), names)


def test_every_block_is_found() -> None:
    """A fence that the pattern above misses would never run."""
    for page in PAGES:
        fences = len(re.findall(r"^\s*```\s*python", page.read_text(), flags=re.MULTILINE))
        assert fences == sum(block["code"] is not None for block in blocks(page)), page.name


def test_pictures_draw(make: Any, tmp_path: Path) -> None:
    pictures = make("pictures")
    for name in pictures.PICTURES:
        assert b"<svg" in pictures.draw(name, tmp_path).read_bytes()
    committed = {path.stem for path in (ROOT / "docs" / "images").glob("*.svg")}
    assert committed == {*pictures.PICTURES}


def test_tables_and_line_numbers_are_up_to_date(make: Any) -> None:
    tables = make("tables")
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text()
        assert tables.filled(text) == text, f"{page.name}: make docs-figures mends it"


def test_links_to_files_of_the_repository() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_formulas(make: Any) -> None:
    """Every equation of the pages is within what the build can draw, as one outline."""
    formulas = make("formulas")
    for page in PAGES[1:]:
        for latex in re.findall(r"^\$\$\s*(.+?)\s*\$\$$", page.read_text(), re.M | re.S):
            drawn = formulas.block(latex)
            assert drawn.count("<svg") == drawn.count('<path d="M'), page.name


def test_site_pages_are_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {page.name for page in PAGES[1:]}
