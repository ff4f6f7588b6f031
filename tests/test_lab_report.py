"""The report: verdicts, grouping, tables, figures, and the page in a real browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import lab_fixtures as made
from adamo_lab import claims, tables
from adamo_lab.errors import LabError
from adamo_lab.figures.curves import draw as draw_curves
from adamo_lab.figures.curves import draw_rates
from adamo_lab.figures.maps import landscapes
from adamo_lab.grids import grids
from adamo_lab.records import FAILED, SUFFIX, Record, RunConfig
from adamo_lab.report import Cover, without_paths, write_report
from adamo_lab.runs import Group, by_study, lightened
from adamo_lab.studies import STUDIES
from adamo_lab.tables import best_lines
from adamo_lab.tasks import TASKS
from adamo_lab.verdicts import HOLDS
from chromium import PROGRAM, Chromium

EVIL = "<script>alert(1)</script>"


# --- grouping


def grouped(*records: Record) -> dict[str, list[Group]]:
    return by_study(records)


def test_records_are_in_the_studies_of_their_files() -> None:
    runs = [*made.study_records("table1", seeds=(5, 17)), *made.study_records("fig3", seeds=(5,))]
    found = grouped(*runs)
    assert [*found] == ["table1", "fig3"]
    assert [g.name for g in found["table1"]] == ["table1"]
    (part,) = STUDIES["table1"].runs
    assert [line.name for line in found["table1"][0].lines] == [arm.name for arm in part.arms]
    assert all(line.seeds == [5, 17] for line in found["table1"][0].lines)


def test_rows_of_one_optimizer_have_names_of_their_own() -> None:
    (group,) = grouped(*made.study_records("table1", seeds=(0,)))["table1"]
    adamw = [line for line in group.lines if line.optimizer == "adamw"]
    assert [line.label for line in adamw] == ["AdamW", "AdamW, tuned", "AdamW, best trial"]
    assert len({line.colour for line in adamw}) == 3


def test_a_row_that_the_study_has_not_is_told_from_the_others() -> None:
    runs = made.study_records("table2", seeds=(0,))
    odd = replace(runs[1].config, hyper={**runs[1].config.hyper, "lr": 0.5})
    (group,) = grouped(*runs, made.record(odd, study="table2"))["table2"]
    labels = [line.label for line in group.lines if line.optimizer == "adamw"]
    assert labels == ["AdamW, lr 0.001", "AdamW, lr 0.5"]


def test_shortened_and_made_up_runs_stay_apart() -> None:
    found = grouped(
        *made.study_records("fig1", seeds=(0,)),
        *made.study_records("fig1", seeds=(0,), scale=0.1),
        *made.study_records("fig1", seeds=(0,), synthetic=True),
    )
    assert [g.banners for g in found["fig1"]] == [
        [],
        ["Shortened to 10 % of its length"],
        ["Made-up data, not the real data set"],
    ]
    assert {len(g.lines) for g in found["fig1"]} == {4}


def test_corpora_stay_apart() -> None:
    runs = made.study_records("language")
    assert [g.label for g in grouped(*runs)["language"]] == [
        "corpus: shakespeare",
        "corpus: wikitext2",
    ]
    one = [r for r in runs if r.config.options["corpus"] == "wikitext2"]
    assert [g.label for g in grouped(*one)["language"]] == ["corpus: wikitext2"]


def test_changed_options_get_a_table_of_their_own() -> None:
    usual = made.study_records("table2", seeds=(0,))
    default = TASKS["grokking"].defaults["width"]
    wide = made.study_records("table2", seeds=(0,), options={"width": 2 * default})
    found = grouped(*usual, *wide)["table2"]
    assert {g.label: g.usual for g in found} == {
        f"width: {default}": True,
        f"width: {2 * default}": False,
    }


def test_none_given_is_not_none() -> None:
    hyper = ({"lr": 1e-3}, {"lr": 1e-3, "low_dim": None})
    runs = [made.record(RunConfig("digits", "adamo", 0, 7, h)) for h in hyper]
    (group,) = grouped(*runs)[""]
    assert sorted(line.label for line in group.lines) == ["AdamO", "AdamO, low_dim none"]


def test_a_sweep_belongs_to_no_study() -> None:
    sweep = [
        made.record(RunConfig("digits", "adamw", seed, 7, {"lr": lr}), study="sweep-digits")
        for lr in (1e-3, 3e-3)
        for seed in (0, 1)
    ]
    ((name, (group,)),) = grouped(*sweep).items()
    assert name == "sweep-digits"
    assert [line.label for line in group.lines] == ["AdamW, lr 0.001", "AdamW, lr 0.003"]
    assert group.lines[0].colour != group.lines[1].colour
    assert lightened("#000000", 0.5) == "#808080"


def test_failed_runs_are_not_counted() -> None:
    good, bad = made.study_records("fig1", seeds=(0,))[:2]
    bad.status = FAILED
    assert [len(g.lines) for g in grouped(good, bad)["fig1"]] == [1]


# --- tables


def table_of(*records: Record, study: str) -> tuple[Group, dict[str, list[str]]]:
    (group, *_) = grouped(*records)[study]
    table = tables.table(group)
    return group, {row.label: [cell.text for cell in row.cells] for row in table.rows}


def accuracies(values: list[float], optimizer: str) -> list[Record]:
    runs = made.study_records("table1", seeds=tuple(range(len(values))))
    row = next(c.hyper for c in (r.config for r in runs) if c.optimizer == optimizer)
    chosen = [r for r in runs if (r.config.optimizer, r.config.hyper) == (optimizer, row)]
    for run, value in zip(chosen, values, strict=True):
        run.result["swa_test_accuracy"] = value
    return chosen


def test_beside_the_paper() -> None:
    runs = accuracies([0.74, 0.75, 0.76], "adamw") + accuracies([0.7, 0.7, 0.7], "adam")
    group, rows = table_of(*runs, study="table1")
    assert [*rows["AdamW"][:3], rows["AdamW"][-1]] == ["75.00 ± 1.00", "74.75 ± 0.15", "+0.25", "3"]
    assert rows["Adam"][:3] == ["70.00 ± 0.00", "74.48 ± 0.12", "−4.48"]
    best = [row.label for row in tables.table(group).rows if row.cells[0].best]
    assert best == ["AdamW"]


def test_one_run_has_no_deviation() -> None:
    _, rows = table_of(*accuracies([0.75], "adamw"), study="table1")
    assert rows["AdamW"][0] == "75.00"


def test_shortened_runs_are_not_subtracted_from_the_paper() -> None:
    (group,) = grouped(*made.study_records("table1", seeds=(0,), scale=0.1))["table1"]
    heads = tables.table(group).heads
    assert {"SWA (%), paper", "SWA (%), ours"} <= {*heads}
    assert "difference" not in heads


def test_not_all_runs_got_there() -> None:
    runs = made.study_records("table2", seeds=(0, 1, 2, 3, 4))
    epochs = {"adamw": [2500, None, 2600, None, 2700], "adamo": [900, 950, 1000, 1050, 1100]}
    for run in runs:
        values = epochs.get(run.config.optimizer, [None] * 5)
        run.result["grokking_epoch"] = values[run.config.seed]
    (group,) = grouped(*runs)["table2"]
    table = tables.table(group)
    at = table.heads.index("grokking epoch, ours")
    cells = {row.label: row.cells[at] for row in table.rows}
    assert (cells["AdamW"].text, cells["AdamW"].note) == ("2600 ± 100", "3 of 5")
    assert (cells["Adam"].text, cells["Adam"].note) == ("never", "0 of 5")
    assert cells["AdamO"].best
    claim = next(c for c in STUDIES["table2"].claims if c.first == "adamo")
    verdict = claims.decide(claim, group)
    assert (verdict.outcome, verdict.test) == (HOLDS, "rank test")
    assert "3 of 5 runs of AdamW got there" in claims.numbers(verdict, group).replace("\xa0", " ")


def test_numbers_of_a_verdict() -> None:
    runs = accuracies([0.80, 0.81, 0.82], "adamo_paper") + accuracies([0.74, 0.75, 0.76], "adamw")
    (group, *_) = grouped(*runs)["table1"]
    verdict = claims.decide(STUDIES["table1"].claims[0], group)
    assert claims.numbers(verdict, group).replace("\xa0", " ") == (
        "significant: +6.00 points (95 % CI +3.73 to +8.27); p = 0.00091; n = 3 and 3"
    )


def test_grid() -> None:
    runs = made.study_records("fig4", seeds=(0, 1))
    for run in runs:
        good = run.config.hyper["lr"] == 8e-4
        run.result["swa_valid_accuracy"] = 0.75 if good else 0.741 if run.config.seed else 0.735
    runs[0].result["swa_valid_accuracy"] = None  # so that this cell's other run, 0.741, is left
    (group,) = grouped(*runs)["fig4"]
    first, second = grids(group)
    found = first.finding.replace("\xa0", " ")
    assert found == "5 of 25 settings (20 %) within 1 point of its best"
    assert second.axes == ("lr", "radial_lr")
    assert [len(ticks) for ticks in second.ticks] == [5, 5]
    assert second.values[0][0] == pytest.approx(0.738)


def sweep_of(count: int) -> list[Record]:
    """Settings that are the better the later, by the final accuracy."""
    runs = []
    for i in range(count):
        config = RunConfig("digits", "adamw", 0, 7, {"lr": (1 + i) * 1e-3})
        result = {"test_accuracy": 0.5 + 0.01 * i, "best_test_accuracy": 0.99 - 0.01 * i}
        runs.append(made.record(config, result=result))
    return runs


def test_the_best_setting_is_that_with_the_best_final_accuracy() -> None:
    runs = sweep_of(12)
    (group,) = grouped(*runs)[""]
    assert tables.columns_of(group)[0].key == "test_accuracy"
    assert [m.key for m in tables.columns_of(group)][-1] == "best_test_accuracy"
    assert [line.hyper["lr"] for line in best_lines(group)] == [12e-3]
    assert "its best setting by test accuracy." in draw_curves(group)[0].caption
    runs[-1].result["test_accuracy"] = None
    assert [line.hyper["lr"] for line in best_lines(group)] == [11e-3]
    caption = draw_curves(group)[0].caption
    assert caption.endswith(
        "by test accuracy, of those in which all runs have one if there are any."
    )
    for run in runs:
        run.result["test_accuracy"] = None
    assert len(best_lines(group)) == 1


def test_an_optimizer_without_a_whole_setting_is_drawn_all_the_same() -> None:
    other = made.record(RunConfig("digits", "adamo", 0, 7, {"lr": 1e-3}))
    other.result["test_accuracy"] = None
    (group,) = grouped(*sweep_of(12), other)[""]
    assert {line.optimizer for line in best_lines(group)} == {"adamw", "adamo"}


def test_a_round_is_not_called_an_epoch() -> None:
    found = {}
    for study in ("language", "table2"):
        (group, *_) = grouped(*made.study_records(study, seeds=(0,), rows=3))[study]
        found[study] = draw_curves(group)[0].alt
    assert "over rounds for" in found["language"]
    assert "over epochs for" in found["table2"]


def test_the_best_at_every_learning_rate() -> None:
    runs = made.study_records("tuning-language", seeds=(0,), rows=3)
    for run in runs:
        better = 0.5 * (run.config.optimizer == "adamp") + 0.1 * (run.config.hyper["lr"] == 4e-3)
        run.result["valid_loss"] = 2 - better + run.config.hyper["weight_decay"]
    group = grouped(*runs)["tuning-language"][0]
    (drawing,) = draw_rates(group)
    assert drawing.alt.startswith("Line chart over the learning rate of AdamW and AdamP; best: ")
    assert "AdamW 1.9100 at 0.004, AdamP 1.4100 at 0.004" in drawing.alt
    (few,) = grouped(*made.study_records("table2", seeds=(0,), rows=3))["table2"]
    assert draw_rates(few) == []


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("FileNotFoundError: /home/me/my-data/cifar.tar", "FileNotFoundError: …/cifar.tar"),
        (r"no C:\data\cifar.tar here", "no …/cifar.tar here"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("a loss of 1/2", "a loss of 1/2"),
    ],
)
def test_paths_are_left_out(text: str, clean: str) -> None:
    assert without_paths(text) == clean


@pytest.mark.parametrize(
    ("p", "text"),
    [(1e-5, "p < 0.0001"), (0.0238, "p = 0.024"), (0.0496, "p = 0.0496"), (0.0504, "p = 0.05"),
     (0.444, "p = 0.44")],
)  # fmt: skip
def test_a_p_value_shows_on_which_side_of_the_level_it_lies(p: float, text: str) -> None:
    assert tables.p_value(p) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1334, "+13"), (-0.00404, "−0.4"), (0.0000475, "+0.005"), (-0.0, "0"), (1e-12, "+1.00e−10"),
     (-2e5, "−2.00e+07")],
)  # fmt: skip
def test_a_number_that_is_not_zero_never_reads_as_zero(value: float, text: str) -> None:
    share = tables.Metric("share", "share", percent=True, digits=0)
    assert tables.number(value, share, signed=True) == text


# --- the page as text


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few runs of every kind, and some with hostile names."""
    root = tmp_path_factory.mktemp("results")
    made.put(root, *made.study_records("table2", seeds=(0, 1, 2), rows=30))
    made.put(root, *made.study_records("fig1", seeds=(0,), rows=20))
    made.put(root, *made.study_records("fig1", seeds=(0,), scale=0.1, synthetic=True, rows=20))
    made.put(root, *made.study_records("fig2", seeds=(0, 1), rows=20))
    made.put(root, *made.study_records("fig4", seeds=(0,), rows=3))
    language = made.study_records("language", seeds=(0, 1, 2), rows=10)
    made.put(root, *(r for r in language if r.config.options["corpus"] == "shakespeare"))
    for optimizer in ("adamw", "adamo"):
        mine = RunConfig("yours", optimizer, 0, 30, {"lr": 1e-3})
        made.put(root, made.record(mine, study="yours"))
    evil = made.record(RunConfig("digits", EVIL, 0, 5, {"lr": EVIL}, {"option": EVIL}))
    evil.environment |= {"warnings": [EVIL], "commit": EVIL, "device": EVIL}
    evil.metrics[-1]["valid_$x$"] = 1.0
    made.put(root / "evil", Record(evil.config, evil.status, evil.result, evil.environment))
    broken = RunConfig("grokking", "sgd", 0, 5000, {"lr": 0.1})
    made.put(root, Record(broken, FAILED, error=f"OSError: /home/me/data/x.bin {EVIL}"))
    diverged = made.record(RunConfig("digits", "sgd", 3, 9, {"lr": 9.0}), rows=9)
    diverged.result["diverged_at"] = 9
    made.put(root, diverged)
    (root / f"damaged{SUFFIX}").write_bytes(b"half a file")
    os.mkfifo(root / f"pipe{SUFFIX}")
    return root


