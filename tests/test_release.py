"""A release's tag is the version that the files state."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def check_tag() -> Any:
    spec = importlib.util.spec_from_file_location("check_tag", ROOT / "scripts" / "check_tag.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(check_tag: Any, tmp_path: Path) -> Path:
    """The files of a release of 1.2.3."""
    for name in check_tag.STATED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text().replace(check_tag.stated(ROOT)[name], "1.2.3")
        (tmp_path / name).write_text(text)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2026-11-18\n")
    return tmp_path


def test_the_files_state_one_version(check_tag: Any) -> None:
    assert len({*check_tag.stated(ROOT).values()}) == 1
    assert "none" not in check_tag.stated(ROOT).values()


def test_a_tag(check_tag: Any, tree: Path) -> None:
    assert check_tag.problems("v1.2.3", tree) == []
    assert len(check_tag.problems("v1.2.4", tree)) == 4
    shutil.copy(ROOT / "CITATION.cff", tree)
    (said,) = check_tag.problems("v1.2.3", tree)
    assert said.startswith("CITATION.cff states version ")


def test_a_release_without_a_date(check_tag: Any, tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("## [1.2.3] - unreleased\n")
    assert [said[:12] for said in check_tag.problems("v1.2.3", tree)] == ["CHANGELOG.md"]
