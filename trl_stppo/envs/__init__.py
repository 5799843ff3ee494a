"""Environments. They know no tensors and no tokenizer."""

from .base import TextEnv
from .check import check_env
from .search import SearchEnv

__all__ = ["SearchEnv", "TextEnv", "check_env"]
