"""Filters that give the integrations of `report_to` only values that all of them accept."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback


class LoggableFigures(TrainerCallback):
    """Passes only numbers and text on to the integrations, which come after it.

    A metric without an episode in the batch is None in the log, for which TensorBoard and MLflow warn
    each time; NaN and infinities are not points of a curve. `log_history` keeps them all.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, Any] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Remove from `logs`, in place, values that are neither finite numbers nor text."""
        self.left_out = {
            name: value
            for name, value in (logs or {}).items()
            if value is None or (isinstance(value, float) and not math.isfinite(value))
        }
        for name in self.left_out:
            del logs[name]


class AllFigures(TrainerCallback):
    """Restores the values that `LoggableFigures` removed; comes after the integrations."""

    def __init__(self, before: LoggableFigures) -> None:
        self._before = before

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the values to `logs`, in place."""
        if logs is not None:
            logs.update(self._before.left_out)


def shield_integrations(callbacks: list[Any]) -> None:
    """Insert both callbacks around the integrations, in place."""
    found = [
        i
        for i, c in enumerate(callbacks)
        if type(c).__module__.startswith("transformers.integrations")
    ]
    if found:
        before = LoggableFigures()
        callbacks.insert(found[-1] + 1, AllFigures(before))
        callbacks.insert(found[0], before)
