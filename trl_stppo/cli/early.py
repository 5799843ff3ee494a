"""What commands look at before the libraries are imported, which read their surroundings then."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .usage import Parser, UsageError

TRUE = ("yes", "true", "t", "y", "1")  # as the parser reads them, in any case


def quieten(words: Sequence[str]) -> None:
    """Keep dependencies' notes to each other off the screen; and a dry run off the network."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    if wants_dry_run(words):
        os.environ["HF_HUB_OFFLINE"] = "1"


def wants_dry_run(words: Sequence[str]) -> bool:
    """Whether flags, or else their YAML file, ask to look only; what is no truth value is the parser's."""
    return str(peeked(words, "dry_run", False)).lower() in TRUE


def peeked(words: Sequence[str], name: str, default: Any) -> Any:
    """What a command line, or else its YAML file, says of one flag; True for a flag without a value.

    For what decides how the rest is read, so that the parser cannot be asked yet.
    """
    flags, _, settings = with_config(words)
    parser = Parser(add_help=False, argument_default=settings.get(name, default))
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const=True)
    return getattr(parser.parse_known_args(flags)[0], name)


def with_config(words: Sequence[str]) -> tuple[list[str], str | None, Mapping[str, Any]]:
    """The words without `--config`, the file that it names, and what the file holds.

    Raises:
        UsageError: the file cannot be read.
    """
    parser = Parser(add_help=False)
    parser.add_argument("--config", action="append", nargs="?", const="", default=[])
    found, flags = parser.parse_known_args(words)
    if len(found.config) > 1:
        raise UsageError("`--config` is given twice. Put everything into one file.")
    if not found.config:
        return flags, None, {}
    if not found.config[0]:
        raise UsageError("`--config` needs the path of a YAML file behind it.")
    return flags, found.config[0], _settings(found.config[0])


def _settings(path: str) -> Mapping[str, Any]:
    try:
        read = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise UsageError(f"`--config {path}` is no YAML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"`--config {path}` cannot be read: {reason}. Check the path.") from error
    if not isinstance(read, dict):
        raise UsageError(
            f"`--config {path}` holds no settings. Write one per line, as in `max_turns: 4`."
        )
    return {str(key): value for key, value in read.items()}
