"""Environments: contract, check, adapters. No tensors and no tokenizer."""

from .base import TextEnv
from .check import check_env

__all__ = ["TextEnv", "check_env"]
