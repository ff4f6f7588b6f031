"""The report: verdicts, grouping, tables, figures, and the page in a real browser."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lab_fixtures as made
from adamo_lab import tables
from adamo_lab.errors import LabError
from adamo_lab.figures.look import power
from adamo_lab.grids import grids
from adamo_lab.groups import Group, by_study, expected_options, lightened
from adamo_lab.records import FAILED, Record, RunConfig
from adamo_lab.report import without_paths, write_report
from adamo_lab.studies import STUDIES, Claim
from adamo_lab.verdicts import FAILS, HOLDS, OPEN, Difference, Summary, judge, rank_p
from chromium import PROGRAM, Chromium

LARGER = Claim("a is larger.", "x", "a", ">", "b")
SMALLER = Claim("a is smaller.", "x", "a", "<", "b")
EQUAL = Claim("They are equal.", "x", "a", "=", "b", margin=1.0)
EVIL = "<script>alert(1)</script>"


# --- verdicts


def test_welch_by_hand() -> None:
    """a: mean 5, variance 1; b: mean 2, variance 4; three each. se² = 5/3, df = 2·25/17."""
    difference = Difference.of(Summary.of([4, 5, 6]), Summary.of([0, 2, 4]))
    assert difference.mean == 3
    assert difference.error == pytest.approx(math.sqrt(5 / 3))
    assert difference.freedom == pytest.approx(50 / 17)


def test_welch_is_scipys() -> None:
    from scipy import stats

    a, b = [0.741, 0.752, 0.748, 0.755], [0.739, 0.731, 0.744]
    expected = stats.ttest_ind(a, b, equal_var=False, alternative="greater")
    verdict = judge(LARGER, a, b)
    assert verdict.p == pytest.approx(expected.pvalue)
    low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert verdict.interval == pytest.approx((low, high))
    assert verdict.n == (4, 3)


CASES = {  # claim, first, second, outcome, a word of the reason
    "larger": (LARGER, [5, 6, 7], [1, 2, 3], HOLDS, "significant"),
    "smaller": (SMALLER, [1, 2, 3], [5, 6, 7], HOLDS, "significant"),
    "opposite": (LARGER, [1, 2, 3], [5, 6, 7], FAILS, "opposite direction significant"),
    "no difference": (LARGER, [1, 2, 3], [1.1, 2, 2.5], FAILS, "no significant difference"),
    "two runs": (LARGER, [5, 6], [1, 2, 3], OPEN, "at least 3 runs"),
    "no runs": (LARGER, [], [], OPEN, "no runs"),
    "one side": (LARGER, [1, 2, 3], [], OPEN, "one side"),
    "identical": (LARGER, [1, 1, 1], [1, 1, 1], FAILS, "identical"),
    "exact": (LARGER, [2, 2, 2], [1, 1, 1], HOLDS, "no variance"),
    "exact, smaller": (SMALLER, [1, 1, 1], [2, 2, 2], HOLDS, "no variance"),
    "exact, opposite": (LARGER, [1, 1, 1], [2, 2, 2], FAILS, "opposite direction"),
    "equal": (EQUAL, [1.0, 1.1, 1.2], [1.0, 1.1, 1.3], HOLDS, "within the margin"),
    "equal, identical": (EQUAL, [1, 1, 1], [1, 1, 1], HOLDS, "within the margin"),
    "not equal": (EQUAL, [9, 9.1, 9.2], [1.0, 1.1, 1.3], FAILS, "outside the margin"),
    "too noisy": (EQUAL, [0, 5, 9], [1, 4, 9], FAILS, "beyond the margin"),
    "equal, missing": (EQUAL, [1, 2, None], [1, 2, 3], OPEN, "never got there"),
}


@pytest.mark.parametrize(("claim", "a", "b", "outcome", "reason"), CASES.values(), ids=CASES)
def test_outcome(claim: Claim, a: list, b: list, outcome: str, reason: str) -> None:
    verdict = judge(claim, a, b)
    assert verdict.outcome == outcome
    assert reason in verdict.reason


def test_equal_values_have_no_variance() -> None:
    """A mean by floating-point sums would leave a remainder, and a t-value out of nothing."""
    verdict = judge(LARGER, [0.99] * 3, [0.99] * 7)
    assert (verdict.difference, verdict.interval) == (0, (0, 0))


def test_missing_counts_as_worst() -> None:
    """Lower is better: runs that never got there are later than all others."""
    reached, not_all = [100.0, 110, 120, 130], [900.0, None, None, None]
    verdict = judge(SMALLER, reached, not_all, higher_is_better=False)
    assert (verdict.outcome, verdict.test) == (HOLDS, "rank test")
    assert verdict.p == pytest.approx(1 / 70)
    assert verdict.missing == (0, 3)
    assert judge(LARGER, reached, not_all, higher_is_better=False).outcome == FAILS
    assert judge(LARGER, reached, not_all, higher_is_better=True).outcome == HOLDS


def test_rank_test_with_too_few_runs_is_open() -> None:
    """3 against 3 cannot give less than 1 in 20, however clear it looks."""
    verdict = judge(SMALLER, [1, 2, 3], [None, None, None], higher_is_better=False)
    assert verdict.outcome == OPEN
    assert "0.05" in verdict.reason


def test_rank_test_by_hand_and_by_scipy() -> None:
    from scipy.stats import mannwhitneyu

    assert rank_p([3, 4], [1, 2]) == pytest.approx(1 / 6)
    assert rank_p([1, 1], [1, 1]) == 1
    # ties: of the 10 pairs from (1, 2, 2, 3, 3), with ranks 1, 2.5, 2.5, 4.5, 4.5, the sum of
    # (3, 3) is reached by one
    assert rank_p([3, 3], [1, 2, 2]) == pytest.approx(1 / 10)
    a, b = [3.0, 1.5, 4.2, 9.9, 2.0], [1.0, 2.5, 0.3, 0.7]
    exact = mannwhitneyu(a, b, alternative="greater", method="exact").pvalue
    assert rank_p(a, b) == pytest.approx(exact)


def test_summary() -> None:
    assert Summary.of([1, None, 3]) == Summary((1.0, 3.0), missing=1)
    assert Summary.of([1, 3]).sd == pytest.approx(math.sqrt(2))
    assert Summary.of([5]).sd is None
    assert Summary.of([None]).mean is None


# --- grouping


def grouped(*records: Record) -> tuple[dict[str, list[Group]], list[Group]]:
    return by_study(records)


def test_records_find_their_studies() -> None:
    studies, others = grouped(*made.study_records("table1", seeds=(5, 17)))
    assert [g.name for g in studies["table1"]] == ["table1"]
    assert [line.optimizer for line in studies["table1"][0].lines] == [
        *STUDIES["table1"].optimizers
    ]
    assert {line.optimizer for line in studies["fig3"][0].lines} == {"adamw", "adamp", "adamo"}
    assert all(line.seeds == [5, 17] for line in studies["table1"][0].lines)
    assert not others
    assert not studies["fig4"]


def test_shortened_and_made_up_runs_stay_apart() -> None:
    studies, _ = grouped(
        *made.study_records("fig1", seeds=(0,)),
        *made.study_records("fig1", seeds=(0,), scale=0.1),
        *made.study_records("fig1", seeds=(0,), synthetic=True),
    )
    assert [g.banners for g in studies["fig1"]] == [
        [],
        ["Shortened to 10 % of its length"],
        ["Made-up data, not the real data set"],
    ]
    assert {len(g.lines) for g in studies["fig1"]} == {4}


def test_corpora_stay_apart() -> None:
    studies, _ = grouped(*made.study_records("language"))
    assert [g.label for g in studies["language"]] == ["corpus: shakespeare", "corpus: wikitext2"]
    one = [r for r in made.study_records("language") if r.config.options["corpus"] == "wikitext2"]
    assert [g.label for g in grouped(*one)[0]["language"]] == ["corpus: wikitext2"]
    assert expected_options(STUDIES["language"]) == [
        {"corpus": "shakespeare"},
        {"corpus": "wikitext2"},
    ]


def test_changed_options_get_a_table_of_their_own() -> None:
    usual = made.study_records("table2", seeds=(0,))
    wide = made.study_records("table2", seeds=(0,), options={"width": 256})
    studies, others = grouped(*usual, *wide)
    assert {g.label for g in studies["table2"]} == {"width: 128", "width: 256"}
    assert not others


def test_a_sweep_belongs_to_no_study() -> None:
    sweep = [
        made.record(RunConfig("digits", "adamw", seed, 7, {"lr": lr, "weight_decay": 0.1}))
        for lr in (1e-3, 3e-3)
        for seed in (0, 1)
    ]
    studies, others = grouped(*sweep)
    assert not any(studies.values())
    (group,) = others
    assert [line.label for line in group.lines] == ["AdamW, lr 0.001", "AdamW, lr 0.003"]
    assert group.lines[0].colour != group.lines[1].colour
    assert lightened("#000000", 0.5) == "#808080"


def test_failed_runs_are_not_counted() -> None:
    good, bad = made.study_records("fig1", seeds=(0,))[:2]
    bad.status = FAILED
    assert [len(g.lines) for g in grouped(good, bad)[0]["fig1"]] == [1]


# --- tables


def table_of(*records: Record, study: str) -> tuple[Group, dict[str, list[str]]]:
    (group, *_) = grouped(*records)[0][study]
    table = tables.table(group)
    return group, {row.label: [cell.text for cell in row.cells] for row in table.rows}


def accuracies(values: list[float], optimizer: str) -> list[Record]:
    runs = made.study_records("table1", seeds=tuple(range(len(values))))
    chosen = [r for r in runs if r.config.optimizer == optimizer]
    for run, value in zip(chosen, values, strict=True):
        run.result["swa_test_accuracy"] = value
    return chosen


def test_beside_the_paper() -> None:
    runs = accuracies([0.74, 0.75, 0.76], "adamw") + accuracies([0.7, 0.7, 0.7], "adam")
    group, rows = table_of(*runs, study="table1")
    assert rows["AdamW"][:4] == ["3", "74.75 ± 0.15", "75.00 ± 1.00", "+0.25"]
    assert rows["Adam"][:4] == ["3", "74.48 ± 0.12", "70.00 ± 0.00", "−4.48"]
    best = [row.label for row in tables.table(group).rows if row.cells[2].best]
    assert best == ["AdamW"]


def test_one_run_has_no_deviation() -> None:
    _, rows = table_of(*accuracies([0.75], "adamw"), study="table1")
    assert rows["AdamW"][2] == "75.00"


def test_shortened_runs_are_not_subtracted_from_the_paper() -> None:
    (group,) = grouped(*made.study_records("table1", seeds=(0,), scale=0.1))[0]["table1"]
    assert ("SWA (%)", ("paper", "ours")) in tables.table(group).heads


def test_not_all_runs_got_there() -> None:
    runs = made.study_records("table2", seeds=(0, 1, 2, 3, 4))
    epochs = {"adamw": [2500, None, 2600, None, 2700], "adamo": [900, 950, 1000, 1050, 1100]}
    for run in runs:
        values = epochs.get(run.config.optimizer, [None] * 5)
        run.result["grokking_epoch"] = values[run.config.seed]
    (group,) = grouped(*runs)[0]["table2"]
    cells = {row.label: row.cells[5] for row in tables.table(group).rows}
    assert (cells["AdamW"].text, cells["AdamW"].note) == ("2600 ± 100", "3 of 5")
    assert (cells["Adam"].text, cells["Adam"].note) == ("never", "0 of 5")
    assert cells["AdamO"].best
    claim = next(c for c in STUDIES["table2"].claims if c.first == "adamo")
    verdict = tables.decide(claim, group)
    assert (verdict.outcome, verdict.test) == (HOLDS, "rank test")
    assert "3 of 5 runs of AdamW got there" in tables.numbers(verdict, group).replace("\xa0", " ")


def test_numbers_of_a_verdict() -> None:
    runs = accuracies([0.80, 0.81, 0.82], "adamo_paper") + accuracies([0.74, 0.75, 0.76], "adamw")
    (group, *_) = grouped(*runs)[0]["table1"]
    verdict = tables.decide(STUDIES["table1"].claims[0], group)
    assert tables.numbers(verdict, group).replace("\xa0", " ") == (
        "significant: AdamO (paper) minus AdamW = +6.00 points (95 % CI +3.73 to +8.27); "
        "p = 0.0009; n = 3 and 3; Welch's t-test"
    )


def test_grid() -> None:
    runs = made.study_records("fig4", seeds=(0, 1))
    for run in runs:
        good = run.config.hyper["lr"] == 8e-4
        run.result["swa_test_accuracy"] = 0.75 if good else 0.741 if run.config.seed else 0.735
    runs[0].result["swa_test_accuracy"] = None
    (group,) = grouped(*runs)[0]["fig4"]
    first, second = grids(group)
    assert (
        first.finding.replace("\xa0", " ") == "5 of 25 settings (20 %) within 1 point of its best"
    )
    assert second.axes == ("lr", "radial_lr")
    assert [len(ticks) for ticks in second.ticks] == [5, 5]
    assert second.values[0][0] == pytest.approx(0.738)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.003, "3·10⁻³"), (1e-4, "10⁻⁴"), (0.03, "0.03"), (300.0, "300"), (2e5, "2·10⁵")],
)
def test_powers(value: float, text: str) -> None:
    assert power(value) == text


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
        made.put(root, made.record(RunConfig("yours", optimizer, 0, 30, {"lr": 1e-3})))
    evil = made.record(RunConfig("digits", EVIL, 0, 5, {"lr": EVIL}, {"option": EVIL}))
    evil.environment |= {"warnings": [EVIL], "commit": EVIL, "device": EVIL}
    evil.metrics[-1]["valid_$x$"] = 1.0
    made.put(root / "evil", Record(evil.config, evil.status, evil.result, evil.environment))
    broken = RunConfig("grokking", "sgd", 0, 5000, {"lr": 0.1})
    made.put(root, Record(broken, FAILED, error=f"OSError: /home/me/data/x.bin {EVIL}"))
    diverged = made.record(RunConfig("digits", "sgd", 3, 9, {"lr": 9.0}), rows=9)
    diverged.result["diverged_at"] = 9
    made.put(root, diverged)
    damaged = root / "damaged" / "run.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
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
    assert html.count("<script>") == 1


def test_page_stands_alone(html: str) -> None:
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    outside = {s for s in sources if not s.startswith(("data:", "#", "figures/"))}
    assert outside == {"https://arxiv.org/abs/2602.05136"}
    assert "url(" not in html
    assert "@import" not in html


@pytest.mark.parametrize(
    "text",
    [
        "Shortened to 10 % of its length",
        "Made-up data, not the real data set",
        "Your model",
        "Other runs",
        "corpus: shakespeare",
        "corpus: wikitext2",
        "adamo-lab study table1",
        "Runs that failed",
        "…/x.bin",
        "Damaged records",
        "damaged/run.json is damaged",
        "Warnings from the optimizers",
        "1 run diverged",
        "only shortened or made-up runs so far",
    ],
)
def test_page_says(html: str, text: str) -> None:
    absent = text == "only shortened or made-up runs so far"
    assert (text in html) != absent


def test_only_shortened_runs_measure_nothing(tmp_path: Path) -> None:
    made.put(tmp_path / "r", *made.study_records("fig1", seeds=(0, 1, 2), scale=0.1, rows=5))
    text = write_report(tmp_path / "r", tmp_path / "out").read_text()
    brief = text[text.index('id="brief"') : text.index('id="table1"')]
    assert "Only shortened or made-up runs so far" in brief
    assert "✓" not in brief
    assert "tag holds" not in brief


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


def test_figures_are_written_twice(page: Path) -> None:
    names = [{p.stem for p in (page.parent / "figures").glob(f"*.{e}")} for e in ("svg", "png")]
    assert names[0] == names[1]
    expected = {
        "fig1-boundaries", "fig2-landscape", "fig2-gradient_norm", "fig4-heat-map-adamo",
        "fig4-heat-map-adamw", "table2-test_accuracy", "table2-train_loss", "table2-layer-norms",
        "table2-layers-adamo", "language-corpus-shakespeare-valid_loss",
        "yours-30-epochs-valid_loss",
    }  # fmt: skip
    assert expected <= names[0]


def test_same_records_same_page(results: Path, page: Path, tmp_path: Path) -> None:
    again = write_report(results, tmp_path)
    assert again.read_bytes() == page.read_bytes()


def test_markdown(page: Path) -> None:
    text = (page.parent / "tables" / "table2.md").read_text()
    assert text.startswith("# Table 2: grokking on modular addition\n\n| ")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert re.search(r"^\| AdamW \| 3 \| 99.02 \| [\d.]+ ± [\d.]+ \|", text, re.MULTILINE)
    assert "- AdamO reaches a higher final accuracy than AdamW." in text
    short = (page.parent / "tables" / "fig1-scale-0.1-made-up.md").read_text()
    assert "**Shortened to 10 % of its length.**" in short
    other = "".join(p.read_text() for p in (page.parent / "tables").glob("digits*.md"))
    assert "<script>" not in other.replace("\\<", "")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="there is no folder"):
        write_report(tmp_path / "nothing", tmp_path)


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no records below"):
        write_report(tmp_path, tmp_path / "out")


def test_needs_no_torch(results: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from adamo_lab.report import write_report; "
        f"write_report(Path({str(results)!r}), Path({str(tmp_path)!r})); "
        "sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


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
    lost = "[...document.querySelectorAll('a[href^=\"#\"]')].filter((a) => !document.getElementById(a.hash.slice(1))).length"  # noqa: E501
    assert browser.value(lost) == 0
    twice = "document.querySelectorAll('[id]').length - new Set([...document.querySelectorAll('[id]')].map((e) => e.id)).size"  # noqa: E501
    assert browser.value(twice) == 0


def test_figure_enlarges(browser: Chromium, page: Path) -> None:
    browser.open(page, 1280)
    assert browser.value("document.querySelector('dialog').open") is False
    where = "(() => { const i = document.querySelector('a.zoom img'); i.scrollIntoView({block: 'center'}); const r = i.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2, r.width] })()"  # noqa: E501
    x, y, small = browser.value(where)
    browser.click(x, y)
    assert browser.value("document.querySelector('dialog').open") is True
    assert (
        browser.value("document.querySelector('dialog img').getBoundingClientRect().width") > small
    )
    assert browser.value("document.querySelector('dialog p').textContent")
    browser.press("Escape", 27)
    assert browser.value("document.querySelector('dialog').open") is False


def test_figure_enlarges_by_keyboard(browser: Chromium, page: Path) -> None:
    browser.open(page, 360)
    browser.value("document.querySelector('a.zoom').focus()")
    browser.press("Enter", 13, "\r")
    assert browser.value("document.querySelector('dialog').open") is True
    assert browser.value("document.activeElement.textContent") == "Close"
    browser.press("Enter", 13, "\r")
    assert browser.value("document.querySelector('dialog').open") is False
    assert browser.value("document.activeElement.className") == "zoom"
    assert browser.complaints == []
