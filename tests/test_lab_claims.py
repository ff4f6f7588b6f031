"""The claims of the studies: each can be decided, from results, from curves or from heat maps."""

from __future__ import annotations

import numpy as np
import pytest

import lab_fixtures as made
from adamo_lab import claims, tables
from adamo_lab.claims import in_brief
from adamo_lab.grids import GRID_METRICS, grid_values, grids
from adamo_lab.records import Record, RunConfig
from adamo_lab.runs import DERIVED, Group, by_study, value
from adamo_lab.studies import STUDIES, Study
from adamo_lab.verdicts import FAILS, HOLDS, OPEN

WITH_CLAIMS = [study for study in STUDIES.values() if study.claims]


@pytest.mark.parametrize("study", WITH_CLAIMS, ids=lambda study: study.name)
def test_every_claim_is_about_runs_of_its_study(study: Study) -> None:
    names = {arm.name for runs in study.runs for arm in runs.arms}
    for claim in study.claims:
        assert {claim.first, claim.second} <= names, claim.text
        assert claim.relation in ("<", ">", "="), claim.text
        assert claim.metric in {m.key for m in study.metrics}, claim.text
        assert claim.source, claim.text
    texts = [claim.text for claim in study.claims]
    assert len(texts) == len({*texts})


@pytest.mark.parametrize("study", WITH_CLAIMS, ids=lambda study: study.name)
def test_three_seeds_decide_every_claim(study: Study) -> None:
    """A metric that no record holds would leave its claim open for ever."""
    records = made.study_records(study.name, seeds=(0, 1, 2, 3))
    brief = in_brief(by_study(records)[study.name])
    assert len(brief) == len(study.runs) * len(study.claims)
    for judged in brief:
        if judged.claim.metric in ("grokking_epoch",):
            continue  # not every made run gets there
        assert judged.outcome in (HOLDS, FAILS), (judged.claim.text, judged.evidence)
        assert [n for _, _, n in judged.means] == [4, 4]


def test_one_optimizer_alone_leaves_every_claim_open() -> None:
    for study in WITH_CLAIMS:
        only = study.claims[0].first
        records = [r for r in made.study_records(study.name) if arm_of(r) == only]
        brief = in_brief(by_study(records)[study.name])
        assert {judged.outcome for judged in brief} == {OPEN}


def arm_of(record: Record) -> str:
    arm = STUDIES[record.study].arm(record.config)
    return arm.name if arm else ""


def test_what_no_run_measures_is_open() -> None:
    """Without SWA no run can have got there."""
    runs = made.study_records("table1", seeds=(0, 1, 2, 3), options={"swa": False})
    for run in runs:
        del run.result["swa_test_accuracy"]
    (group,) = by_study(runs)["table1"]
    claim = STUDIES["table1"].claims[0]
    verdict = claims.decide(claim, group)
    assert (verdict.outcome, verdict.reason) == (OPEN, "not measured in these runs")
    assert claims.means(claim, group) == []
    assert claims.numbers(verdict, group).startswith("not measured in these runs; n")


def test_what_one_side_did_not_measure_decides_nothing() -> None:
    runs = made.study_records("table1", seeds=(0, 1, 2, 3))
    for run in runs:
        if run.config.optimizer == "adamw":
            del run.result["swa_test_accuracy"]
    (group,) = by_study(runs)["table1"]
    claim = next(c for c in STUDIES["table1"].claims if c.second == "adamw")
    assert claims.decide(claim, group).outcome == OPEN


def test_that_none_got_there_is_measured() -> None:
    """That no run has generalized is an outcome."""
    runs = made.study_records("table2", seeds=(0, 1, 2, 3))
    for run in runs:
        run.result["grokking_epoch"] = None
    (group,) = by_study(runs)["table2"]
    claim = next(c for c in STUDIES["table2"].claims if c.first == "adamo")
    assert claims.decide(claim, group).outcome == FAILS
    assert [text for _, text, _ in claims.means(claim, group)] == ["never", "never"]


# --- from curves


def curve(optimizer: str, seed: int, points: dict[int, float], epochs: int = 300) -> Record:
    config = RunConfig("cifar100", optimizer, seed, epochs, {"lr": 8e-4})
    rows = [{"epoch": epoch, "test_accuracy": y} for epoch, y in points.items()]
    return made.record(config, metrics=rows)


def test_gain_at_drops_by_hand() -> None:
    around = {45: 0.4, 50: 0.6, 51: 0.7, 60: 0.9, 100: 0.5, 103: 0.6, 150: 0.5, 160: 0.5, 161: 0.0}
    run = curve("adamw", 0, {**around, 40: 0.0, 61: 0.0})
    assert value(run, "gain_at_drops") == pytest.approx((0.3 + 0.1 + 0.0) / 3)
    del run.metrics[4:6]  # nothing around epoch 100
    assert value(run, "gain_at_drops") is None


