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


@dataclass(frozen=True)
class Parts:
    """Arguments of `RolloutEngine`, which describes them."""

    drivers: dict[str | None, Driver]
    pool: EnvironmentPool | None
    calls: EnvironmentCalls
    limits: Limits
    tool_suffix: Callable[[list[Message]], list[int]] | None
    on_env_error: str
    env_error_penalty: float
    selection: Selection | None
