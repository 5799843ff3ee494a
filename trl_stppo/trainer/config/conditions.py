"""Conditions on logged metrics, as `stop_when` lists them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_NUMBER = r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?"
_TEXT = re.compile(rf"\s*([^<>]*[^\s<>])\s*([<>])\s*({_NUMBER})(?:\s+for\s+([1-9]\d*))?\s*", re.I)


class Condition(NamedTuple):
    """Condition that a metric is below or above a limit in `patience` consecutive log entries."""

    metric: str
    below: bool
    limit: float
    patience: int

    def __str__(self) -> str:
        return f"{self.metric} {'<' if self.below else '>'} {self.limit:.12g} for {self.patience}"


def conditions(stop_when: Any) -> list[Condition]:
    """Parse `stop_when`, which is a text, a list of texts, or None."""
    texts = [stop_when] if isinstance(stop_when, str) else stop_when or []
    found = []
    for text in texts if isinstance(texts, list | tuple) else [texts]:
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[1].startswith("eval_"):
            raise ValueError(
                f"`stop_when={text!r}` cannot be read. A condition is a text such as 'reward_std < 0.01 "
                f"for 5', on a metric of the training; without `for` it has to hold 5 times."
            )
        found.append(Condition(match[1], match[2] == "<", float(match[3]), int(match[4] or 5)))
    return list(dict.fromkeys(found))
