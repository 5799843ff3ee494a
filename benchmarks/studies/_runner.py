"""Runs the cells of a study that have no record yet, each in a process of its own with one thread."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from _plan import HERE, Cell, Study
from _records import Record, Records
from _report import final

WORKER = (sys.executable, str(HERE / "_cell.py"))
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
# Seconds between two looks at the workers.
PAUSE = 0.05


@dataclass(frozen=True)
class Options:
    """Options of the runner.

    Attributes:
        folder: of agents, games and logs.
        workers: cells that run at the same time.
        minutes: after which no cell starts.
        small: each cell has two short rollouts.
        command: of a worker, which reads a job from its standard input.
    """

    folder: Path
    workers: int = 1
    minutes: float = float("inf")
    small: bool = False
    command: Sequence[str] = WORKER


class Worker:
    """A process that runs a cell, and ends when this one does."""

    def __init__(self, study: Study, cell: Cell, options: Options, prepares: bool = False) -> None:
        self.cell = cell
        name = re.sub(r"[^\w.+-]", "_", "_".join(map(str, (cell.study, *cell.key))))
        self.log = options.folder / "logs" / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._result = self.log.with_suffix(".json")
        self._result.unlink(missing_ok=True)
        job = {
            "cell": asdict(cell),
            "folder": str(options.folder),
            "result": None if prepares else str(self._result),
            "small": options.small,
            "curves": study.curves,
            "modules": str(study.folder),
        }
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                options.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **THREADS},
                preexec_fn=partial(os.nice, 10),
            )
        assert self.process.stdin is not None
        try:
            # The pipe stays open as long as this process lives; a worker ends with it.
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def record(self) -> Record | None:
        """Return the record that it has left, once; None if it has failed."""
        if self.process.returncode or not self._result.is_file():
            return None
        record = json.loads(self._result.read_text())
        self._result.unlink()
        return record

    @property
    def failure(self) -> str:
        """The last line of its output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"exit status {self.process.returncode}; {lines[-1] if lines else 'no output'}"


def run_all(study: Study, cells: Sequence[Cell], records: Records, options: Options) -> dict[str, Any]:
    """Run cells; their records are in the file when this returns.

    Returns:
        How many cells have been run and left out, and the failures of cells whose worker broke down.
    """
    todo, running, failed = list(cells), list[Worker](), list[dict[str, str]]()
    deadline, done = time.monotonic() + 60 * options.minutes, 0
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while running or (todo and time.monotonic() < deadline):
            while todo and len(running) < options.workers and time.monotonic() < deadline:
                running.append(Worker(study, todo.pop(0), options))
            time.sleep(PAUSE)
            for worker in [worker for worker in running if worker.ended]:
                running.remove(worker)
                title = " ".join(map(str, worker.cell.key))
                if (record := worker.record()) is None:
                    failed.append({"cell": title, "error": worker.failure})
                    print(f"FAILED {title}: {worker.failure}; all of it: {worker.log}", flush=True)
                    continue
                records.add(record)
                done += 1
                rest = [*todo, *(each.cell for each in running)]
                left = time_left(rest, records.rows, options.workers)
                print(
                    f"{done}/{len(cells)} {title}: {final(record):.3f}, {record['seconds']:.0f} s{left}",
                    flush=True,
                )
    finally:
        for worker in running:
            worker.process.kill()
        signal.signal(signal.SIGTERM, before)
    return {"ran": done, "left": len(todo), "failed": failed}


def time_left(cells: Sequence[Cell], records: Sequence[Record], workers: int) -> str:
    """Return the time that cells will take, by records of the same task and arm, else task, else any."""
    if not cells or not records:
        return ""
    seconds: dict[tuple[str, ...], list[float]] = {}
    for record in records:
        for kind in ((record["task"], record["arm"]), (record["task"],), ()):
            seconds.setdefault(kind, []).append(record["seconds"])
    total = 0.0
    for cell in cells:
        kinds = ((cell.task, cell.arm), (cell.task,), ())
        total += statistics.fmean(next(seconds[kind] for kind in kinds if kind in seconds))
    left = timedelta(seconds=round(total / workers))
    return f"; {left} left, until {datetime.now() + left:%H:%M}"


def prepare(study: Study, cells: Sequence[Cell], options: Options) -> dict[str, Any]:
    """Make agents and games of the cells' tasks, one after the other."""
    first = {(cell.task, cell.seed): cell for cell in cells}
    failed = []
    for cell in first.values():
        worker = Worker(study, cell, options, prepares=True)
        worker.process.wait()
        if worker.process.returncode:
            failed.append({"cell": " ".join(map(str, cell.key)), "error": worker.failure})
        print(f"prepared {cell.task} for seed {cell.seed}", flush=True)
    return {"ran": 0, "left": len(cells), "failed": failed}
