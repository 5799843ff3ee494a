"""Which figure of an update runs ahead of a collapse: from the runs of the stability study, recorded before.

A run collapses at the first update at which the mean success of three rollouts is below half of the best such
mean, if that was at least 0.3. A figure is judged by how often it is larger in the three updates before a
collapse than in another update (area under the ROC curve; 0.5 says nothing).
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from _stability_grid import COLLAPSE, SUCCESS, key_of
from _stability_report import WINDOW, Row, number

AHEAD, EARNED = 3, 0.3
# Larger is more alarming; of "kept share", "cosine" and "explained variance" the negative is taken.
SIGNALS = {
    "KL": "policy/approx_kl",
    "norm of C": "clip_bias/norm",
    "clip fraction": "policy/clip_fraction",
    "largest ratio": "policy/ratio_max",
    "entropy": "policy/entropy",
    "explained variance": "value/explained_variance",
    "cosine": "clip_bias/cosine",
}
NEGATIVE = ("explained variance", "cosine")


def collapse_at(success: Sequence[float]) -> int | None:
    """Update, from 0, at which a run has collapsed; None if it never did."""
    best = 0.0
    for update in range(len(success)):
        mean = statistics.fmean(success[max(0, update + 1 - WINDOW) : update + 1])
        best = max(best, mean)
        if best >= EARNED and mean < COLLAPSE * best:
            return update
    return None


def figures_of(row: Row) -> dict[str, float | None]:
    """The signals of an update."""
    found = {name: number(row, column) for name, column in SIGNALS.items()}
    found = {n: -v if v is not None and n in NEGATIVE else v for n, v in found.items()}
    kept, clipped = (number(row, f"clip_bias/{name}") for name in ("grad_norm", "norm"))
    whole = (kept or 0.0) + (clipped or 0.0)
    return {**found, "kept share": -(kept or 0.0) / whole if whole else None}


def area(before: Sequence[float], others: Iterable[float]) -> float | None:
    """Chance that one of the former is larger than one of the latter, a tie counting half."""
    ordered = sorted(others)
    if not before or not ordered:
        return None
    below = sum(bisect.bisect_left(ordered, x) + bisect.bisect_right(ordered, x) for x in before)
    return below / 2 / len(before) / len(ordered)


def signals(rows: Iterable[Row]) -> dict[str, Any]:
    """Area under the curve of every signal, and how many runs collapsed.

    Args:
        rows: of the stability study, runs one after the other.
    """
    before: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    runs = collapses = 0
    for _, run in itertools.groupby(rows, key_of):
        updates = [row for row in run if row["phase"] == "train"]
        success = [number(row, SUCCESS) or 0.0 for row in updates]
        end = collapse_at(success)
        runs, collapses = runs + 1, collapses + (end is not None)
        # The last updates of a run that held cannot be judged: it might have collapsed after them.
        stop = end if end is not None else len(updates) - AHEAD
        for update in range(WINDOW - 1, stop):
            soon = end is not None and end - update <= AHEAD
            drop = max(success[: update + 1]) - success[update]
            for name, value in {**figures_of(updates[update]), "drop of success": drop}.items():
                if value is not None:
                    (before if soon else others).setdefault(name, []).append(value)
    areas = {name: area(before.get(name, []), others[name]) for name in others}
    return {"runs": runs, "collapses": collapses, "areas": areas}
