"""Tables from records in the pages: python docs/tables.py

What stands between ``<!-- table NAME -->`` and ``<!-- end -->`` is written by this program.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from scipy.stats import false_discovery_control

from adamo_lab.claims import Judged, in_brief
from adamo_lab.figures.curves import best_by_rate
from adamo_lab.grids import GRID_METRICS, grid_values, grids
from adamo_lab.optimizers import ADAMO, ANGULAR
from adamo_lab.records import SUFFIX, Record, load
from adamo_lab.runs import Group, Line, capitalized, groups, telling
from adamo_lab.studies import STUDIES, Study
from adamo_lab.studies.base import Metric
from adamo_lab.studies.paper import PREMISE_TASKS
from adamo_lab.tables import columns_of, heading, number, spread
from adamo_lab.verdicts import FAILS, HOLDS, OPEN, after_correction, welch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHORT = re.compile(r"(?<=\b[0-9a-f]{7})[0-9a-f]+\b|,(?= with)")  # what a commit goes without
CHIP = re.compile(r"\(R\)| Processor @.*")  # what a machine goes without


def records(study: str) -> list[Record]:
    """The runs in a study's file."""
    found, problems = load(ROOT / "results" / f"{study}{SUFFIX}")
    if problems:
        raise ValueError("; ".join(problems))
    return found


def settled(name: str) -> list[Group]:
    """A study's file as groups of lines: the runs of a line differ in their seed alone."""
    return groups(sorted(records(name), key=lambda r: r.id), STUDIES[name])


def study(name: str, columns: Mapping[str, tuple[str, float, int]]) -> str:
    """Mean ± standard deviation of some results, each with the paper's value where it prints any.

    Columns are {result: (title, factor, digits)}. Groups of runs have a table each.
    """
    found = settled(name)
    tables = [group_table(group, columns, STUDIES[name].paper) for group in found]
    if len(found) == 1:
        return tables[0]
    return "".join(
        f"\n**{group.title}**\n\n{text}" for group, text in zip(found, tables, strict=True)
    )


def group_table(
    group: Group,
    columns: Mapping[str, tuple[str, float, int]],
    printed: Mapping[str, Mapping[str, tuple[float, float | None]]],
) -> str:
    """One table, and below it what ran it; hardware is a column only if rows differ in it."""
    known = {column for values in printed.values() for column in values}
    titles = []
    for column, (title, _, _) in columns.items():
        titles += [title, "paper's"] if column in known else [title]
    devices = sorted({machines(line.runs) for line in group.lines})
    mixed = ["hardware"] if len(devices) > 1 else []
    rows = [["optimizer", "settings", *titles, "n", *mixed]]
    for line in group.lines:
        cells = []
        for column, (_, factor, digits) in columns.items():
            cells.append(mean_and_sd(line.values(column), factor, digits))
            if column in known:
                theirs = printed.get(line.name, {}).get(column)
                cells.append(stated(theirs, factor, digits) if theirs else "–")
        rows.append([
            line.title, settings(line, group), *cells, str(len(line.runs)),
            *(machines(line.runs) for _ in mixed),
        ])  # fmt: skip
    about = [] if mixed else [f"Hardware: {devices[0]}."]
    return f"{table(rows)}\n{' '.join([*about, commits_of(group.runs)])}\n"


def commit_of(run: Record) -> str:
    """Seven digits of it, and whether files differed from it."""
    return SHORT.sub("", run.environment["commit"])


def commits_of(runs: Sequence[Record]) -> str:
    commits = sorted({commit_of(run) for run in runs})
    return f"{'Commits' if len(commits) > 1 else 'Commit'}: {', '.join(commits)}."


def sensitivity(name: str) -> str:
    """How many settings of a heat map are nearly as good as its best: one share a seed."""
    (group,) = settled(name)
    rows = [["optimizer", "settings", "best, %", "at", "within 1 point", "in one region", "n"]]
    for grid in grids(group):
        shares = [grid_values(group, grid.line.name, key) for key in GRID_METRICS]
        told = [f"{mean_and_sd(x, 100, 0)} %" if x else grid.finding for x in shares]
        best = [f"{100 * grid.best:.1f}", grid.best_setting]
        rows.append([grid.line.title, str(grid.count), *best, *told, str(len(shares[0]))])
    return f"{table(rows)}\nHardware: {machines(group.runs)}. {commits_of(group.runs)}\n"


