"""Read the logs of runs from their folders, also during training.

`metrics.jsonl` has one line of settings and then the entries of `log_history`. Runs of other trainers are
read from `trainer_state.json`.
"""

from __future__ import annotations

import json
import logging
import math
import operator
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
STATE_FILE = "trainer_state.json"
FORMAT = 1
# TRL's metrics that the panels draw -> this package's names.
OF_TRL = {
    "reward": "episode/score",
    "entropy": "policy/entropy",
    "clip_ratio/region_mean": "policy/clip_fraction",
}


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
    steps_per_rollout: int | None = None
    resumed: list[int] = field(default_factory=list)

    def panels(self) -> list[Panel]:
        """Return the panels of which the run has a value: success or else score, and diagnostics."""
        outcomes = [panel for panel in OUTCOMES if self.points(panel.metric)[0]]
        return [*outcomes[:1], *(p for p in DIAGNOSTICS if self.points(p.metric)[0])]

    def points(self, metric: str, steps: int | None = None) -> tuple[list[int], list[float]]:
        """Return the sorted updates and a metric's mean in each. Each step counts with its last entry.

        Values that are not finite are left out. An update has `steps` optimizer steps, by default the
        run's `steps_per_rollout`, or 1.
        """
        per_update = steps or self.steps_per_rollout or 1
        entries = sorted((e for e in self.history if metric in e), key=lambda e: e["step"])
        last = {entry["step"]: number(entry[metric]) for entry in entries}
        updates: dict[int, list[float]] = {}
        for step, value in last.items():
            if value is not None:
                updates.setdefault(math.ceil(step / per_update), []).append(value)
        return list(updates), [fmean(values) for values in updates.values()]

    def falls(self) -> set[int]:
        """Return the updates in which the counter `guard/falls` increased."""
        at, counts = self.points(FALLS, 1)
        pairs = zip(at, counts, [0.0, *counts], strict=False)
        steps = self.steps_per_rollout or 1
        return {math.ceil(step / steps) for step, now, before in pairs if now > before}


def read_run(path: str | Path) -> Run:
    """Read the log of a run from its output directory, a checkpoint, or a log file.

    Raises:
        FileNotFoundError: there is no such folder, or it has no log yet.
        ValueError: the log is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"`runs={path}` does not exist; must be an output_dir, a checkpoint or a log file."
        )
    if path.is_file():
        return _read_file(path, path.parent)
    checkpoints = path.glob(f"checkpoint-*/{STATE_FILE}")
    newest_first = sorted(checkpoints, key=lambda file: file.stat().st_mtime, reverse=True)
    for source in (path / METRICS_FILE, path / STATE_FILE, *newest_first):
        if source.is_file() and (run := _read_file(source, path)).history:
            return run
    raise FileNotFoundError(
        f"`runs={path}` holds no log; a run writes its first entry after `logging_steps` steps."
    )


def _read_file(file: Path, folder: Path) -> Run:
    head: dict[str, Any] = {}
    try:
        if file.suffix == ".jsonl":
            head, history = _read_lines(file)
        else:
            history = [*json.loads(file.read_text(encoding="utf-8"))["log_history"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"`runs={file}` is no log of a run, or it is damaged ({type(error).__name__}: {error})."
        ) from error
    valid = [e for e in history if isinstance(e, dict) and number(e.get("step")) is not None]
    if odd := len(history) - len(valid):
        logger.warning("%s: %d damaged entries are left out.", file, odd)
    if not head:
        valid = list(map(_named, valid))
    per_rollout = head["steps_per_rollout"] if "steps_per_rollout" in head else _pace(valid)
    return Run(folder, valid, head.get("settings", {}), per_rollout, head.get("resumed", []))


def _pace(history: list[Entry]) -> int | None:
    """Return TRL's optimizer steps per rollout; None if a step is not logged.

    Each rollout logs `num_tokens`, so the distance between two such entries is the result.
    """
    steps, played = (
        sorted({entry["step"] for entry in history if name in entry}) for name in ("loss", "num_tokens")
    )
    gaps = [min(map(operator.sub, at[1:], at), default=0) for at in (steps, played)]
    return gaps[1] if gaps[0] == 1 and gaps[1] else None


def _named(entry: Entry) -> Entry:
    """Add this package's names of TRL's metrics to an entry of another trainer's log."""
    return {**{ours: entry[name] for name, ours in OF_TRL.items() if name in entry}, **entry}


def _read_lines(file: Path) -> tuple[dict[str, Any], list[object]]:
    """Return the first line and the entries of `metrics.jsonl`. A damaged entry becomes None."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    written = [line for line in lines[:-1] if line.strip()]
    if not written:
        return {}, []
    first, *entries = json.loads(written[0]), *map(_entry, written[1:])
    if first.get("format") != FORMAT:
        raise ValueError(f"format {first.get('format')!r}; this version reads {FORMAT}")
    return first, entries


def _entry(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
