"""Environments: their contract, a check of it, adapters. They know no tensors and no tokenizer."""

from typing import Any

from trl_stppo import moved

from .base import TextEnv
from .check import check_env

__all__ = ["TextEnv", "check_env"]


def __getattr__(name: str) -> Any:
    return moved.attribute(__name__, name)
