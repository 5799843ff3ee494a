"""Games of other packages as text environments; each package is imported on first use."""

from .gem import GemEnv
from .gymnasium import BlackjackEnv, CliffWalkingEnv, FrozenLakeEnv, TaxiEnv
from .openenv import AsyncOpenEnvSession, NoAction, OpenEnvSession
from .textarena import TextArenaEnv
from .textworld import TextWorldEnv

__all__ = [
    "AsyncOpenEnvSession",
    "BlackjackEnv",
    "CliffWalkingEnv",
    "FrozenLakeEnv",
    "GemEnv",
    "NoAction",
    "OpenEnvSession",
    "TaxiEnv",
    "TextArenaEnv",
    "TextWorldEnv",
]
