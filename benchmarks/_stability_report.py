"""From the study's table to figures per cell: collapses, success, what the updates were like."""

from __future__ import annotations

import itertools
import random
import statistics
from typing import Any

from _stability_grid import CELL_FIELDS, COLLAPSE, FIGURES, SUCCESS, Table, key_of
from rich.console import Console
from rich.table import Table as Grid

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


def estimate_agreement(table: Table) -> dict[str, float]:
    """Correlation of the exact and the estimated share of the kept part, over updates of the test."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in table.rows:
        kept, bias = number(row, "clip_bias/grad_norm"), number(row, "clip_bias/norm")
        estimated = number(row, "clip_bias/estimated_share")
        if row["stage"] != "test" or row["estimator"] != "exact" or not kept or not bias:
            continue
        if estimated is not None:
            pairs.setdefault(row["method"], []).append((kept / (kept + bias), estimated))
    return {
        method: statistics.correlation(*zip(*points, strict=True))
        for method, points in pairs.items()
        if len(set(points)) > 2
    }


def print_tables(found: list[dict[str, Any]]) -> None:
    """One table per stage and task."""
    console = Console(width=150)
    columns = {
        "clip": "policy/clip_fraction",
        "KL": "policy/approx_kl",
        "|g|": "clip_bias/grad_norm",
        "|C|": "clip_bias/norm",
        "cos": "clip_bias/cosine",
        "scale": "clip_bias/scale",
    }
    for (stage, task), entries in itertools.groupby(found, lambda e: (e["stage"], e["task"])):
        grid = Grid(title=f"{stage}, {task}")
        for name in ("pressure", "rate", "method", "correction", "collapsed", "final", "90 %"):
            grid.add_column(name)
        for name in ("area", *columns):
            grid.add_column(name, justify="right")
        order = sorted(entries, key=lambda e: (e["pressure"], float(e["learning_rate"])))
        for e in order:
            rule = "" if e["mode"] == "none" else f"{e['mode']} {e['power']} on {e['target']}"
            extra = [part for part in (e["estimator"], e["optimizer"]) if part in ("logits", "sgd")]
            extra += [f"clip {e['cliprange']}"] if float(e["cliprange"]) != 0.2 else []
            grid.add_row(
                e["pressure"],
                f"{float(e['learning_rate']):.2g}",
                e["method"],
                " ".join([rule, *extra]),
                f"{e['collapsed']} / {e['runs']}",
                f"{e['final']:.2f}",
                f"{e['final_low']:.2f} - {e['final_high']:.2f}",
                f"{e['area']:.2f}",
                *("" if e[name] is None else f"{e[name]:.3g}" for name in columns.values()),
            )
        console.print(grid)