def test_early_accuracy_by_hand() -> None:
    points = {100: 0.5, 200: 0.7, 201: 0.9}
    assert value(curve("adamw", 0, points), "early_test_accuracy") == pytest.approx(0.6)
    shortened = {10: 0.5, 20: 0.7, 21: 0.9}
    assert value(curve("adamw", 0, shortened, 30), "early_test_accuracy") == pytest.approx(0.6)
    assert value(curve("adamw", 0, {}), "early_test_accuracy") is None
    assert value(curve("adamw", 0, {300: 0.9}), "early_test_accuracy") is None


def test_a_curve_that_divergence_cut_off_has_no_mean() -> None:
    points = dict.fromkeys(range(5, 156, 5), 0.5)
    run = curve("adamw", 0, points)
    assert value(run, "early_test_accuracy") is None
    assert value(run, "gain_at_drops") is None  # of the last drop it saw half


def test_derived_columns_are_of_the_study_that_names_them() -> None:
    runs = [r for name in ("table1", "fig3") for r in made.study_records(name)]
    studies = by_study(runs)
    heads = {name: {*tables.table(studies[name][0]).heads} for name in studies}
    assert {"first 200 (%)", "gain at drops (%)"} <= heads["fig3"]
    assert not {"first 200 (%)", "gain at drops (%)"} & heads["table1"]
    assert not {*DERIVED} & {key for run in studies["table1"][0].runs for key in run.result}


# --- from heat maps

GOOD = {  # cells within a point of the best: (row, column) of the five learning rates and values
    "adamw": {(0, 0), (2, 2), (2, 3), (4, 4)},
    "adamo_paper": {(0, 0), (0, 1), (1, 1), (2, 1), (2, 2), (4, 4)},
}


AXES = {"adamw": ("lr", "weight_decay"), "adamo_paper": ("lr", "radial_lr")}


def heat_maps(seeds: tuple[int, ...]) -> tuple[Group, list[Record]]:
    runs = made.study_records("fig4", seeds=seeds, rows=3)
    for optimizer, axes in AXES.items():
        mine = [run for run in runs if run.config.optimizer == optimizer]
        ticks = [sorted({run.config.hyper[axis] for run in mine}) for axis in axes]
        for run in mine:
            row, column = (ticks[k].index(run.config.hyper[axes[k]]) for k in (0, 1))
            good = (row, column) in GOOD[optimizer]
            run.result["swa_valid_accuracy"] = 0.75 - 0.0001 * run.config.seed if good else 0.7
    (group,) = by_study(runs)["fig4"]
    return group, runs


def test_shares_of_a_heat_map() -> None:
    group, _ = heat_maps((0, 1))
    assert {m.line.name: m.axes for m in grids(group)} == AXES
    assert [m.region for m in grids(group)] == [2, 5]
    assert grid_values(group, "adamw", "near_share") == [4 / 25, 4 / 25]
    assert grid_values(group, "adamo_paper", "near_share") == [6 / 25, 6 / 25]
    assert grid_values(group, "adamw", "region_share") == [2 / 25, 2 / 25]
    assert grid_values(group, "adamo_paper", "region_share") == [5 / 25, 5 / 25]


def test_exactly_a_point_below_the_best_is_within_a_point() -> None:
    """Images counted in float32: 50 of 5,000 are a difference of 0.01000005."""
    group, runs = heat_maps((0,))
    best, *others = [run for run in runs if run.config.optimizer == "adamw"]
    for run, right in ((best, 3050), *((run, 3000) for run in others)):
        run.result["swa_valid_accuracy"] = float(np.float32(right) / np.float32(5000))
    assert grid_values(group, "adamw", "near_share") == [1.0]


def test_heat_maps_decide() -> None:
    group, _ = heat_maps((0, 1, 2, 3))
    for claim in STUDIES["fig4"].claims:
        assert claim.metric in GRID_METRICS
        verdict = claims.decide(claim, group)
        assert (verdict.outcome, verdict.n) == (HOLDS, (4, 4))
        assert verdict.test == "rank test"  # the maps of all seeds are alike
    shares = claims.means(STUDIES["fig4"].claims[0], group)
    assert shares == [("AdamO (paper)", "24\xa0±\xa00\xa0%", 4), ("AdamW", "16\xa0±\xa00\xa0%", 4)]
    for seeds in ((0,), (0, 1, 2)):
        few, _ = heat_maps(seeds)
        assert claims.decide(STUDIES["fig4"].claims[0], few).outcome == OPEN


def test_a_seed_without_the_whole_heat_map_does_not_count() -> None:
    _, runs = heat_maps((0, 1))
    late = next(r for r in runs if r.config.seed == 1 and r.config.optimizer == "adamo_paper")
    (group,) = by_study([r for r in runs if r is not late])["fig4"]
    assert len(grid_values(group, "adamo_paper", "near_share")) == 1
    assert len(grid_values(group, "adamw", "near_share")) == 2


