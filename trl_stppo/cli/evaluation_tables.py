"""Print a table of evaluation metrics by agent and data set, with averages."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..statistics import mean_interval
from ..watch.runs import MEASURES

Figures = dict[str, float]
# Label of an agent -> data set or average -> metrics.
Results = dict[str, dict[str, Figures]]
# Success and score of each episode, in the order of the rows.
Outcomes = list[tuple[bool | None, float]]
MEAN, ALL_ROWS = "mean of data sets", "all rows"
BOUNDS = {
    f"{column} {end}": (column, end) for column in ("success", "score") for end in ("low", "high")
}


def figures_of(
    metrics: Mapping[str, float], functions: Mapping[str, str] | None = None, prefix: str = ""
) -> Figures:
    """Return the table's columns for one data set, without metrics that are missing or NaN.

    `functions` maps the name of a reward function to the title of its column. Each metric's name begins with
    `prefix`.
    """
    names = MEASURES | {"judged": "episode/success_known"}
    names |= {key: f"{MEASURES[c]}_{end}" for key, (c, end) in BOUNDS.items()}
    names |= {title: f"rewards/{name}/mean" for name, title in (functions or {}).items()}
    values = {column: metrics.get(prefix + name) for column, name in names.items()}
    return {k: float(v) for k, v in values.items() if v is not None and not math.isnan(v)}


def with_averages(parts: dict[str, Figures]) -> dict[str, Figures]:
    """Add two averages to the metrics: the mean over data sets, and the mean over all episodes.

    A column is averaged if all data sets have it. Intervals are combined like intervals of independent
    estimates: the squares of the distances to each bound add up, times the squared weights
    (MOVER; Zou and Donner 2008, Statistics in Medicine 27, 1693-1702).
    """
    every, result = list(parts.values()), dict(parts)
    if len(every) < 2:
        return result
    common = [c for c in every[0] if c != "episodes" and all(c in f for f in every)]
    for name in (MEAN, ALL_ROWS):
        averaged: Figures = {"episodes": sum(f["episodes"] for f in every)}
        for column in (c for c in common if c not in BOUNDS):
            counts = [1.0] * len(every)
            # Weight each data set by the number of episodes in the column's mean.
            if name == ALL_ROWS:
                judged = [f.get("judged", 1.0) if column == "success" else 1.0 for f in every]
                counts = [f["episodes"] * share for f, share in zip(every, judged, strict=True)]
            weights = [count / sum(counts) for count in counts]
            pairs = list(zip(weights, every, strict=True))
            averaged[column] = sum(weight * f[column] for weight, f in pairs)
            for key in (key for key in common if BOUNDS.get(key, ("",))[0] == column):
                apart = math.hypot(*(weight * (f[key] - f[column]) for weight, f in pairs))
                averaged[key] = averaged[column] + math.copysign(apart, -1 if "low" in key else 1)
        result[name] = averaged
    return result


def print_table(results: Results) -> None:
    """Print the results as a table with one line per agent and data set."""
    rows = [(label, name, f) for label, parts in results.items() for name, f in parts.items()]
    present = dict.fromkeys(column for *_, figures in rows for column in figures)
    wanted = dict.fromkeys([*MEASURES, *present])
    shown = [c for c in wanted if c in present and c not in BOUNDS and c != "judged"]
    sets = list(dict.fromkeys(name for _, name, _ in rows))
    names = ["agent", "data set"] if len(sets) > 1 else ["agent"]
    title = None if len(sets) > 1 else escape(*sets)
    table = Table(*names, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for column in shown:
        table.add_column(column, justify="right")
    for label, name, figures in rows:
        cells = [_cell(figures, column) for column in shown]
        table.add_row(*map(escape, [label, name][: len(names)]), *map(escape, cells))
    Console().print(table)


def print_differences(outcomes: Mapping[str, Outcomes], repetitions: int) -> None:
    """Print how much each agent is above the first over all rows, with an interval paired by row.

    `repetitions`: number of consecutive episodes of a row. Success is compared if all episodes are judged,
    else the score.
    """
    (first, base), *others = outcomes.items()
    judged = all(success is not None for each in outcomes.values() for success, _ in each)
    column, index = ("success", 0) if judged else ("score", 1)
    for label, own in others:
        gains = [
            float(a[index] or 0) - float(b[index] or 0) for a, b in zip(own, base, strict=True)
        ]
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
