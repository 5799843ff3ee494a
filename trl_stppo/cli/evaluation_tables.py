"""Figures of evaluations as tables: per data set, averaged, side by side; on the screen and in files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..hub.markdown import table

Figures = dict[str, float]
# Label of an agent -> data set, or kind of average -> its figures.
Results = dict[str, dict[str, Figures]]
MEAN, ALL_ROWS = "mean of data sets", "all rows"
# Column -> name among the figures of an evaluation.
MEASURES = {
    "success": "episode/success_rate",
    "score": "episode/score",
    "turns": "turns/mean",
    "valid actions": "turns/valid_action_rate",
    "episodes": "episodes",
    "judged": "episode/success_known",
}
# Columns that come with a 95 % interval.
BOUNDED = ("success", "score")


def figures_of(
    metrics: Mapping[str, float], functions: Mapping[str, str] | None = None, prefix: str = ""
) -> Figures:
    """The columns of one data set; what is not known is left out.

    Args:
        metrics: figures of an evaluation.
        functions: names of reward functions that have a column of their own -> its title.
        prefix: of the names in `metrics`.
    """
    names = dict(MEASURES)
    for column in BOUNDED:
        names |= {f"{column} {end}": f"{MEASURES[column]}_{end}" for end in ("low", "high")}
    names |= {title: f"rewards/{name}/mean" for name, title in (functions or {}).items()}
    values = {column: metrics.get(prefix + name) for column, name in names.items()}
    return {k: float(v) for k, v in values.items() if v is not None and not math.isnan(v)}


def with_averages(parts: dict[str, Figures]) -> dict[str, Figures]:
    """The data sets, their mean, and the mean over all episodes.

    A column is averaged where all data sets have it. Intervals of the parts are combined as those of
    independent estimates: the squares of the distances to each bound add up, times the squared weights
    (MOVER; Zou and Donner 2008, Statistics in Medicine 27, 1693-1702).
    """
    if len(parts) < 2:
        return parts
    every = list(parts.values())
    even = [1.0 / len(every)] * len(every)
    result = dict(parts)
    for name, weights_of in ((MEAN, lambda column: even), (ALL_ROWS, _by_size(every))):
        averaged: Figures = {"episodes": sum(f["episodes"] for f in every)}
        for column in _common(every):
            weights = weights_of(column)
            center = sum(w * f[column] for w, f in zip(weights, every, strict=True))
            averaged[column] = center
            for end in ("low", "high"):
                key = f"{column} {end}"
                if all(key in f for f in every):
                    apart = [w * (f[key] - f[column]) for w, f in zip(weights, every, strict=True)]
                    averaged[key] = center + math.copysign(
                        math.hypot(*apart), -1 if end == "low" else 1
                    )
        result[name] = averaged
    return result


def _by_size(every: list[Figures]) -> Any:
    def weights(column: str) -> list[float]:
        """Shares of the episodes that the column is a mean of."""
        judged = [
            f["episodes"] * (f.get("judged", 1.0) if column == "success" else 1.0) for f in every
        ]
        return [count / sum(judged) for count in judged]

    return weights


def _common(every: list[Figures]) -> list[str]:
    bounds = tuple(f"{column} {end}" for column in BOUNDED for end in ("low", "high"))
    return [c for c in every[0] if c not in (*bounds, "episodes") and all(c in f for f in every)]


# -------------------------------------------------------------------------- layouts


def shown(figures: Figures, column: str) -> str:
    """A cell."""
    value = figures.get(column)
    if value is None:
        return "-"
    return f"{value:.0f}" if column == "episodes" else f"{value:.3f}"


def with_interval(figures: Figures, column: str) -> str:
    """A cell with the bounds behind the value."""
    text = shown(figures, column)
    if f"{column} low" not in figures:
        return text
    return f"{text} [{figures[f'{column} low']:.3f}, {figures[f'{column} high']:.3f}]"


def agent_table(parts: dict[str, Figures]) -> list[list[str]]:
    """One agent: a line per data set, the heading first."""
    present = {column for figures in parts.values() for column in figures}
    extra = sorted(present - {*MEASURES, *(f"{c} {e}" for c in BOUNDED for e in ("low", "high"))})
    main = "success" if "success" in present else "score"
    others = [c for c in ("score", *extra, "turns", "valid actions") if c in present and c != main]
    lines = [["data set", main, "95 % interval", *others, "episodes"]]
    for name, figures in parts.items():
        bounds = with_interval(figures, main).partition(" [")[2].rstrip("]").replace(", ", " - ")
        cells = [shown(figures, column) for column in (*others, "episodes")]
        lines.append([name, shown(figures, main), bounds or "-", *cells])
    return lines


def comparison(results: Results) -> list[list[str]]:
    """Several agents: a line per data set and a column per agent, the heading first."""
    every = [figures for parts in results.values() for figures in parts.values()]
    main = "success" if any("success" in figures for figures in every) else "score"
    names = list(dict.fromkeys(name for parts in results.values() for name in parts))
    lines = [[f"{main} [95 % interval]", *results]]
    for name in names:
        lines.append(
            [name, *(with_interval(parts.get(name, {}), main) for parts in results.values())]
        )
    return lines


def layouts(results: Results) -> dict[str, list[list[str]]]:
    """All tables by title."""
    tables = {} if len(results) < 2 else {"Agents side by side": comparison(results)}
    return tables | {label: agent_table(parts) for label, parts in results.items()}


def print_tables(results: Results) -> None:
    """Show all tables on the screen."""
    console = Console()
    for title, (heading, *lines) in layouts(results).items():
        drawn = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # eight in 80 characters
        for index, name in enumerate(heading):
            side: Any = "right" if index else "left"
            drawn.add_column(
                name.replace("[", r"\["), justify=side, no_wrap=name != "valid actions"
            )
        for line in lines:
            drawn.add_row(*(cell.replace("[", r"\[") for cell in line))
        console.print(drawn)


def markdown(results: Results) -> str:
    """All tables as Markdown."""
    parts = []
    for title, (heading, *lines) in layouts(results).items():
        parts += [f"**{title}**", "", table(heading, lines), ""]
    return "\n".join(parts)


def as_csv(results: Results) -> str:
    """One line per agent and data set, all figures."""
    rows = [(label, name, f) for label, parts in results.items() for name, f in parts.items()]
    columns = list(dict.fromkeys(column for *_, figures in rows for column in figures))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["agent", "data set", *columns])
    for label, name, figures in rows:
        writer.writerow([label, name, *(figures.get(column, "") for column in columns)])
    return text.getvalue()


def write_files(path: Path, results: Results, settings: Mapping[str, Any]) -> list[Path]:
    """Write `path` with the endings .json, .md and .csv; the JSON has the settings too."""
    stem = path.with_suffix("") if path.suffix in (".json", ".md", ".csv") else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    contents = {
        ".json": json.dumps({"settings": settings, "results": results}, indent=1) + "\n",
        ".md": markdown(results),
        ".csv": as_csv(results),
    }
    written = []
    for ending, text in contents.items():
        written.append(stem.with_name(stem.name + ending))
        written[-1].write_text(text)
    return written
