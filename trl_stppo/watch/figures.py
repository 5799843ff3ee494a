"""Names and formats of logged metrics."""

from __future__ import annotations

import math
from typing import Any

SUCCESS, SCORE = "episode/success_rate", "episode/score"
# Falls so far in the run.
FALLS = "guard/falls"
# Shown for a metric that is missing or not a number.
NOTHING = "–"  # noqa: RUF001


def number(value: Any) -> float | None:
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
    if value is None:
        return NOTHING
    text = format(value, form)
    return text.lstrip("-") if not any(digit in text for digit in "123456789") else text


def duration(seconds: float | None) -> str:
    """Format seconds as "42 s", "3:05" or "2:10:00"."""
    if seconds is None:
        return NOTHING
    minutes, left = divmod(round(max(0.0, seconds)), 60)
    if not minutes:
        return f"{left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
