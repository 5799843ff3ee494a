"""An environment of one's own: a question whose answer stands in a note that has to be asked for."""

from __future__ import annotations

import re
from typing import Any


class LookupEnv:
    """`<search>words</search>` shows the note if it has one of the words, `<answer>..</answer>` ends.

    Args:
        invalid_reward: of a turn that is neither.
    """

    def __init__(self, invalid_reward: float = -0.1) -> None:
        self.invalid_reward = invalid_reward
        self.over = True

    def reset(self, *, note: str, answer: str, **row: Any) -> tuple[str, dict[str, Any]]:
        """Every column of a row comes by its name; the model reads the row's `prompt`, and this text."""
        self.note, self.answer, self.over = note, answer, False
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One turn of the model: observation, reward, terminated, truncated, info."""
        if self.over:
            raise RuntimeError("The episode is over: call reset.")
        found = re.fullmatch(r"<(search|answer)>(.*)</\1>", action.strip(), re.DOTALL)
        if found is None:
            reminder = "Write <search>words</search> or <answer>words</answer>."
            return reminder, self.invalid_reward, False, False, {"valid_action": False}
        words = found[2].strip()
        if found[1] == "answer":
            self.over, right = True, words.lower() == self.answer.lower()
            return "", float(right), True, False, {"valid_action": True, "success": right}
        shown = self.note if set(words.split()) & set(self.note.split()) else "nothing found"
        observation = f"<information> {shown} </information>"
        return observation, 0.0, False, False, {"valid_action": True}
