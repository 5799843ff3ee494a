"""Environments: contract, check, adapters. No tensors and no tokenizer."""

from .check import check_env

__all__ = ["check_env"]
