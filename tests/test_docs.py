"""The documentation tells the truth: its code runs, its pictures draw, its tables are the records'.

The ```python blocks of a page run in order, in one namespace. What a block needs and a reader does
not want to see stands before it in a comment, ``<!-- prelude … -->``. A block that cannot run here
says why in its first line: ```python no-run: the reason.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("matplotlib", reason="the pictures need the extra [lab]")

import lab_fixtures as made
from adamo_lab.records import Record
from adamo_lab.studies import STUDIES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))]
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


def test_tables_are_up_to_date(make: Any) -> None:
    tables = make("tables")
    assert tables.PAGES == PAGES
    for page in PAGES:
        text = page.read_text()
        assert tables.filled(text) == text, f"{page.name}: make docs-figures mends it"


def accuracy(optimizer: str, seed: int, value: float, **hyper: Any) -> Record:
    """A full run of CIFAR-100 with a made result."""
    study = next(c for c in STUDIES["table1"].configs((seed,)) if c.optimizer == optimizer)
    config = replace(study, hyper={**study.hyper, **hyper})
    found = {"swa_test_accuracy": value, "test_accuracy": value}
    return made.record(config, rows=1, result=found, study="table1")


@pytest.fixture
def made_up(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """docs/tables.py with records of its own in place of results/."""
    tables = make("tables")
    monkeypatch.setattr(tables, "ROOT", tmp_path)

    def put(*records: Record) -> Any:
        made.put(tmp_path / "results", *records)
        return tables

    return put


def cells(table: str) -> list[list[str]]:
    rows = [row for row in table.splitlines() if row.startswith("|")][2:]
    return [row.replace("\N{NO-BREAK SPACE}", " ").strip("| ").split(" | ") for row in rows]


def test_a_row_of_a_table_is_one_setting(made_up: Any) -> None:
    tables = made_up(
        *(accuracy("adamo_paper", seed, 0.7 + 0.01 * seed) for seed in (0, 1)),
        accuracy("adamo_paper", 0, 0.5, weight_decay=0.5),
        accuracy("adamo_paper", 0, 0.6, guard=True),
    )
    rows = {(row[1], row[2], row[-1]) for row in cells(tables.TABLES["table1"]())}
    usual = "lr 0.0008, weight_decay {}, radial_lr 0.005, curvature_target 1.0, {}, guard {}"
    late = "late (delta 0.1, wd_ratio 0.5)"
    assert rows == {
        (usual.format(0.0002, late, False), "70.50 ± 0.71", "2"),
        (usual.format(0.5, late, False), "50.00", "1"),
        (usual.format(0.0002, late, True), "60.00", "1"),
    }


def test_the_papers_value_stands_beside_ours(made_up: Any) -> None:
    found = [accuracy("adamw", 0, 0.7), accuracy("adamw", 0, 0.7, weight_decay=0.5)]
    rows = cells(made_up(*found).TABLES["table1"]())
    assert [row[0] for row in rows] == ["AdamW", "AdamW, tuned"]
    assert [row[2:4] for row in rows] == [["70.00", "74.75 ± 0.15"], ["70.00", "–"]]


def test_settings_name_what_is_not_the_default(made_up: Any) -> None:
    changed = {"radial_lr_ratio": 1.0, "curvature_target": "auto", "decay_lr": "radial"}
    found = (accuracy("adamo_no_dimension", 0, 0.7, **changed), accuracy("adamo_paper", 0, 0.6))
    rows = cells(made_up(*found).TABLES["table1"]())
    assert [row[1] for row in rows] == [
        "lr 0.0008, weight_decay 0.0002, radial_lr 0.005, radial_lr_ratio 1.0, low_dim None, "
        "late (delta 0.1, wd_ratio 0.5)",
        "lr 0.0008, weight_decay 0.0002, radial_lr 0.005, curvature_target 1.0, "
        "late (delta 0.1, wd_ratio 0.5)",
    ]


def test_runs_of_different_length_have_tables_of_their_own(made_up: Any) -> None:
    long, short = accuracy("adamw", 0, 0.7), accuracy("adamw", 1, 0.5)
    short = replace(short, config=replace(short.config, epochs=30, scale=0.1))
    _, first, second = made_up(long, short).TABLES["table1"]().split("\n**")
    assert first.startswith("300 epochs**")
    assert second.startswith("30 epochs, shortened**")
    assert [cells(part)[0][2] for part in (first, second)] == ["70.00", "50.00"]


def test_a_verdict_stands_beside_adamw(made_up: Any) -> None:
    """Welch's p, corrected, and the share of AdamW's steps after which its last loss is reached."""
    name, found = "evidence-small-gpt-verdict", []
    ends = {"adamw": (1.50, 1.52), "angular": (1.42, 1.44), "muon": (1.60, 1.62)}
    for optimizer, losses in ends.items():
        for seed, loss in zip((3, 4), losses, strict=True):
            configs = STUDIES[name].configs((seed,))
            config = next(c for c in configs if c.optimizer == optimizer)
            rows = [{"epoch": 25, "valid_loss": 1.6}, {"epoch": 50, "valid_loss": loss}]
            result = {"valid_loss": loss}
            found.append(made.record(config, result=result, metrics=rows, study=name))
    table = cells(made_up(*found).TABLES[name]())
    assert [row[2:] for row in table] == [
        ["1.5100 ± 0.0141", "", "", "100", "2"],
        ["1.4300 ± 0.0141", "0.03", "0.03", "76", "2"],
        ["1.6100 ± 0.0141", "0.02", "0.03", "–", "2"],
    ]


def test_the_line_below_a_table_says_what_ran_it(made_up: Any) -> None:
    first, second = accuracy("adamw", 0, 0.7), accuracy("adamw", 1, 0.7)
    first.environment |= {"device": "a GPU", "commit": "1234567"}
    second.environment |= {"device": "a GPU", "commit": "abcdef0"}
    table = made_up(first, second).TABLES["table1"]()
    assert table.splitlines()[-1] == "Hardware: a GPU. Commits: 1234567, abcdef0."
    other = accuracy("adamo_paper", 0, 0.7)
    other.environment |= {"device": "a CPU", "commit": "abcdef0"}
    table = made_up(other).TABLES["table1"]()
    assert [row[-1] for row in cells(table)] == ["a GPU", "a CPU"]
    assert table.splitlines()[-1] == "Commits: 1234567, abcdef0."


def test_a_row_of_the_picture_is_one_setting(made_up: Any, make: Any, tmp_path: Path) -> None:
    runs = (accuracy("adamo_paper", s, 0.7, weight_decay=w) for s in (0, 1) for w in (0, 1))
    made_up(*runs)
    pictures = make("pictures")
    (group,) = pictures.settled("table1")
    labels = [x.label for x in group.lines]
    assert labels == ["AdamO (paper), weight_decay 0", "AdamO (paper), weight_decay 1"]
    assert [pictures.accuracies(x) for x in group.lines] == [[70.0, 70.0]] * 2


def test_claims_come_from_the_records(made_up: Any) -> None:
    tables = made_up(
        *(accuracy("adamw", seed, 0.70 + 0.001 * seed) for seed in range(3)),
        *(accuracy("adamo_paper", seed, 0.75 + 0.001 * seed) for seed in range(3)),
        *(accuracy("adamp", seed, 0.60 + 0.001 * seed) for seed in range(3)),
    )
    rows = {row[0]: row for row in cells(tables.claims()) if len(row) == 4}
    assert rows["AdamO is more accurate than AdamW."][1:3] == ["Table 1", "**holds**"]
    numbers = rows["AdamO is more accurate than AdamW."][3].replace("\xa0", " ")
    assert numbers.startswith(
        "SWA: AdamO (paper) 75.10 ± 0.10 %, AdamW 70.10 ± 0.10 %. Significant"
    )
    assert "p < 0.0001; n = 3 and 3" in numbers
    assert rows["AdamP is slightly more accurate than AdamW."][2] == "**does not hold**"
    assert rows["Without projection AdamO is less accurate."][2] == "**open**"
    assert not any(row[1].startswith("ours") for row in rows.values())
    assert cells(tables.own_claims()) == []  # no runs of these
    held = sum(row[2] == "**holds**" for row in rows.values())
    assert tables.counts().startswith(f"Of the paper's {len(rows)} claims, {held} hold")


def test_the_best_of_the_trials(made_up: Any) -> None:
    trials = made.study_records("tuning-grokking", seeds=(0,), rows=5)
    for run in trials:
        run.result["grokking_epoch"] = None
    for run, epoch in zip(
        [r for r in trials if r.config.optimizer == "adamp"], (700, 500), strict=False
    ):
        run.result["grokking_epoch"] = epoch
    trials[0].result["grokking_epoch"] = 900
    rows = cells(made_up(*trials).TABLES["tuning"]())
    assert [row[1:5] for row in rows] == [
        ["AdamW", "19", "grokking epoch", "900"],
        ["AdamP", "19", "grokking epoch", "500"],
    ]
    assert rows[1][5] == "lr 0.001, weight_decay 0.5"


def test_report_in_the_site(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made when something has changed, and only then."""
    hooks = make("hooks")
    made.put(tmp_path / "results", accuracy("adamw", 0, 0.7))
    written = []

    def write(results: Path, out: Path) -> None:
        written.append(results)
        out.mkdir(parents=True)
        (out / "index.html").write_text("page")

    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    monkeypatch.setattr(hooks, "write_report", write)
    for _ in range(2):
        assert hooks.report(tmp_path / "out").read_text() == "page"
    assert len(written) == 1
    made.put(tmp_path / "results", accuracy("adamw", 1, 0.7))
    hooks.report(tmp_path / "out")
    assert len(written) == 2
    page = SimpleNamespace(file=SimpleNamespace(src_uri="claims.md"))
    assert hooks.on_page_markdown("[a](../results)", page) == "[a](report/index.html)"


