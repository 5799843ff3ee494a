"""Read the logs of runs from their folders, also during training.

`metrics.jsonl` has one line of settings and then the entries of `log_history`.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

SUCCESS, SCORE = "episode/success_rate", "episode/score"
FALLS = "guard/falls"
# Heading of a table -> metric of an evaluation (docs/evaluation.md).
MEASURES = {
    **{"success": SUCCESS, "score": SCORE, "turns": "turns/mean"},
    **{"valid actions": "turns/valid_action_rate", "episodes": "episodes"},
}
NOTHING = "-"
logger = logging.getLogger(__name__)
# A line of `log_history`: its step and metrics.
Entry = dict[str, Any]
METRICS_FILE = "metrics.jsonl"
FORMAT = 1


def number(value: object) -> float | None:
    """Return a logged metric as float; None if it is missing, not a number, or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        figure = float(value)
    except OverflowError:
        # An int may have hundreds of digits.
        return None
    return figure if math.isfinite(figure) else None


def shown(value: float | None, form: str = ".3f") -> str:
    """Format a metric as text. None becomes `NOTHING`, and a rounded zero loses its minus sign."""
    return NOTHING if value is None else format(value, f"z{form}")


def duration(seconds: float | None) -> str:
    """Format seconds as "42 s", "3:05" or "2:10:00"."""
    if seconds is None:
        return NOTHING
    minutes, left = divmod(round(max(0.0, seconds)), 60)
    if not minutes:
        return f"{left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class Panel(NamedTuple):
    """One panel of curves: metric, title, unit, and limits of the axis (None: from the data)."""

    metric: str
    title: str
    unit: str
    limits: tuple[float | None, float | None] = (0, None)


OUTCOMES = (
    Panel(SUCCESS, "success", "share of episodes", (-0.02, 1.02)),
    Panel(SCORE, "score", "reward", (None, None)),
)
DIAGNOSTICS = (
    Panel("policy/approx_kl", "KL to the sampling policy", "nats per token"),
    Panel("policy/clip_fraction", "clip fraction", "share of tokens"),
    Panel("policy/entropy", "entropy", "nats per token"),
    Panel("tools/call_frequency", "tool calls", "per episode"),
    Panel("clip_bias/scale", "scale of the update", "factor", (-0.02, 1.02)),
    Panel("step/factor", "factor of the trust region on steps", "factor"),
    Panel("value/explained_variance", "explained variance", "share", (-1.05, 1.05)),
)


@dataclass(frozen=True)
class Run:
    """The log of a run.

    Attributes:
        history: entries of `log_history`, oldest first.
        settings: changed settings, and names of model, environment and dataset, as `metrics.jsonl` has them.
    """

    folder: Path
    history: list[Entry]
    settings: dict[str, Any] = field(default_factory=dict)
    steps_per_rollout: int = 1
    resumed: list[int] = field(default_factory=list)

    def panels(self) -> list[Panel]:
        """Return the panels of which the run has a value: success or else score, and diagnostics."""
        outcomes = [panel for panel in OUTCOMES if self.points(panel.metric)[0]]
        return [*outcomes[:1], *(p for p in DIAGNOSTICS if self.points(p.metric)[0])]

    def points(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the sorted updates and a metric's mean in each. Each step counts with its last entry.

        Values that are not finite are left out.
        """
        entries = sorted((e for e in self.history if metric in e), key=lambda e: e["step"])
        last = {entry["step"]: number(entry[metric]) for entry in entries}
        updates: dict[int, list[float]] = {}
        for step, value in last.items():
            if value is not None:
                updates.setdefault(math.ceil(step / self.steps_per_rollout), []).append(value)
        return list(updates), [fmean(values) for values in updates.values()]

    def falls(self) -> set[int]:
        """Return the updates in which the counter `guard/falls` increased."""
        counts = [(entry["step"], entry[FALLS]) for entry in self.history if FALLS in entry]
        pairs = zip(counts, [(0, 0.0), *counts], strict=False)
        return {
            math.ceil(step / self.steps_per_rollout) for (step, now), (_, before) in pairs if now > before
        }


def read_run(path: str | Path) -> Run:
    """Read the log of a run from its output directory or a log file.

    Raises:
        FileNotFoundError: there is no such folder, or it has no log yet.
        ValueError: the log is damaged.
    """
    path = Path(path)
    file = path if path.is_file() else path / METRICS_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"`runs={path}`: must be the output_dir of a run of trl-stppo, or its log {METRICS_FILE}."
        )
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        # The last line is empty, or it is being written.
        head, *entries = json.loads(lines[0]), *map(_entry, filter(None, lines[1:-1]))
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}; this version reads {FORMAT}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"`runs={file}` is no log of a run, or it is damaged ({type(error).__name__}: {error})."
        ) from error
    history = [e for e in entries if isinstance(e, dict) and number(e.get("step")) is not None]
    if odd := len(entries) - len(history):
        logger.warning("%s: %d damaged entries are left out.", file, odd)
    return Run(file.parent, history, head["settings"], head["steps_per_rollout"], head.get("resumed", []))


def _entry(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
