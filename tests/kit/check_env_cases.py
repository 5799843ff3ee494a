"""Environments for the tests of `check_env`: clean ones, and a way to spoil them."""

import asyncio
from typing import Any

from trl_stppo.envs import check_env


class Clean:
    """Ends with its third turn."""

    def reset(self, **row: Any):
        self.turn = 0
        return f"Row {row.get('seed')}", {}

    def step(self, action: str):
        self.turn += 1
        done, info = self.turn >= 3, {"valid_action": bool(action.strip())}
        if done:
            info["success"] = True
        return f"Turn {self.turn}", float(done), done, False, info


class CleanTools:
    def __init__(self) -> None:
        self.turn_rewards: list[float] = []

    def reset(self, **row: Any) -> str | None:
        self.turn_rewards = []
        return None

    def look(self, where: str, times: int = 1) -> str:
        """Look somewhere.\n\nArgs:\n    where: the place.\n    times: how often."""
        self.turn_rewards.append(0.5)
        return where * times

    def get_reward(self) -> float | None:
        return sum(self.turn_rewards) or None


class CleanAsync(Clean):
    async def reset(self, **row: Any):
        await asyncio.sleep(0)
        return super().reset(**row)

    async def step(self, action: str):
        return super().step(action)

    async def close(self):
        self.turn = None


class CleanAsyncTools(CleanTools):
    async def reset(self, **row: Any) -> str | None:
        return super().reset(**row)

    async def look(self, where: str) -> str:
        """Look.\n\nArgs:\n    where: the place."""
        return super().look(where)

    async def get_reward(self) -> float:
        return 0.0


ONE = Clean()


LOOK = [("look", {"where": "here"})]


def env_with(base: type = Clean, **methods: Any) -> type:
    return type("Faulty", (base,), methods)


def returning(*values: Any, at: int | None = None):
    """A step whose values are replaced; by index where `at` is given."""

    def step(self, action):
        result = list(Clean.step(self, action))
        if at is None:
            return values[0]
        result[at] = values[0]
        return tuple(result)

    return step


def smell(env: Any, rows: Any = None, **settings: Any) -> str:
    """The one warning."""
    found = check_env(env, rows, **settings)
    assert len(found) == 1, found
    return found[0]
