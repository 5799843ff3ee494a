"""Agents that search: environments, retrievers, data sets and rewards (docs/recipes.md)."""

from .env import SearchEnv, StdlibSearchEnv

__all__ = ["SearchEnv", "StdlibSearchEnv"]
