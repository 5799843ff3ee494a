"""Wrong words on a command line: one line for each, with what to write instead."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from ..wording import did_you_mean, proposal


class UsageError(ValueError):
    """Words, or keys of a file, that a command cannot make sense of."""


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations, which raises `UsageError` where argparse ends the process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UsageError(worded(message))


def worded(message: str) -> str:
    """What argparse complains of, with one spelling of the flag, and the nearest of the choices if any."""
    message = re.sub(r"^argument ([^\s/:]+)\S*: ", r"`\1`: ", message)
    choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
    nearest = choice and did_you_mean(choice[1], re.split("'?, '?", choice[2].strip("'")))
    return f"{message}. {nearest or ''}".rstrip()


def names_of(parser: argparse.ArgumentParser) -> set[str]:
    """All flags, without dashes and with underscores."""
    return {flag_name(option) for option in parser._option_string_actions if option[:2] == "--"}


def flag_name(word: str) -> str:
    """`max_turns` of `--max-turns=3`."""
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def refuse(
    words: Sequence[str], known: Collection[str], keys: Sequence[str] = (), path: str | None = None
) -> None:
    """Raise for words and keys that nobody knows, all at once.

    Args:
        words: that a parser has left.
        known: flags without dashes, some of which may be left to others.
        keys: of a file, that are no flags.
        path: of the file.
    """
    said = []
    otherwise = "Correct the name, or take it out; --help_all lists all flags."
    for position, word in enumerate(words):
        if word.startswith("-"):
            if (name := flag_name(word)) not in known:
                nearest = proposal(name, known, "--") or otherwise
                said.append(f"`{word}`: not known here. {nearest}")
        elif position == 0:  # behind a flag it is the flag's
            is_file = word.endswith((".yaml", ".yml"))
            named = f" Name a file of settings by `--config {word}`." if is_file else ""
            said.append(f"`{word}` belongs to no flag.{named}")
    for key in keys:
        nearest = proposal(key, known) or otherwise
        said.append(f"`{key}` in {path}: not known here. {nearest}")
    if said:
        raise UsageError("\n".join(said))
