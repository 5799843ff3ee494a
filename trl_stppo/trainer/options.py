"""Options of a configuration: help texts, aliases, and PPO names without effect. Light to import."""

from __future__ import annotations

import functools
import logging
from dataclasses import field
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)
Config = TypeVar("Config")
Value = TypeVar("Value")
# PPO's name -> GRPOConfig's name for the same setting.
ALIASES = {
    "num_ppo_epochs": "num_iterations",
    "cliprange": "epsilon",
    "response_length": "max_completion_length",
}
# Settings of TRL's PPO without effect here, which scripts may set and read -> the reason.
IGNORED = {
    "dataset_num_proc": "the rows are tokenised as they are played",
    "model_adapter_name": "the adapter that is trained is always 'default'",
    "ref_adapter_name": "the frozen copy of it is always 'ref'",
    "num_sample_generations": "log_completions=True prints episodes",
}


def option(default: Value, meaning: str) -> Value:
    """Define a dataclass field with a default and a help text for `--help` and the API pages."""
    spec: Any = field(default=default, metadata={"help": meaning})
    return cast(Value, spec)


def takes_ignored(cls: type[Config]) -> type[Config]:
    """Class decorator: the dataclass's constructor also accepts the names in IGNORED."""
    generated = cls.__init__

    @functools.wraps(generated)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        for name in IGNORED.keys() & settings.keys():
            value = settings.pop(name)
            if value not in (None, 0):
                logger.warning("`%s=%s` is ignored: %s.", name, value, IGNORED[name])
            # Scripts read the names back.
            setattr(self, name, value)
        generated(self, *args, **settings)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls
