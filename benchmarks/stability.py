"""Which variant survives how much off-policy pressure: the stability study.

    python benchmarks/stability.py --budget_hours 3           # all stages, two processes
    python benchmarks/stability.py --stages pilot tune
    python benchmarks/stability.py --quick                    # under a minute, to see that it runs

Trains small agents with every method, pressure, learning rate and seed of `_stability_grid.py`, stage by
stage, and appends each run to one tidy table, `results.csv`: a row per update and for the held-out
episodes before and after. A run that is in the table is not run again, so an interrupted study goes on
where it was. The last line is JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before torch is loaded: runs are small, and there is one per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _outcome import finish
from _stability_grid import Cell, Table
from _stability_report import print_tables, summaries
from _stability_run import run
from _stability_stages import STAGES, decisions
from _stability_tasks import build_agent, load_task


def work(cell: Cell, folder: str, updates: int | None) -> list[dict[str, Any]]:
    """One run, in a process that stays for others."""
    task = load_task(cell.task, Path(folder))
    return run(cell, task if updates is None else replace(task, updates=updates))


def run_all(
    cells: Sequence[Any],
    table: Any,
    args: argparse.Namespace,
    deadline: float,
    work: Callable[..., list[dict[str, Any]]] = work,
) -> int:
    """Run what is not in the table yet; returns how many runs the deadline left out."""
    todo = [cell for cell in cells if cell.key not in table.keys]
    if not todo:
        return 0
    for task in {cell.task for cell in todo}:
        build_agent(task, args.output, 20 if args.quick else None)
    spawn = multiprocessing.get_context("spawn")
    waiting, running = iter(todo), dict[Future[Any], Any]()
    done = 0
    with ProcessPoolExecutor(args.workers, mp_context=spawn) as pool:
        while True:
            while len(running) < args.workers and time.monotonic() < deadline:
                cell = next(waiting, None)
                if cell is None:
                    break
                running[pool.submit(work, cell, str(args.output), args.updates)] = cell
            if not running:
                return len(todo) - done
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                rows = future.result()
                table.add(cell, rows)
                done += 1
                print(
                    f"{done}/{len(todo)} {cell.title} {rows[-1]['episode/success_rate']:.2f}",
                    flush=True,
                )


def main() -> None:
    """Run the stages, print the tables, then the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--budget_hours", type=float, default=6.0, help="no run starts after it")
    parser.add_argument("--workers", type=int, default=2, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=Path("runs/stability"))
    parser.add_argument("--quick", action="store_true", help="a few runs of two updates")
    args = parser.parse_args()
    args.updates = 2 if args.quick else None
    if args.quick:
        args.output = args.output / "quick"
        shutil.rmtree(args.output, ignore_errors=True)  # the agent of other versions included
    args.output.mkdir(parents=True, exist_ok=True)
    table = Table(args.output / "results.csv")
    deadline = time.monotonic() + 3600 * args.budget_hours
    left_out = {}
    for stage in args.stages:
        cells = STAGES[stage](table)
        left_out[stage] = run_all(cells[:2] if args.quick else cells, table, args, deadline)
        if args.quick:
            break
    found = summaries(table)
    print_tables(found)
    # A run that dies is a result of the study, yet not one of those that show that it runs.
    died = [{"error": row["error"]} for row in table.rows if args.quick and row["error"]]
    outcome = {"quick": args.quick, "left_out": left_out, "cells": found, "died": died}
    finish(outcome if args.quick else {**outcome, **decisions(table)})


if __name__ == "__main__":
    main()