@pytest.fixture(scope="module")
def page(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(results, tmp_path_factory.mktemp("report") / "out")


@pytest.fixture(scope="module")
def html(page: Path) -> str:
    return page.read_text()


def test_hostile_strings_are_text(html: str) -> None:
    assert EVIL not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script" not in html


def test_page_stands_alone(html: str) -> None:
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    outside = {s for s in sources if not s.startswith(("data:", "#", "figures/"))}
    assert outside == {"https://arxiv.org/abs/2602.05136"}
    assert not re.search(r"url\((?!%23)", html)
    assert "@import" not in html


@pytest.mark.parametrize(
    "text",
    [
        "Shortened to 10 % of its length",
        "Made-up data, not the real data set",
        "Your model",
        "Other runs",
        "corpus: shakespeare",
        "Runs that failed",
        "…/x.bin",
        "Damaged records",
        "damaged.jsonl.gz, line 1 is left out: it is damaged",
        "pipe.jsonl.gz is no file",
        "With all tests taken together",
        "Warnings from the optimizers",
        "1 run diverged",
    ],
)
def test_page_says(html: str, text: str) -> None:
    assert text in html


def test_a_page_can_tell_its_own_story(tmp_path: Path) -> None:
    for optimizer in ("adamw", "adamo"):
        made.put(tmp_path / "r", made.record(RunConfig("digits", optimizer, 0, 9, {"lr": 1e-3})))
    cover = Cover("A title", "A <lead>.", {"digits": ("Digits", "Look."), "toy2d": ("T", "")})
    text = write_report(tmp_path / "r", tmp_path / "out", cover).read_text()
    assert "<h1>A title</h1>" in text
    assert "A &lt;lead&gt;." in text
    assert re.findall(r"<h2[^>]*>([^<]*)", text) == ["Digits", "How it was measured"]
    assert "not yet measured" not in text


def test_only_shortened_runs_measure_nothing(tmp_path: Path) -> None:
    made.put(tmp_path / "r", *made.study_records("fig1", seeds=(0, 1, 2), scale=0.1, rows=5))
    text = write_report(tmp_path / "r", tmp_path / "out").read_text()
    assert 'id="brief"' not in text
    assert "Shortened to 10 % of its length" in text


def test_a_line_that_is_odd_inside_is_drawn_or_named_and_never_ends_the_page(
    tmp_path: Path,
) -> None:
    """What the columns' kinds let through: shapes that no figure can draw, texts for numbers."""
    boundary, *_ = made.study_records("fig1", seeds=(0,), rows=3)
    *_, plane = made.study_records("fig2", seeds=(0,), rows=3)
    boundary.arrays |= {"grid": [1.0, 2.0], "points": [[1.0]]}
    boundary.result |= {"weight_norm": "large", "test_accuracy": [1]}
    boundary.environment = {"date": 3, "commit": None}
    plane.arrays["xs"] = [[1.0]]
    plane.result["explained_variance"] = "most"
    made.put(tmp_path / "r", boundary, plane)
    assert "Figure 1" in write_report(tmp_path / "r", tmp_path / "out").read_text()


def test_no_machine_paths(html: str, results: Path) -> None:
    assert str(results) not in html
    assert "/home/me" not in html


def test_banner_is_in_the_picture(page: Path) -> None:
    """Text is drawn as outlines; the banner's box is a shape of its own colour."""
    figures = page.parent / "figures"
    marked = {p.name for p in figures.glob("*.svg") if "#ffe8b3" in p.read_text()}
    short = {p.name for p in figures.glob("*scale-0.1*.svg")}
    assert marked == short
    assert len(short) > 3


def test_figures_are_files_too(page: Path) -> None:
    names = {p.stem for p in (page.parent / "figures").glob("*.svg")}
    expected = {
        "fig1-boundaries", "fig2-landscape", "fig2-gradient_norm", "fig4-heat-map-adamo_paper",
        "fig4-heat-map-adamw", "table2-test_accuracy", "table2-train_loss",
        "language-corpus-shakespeare-valid_loss", "yours-yours-30-epochs-valid_loss",
    }  # fmt: skip
    assert expected <= names


def test_the_landscape_with_the_most_paths_is_drawn() -> None:
    runs = made.study_records("fig2", seeds=(0,))[:2]
    few, both = made.landscape(runs[:1]), made.landscape(runs)
    for order in ((few, both), (both, few)):
        (group,) = grouped(*runs, *order)["fig2"]
        (drawing,) = landscapes(group)
        assert "AdamW and AdamO" in drawing.alt


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="there is no folder"):
        write_report(tmp_path / "nothing", tmp_path)


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no records below"):
        write_report(tmp_path, tmp_path / "out")


