"""Test an environment for errors and common mistakes.

Makes the environment, plays a few rows, and reports broken rules of the contract (errors) and usual mistakes
(warnings), such as rewards that are not numbers or state that two instances share (docs/environments.md). An
agent, `(client, row)`, gets the actions as the turns of the policy. Without --rows and --row the rows are
those of the class, or one made-up row.

Examples:
    trl-stppo env check my_env:MyEnv --rows rows.jsonl
    trl-stppo env check my_env:MyEnv --action 'go left' --action 'go right' --strict
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from typing import Any

from ..envs.base import is_text_environment
from ..envs.check import DEFAULT_ACTIONS, MAX_ROWS, check_env
from ..redaction import redacted
from .agent_check import is_agent, play_agent
from .objects import named_factory, rows_for
from .play import tool_call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `env check` to the parser."""
    add = parser.add_argument
    add("environment", metavar="MODULE:CLASS", help="An environment, its factory, or an agent.")
    add("--rows", metavar="FILE", help="Rows to play, one JSON object per line (.jsonl).")
    add("--row", metavar="JSON", help="One row.")
    add("--arguments", metavar="JSON", help="Arguments of the class.")
    add("--action", metavar="TEXT", action="append", help="A turn to play; repeat it for several.")
    add("--steps", metavar="N", type=int, default=20, help="Most turns of an episode.")
    add("--seed", metavar="N", type=int, default=0, help="Seed of a made-up row.")
    add("--strict", action="store_true", help="Warnings fail too.")


def run(options: argparse.Namespace) -> int:
    """Check the environment and print warnings; return 1 for warnings with --strict, else 0."""
    factory = named_factory(options.environment, options.arguments)
    rows = rows_for(options.environment, options.rows, options.row)
    if is_agent(factory):
        made_up = {"prompt": [{"role": "user", "content": "hello"}], "seed": options.seed}
        words = options.action or DEFAULT_ACTIONS
        played = (rows or [made_up])[:MAX_ROWS]
        lines = [play_agent(factory, row, words, options.steps) for row in played]
        print(f"{options.environment}: agent", *(line for line, _ in lines), sep="\n")
        return _report([*dict.fromkeys(m for _, found in lines for m in found)], options.strict)
    is_text, actions = True, list[Any](options.action or [])
    # `check_env` reports what a factory raises.
    with contextlib.suppress(Exception):
        is_text = is_text_environment(factory())
    if not is_text:
        actions = [tool_call(word) for word in actions]
        if not actions:
            print("No tool is called: name calls with `--action 'name {\"argument\": ...}'`.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = {"actions": actions or None, "steps": options.steps, "seed": options.seed}
        found = check_env(factory, rows, **named)
    print(f"{options.environment}: played {min(len(rows or [{}]), MAX_ROWS)} rows")
    return _report(found, options.strict)


def _report(found: list[str], strict: bool) -> int:
    for message in found:
        print(redacted(f"warning: {message}"))
    print(f"OK, {len(found)} warning{'' if len(found) == 1 else 's'}")
    return int(bool(found) and strict)
