"""What plays episodes: the parts that an engine has made once, and every batch uses."""

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
        drivers: by name of the environment factory; None is the single unnamed one, or nobody.
        pool: their instances, None where there are only tools.
        calls: where environments run.
        limits: budgets of an episode.
        tool_suffix: tool messages -> their token ids, TRL's own function.
        on_env_error: what an episode teaches whose environment failed: `"penalise"` pays its last
            turn `-env_error_penalty`, `"mask"` teaches nothing, `"drop"` is left out of the batch's
            figures too.
        env_error_penalty: reward units.
        selection: plays the best of several turns; None plays the one that is sampled.
    """

    drivers: dict[str | None, Driver]
    pool: EnvironmentPool | None
    calls: EnvironmentCalls
    limits: Limits
    tool_suffix: Callable[[list[Message]], list[int]] | None = None
    on_env_error: str = "mask"
    env_error_penalty: float = 1.0
    selection: Selection | None = None
