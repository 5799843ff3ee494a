"""What commands look at before the libraries are imported, which read their surroundings then."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from .usage import UsageError

TRUE = ("yes", "true", "t", "y", "1")  # as the parser reads them, in any case


def quieten(words: Sequence[str]) -> None:
    """Keep dependencies' notes to each other off the screen; and a dry run off the network."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    if wants_dry_run(words):
        os.environ["HF_HUB_OFFLINE"] = "1"


def check_config(words: Sequence[str]) -> None:
    """Refuse a file that is not there before seconds of imports; two of them are the parser's."""
    path = config_path(words)
    times = sum(word.partition("=")[0] == "--config" for word in words)
    if path is not None and times == 1 and not Path(path).exists():
        reason = os.strerror(errno.ENOENT)
        raise UsageError(f"`--config {path}` cannot be read: {reason}. Check the path.")


def wants_dry_run(words: Sequence[str]) -> bool:
    """Whether flags, or else their YAML file, ask to look only; what is no truth value is the parser's."""
    return str(peeked(words, "dry_run", False)).lower() in TRUE


def peeked(words: Sequence[str], name: str, default: Any) -> Any:
    """What a command line, or else its YAML file, says of one flag; True for a flag without a value.

    For what decides how the rest is read, so that the parser cannot be asked yet.
    """
    found = default
    path = config_path(words)
    if path is not None:
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            read = _yaml(Path(path).read_text())
            if isinstance(read, dict):  # anything else is for the parser to refuse
                found = read.get(name, found)
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            following = words[index + 1] if index + 1 < len(words) else "--"
            found = value if equals else True if following.startswith("--") else following
    return found


def config_path(words: Sequence[str]) -> str | None:
    """The YAML file that a command line names."""
    found = None
    for index, word in enumerate(words):
        if word == "--config" and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith("--config="):
            found = word.partition("=")[2]
    return found


@functools.lru_cache(maxsize=4)
def _yaml(text: str) -> Any:
    return yaml.safe_load(text)
