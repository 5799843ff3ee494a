"""From the study's table to figures per cell: collapses, success, what the updates were like."""

from __future__ import annotations

import itertools
import random
import statistics
from typing import Any

from _stability_grid import CELL_FIELDS, COLLAPSE, FIGURES, SUCCESS, Table, key_of

BOOTSTRAP, LEVEL = 1_000, 0.9
WINDOW = 3  # rollouts, of the success at its best
Row = dict[str, str]


def number(row: Row, name: str) -> float | None:
    """A figure of a row, None where it was not measured."""
    return float(row[name]) if row.get(name) else None


def curve(run: list[Row], name: str) -> list[float]:
    """A figure update by update."""
    values = [number(row, name) for row in run if row["phase"] == "train"]
    return [value for value in values if value is not None]


def judge(run: list[Row]) -> dict[str, float]:
    """What one run came to."""
    start, end = (number(row, SUCCESS) or 0.0 for row in run if row["phase"] == "test")
    success = curve(run, SUCCESS)
    smooth = [statistics.fmean(success[i : i + WINDOW]) for i in range(len(success) - WINDOW + 1)]
    best = max([start, *smooth])
    failed = any(row["phase"] == "failed" for row in run)
    result = {
        "start": start,
        "final": 0.0 if failed else end,
        "best": best,
        "collapsed": float(failed or end < COLLAPSE * best),
        "area": statistics.fmean(success) if success else 0.0,
    }
    for name in FIGURES[1:]:
        values = curve(run, name)
        if values:
            result[name] = statistics.fmean(values)
    return result


def bootstrap(values: list[float]) -> tuple[float, float]:
    """Percentile interval of the mean over seeds."""
    dice = random.Random(0)
    means = sorted(statistics.fmean(dice.choices(values, k=len(values))) for _ in range(BOOTSTRAP))
    tail = int(BOOTSTRAP * (1 - LEVEL) / 2)
    return means[tail], means[-1 - tail]


def summaries(table: Table) -> list[dict[str, Any]]:
    """One entry per cell, over its seeds."""
    seed = CELL_FIELDS.index("seed")

    def cell_of(key: tuple[str, ...]) -> tuple[str, ...]:
        return key[:seed] + key[seed + 1 :]

    runs = {key: list(rows) for key, rows in itertools.groupby(table.rows, key_of)}
    cells: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for key, rows in runs.items():
        cells.setdefault(cell_of(key), []).append(judge(rows))
    names = [name for name in CELL_FIELDS if name != "seed"]
    found = []
    for cell, judged in cells.items():
        entry: dict[str, Any] = dict(zip(names, cell, strict=True))
        entry["runs"] = len(judged)
        entry["collapsed"] = int(sum(run["collapsed"] for run in judged))
        finals = [run["final"] for run in judged]
        entry["final_low"], entry["final_high"] = bootstrap(finals)
        for name in ("start", "final", "area", *FIGURES[1:]):
            values = [run[name] for run in judged if name in run]
            entry[name] = statistics.fmean(values) if values else None
        found.append(entry)
    return found