def best_trials() -> str:
    """Of every optimizer's trials on a task, how many there are and the best; all are one run."""
    rows = [["task", "optimizer", "trials", "measured", "best", "at"]]
    for name in ("tuning-cifar100", "tuning-grokking", "tuning-language"):
        metric, where = STUDIES[name].metrics[0], STUDIES[name].title.removeprefix("Tuning on ")
        for group in settled(name):
            for title in dict.fromkeys(line.title for line in group.lines):
                mine = [line for line in group.lines if line.title == title]
                found = [(v, x) for x in mine for v in x.values(metric.key) if v is not None]
                choose = max if metric.higher_is_better else min
                value, line = choose(found, key=lambda pair: pair[0])
                rows.append([
                    f"{where}, {group.title.lower()}", title, str(len(mine)),
                    heading(metric), number(value, metric), settings(line, group),
                ])  # fmt: skip
    return table(rows)


def by_rate(name: str) -> str:
    """A row an optimizer, a column a learning rate: the best of the other settings tried there."""
    found = settled(name)
    return "".join(rates_table(group, len(found) > 1) for group in found)


def rates_table(group: Group, titled: bool) -> str:
    metric, rows = columns_of(group)[0], []
    by_name = {x.name: best_by_rate(group.named(x.name), metric) for x in group.lines}
    rates = sorted({rate for curve in by_name.values() for rate in curve})
    best = {r: metric.better(c[r][1].mean or 0 for c in by_name.values() if r in c) for r in rates}
    for name, curve in by_name.items():
        title, cells = group.named(name)[0].title, []
        for rate in rates:
            ours = curve[rate][1] if rate in curve else None
            text = spread(ours.mean, ours.sd, metric) if ours else "–"
            cells.append(f"**{text}**" if ours and ours.mean == best[rate] else text)
        rows.append([title, *cells])
    n = max(len(line.runs) for line in group.lines)
    heads = [["optimizer", *(f"lr {rate:g}" for rate in rates)]]
    title = f"\n**{capitalized(group.label)}**\n\n" if titled else ""
    seeds = "one seed" if n == 1 else f"means ± standard deviations of {n} seeds"
    said = f"{capitalized(heading(metric))}, {seeds}. Hardware: {machines(group.runs)}."
    return f"{title}{table([*heads, *rows])}\n{said} {commits_of(group.runs)}\n"


def beside_adamw(name: str) -> str:
    """A study's rows against AdamW: Welch's test, two-sided, and how soon each had AdamW's loss."""
    (group,) = settled(name)
    metric = STUDIES[name].metrics[0]
    base = group.named("adamw")[0]
    theirs = base.of(metric.key)
    tested = [line for line in group.lines if line is not base]
    found = [float(welch(line.of(metric.key), theirs).pvalue) for line in tested]
    corrected = false_discovery_control(found)
    shown = {id(line): (p, q) for line, p, q in zip(tested, found, corrected, strict=True)}
    rows = [["optimizer", "settings", heading(metric), "p", "corrected", "AdamW's steps, %", "n"]]
    for line in group.lines:
        ours, (p, q) = line.of(metric.key), shown.get(id(line), (None, None))
        soon = 100 * reached(line, metric, theirs.mean or 0)
        rows.append([
            line.title, settings(line, group), spread(ours.mean, ours.sd, metric),
            small(p), small(q), f"{soon:.0f}" if soon <= 100 else "–", str(ours.n),
        ])  # fmt: skip
    return f"{table(rows)}\nHardware: {machines(group.runs)}. {commits_of(group.runs)}\n"


def small(p: float | None) -> str:
    return "" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.1g}" if p < 0.1 else f"{p:.2f}"


def reached(line: Line, metric: Metric, value: float) -> float:
    """The share of a run after which the mean over the seeds is as good as ``value``; or ∞."""
    rows = list(zip(*(run.metrics for run in line.runs), strict=True))
    curve = [(r[0]["epoch"], statistics.fmean(x[metric.key] for x in r)) for r in rows]
    length, before = line.runs[0].config.epochs, curve[0]
    for epoch, here in curve:
        if metric.better((here, value)) == here:
            share = (value - before[1]) / (here - before[1]) if here != before[1] else 1
            return (before[0] + share * (epoch - before[0])) / length
        before = epoch, here
    return math.inf


PREMISE = {  # a result: its title, and how many digits
    "way_undone": ("way undone, %", 1),
    "way_a_step": ("way a step, %", 3),
    "radial_share": ("radial share of all ‖g‖², %", 2),
    "radial_share_of_a_step": ("of a step's, %", 2),
}


