"""The grid of the stability study, its table of results, and what counts as a collapse.

All of this was fixed before the runs that it judges.
"""

from __future__ import annotations

import csv
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# A run has collapsed if it ends, on held-out episodes, below this share of the best success it ever had
# (start included; training episodes, mean of three rollouts), or cannot go on.
COLLAPSE = 0.5

METHODS = {  # name -> (ratio, whether the correction is on, whether there is a critic)
    "ppo": ("token", False, True),
    "turn-ppo": ("turn", False, True),
    "s-ppo": ("token", True, True),
    "st-ppo": ("turn", True, True),
    "grpo": ("token", False, False),
    "gspo": ("sequence", False, False),
    "st-grpo": ("turn", True, False),
}
# Epochs, mini-batches, updates by which rollouts are stale; from hardly any pressure to a lot.
PRESSURES = {"none": (1, 4, 0), "epochs": (4, 4, 0), "stale": (4, 4, 2), "both": (8, 4, 4)}
# Of later studies: rollouts one update old and no other pressure; the settings of the tutorial.
LATER_PRESSURES = {"overlap": (1, 4, 1), "tutorial": (2, 4, 0)}
LEARNING_RATES = (1e-4, 3e-4, 5.5e-4, 1e-3)
PILOT_SEEDS, TUNE_SEEDS, TEST_SEEDS = range(100, 103), range(200, 203), range(5)
# For what was asked after the test had been seen.
SECOND_SEEDS = range(5, 10)
# Mode, power, target. "floor", "relative" and "share" on the gradient lost and have left the package; their
# runs are in the recorded table.
CORRECTIONS = (
    ("triggered", 1.0, "gradient"),
    ("share", 1.0, "update"),
    ("share", 2.0, "update"),
    ("share", 4.0, "update"),
    ("share", 8.0, "update"),
)
# Means of a turn's tokens spread less than tokens do, so that the usual 0.2 may be too wide for them.
TURN_CLIP_RANGES = (0.03, 0.08)


@dataclass(frozen=True)
class Cell:
    """One run. What is equal but for `seed` is one cell of the tables."""

    stage: str
    task: str
    method: str
    pressure: str
    learning_rate: float
    seed: int
    mode: str = "none"
    power: float = 1.0
    target: str = "update"
    estimator: str = "exact"
    optimizer: str = "adamw_torch"
    cliprange: float = 0.2

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the run in the table."""
        return tuple(str(value) for value in asdict(self).values())

    @property
    def title(self) -> str:
        """For one line of progress."""
        return " ".join(self.key)


CELL_FIELDS = tuple(field.name for field in fields(Cell))
FIGURES = (
    *("episode/success_rate", "turns/mean", "turns/valid_action_rate", "value/explained_variance"),
    *("policy/clip_fraction", "policy/approx_kl", "policy/entropy", "policy/ratio_max"),
    *("clip_bias/norm", "clip_bias/grad_norm", "clip_bias/scale", "clip_bias/cosine"),
    "clip_bias/estimated_share",
)
SUCCESS = FIGURES[0]
COLUMNS = (*CELL_FIELDS, "phase", "update", *FIGURES, "seconds", "error")


class Table:
    """The results file: all runs, complete or not there.

    Args:
        path: a CSV file; made on the first `add`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        if path.is_file():
            with open(path, newline="") as file:
                rows = list(csv.DictReader(file))
            # A run's last row is written with the others; without it the run was cut off.
            complete = {key_of(row) for row in rows if row["seconds"]}
            self.rows = [row for row in rows if key_of(row) in complete]
        staging = path.with_suffix(".incomplete")
        with open(staging, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(staging, path)

    @property
    def keys(self) -> set[tuple[str, ...]]:
        """The runs that are there."""
        return {key_of(row) for row in self.rows}

    def add(self, cell: Cell, rows: list[dict[str, Any]]) -> None:
        """Append a run."""
        added = []
        for row in rows:
            line = {**asdict(cell), **row}
            added.append({c: "" if line.get(c) is None else str(line[c]) for c in COLUMNS})
        self.rows += added
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerows(added)


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    """Identity of the run that a row belongs to."""
    return tuple(row[name] for name in CELL_FIELDS)