@pytest.mark.slow
def test_needs_no_torch_and_repeats_itself(results: Path, page: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from adamo_lab.report import write_report; "
        f"write_report(Path({str(results)!r}), Path({str(tmp_path)!r})); "
        "sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    assert (tmp_path / "index.html").read_bytes() == page.read_bytes()


@pytest.mark.slow
def test_sixty_long_runs_are_quick(tmp_path: Path) -> None:
    runs = made.study_records("table1", seeds=(0, 1, 2), rows=500)
    runs += made.study_records("table2", seeds=(0, 1, 2, 3, 4, 5), rows=500)
    made.put(tmp_path / "r", *runs)
    started = time.process_time()
    write_report(tmp_path / "r", tmp_path / "out")
    assert time.process_time() - started < 20


# --- the page in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    if not PROGRAM:
        pytest.skip("Chromium is not installed")
    chromium = Chromium()
    yield chromium
    chromium.close()


LOST_ANCHORS = """[...document.querySelectorAll('a[href^="#"]')]
    .filter((a) => !document.getElementById(a.hash.slice(1))).length"""
DOUBLE_IDS = """(() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
    return ids.length - new Set(ids).size })()"""
VIEWS = {"phone": (360, False), "desktop": (1280, False), "phone, dark": (360, True)}


@pytest.mark.parametrize(("width", "dark"), VIEWS.values(), ids=VIEWS)
def test_view(browser: Chromium, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width, dark=dark)
    assert browser.value("innerWidth") == width
    for _ in range(2):  # as it opens, then with all details open
        assert browser.value("document.documentElement.scrollWidth") <= width
        browser.value("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    pictures = "[...document.images].filter((i) => !i.naturalWidth || !i.alt).length"
    assert browser.value("document.images.length") > 20
    assert browser.value(pictures) == 0
    colour = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", colour))) < 64) == dark
    assert browser.complaints == []


def test_anchors_lead_somewhere(browser: Chromium, page: Path) -> None:
    browser.open(page, 1280)
    assert browser.value(LOST_ANCHORS) == 0
    assert browser.value(DOUBLE_IDS) == 0
