"""Agents that search: environments, retrievers, data sets and rewards (docs/search_agents.md)."""

from .env import SearchEnv, StdlibSearchEnv

__all__ = ["SearchEnv", "StdlibSearchEnv"]
