"""Per-turn rewards of TRL's tool-method environments.

Such an environment keeps a list attribute `turn_rewards`, cleared in `reset`, to which its tools
append. TRL's loop is lock-step: every tool of turn k runs between the k-th and the next generation
call. Reading the lists at each generation call therefore attributes an entry to the turn that caused
it, however many tools a turn calls and however many of them fail.
"""

from __future__ import annotations

from typing import Any

from .record import check_reward

ATTRIBUTE = "turn_rewards"


class ToolRewards:
    """Watches the `turn_rewards` of one batch of environments."""

    def __init__(self, environments: list[Any]) -> None:
        self._lists = [getattr(env, ATTRIBUTE, None) for env in environments]
        self._environments = environments
        self._seen = [0] * len(environments)
        self._turns: list[list[float]] = [[] for _ in environments]
        self.is_used = any(rewards is not None for rewards in self._lists)

    def end_turn(self) -> None:
        """Attribute what was appended since the last call to the turn that has just ended."""
        for i, env in enumerate(self._environments):
            rewards = getattr(env, ATTRIBUTE, None)
            if rewards is None:
                continue
            name = f"{type(env).__name__}.{ATTRIBUTE}"
            if not isinstance(rewards, list):
                raise ValueError(
                    f"`{name}` is a {type(rewards).__name__}; it must be a list of floats that is "
                    f"cleared in `reset` and appended to by the tools."
                )
            if len(rewards) < self._seen[i]:
                raise ValueError(
                    f"`{name}` shrank from {self._seen[i]} to {len(rewards)} entries during an "
                    f"episode. Clear it in `reset` only; tools may append."
                )
            new = rewards[self._seen[i] :]
            self._turns[i].append(sum(check_reward(r, f"{name}[-1]") for r in new))
            self._seen[i] = len(rewards)

    def totals(self) -> list[float]:
        """What each episode has earned so far."""
        return [sum(rewards) for rewards in self._turns]

    def per_turn(self, num_turns: list[int]) -> list[list[float]]:
        """One reward per turn; what came after an episode's last turn belongs to it."""
        result = []
        for rewards, turns in zip(self._turns, num_turns, strict=True):
            row = [0.0] * turns
            for turn, reward in enumerate(rewards):
                if turns:
                    row[min(turn, turns - 1)] += reward
            result.append(row)
        return result
