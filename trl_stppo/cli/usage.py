"""Helpers of all commands: argument parser, checks of JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any, NoReturn


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


def parsed_json(text: str, flag: str) -> Any:
    """Parse the JSON object in the text of a flag; raise UsageError for other text."""
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        read = error
    if not isinstance(read, dict):
        raise UsageError(f"`{flag}={text}` is no JSON object ({read}).")
    return read
