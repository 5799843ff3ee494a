"""What every integration of `report_to` can take."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback


class LoggableFigures(TrainerCallback):
    """Hands only numbers on to the integrations, between which and the other callbacks it stands.

    A figure that no episode of a batch has is None in the log, for which TensorBoard and MLflow warn
    each time; NaN and infinities are no points of a curve. `log_history` keeps them all.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, Any] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take out of `logs`, in place, what is no finite number and no text."""
        self.left_out = {
            name: value
            for name, value in (logs or {}).items()
            if value is None or (isinstance(value, float) and not math.isfinite(value))
        }
        for name in self.left_out:
            del logs[name]


class AllFigures(TrainerCallback):
    """Puts back what `LoggableFigures` has taken out; stands behind the integrations."""

    def __init__(self, before: LoggableFigures) -> None:
        self._before = before

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add to `logs`, in place."""
        if logs is not None:
            logs.update(self._before.left_out)


def shield_integrations(callbacks: list[Any]) -> None:
    """Put the two around the integrations among the callbacks, in place."""
    found = [
        i
        for i, c in enumerate(callbacks)
        if type(c).__module__.startswith("transformers.integrations")
    ]
    if found:
        before = LoggableFigures()
        callbacks.insert(found[-1] + 1, AllFigures(before))
        callbacks.insert(found[0], before)
