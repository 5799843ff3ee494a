"""Environments. They know no tensors and no tokenizer."""

from .base import TextEnv
from .check import check_env
from .search import SearchEnv, StdlibSearchEnv

__all__ = ["SearchEnv", "StdlibSearchEnv", "TextEnv", "check_env"]
