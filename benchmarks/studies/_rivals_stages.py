"""Who takes part in the study of rivals, in which runs, how they are ranked; `rivals.md` has the rules."""

from __future__ import annotations

import csv
import functools
import gzip
import itertools
import json
import os
import statistics
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _rivals_trainer import FIGURES as OWN_FIGURES
from _rivals_trainer import parts_of
from _stability_grid import FIGURES, PILOT_SEEDS, SUCCESS, TUNE_SEEDS, Cell
from _stability_report import judge
from _stability_stages import levels as levels_of
from _stability_stages import pilot as pilot_cells

RECORDED = Path(__file__).parents[2] / "docs/figures/stability.csv.gz"  # of the stability study
FIRST_TASKS = ("corridor", "demo")  # those of the first stage, whose score counts
TASKS = (*FIRST_TASKS, "textworld")
LEVELS = ("threshold", "extreme")
CLIP_RANGES = {"corridor": 0.08, "demo": 0.2, "textworld": 0.2}  # of turn ratios; tokens have 0.2
REFERENCES = ("token", "turn", "share")
CANDIDATES = (
    *("episodes", "episodes+share", "episodes+share-logits", "share-logits"),
    *("turns", "turns+share", "winners", "winners+share", "winners+share-logits", "topr"),
    *("vtrace", "vtrace+share", "vtrace-mean+share", "turn-gae+share", "token-gae+share"),
    *("critic-lambda+share", "episodes+vtrace+share"),
    *("mask", "mask+share", "m2po", "m2po+share", "decoupled", "decoupled+share"),
    *("ess", "ess-turns", "ess-0.55+tis", "episodes+ess"),
    *("kl-0.003", "kl-0.01", "kl-0.03", "episodes+kl-0.01"),
    *("target-kl-0.01", "target-kl-0.03"),
    *("sapo", "cispo", "vespo"),
)
SURVIVORS, TIE, BEST = 3, 0.01, 12
Record = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One run: a rival, and the cell of the stability study that it takes the place of."""

    arm: str
    level: str
    cell: Cell
    base: float = 1.0

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the run among the records."""
        cell = self.cell
        return (
            cell.stage,
            cell.task,
            self.arm,
            cell.pressure,
            *map(str, (cell.learning_rate, cell.seed)),
        )

    @property
    def task(self) -> str:
        """What it trains on."""
        return self.cell.task

    @property
    def title(self) -> str:
        """For one line of progress."""
        return " ".join(self.key)


def trial(
    stage: str,
    task: str,
    arm: str,
    name: str,
    level: tuple[str, float],
    seed: int,
    base: float = 1.0,
) -> Trial:
    """A run of a rival at a level."""
    tokens = "token" in parts_of(arm)
    method, width = ("ppo", 0.2) if tokens else ("turn-ppo", CLIP_RANGES[task])
    power = 4.0 if "share" in arm else 1.0
    cell = Cell(stage, task, method, *level, seed, power=power, cliprange=width)
    return Trial(arm, name, cell, base)


