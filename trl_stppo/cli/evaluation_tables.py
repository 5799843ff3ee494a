"""Print a table of evaluation metrics by agent and data set, with their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ..statistics import mean_interval
from ..watch.runs import MEASURES

Figures = dict[str, float]
# Label of an agent -> data set or average -> metrics.
Results = dict[str, dict[str, Figures]]
# Success and score of each episode, in the order of the rows.
Outcomes = list[tuple[bool | None, float]]
MEAN = "mean of data sets"
BOUNDS = {f"{column} {end}": (column, end) for column in ("success", "score") for end in ("low", "high")}


def figures_of(
    metrics: Mapping[str, float], functions: Mapping[str, str] | None = None, prefix: str = ""
) -> Figures:
    """Return the table's columns for one data set, without metrics that are missing or NaN.

    `functions` maps the name of a reward function to the title of its column. Each metric's name begins with
    `prefix`.
    """
    names = MEASURES | {key: f"{MEASURES[c]}_{end}" for key, (c, end) in BOUNDS.items()}
    names |= {title: f"rewards/{name}/mean" for name, title in (functions or {}).items()}
    values = {column: metrics.get(prefix + name) for column, name in names.items()}
    return {k: float(v) for k, v in values.items() if v is not None and not math.isnan(v)}


def with_mean(parts: dict[str, Figures]) -> dict[str, Figures]:
    """Add the mean of several data sets to their metrics.

    A column is averaged if all data sets have it. Intervals are combined like intervals of independent
    estimates: the squares of the distances to each bound add up, divided by the squared number of data sets
    (MOVER; Zou and Donner 2008, Statistics in Medicine 27, 1693-1702).
    """
    every = list(parts.values())
    if len(every) < 2:
        return parts
    mean: Figures = {"episodes": sum(figures["episodes"] for figures in every)}
    for column in (c for c in every[0] if c not in (*BOUNDS, *mean)):
        if all(column in figures for figures in every):
            mean[column] = fmean(figures[column] for figures in every)
    for key, (column, end) in BOUNDS.items():
        if all(key in figures for figures in every):
            apart = math.hypot(*(figures[key] - figures[column] for figures in every)) / len(every)
            mean[key] = mean[column] + math.copysign(apart, -1 if end == "low" else 1)
    return {**parts, MEAN: mean}


def print_table(results: Results) -> None:
    """Print the results as a table with one line per agent and data set."""
    rows = [(label, name, f) for label, parts in results.items() for name, f in parts.items()]
    present = dict.fromkeys(column for *_, figures in rows for column in figures)
    wanted = dict.fromkeys([*MEASURES, *present])
    shown = [c for c in wanted if c in present and c not in BOUNDS]
    sets = list(dict.fromkeys(name for _, name, _ in rows))
    names = ["agent", "data set"] if len(sets) > 1 else ["agent"]
    title = None if len(sets) > 1 else escape(*sets)
    options = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "show_edge": False, "pad_edge": False}
    columns = [Column(name, overflow="fold") for name in names]
    table = Table(*columns, title=title, title_justify="left", **options)
    for column in shown:
        # At 80 columns a heading breaks, and an interval does not.
        kept = f"{column} low" in present
        table.add_column(column, justify="right", overflow="fold", no_wrap=kept)
    for label, name, figures in rows:
        cells = [_cell(figures, column) for column in shown]
        table.add_row(*map(escape, [label, name][: len(names)]), *map(escape, cells))
    Console().print(table)


def print_differences(outcomes: Mapping[str, Outcomes], repetitions: int) -> None:
    """Print each agent's difference from the first agent over all rows, with an interval paired by row.

    `repetitions`: number of consecutive episodes of a row. Success is compared if all episodes are judged,
    else the score.
    """
    (first, base), *others = outcomes.items()
    judged = all(success is not None for each in outcomes.values() for success, _ in each)
    column, index = ("success", 0) if judged else ("score", 1)
    for label, own in others:
        gains = [float(a[index] or 0) - float(b[index] or 0) for a, b in zip(own, base, strict=True)]
        totals = [sum(gains[at : at + repetitions]) for at in range(0, len(gains), repetitions)]
        bounds = mean_interval(totals, [repetitions] * len(totals))
        interval = "" if bounds is None else f" [{bounds[0]:+.3f}, {bounds[1]:+.3f}]"
        gain = sum(gains) / max(len(gains), 1)
        print(f"{label} less {first}, all rows, paired: {column} {gain:+.3f}{interval}")


def _cell(figures: Figures, column: str) -> str:
    """Format a table cell: a value with its 95 % interval, or "-" if the metric is missing."""
    if column not in figures:
        return "-"
    text = f"{figures[column]:.0f}" if column == "episodes" else f"{figures[column]:.3f}"
    if f"{column} low" not in figures:
        return text
    return f"{text} [{figures[f'{column} low']:.3f}, {figures[f'{column} high']:.3f}]"
