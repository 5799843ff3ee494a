"""Helpers of all commands: argument parser, hints for unknown names, checks of JSON."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Collection
from typing import Any, NoReturn

from ..redaction import redacted

# Setting of another version that the closest name here would not replace -> what to do.
GONE = {
    **{"torch_dtype": "set `dtype`", "max_prompt_length": "prompts are not cut"},
    **{"use_auth_token": "set `hub_token`", "batch_size": "set `per_device_train_batch_size`"},
    **dict.fromkeys(
        ("overwrite_output_dir", "group_by_length", "save_safetensors"), "leave it out"
    ),
    **dict.fromkeys(("max_length", "max_seq_length"), "`max_completion_length` limits an episode"),
    # Names of other libraries, see docs/migration.md.
    **{"lora_rank": "set `lora_r`", "use_lora": "set `use_peft`", "gae_lambda": "set `lam`"},
    **{"actor_learning_rate": "set `learning_rate`", "warmup_ratio": "set `warmup_steps` below 1"},
    **{"enable_thinking": "set `chat_template_kwargs`", "dataset": "set `dataset_name`"},
    **dict.fromkeys(("mini_batch_size", "ppo_mini_batch_size"), "set `num_mini_batches`"),
    **{"num_epochs": "set `num_train_epochs`", "stage": "leave it out"},
    "train_batch_size": "set `per_device_train_batch_size`",
}


class UsageError(ValueError):
    """A wrong flag, or a wrong key in a settings file."""


class Parser(argparse.ArgumentParser):
    """Argument parser without abbreviated flags. An error raises `UsageError` instead of exiting."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` instead of printing the usage and exiting."""
        raise UsageError(message)


def hint(name: str, known: Collection[str]) -> str:
    """Return a hint for an unknown flag or key: what replaces it, the closest known name, or `--help_all`."""
    if name in GONE:
        return f"It does not exist here: {GONE[name]}."
    close = difflib.get_close_matches(name, known, 1)
    return f"Did you mean `{close[0]}`?" if close else "--help_all lists all flags."


def parsed_json(text: str, flag: str) -> Any:
    """Parse the JSON object in the text of a flag; raise UsageError for other text."""
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        read = error
    if not isinstance(read, dict):
        raise UsageError(f"`{flag}={redacted(text)}` is no JSON object ({read}).")
    return read
