"""What stabilises best under off-policy pressure: every correction that we know of, on the same runs.

    python benchmarks/studies/rivals.py --stages first --tasks corridor   # goes on where it was
    python benchmarks/studies/rivals.py --quick   # under a minute, to see that it runs

The rules, written before the runs that they judge, are in `rivals.md`; the rivals are prototypes
(`_rivals_trainer.py`) over the trainer's hooks. Each finished run is a line of `rivals.jsonl.gz`; one
that is there is not run again. Tasks, pressures and the driver are those of `stability.py`. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1]))  # for _outcome

from _outcome import finish
from _rivals_credit import CreditTrainer, credit, credit_table
from _rivals_signals import signals
from _rivals_stages import (
    FIRST_TASKS,
    LEVELS,
    RECORDED,
    STAGES,
    TASKS,
    Records,
    Trial,
    survivors,
    table_of,
    trial,
)
from _rivals_test import groups, sweep, swept, test, tuning, verdict
from _rivals_trainer import FIGURES as OWN_FIGURES
from _rivals_trainer import RivalTrainer, settings_of
from _stability_grid import FIGURES
from _stability_pool import run_all
from _stability_run import run
from _stability_tasks import load_task
from rich.console import Console
from rich.table import Table as Grid

# What waits for the first stage's verdict.
LATER = {stage.__name__: stage for stage in (tuning, test, sweep, groups, credit)}
ALL_STAGES = {**STAGES, **LATER}
# Between them they have every hook.
QUICK = ("episodes+vtrace+share", "decoupled+turns+ess")


def work(job: Trial, folder: str, updates: int | None) -> list[dict[str, Any]]:
    """One run, in a process that stays for others."""
    task = load_task(job.cell.task, Path(folder))
    task = (
        task if updates is None else replace(task, updates=updates, test=task.test.select(range(8)))
    )
    kind = CreditTrainer if job.cell.stage == "credit" else RivalTrainer
    make: Any = partial(kind, arm=job.arm, base=job.base)
    settings = settings_of(job.arm)
    if job.cell.stage == "groups":  # the package as it is
        make, settings = None, {"stabilizers": job.arm.split("+"), "clip_bias_estimator": None}
    started = time.process_time()  # who waits for a busy machine is no slower a method
    rows = run(job.cell, task, make, (*FIGURES, *OWN_FIGURES), **settings)
    rows[-1]["cpu"] = time.process_time() - started
    return rows


def print_table(table: list[dict[str, Any]]) -> None:
    """Final success of each rival, best first."""
    cells = [f"{task} {level}" for task in FIRST_TASKS for level in LEVELS]
    grid = Grid(title="first stage, mean final success")
    for name in ("rival", *cells, "score", "worst", "collapsed"):
        grid.add_column(name)
    for line in table:
        means = [f"{line['cells'][c]:.2f}" if c in line["cells"] else "" for c in cells]
        score, worst = f"{line['score']:.3f}", f"{line['worst']:.2f}"
        grid.add_row(line["arm"], *means, score, worst, f"{line['collapsed']} / {line['runs']}")
    Console(width=120).print(grid)


def run_stage(stage: str, task: str, records: Records, args: Any, deadline: float) -> int:
    """All runs of a stage, asked again after each round; returns how many the deadline left out."""
    if stage in LATER and len(survivors(table_of(records))) < 2:
        return 0
    jobs_of = ALL_STAGES.get(stage, quick_jobs)
    while True:
        jobs = jobs_of(records, task)
        left_out = run_all(jobs, records, args, deadline, work)
        if left_out or stage not in ("pilot", "tuning") or not jobs:
            return left_out


def quick_jobs(*_: Any) -> list[Trial]:
    """Two updates of a few."""
    return [trial("quick", "corridor", arm, "epochs", ("epochs", 1e-3), 200) for arm in QUICK]


def main() -> None:
    """Run the stages, print the table, then the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=list(ALL_STAGES), default=list(ALL_STAGES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--budget_hours", type=float, default=24.0, help="no run starts after it")
    parser.add_argument("--jobs", dest="workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=Path("runs/rivals"), help="of agents")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "rivals.jsonl.gz")
    parser.add_argument("--quick", action="store_true", help="a few runs of two updates")
    args = parser.parse_args()
    args.updates = 2 if args.quick else None
    if args.quick:
        args.output, args.tasks = args.output / "quick", ["corridor"]
        args.data, args.stages = args.output / "rivals.jsonl.gz", ["quick"]
        shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True, exist_ok=True)
    records = Records(args.data)
    deadline = time.monotonic() + 3600 * args.budget_hours
    left_out = {}
    for stage in args.stages:  # the test looks at the first stage of all tasks
        for task in args.tasks:
            left_out[f"{stage} {task}"] = run_stage(stage, task, records, args, deadline)
    table = table_of(records)
    print_table(table)
    died = [{"error": r["error"]} for r in records.rows if args.quick and r["error"]]
    outcome = {"quick": args.quick, "left_out": left_out, "runs": len(records.rows), "died": died}
    tested = [task for task in TASKS if records.of("test", task)]
    judged = verdict(records, tested) if tested else None
    with gzip.open(RECORDED, "rt", newline="") as file:
        ahead = signals(csv.DictReader(file))
    outcome |= {"rivals": table, "survivors": survivors(table), "verdict": judged}
    outcome |= {"signals": ahead, "credit": credit_table(records), "sweep": swept(records)}
    finish(outcome)


if __name__ == "__main__":
    main()
