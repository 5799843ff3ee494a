"""Test an environment for errors and common mistakes.

Makes the environment, plays a few rows, and reports broken rules of the
contract (errors) and usual mistakes (warnings), such as rewards that are not
numbers or state that two instances share (docs/environments.md). Without
--rows and --row it plays the rows of the class, or one made-up row.

Examples:
    trl-stppo env check my_env:MyEnv --rows rows.jsonl
    trl-stppo env check my_env:MyEnv --action 'go left' --strict
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import warnings
from typing import Any

from ..envs.base import is_text_environment
from ..envs.check import MAX_ROWS, check_env
from ..rollout.environments import close_environment
from .objects import factory_of, rows_for
from .usage import UsageError, parsed_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `env check` to the parser."""
    add = parser.add_argument
    add("environment", metavar="MODULE:CLASS", help="An environment, or its factory.")
    add("--rows", metavar="FILE", help="Rows to play, one JSON object per line (.jsonl).")
    add("--row", metavar="JSON", help="One row.")
    add("--arguments", metavar="JSON", help="Arguments of the class.")
    add("--action", metavar="TEXT", action="append", help="A turn to play; repeat it for several.")
    add("--steps", metavar="N", type=int, default=20, help="Most turns of an episode.")
    add("--strict", action="store_true", help="Warnings fail too.")


def run(options: argparse.Namespace) -> int:
    """Check the environment and print warnings; return 1 for warnings with --strict, else 0."""
    factory: Any = factory_of(options.environment, options.arguments, flag="arguments")
    if factory is None:
        raise UsageError("`environment` is 'none'; must be module:name.")
    rows = rows_for(options.environment, options.rows, options.row)
    actions, is_text = list[Any](options.action or []), True
    # Ignore an error of the factory here, because `check_env` reports it.
    with contextlib.suppress(Exception):
        probe = factory()
        is_text = is_text_environment(probe)
        close_environment(probe, asyncio.run)
    if not is_text:
        actions = [tool_call(word) for word in actions]
        if not actions:
            print("No tool is called: name calls with `--action 'name {\"argument\": ...}'`.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_env(factory, rows, actions=actions or None, steps=options.steps)
    print(f"{options.environment}: played {min(len(rows or [{}]), MAX_ROWS)} rows")
    for message in found:
        print(f"warning: {message}")
    print(f"OK, {len(found)} warning{'' if len(found) == 1 else 's'}")
    return int(bool(found) and options.strict)


def tool_call(words: str) -> tuple[str, dict[str, object]]:
    """Parse a tool call `name {arguments}`."""
    name, _, arguments = words.strip().partition(" ")
    return name, parsed_json(arguments or "{}", name)