class Records:
    """The results file: a compressed line of JSON per finished run, appended as it ends.

    Args:
        path: .jsonl.gz; what a killed process has left at its end is cut off.
        figures: of the log that a record keeps.

    Attributes:
        about: goes into every record that is added.
    """

    def __init__(self, path: Path, figures: Iterable[str] = (*FIGURES, *OWN_FIGURES)) -> None:
        self.path, self.rows, self.figures = path, list[Record](), tuple(figures)
        self.about: Record = {}
        if not path.is_file():
            return
        complete = 0
        data = path.read_bytes()
        while complete < len(data):  # every run is a member of its own
            member = zlib.decompressobj(wbits=31)
            try:
                line = member.decompress(data[complete:])
            except zlib.error:
                break
            if not member.eof:
                break
            self.rows.append(json.loads(line))
            complete = len(data) - len(member.unused_data)
        if complete < len(data):
            os.truncate(path, complete)

    @property
    def keys(self) -> set[tuple[str, ...]]:
        """The runs that are there."""
        return {tuple(row["key"]) for row in self.rows}

    def add(self, done: Trial, rows: list[dict[str, Any]]) -> None:
        """Append a run, from the rows of `_stability_run.run`."""
        updates = [row for row in rows if row["phase"] == "train"]
        names = [n for n in self.figures if any(r.get(n) is not None for r in updates)]
        record: Record = {"key": list(done.key), "level": done.level, "base": done.base}
        record |= self.about
        record["cell"] = asdict(done.cell)
        record["test"] = [row[SUCCESS] for row in rows if row["phase"] == "test"]
        record["curves"] = {name: [_short(row.get(name)) for row in updates] for name in names}
        record["error"] = next((row["error"] for row in rows if row["phase"] == "failed"), None)
        record |= {name: round(rows[-1][name], 1) for name in ("seconds", "cpu")}
        self.rows.append(record)
        with open(self.path, "ab") as file:
            file.write(gzip.compress(json.dumps(record).encode() + b"\n", mtime=0))
            file.flush()
            os.fsync(file.fileno())

    def of(self, stage: str, task: str) -> list[Record]:
        """The runs of a stage on a task."""
        return [r for r in self.rows if (r["cell"]["stage"], r["cell"]["task"]) == (stage, task)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def rows_of(record: Record) -> list[dict[str, str]]:
    """A run as the stability study's table has it."""
    curves = record["curves"]
    count = len(next(iter(curves.values()), []))
    lines: list[dict[str, Any]] = [{"phase": "test", "update": 0, SUCCESS: record["test"][0]}]
    for update in range(count):
        figures = {name: curve[update] for name, curve in curves.items()}
        lines.append({"phase": "train", "update": update + 1, **figures})
    if record["error"]:
        lines.append({"phase": "failed", "error": record["error"]})
    last = {"phase": "test", "update": count, SUCCESS: record["test"][-1]}
    lines.append({**last, "seconds": record["seconds"]})
    shown = [{n: "" if v is None else str(v) for n, v in line.items()} for line in lines]
    cell = {name: str(value) for name, value in record["cell"].items()}
    return [{**cell, **line} for line in shown]


# -------------------------------------------------------------------------------- stages


def levels(records: Records, task: str) -> dict[str, tuple[str, float]]:
    """Pressure and rate of each level, by the stability study's rule, from token PPO alone."""
    pilots = () if task == "corridor" else tuple(map(json.dumps, records.of("pilot", task)))
    return dict(_levels(task, pilots))


@functools.lru_cache
def _levels(task: str, pilots: tuple[str, ...]) -> dict[str, tuple[str, float]]:
    if task == "corridor":
        with gzip.open(RECORDED, "rt", newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = [row for record in pilots for row in rows_of(json.loads(record))]
    table: Any = SimpleNamespace(rows=rows)
    found = levels_of(table, task)
    found.setdefault("threshold", ("stale", found["extreme"][1]))
    # Where asynchronous users live: hardly any pressure but that of one update.
    found["overlap"] = ("overlap", found["none"][1])
    return found


def pilot(records: Records, task: str) -> list[Trial]:
    """Token PPO at the pressures and rates that `levels` looks at; the corridor's is the stability study's.

    What it looks at next depends on what it has seen, so it is asked again after each round.
    """
    if task == "corridor":
        return []
    cells: Any = pilot_cells
    every = [Trial("token", cell.pressure, cell) for cell in cells(SimpleNamespace(rows=[]), task)]
    missing = [job for job in every if job.key not in records.keys]
    try:
        levels(records, task)
    except KeyError as error:  # the next pressure and rate
        return [job for job in missing if (job.level, job.cell.learning_rate) == error.args[0]]
    return []


def on_policy(records: Records, task: str) -> list[Trial]:
    """Turn ratios without pressure: how large the effective share is then."""
    level = levels(records, task)["none"]
    return [trial("on-policy", task, "turn", "none", level, seed) for seed in PILOT_SEEDS]


def base_of(records: Records, task: str, arm: str) -> float:
    """Effective share at which a step of "ess" or "ess-turns" is whole: the median on policy."""
    name = "study/ess_turns" if "ess-turns" in parts_of(arm) else "study/ess_episodes"
    if "ess" not in arm:
        return 1.0
    shares = [x for record in records.of("on-policy", task) for x in record["curves"][name]]
    return float(f"{statistics.median(shares):.4g}")


def first(records: Records, task: str) -> list[Trial]:
    """All rivals at both levels, on other tasks the first one's best; each seed of all before the next."""
    if task not in FIRST_TASKS:
        return []
    at, arms = levels(records, task), [*REFERENCES, *CANDIDATES]
    if task != TASKS[0]:
        before = {line["arm"]: line["cells"] for line in table_of(records)}
        own = {a: [x for c, x in cells.items() if task not in c] for a, cells in before.items()}
        best = sorted(CANDIDATES, key=lambda arm: -sum(own.get(arm, [])))[:BEST]
        arms = sorted([*REFERENCES, *best], key=lambda arm: -sum(own.get(arm, [])))
    return [
        trial("first", task, arm, name, at[name], seed, base_of(records, task, arm))
        for seed, name, arm in itertools.product(TUNE_SEEDS, LEVELS, arms)
    ]


def reproduce(records: Records, task: str) -> list[Trial]:
    """Cells of the study's own pilot, which had another prototype."""
    cells: dict[str, list[tuple[str, float, str]]] = {
        "corridor": [
            *(("both", 1e-3, arm) for arm in ("share", "episodes+share")),
            *(("both", 1.4e-4, arm) for arm in ("turn", "episodes")),
        ],
        "demo": [("both", 5e-4, "episodes+share")],
    }
    return [
        trial("reproduce", task, arm, pressure, (pressure, rate), seed)
        for seed in (200, 201, 202, 300, 301)
        for pressure, rate, arm in cells.get(task, [])
        if seed < 202 or (task, rate) == ("corridor", 1e-3)
    ]


STAGES: dict[str, Callable[[Records, str], list[Trial]]] = {
    "reproduce": reproduce,
    "pilot": pilot,
    "on-policy": on_policy,
    "first": first,
}


# --------------------------------------------------------------------------------- ranking


def table_of(records: Records) -> list[dict[str, Any]]:
    """One line per rival of the first stage: final success per task and level, best score first."""
    finals: dict[str, dict[str, list[float]]] = {}
    lost: dict[str, int] = {}
    for task in FIRST_TASKS:
        for record in records.of("first", task):
            arm, run = record["key"][2], judge(rows_of(record))
            finals.setdefault(arm, {}).setdefault(f"{task} {record['level']}", []).append(
                run["final"]
            )
            lost[arm] = lost.get(arm, 0) + int(run["collapsed"])
    lines = []
    for arm, cells in finals.items():
        means = {cell: statistics.fmean(values) for cell, values in cells.items()}
        runs = [value for values in cells.values() for value in values]
        line = {"arm": arm, "cells": means, "score": statistics.fmean(means.values())}
        lines.append({**line, "worst": min(runs), "collapsed": lost[arm], "runs": len(runs)})
    return sorted(lines, key=lambda line: -line["score"])


def family(arm: str) -> str:
    """What stays of a rival's name without its numbers and without how norms are measured."""
    return "+".join(part for part in sorted(parts_of(arm))).replace("share-logits", "share")


def price(arm: str) -> tuple[int, int]:
    """Second gradients, then parts: the fewer, the earlier in a tie."""
    parts = parts_of(arm)
    return int("share" in parts), len(parts)


def survivors(table: Iterable[dict[str, Any]]) -> list[str]:
    """The best candidates, one of a family; of those that tie with the best left, the cheapest."""
    table = list(table)
    most = max((line["runs"] for line in table), default=0)
    left = [line for line in table if line["arm"] in CANDIDATES and line["runs"] == most]
    chosen: list[str] = []
    while left and len(chosen) < SURVIVORS:
        best = max(line["score"] for line in left)
        tied = [line for line in left if line["score"] >= best - TIE]
        arm = min(tied, key=lambda line: (*price(line["arm"]), -line["worst"]))["arm"]
        chosen.append(arm)
        left = [line for line in left if family(line["arm"]) != family(arm)]
    return chosen
