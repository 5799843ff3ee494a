"""Adapters of other packages' games, which are imported on first use."""

from .gem import GemEnv
from .gymnasium import GymnasiumEnv
from .mcp import McpEnv
from .openenv import AsyncOpenEnvSession, NoAction, OpenEnvSession
from .textworld import TextWorldEnv

__all__ = [
    "AsyncOpenEnvSession",
    "GemEnv",
    "GymnasiumEnv",
    "McpEnv",
    "NoAction",
    "OpenEnvSession",
    "TextWorldEnv",
]