def test_a_map_with_missing_settings_decides_nothing() -> None:
    """Else an optimizer would gain from settings at which its runs break."""
    _, runs = heat_maps((0, 1, 2))
    theirs = [r for r in runs if r.config.optimizer == "adamo_paper"]
    lost = theirs[0].config.hyper
    left = [r for r in runs if r not in theirs or r.config.hyper != lost]
    assert len(left) == len(runs) - 3
    (group,) = by_study(left)["fig4"]
    assert grid_values(group, "adamo_paper", "near_share") == []
    verdict = claims.decide(STUDIES["fig4"].claims[0], group)
    assert (verdict.outcome, verdict.reason) == (
        OPEN, "no seed has run all settings of both heat maps yet"
    )  # fmt: skip


def test_a_failed_setting_is_not_a_good_one() -> None:
    group, runs = heat_maps((0,))
    bad = next(r for r in runs if r.result["swa_valid_accuracy"] < 0.71)
    bad.result["swa_valid_accuracy"] = None
    assert grid_values(group, bad.config.optimizer, "near_share") == [
        len(GOOD[bad.config.optimizer]) / 25
    ]


def test_a_seed_in_which_all_diverged_has_no_good_setting() -> None:
    group, runs = heat_maps((0, 1))
    for run in runs:
        if run.config.optimizer == "adamw" and run.config.seed == 1:
            run.result["swa_valid_accuracy"] = None
    assert grid_values(group, "adamw", "near_share") == [4 / 25, 0.0]
    assert grid_values(group, "adamw", "region_share") == [2 / 25, 0.0]


def test_a_setting_that_diverged_once_is_not_good() -> None:
    """Nor is it the best, whatever its other runs are worth."""
    group, runs = heat_maps((0, 1, 2))
    for run in runs:
        if run.config.optimizer == "adamw" and run.config.hyper["lr"] >= 1.6e-3:
            lucky = run.config.seed == 0
            run.result["swa_valid_accuracy"] = 0.9 if lucky else None
    grid = grids(group)[0]
    assert grid.best == pytest.approx(0.7499)
    assert np.argwhere(grid.good).tolist() == [[0, 0], [2, 2], [2, 3]]
    assert [grid.text(3, column) for column in range(5)] == ["1 of 3"] * 5
    assert grid.finding.replace("\xa0", " ") == (
        "3 of 25 settings (12 %) within 1 point of its best"
    )


def test_an_unfinished_map_has_no_share() -> None:
    _, runs = heat_maps((0, 1))
    first = [r for r in runs if r.config.optimizer == "adamw"]
    first = [r for r in first if r.config.seed == 0 or r.config.hyper["lr"] == 2e-4]
    (group,) = by_study(first)["fig4"]
    (grid,) = grids(group)
    assert grid.finding == "30 of 50 runs so far"
    (group,) = by_study(first[:2])["fig4"]
    (grid,) = grids(group)
    assert [len(ticks) for ticks in grid.ticks] == [5, 5]
    assert [grid.text(0, 1), grid.text(4, 4)] == ["70.0", "–"]
    assert grid.finding == "2 of 25 runs so far"


def test_a_map_on_which_nothing_survived_is_none() -> None:
    group, runs = heat_maps((0,))
    for run in runs:
        if run.config.optimizer == "adamw":
            run.result["swa_valid_accuracy"] = None
    (grid,) = grids(group)
    assert grid.line.name == "adamo_paper"
    rows = {row.label: [cell.text for cell in row.cells] for row in
            tables.best_table(group).rows}  # fmt: skip
    assert (rows["AdamW"][0], rows["AdamW"][2:]) == ("–", ["25", "25"])
    assert (rows["AdamO (paper)"][0], rows["AdamO (paper)"][2:]) == ("75.00", ["25", "25"])


# --- the numbers of a verdict


def test_means() -> None:
    runs = made.study_records("table2", seeds=(0, 1, 2))
    for run in runs:
        epochs = {"adamo": 900 + 100 * run.config.seed, "adamw": [2000, None, 3000]}
        found = epochs.get(run.config.optimizer)
        run.result["grokking_epoch"] = found[run.config.seed] if isinstance(found, list) else found
    (group,) = by_study(runs)["table2"]
    text = {claim.first: claims.means(claim, group) for claim in STUDIES["table2"].claims
            if claim.metric == "grokking_epoch"}  # fmt: skip
    adamw = ("AdamW", "2500 ± 707 (2 of 3 runs)".replace(" ", "\xa0"), 3)
    first = ("AdamO", "1000 ± 100".replace(" ", "\xa0"), 3)
    assert text["adamo"] == [first, adamw]
    assert text["adamo_paper"] == [("AdamO (paper)", "never", 3), adamw]


def test_held_out_images_of_made_up_data_are_fewer() -> None:
    """There are 2,000 of them, and studies of the real ones hold 5,000 out."""
    for name in ("tuning-cifar100", "fig4"):
        real, made_up = (STUDIES[name].configs((0,), synthetic=s) for s in (False, True))
        assert {run.options["holdout"] for run in real} == {5000}
        assert {run.options["holdout"] for run in made_up} == {500}
        asked = STUDIES[name].configs((0,), synthetic=True, options={"holdout": 100})
        assert {run.options["holdout"] for run in asked} == {100}
