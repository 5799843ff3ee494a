"""Conditions on logged metrics that end a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ..config.conditions import conditions

logger = logging.getLogger(__name__)


class StopWhen:
    """Counts, per condition, the log entries in a row that meet it."""

    def __init__(self, stop_when: Any) -> None:
        self.conditions = conditions(stop_when)
        self.strikes: dict[str, int] = {}

    def look(self, logs: Mapping[str, float], step: int) -> str | None:
        """Check a log entry of the training; return the reason to stop, None without one."""
        verdict = None
        for condition in self.conditions:
            name, limit, value = str(condition), condition.limit, logs.get(condition.metric)
            if value is None and name not in self.strikes:
                logger.warning("`stop_when=%r`: the log of step %d has no such metric.", name, step)
            count = self.strikes.setdefault(name, 0)
            if value is None or math.isnan(value):
                continue
            met = value < limit if condition.below else value > limit
            self.strikes[name] = count + 1 if met else 0
            if self.strikes[name] >= condition.patience:
                verdict = (
                    f"`stop_when={name!r}` was met; the last value is {value:.4g} at step {step}"
                )
        return verdict
