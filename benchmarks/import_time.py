"""How long the package takes to import, beside TRL, each time in a new interpreter.

    python benchmarks/import_time.py            # 15 alternations, about two minutes on two cores
    python benchmarks/import_time.py --quick    # 3 alternations

The commands take turns, so that what else the machine does meets all of them; medians are compared.
The last line is JSON with every figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from _outcome import finish
from rich.console import Console
from rich.table import Table

STATEMENTS = {
    "nothing": "pass",
    "import trl": "import trl",
    "import trl_stppo": "import trl_stppo",
    "GRPOTrainer": "from trl import GRPOConfig, GRPOTrainer",
    "STPPOTrainer": "from trl_stppo import STPPOConfig, STPPOTrainer",
}
# Ours, and TRL's own for the same purpose.
PAIRS = {"import trl_stppo": "import trl", "STPPOTrainer": "GRPOTrainer"}


def seconds(statement: str) -> float:
    """Wall time of an interpreter that runs one statement."""
    started = time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", statement], check=True, capture_output=True, env=environment
    )
    return time.perf_counter() - started


def main() -> None:
    """Measure, show a table, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 alternations")
    parser.add_argument("--repeats", type=int, help="alternations")
    options = parser.parse_args()
    repeats = options.repeats or (3 if options.quick else 15)
    for statement in STATEMENTS.values():
        seconds(statement)  # compiles what has not been compiled
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(repeats):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds(statement))
    medians = {name: statistics.median(values) for name, values in times.items()}

    table = Table("statement", "median s", "least s", "beside TRL's")
    ratios = {name: medians[name] / medians[theirs] for name, theirs in PAIRS.items()}
    for name, values in times.items():
        ratio = f"{ratios[name]:.2f}x" if name in ratios else ""
        table.add_row(STATEMENTS[name], f"{medians[name]:.2f}", f"{min(values):.2f}", ratio)
    Console().print(table)
    finish({"repeats": repeats, "seconds": medians, "ratios": ratios})


if __name__ == "__main__":
    main()
