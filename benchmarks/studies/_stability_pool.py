"""Runs what is not recorded yet, several runs at a time."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

from _stability_tasks import build_agent


def run_all(
    cells: Sequence[Any],
    table: Any,
    args: argparse.Namespace,
    deadline: float,
    work: Callable[..., list[dict[str, Any]]],
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