def premise() -> str:
    """What the norms do: the tasks of the premise in one table."""
    rows, seen = [["task", "optimizer", *(title for title, _ in PREMISE.values()), "n"]], []
    for task, (*_, name) in PREMISE_TASKS.items():
        (group,) = settled(f"premise-{task}")
        for line in group.lines:
            cells = (mean_and_sd(line.values(key), 100, n) for key, (_, n) in PREMISE.items())
            rows.append([name, line.title, *cells, str(len(line.runs))])
            seen += line.runs
    return f"{table(rows)}\nHardware: {machines(seen)}. {commits_of(seen)}\n"


def machines(runs: Sequence[Record]) -> str:
    return ", ".join(sorted({CHIP.sub("", run.environment["device"]) for run in runs}))


ALWAYS = ("lr", "weight_decay")
NOTED = ("radial_lr", "radial_lr_ratio", "curvature_target", "swa_lr", "decay_vectors")
NOTED += ("low_dim", "angular_rms", "max_angle", "decay_lr", "late")


def settings(line: Line, group: Group) -> str:
    """Learning rate and decay, what tells rows of one optimizer apart, and what is not usual."""
    same = [other.hyper for other in group.lines if other.title == line.title]

    def told(key: str, value: Any) -> bool:
        if key in ALWAYS or key in telling(same):
            return True
        return key in NOTED and value != {**ADAMO, **ANGULAR}.get(key, ...)

    keys = [k for k in dict.fromkeys((*ALWAYS, *NOTED, *line.hyper)) if k in line.hyper]
    space = "\N{NO-BREAK SPACE}"
    return ", ".join(f"{k}{space}{show(line.hyper[k])}" for k in keys if told(k, line.hyper[k]))


def show(value: Any) -> str:
    """A dictionary is what the protocol sets from epoch 200 on."""
    if not isinstance(value, Mapping):
        return str(value)
    return f"({', '.join(f'{k} {v}' for k, v in value.items())})"


def mean_and_sd(values: list[float | None], factor: float, digits: int) -> str:
    """Mean ± standard deviation; a run without a value never got there."""
    found = [factor * value for value in values if value is not None]
    if not found:
        return "never"
    mean = f"{statistics.fmean(found):.{digits}f}"
    text = mean if len(found) == 1 else f"{mean} ± {statistics.stdev(found):.{digits}f}"
    return text if len(found) == len(values) else f"{text} ({len(found)} of {len(values)} runs)"


def stated(value: tuple[float, float | None], factor: float, digits: int) -> str:
    """Mean, and ± standard deviation where the paper prints one."""
    return " ± ".join(f"{factor * x:.{digits}f}" for x in value if x is not None)


def bench(name: str) -> str:
    """Time of a step against fused AdamW: every optimizer on every network."""
    found = load_bench(name)["networks"]
    names = list(dict.fromkeys(o for network in found.values() for o in network["optimizers"]))
    rows = [["optimizer", *(f"{k} ({v['parameters'] / 1e6:.1f} M)" for k, v in found.items())]]
    for optimizer in names:
        cells = [network["optimizers"].get(optimizer) for network in found.values()]
        rows.append([optimizer, *(ratio(cell) if cell else "–" for cell in cells)])
    return table(rows)


def ratio(cell: dict[str, Any]) -> str:
    value = cell.get("device_ratio", cell["ratio"])
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def training() -> str:
    rows = [["network", "AngularAdamW", "AdamO", "steps/s under AdamW fused"]]
    for network, found in load_bench("bench-cuda-training")["training"].items():
        shares = [f"{found[name]:.3f}" for name in ("AngularAdamW", "AdamO")]
        rows.append([network, *shares, f"{found['adamw_fused_steps_per_second']:.0f}"])
    return table(rows)


def load_bench(name: str) -> Any:
    return json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())


def table(rows: list[list[str]]) -> str:
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


