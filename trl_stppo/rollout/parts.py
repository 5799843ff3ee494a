"""The parts of an engine that are made once and used by every batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .chat import Message
from .driver import Driver
from .environments import EnvironmentPool
from .episode import Limits
from .turns import Selection
from .workers import EnvironmentCalls


@dataclass(eq=False, repr=False)
class Parts:
    """Arguments of `RolloutEngine`.

    Args:
        drivers: by key of the environment factory; None is the single unnamed one, or no factory.
        pool: environment instances, None if there are only tools.
        calls: runs the environments.
        limits: budgets of an episode.
        tool_suffix: tool messages -> their token ids, TRL's own function.
        on_env_error: treatment of an episode whose environment failed: `"penalise"` rewards its last
            turn with `-env_error_penalty`, `"mask"` does not train on it, `"drop"` also leaves it out
            of the batch's metrics.
        env_error_penalty: reward units.
        selection: plays the best of several turns; None plays the sampled turn.
    """

    drivers: dict[str | None, Driver]
    pool: EnvironmentPool | None
    calls: EnvironmentCalls
    limits: Limits
    tool_suffix: Callable[[list[Message]], list[int]] | None = None
    on_env_error: str = "mask"
    env_error_penalty: float = 1.0
    selection: Selection | None = None