def test_links_to_files_of_the_repository() -> None:
    for page in LINKED:
        text = page.read_text()
        assert "#L" not in text, f"{page.name}: lines move; link to the file and name the function"
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_links_that_show_a_name_lead_to_the_file_that_has_it() -> None:
    """[`of_turns`](../src/adamo_optim/diagnostics.py) is a function of that file."""
    link = re.compile(r"\[`(\w+)`\]\(((?:\.\./)?(?:src|tests|docs|scripts)/[\w/]+\.py)\)")
    for page in LINKED:
        for name, target in link.findall(page.read_text()):
            code = (page.parent / target).read_text()
            defined = rf"^\s*(?:def|class) {name}\b|^{name}\b.*="
            assert re.search(defined, code, re.M), f"{page.name}: {target} has no {name}"


def test_contributing_knows_every_file() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for package in ("adamo_optim", "adamo_lab"):
        for path in (ROOT / "src" / package).iterdir():
            if path.name.startswith("_") or path.suffix not in ("", ".py"):
                continue
            is_room = path.is_dir() and (path / "__init__.py").exists()
            if is_room or path.suffix == ".py":
                assert f"`{path.name}{'/' * is_room}`" in text, path


def test_formulas(make: Any) -> None:
    """Every equation of the pages is within what the build can turn into MathML."""
    formulas = make("formulas")
    for page in PAGES[1:]:
        for latex in re.findall(r"^\$\$\s*(.+?)\s*\$\$$", page.read_text(), re.M | re.S):
            tree = ElementTree.fromstring(formulas.block(latex))
            assert "\\" not in "".join(tree.itertext()), page.name


def test_site_pages_are_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {page.name for page in PAGES[1:]}
