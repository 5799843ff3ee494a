"""Trains for a long time with environments that fail, and watches what the processes hold.

    python benchmarks/soak.py --minutes 60     # two processes
    python benchmarks/soak.py --quick          # under a minute, to see that it runs

One episode in ten ends in an exception, a hang, garbage or SystemExit; checkpoints and evaluations go on
beside it. Flat means: over the second half of the run, memory, threads and open files do not grow. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from _launch import launch
from _outcome import finish
from rich.console import Console
from rich.table import Table

HELD = ("memory_mb", "threads", "files")
# Growth from the third to the fourth quarter of the run that counts as flat. It is that of the least value of
# each quarter: a rollout that is played while a sample is taken holds memory and threads of its own.
TOLERANCE = {"memory_mb": 0.03, "threads": 0.05, "files": 0.02}


def soak(
    folder: Path, processes: int, seconds: float, every: int, overlap: bool
) -> list[list[dict[str, Any]]]:
    """Run; returns the samples of each process."""
    job = {"folder": str(folder), "seconds": seconds, "every": every, "overlap": overlap}
    launch("_soak_worker.py", job, processes)
    files = [folder / f"rank{rank}.jsonl" for rank in range(processes)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Least values of the quarters of a run, and whether the last two agree."""
    result: dict[str, Any] = {"steps": len(samples), "minutes": samples[-1]["seconds"] / 60}
    for name in HELD:
        values = [sample[name] for sample in samples]
        cuts = [len(values) * i // 4 for i in range(5)]
        quarters = [min(values[a:b] or values) for a, b in itertools.pairwise(cuts)]
        growth = quarters[3] / quarters[2] - 1
        result[name] = {
            "quarters": quarters,
            "max": max(values),
            "growth": growth,
            "flat": growth <= TOLERANCE[name],
        }
    return result


def main() -> None:
    """Run, print the table, then the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--overlap", action="store_true", help="with `rollout_overlap`")
    parser.add_argument("--folder", help="keep samples and checkpoints there")
    options = parser.parse_args()
    minutes, every = (0.25, 8) if options.quick else (options.minutes, 64)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        samples = soak(folder, options.processes, 60 * minutes, every, options.overlap)
        ranks = [summarise(s) for s in samples]
    table = Table(title=f"{options.processes} processes, {ranks[0]['minutes']:.1f} minutes")
    for column in ("process", "held", "quarter 1", "2", "3", "4", "max", "flat"):
        table.add_column(column)
    for rank, result in enumerate(ranks):
        for name in HELD:
            quarters = [f"{least:.1f}" for least in result[name]["quarters"]]
            flat = "yes" if result[name]["flat"] else "NO"
            table.add_row(str(rank), name, *quarters, f"{result[name]['max']:.0f}", flat)
    Console(width=110).print(table)
    finish({"quick": options.quick, "overlap": options.overlap, "ranks": ranks})


if __name__ == "__main__":
    main()
