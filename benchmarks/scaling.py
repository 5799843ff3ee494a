"""Traffic of several processes per update, and their gain: 1, 2 and 4 of them on this machine.

    python benchmarks/scaling.py            # about five minutes on two cores
    python benchmarks/scaling.py --quick    # under a minute

Bytes are counted at the collectives, and compared with the arithmetic of `docs/many_gpus.md`. Times hold
for this machine's cores only: with more processes than cores they measure the sharing of cores. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from typing import Any

from _launch import launch
from _outcome import finish
from _scaling_worker import MARK
from geometries import save_random_model
from rich.console import Console
from rich.table import Table

FLOAT_BYTES = 4


def run(processes: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train on so many processes; returns what process 0 says."""
    output = launch("_scaling_worker.py", job, processes).splitlines()
    lines = [line for line in output if line.startswith(MARK)]
    parsed: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return parsed


def expected_bytes(result: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that a process gives to collectives per update, from the numbers of parameters."""
    return {
        "policy gradient": FLOAT_BYTES * result["policy_parameters"],
        "critic gradient": FLOAT_BYTES * result["critic_parameters"],
        "clipping bias": FLOAT_BYTES * result["policy_parameters"],
    }


def show(console: Console, title: str, runs: dict[int, dict[str, Any]]) -> None:
    """One row per number of processes."""
    table = Table(title=title)
    purposes = ("policy gradient", "critic gradient", "clipping bias", "figures")
    for name in ("processes", "tokens/s", "x", *purposes, "expected", "per rollout"):
        table.add_column(name, justify="right")
    single = runs[1]["tokens_per_second"]
    for processes, result in runs.items():
        sent = result["bytes_per_update"]
        expected = sum(expected_bytes(result).values()) if processes > 1 else 0
        table.add_row(
            str(processes),
            f"{result['tokens_per_second']:,.0f}",
            f"{result['tokens_per_second'] / single:.2f}",
            *(_size(sent.get(name, 0)) for name in purposes),
            _size(expected),
            _size(result["bytes_per_rollout"]),
        )
    console.print(table)


def _size(count: float) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**17 else f"{count / 2**10:.1f} KiB"


def main() -> None:
    """Measure, print the tables, then the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, LoRA only, weak scaling"
    )
    parser.add_argument("--model", default=None, help="a geometry of geometries.py")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    if options.processes[0] != 1:
        parser.error("`--processes` must begin with 1, which the others are compared with")
    console = Console(width=150)
    figures: dict[str, Any] = {"cores": os.cpu_count(), "quick": options.quick}
    cases = (
        [("lora", False)] if options.quick else [("lora", False), ("lora", True), ("full", False)]
    )
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_model(options.model or "tiny", folder)
        for tuning, strong in cases:
            name = f"{tuning}, {'16 episodes in all' if strong else 'episodes per process'}"
            job = {
                "model": model,
                "tuning": tuning,
                "strong": strong,
                "episodes": 16 if strong else 4 if options.quick else 8,
                "micro": 4,
                "longest": 96 if options.quick else 256,
                "epochs": 3,
                "rollouts": 2 if options.quick else 4,
            }
            runs = {}
            for processes in options.processes:
                runs[processes] = result = run(processes, job)
                total = result["tokens_per_update"] * processes
                result["tokens_per_second"] = total / result["seconds_per_update"]
                result["expected_bytes_per_update"] = expected_bytes(result)
            show(console, name, runs)
            figures[name] = runs
    finish(figures)


if __name__ == "__main__":
    main()
