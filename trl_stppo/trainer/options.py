"""Options of a configuration: help texts and aliases. Light to import."""

from __future__ import annotations

from dataclasses import field
from typing import Any, TypeVar, cast

Value = TypeVar("Value")
# PPO's name -> GRPOConfig's name for the same setting.
ALIASES = {
    "num_ppo_epochs": "num_iterations",
    "cliprange": "epsilon",
    "response_length": "max_completion_length",
}


def option(default: Value, meaning: str) -> Value:
    """Define a dataclass field with a default and a help text for `--help` and the API pages."""
    spec: Any = field(default=default, metadata={"help": meaning})
    return cast(Value, spec)