GROKKING = {
    "test_accuracy": ("test accuracy, %", 100.0, 2),
    "grokking_epoch": ("grokking epoch", 1.0, 0),
}
TABLES: dict[str, Callable[[], str]] = {
    "language": lambda: study("language", {"valid_loss": ("validation loss", 1, 3)}),
    "table1": lambda: study(
        "table1",
        {
            "swa_test_accuracy": ("SWA, %", 100, 2),
            "test_accuracy": ("last epoch, %", 100, 2),
            "best_test_accuracy": ("best epoch, %", 100, 2),
        },
    ),
    "table2": lambda: study("table2", GROKKING),
    "table3": lambda: study("table3", GROKKING),
    "fig1": lambda: study(
        "fig1",
        {
            "weight_norm": ("‖w‖", 1, 1),
            "boundary_length": ("boundary length", 1, 2),
            "test_accuracy": ("test accuracy, %", 100, 1),
        },
    ),
    "tuning": best_trials,
    "evidence-gpt": lambda: by_rate("evidence-gpt"),
    "evidence-vit": lambda: by_rate("evidence-vit"),
    "evidence-digits": lambda: by_rate("evidence-digits"),
    "evidence-small-resnet": lambda: by_rate("evidence-small-resnet"),
    "evidence-small-enwik8": lambda: by_rate("evidence-small-enwik8"),
    "evidence-small-enwik8-after": lambda: by_rate("evidence-small-enwik8-after"),
    **{
        name: partial(beside_adamw, name)
        for name in (
            "evidence-small-resnet-verdict",
            "evidence-small-gpt-verdict",
            "evidence-small-gpt-after-verdict",
            "evidence-small-enwik8-after-verdict",
        )
    },
    "language-rows": lambda: study("language-rows", {"valid_loss": ("validation loss", 1, 3)}),
    "premise": premise,
    "fig4": lambda: sensitivity("fig4"),
    "cuda": lambda: bench("bench-cuda"),
    "cpu": lambda: bench("bench-cpu"),
    "training": training,
}


# --- claims and their verdicts

VERDICTS = {HOLDS: "holds", FAILS: "does not hold", OPEN: "open"}
OURS = "ours"  # how the source of a claim begins that is not the paper's


@cache
def judged() -> list[tuple[Study, Judged]]:
    """Every claim of every study with its verdict, as in the laboratory's report."""
    return [(study, j) for name, study in STUDIES.items() for j in in_brief(settled(name))]


def is_ours(found: Judged) -> bool:
    return found.claim.source.startswith(OURS)


def claims() -> str:
    """Those of the paper: a heading and a table for every study that has some."""
    parts = []
    for study in STUDIES.values():
        found = [j for s, j in judged() if s is study and not is_ours(j)]
        rows = [["claim", "in the paper", "verdict", "numbers"]]
        rows += [[claim(j), j.claim.source, verdict(j), j.evidence] for j in found]
        if found:
            parts.append(f"### {study.title}\n\n{study.about}\n\n{table(rows)}")
    return "\n" + "\n".join(parts) + "\n"


def own_claims() -> str:
    rows = [["claim", "study", "verdict", "numbers"]]
    rows += [[claim(j), study.title, verdict(j), j.evidence]
             for study, j in judged() if is_ours(j)]  # fmt: skip
    return table(rows)


def claim(j: Judged) -> str:
    return f"{j.claim.text.removesuffix('.')} ({j.group.label})." if j.group.label else j.claim.text


def verdict(j: Judged) -> str:
    return f"**{VERDICTS[j.outcome]}**"


def counts() -> str:
    """How many of the paper's claims hold, and how many of ours."""
    texts = []
    for whose, ours in (("the paper's", False), ("our own", True)):
        chosen = [j for _, j in judged() if is_ours(j) == ours]
        found = Counter(j.outcome for j in chosen)
        weak = sum(j.verdict.reason == "no significant difference" for j in chosen)
        holds = "holds" if found[HOLDS] == 1 else "hold"
        does = "does" if found[FAILS] == 1 else "do"
        are = "is" if found[OPEN] <= 1 else "are"
        fails = f"{found[FAILS]} {does} not ({weak} of them for want of a significant difference)"
        said = f"{found[HOLDS]} {holds}, {fails}, and {found[OPEN] or 'none'} {are} open"
        texts.append(f"Of {whose} {found.total()} claims, {said}.")
    left = after_correction(j.verdict for _, j in judged())
    texts.append(
        f"With all tests taken together (false-discovery control at 5 %) {left} still hold."
    )
    return " ".join(texts) + "\n"


TABLES |= {
    "claims": claims,
    "claims-ours": own_claims,
    "claims-counts": counts,
}


# --- pages


def filled(page: str) -> str:
    """A page's text with its tables made anew."""
    return TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


if __name__ == "__main__":
    for path in PAGES:
        text = path.read_text()
        if (new := filled(text)) != text:
            path.write_text(new)
            print(path)
