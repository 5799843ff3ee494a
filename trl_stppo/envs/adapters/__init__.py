"""Games of other packages as text environments; each package is imported on first use."""

from .gem import GemEnv
from .gymnasium import GymnasiumEnv
from .openenv import AsyncOpenEnvSession, NoAction, OpenEnvSession
from .textworld import TextWorldEnv

__all__ = [
    "AsyncOpenEnvSession",
    "GemEnv",
    "GymnasiumEnv",
    "NoAction",
    "OpenEnvSession",
    "TextWorldEnv",
]
