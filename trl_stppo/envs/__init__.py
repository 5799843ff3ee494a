"""Environments. They know no tensors and no tokenizer."""

from .base import TextEnv
from .search import SearchEnv

__all__ = ["SearchEnv", "TextEnv"]
