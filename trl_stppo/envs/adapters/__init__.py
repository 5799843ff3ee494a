"""Adapters of other packages' games. Each package is imported when its adapter is first used."""

from .gem import GemEnv
from .mcp import McpEnv

__all__ = ["GemEnv", "McpEnv"]
