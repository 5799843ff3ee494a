"""Play an environment yourself.

One line is one turn; a backslash at its end continues it on the next line. `:q` or the end of the input
stops. A tool call is `name {"argument": "value"}`. Without --rows and --row the rows are those of the class.

Examples:
    trl-stppo env play my_env:MyEnv --rows rows.jsonl --index 3
    trl-stppo env play my_env:MyEnv --row '{"prompt": "Go."}'
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
from typing import Any

from ..envs.base import is_text_environment, taken_columns, tool_names
from .objects import named_factory, rows_for
from .usage import UsageError, parsed_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `env play` to the parser."""
    add = parser.add_argument
    add("environment", metavar="MODULE:CLASS", help="An environment, or its factory.")
    add("--arguments", metavar="JSON", help="Arguments of the class.")
    add("--rows", metavar="FILE", help="Rows, one JSON object per line (.jsonl).")
    add("--index", metavar="N", type=int, default=0, help="Which of the rows (0).")
    add("--row", metavar="JSON", help="A row.")


def run(options: argparse.Namespace) -> int:
    """Play an environment from standard input until the episode or the input ends."""
    factory = named_factory(options.environment, options.arguments)
    known = rows_for(options.environment, options.rows, options.row)
    rows = known or [{"prompt": ""}]
    if not 0 <= options.index < len(rows):
        raise UsageError(f"`--index {options.index}`: there are {len(rows)} rows, counted from 0.")
    row = rows[options.index]
    with asyncio.Runner() as runner:

        def call(function: Any, *arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            return runner.run(result) if inspect.iscoroutine(result) else result

        try:
            env, total, turns = factory(), 0.0, 0
        except TypeError as error:
            raise UsageError(f"{error}. Set the arguments: `--arguments JSON`.") from error
        is_text = is_text_environment(env)
        try:
            opening = call(env.reset, **(taken_columns(env.reset, row, 0) if is_text else row))
        except Exception as error:
            # A TypeError comes from a missing column, in most cases.
            if known and not isinstance(error, TypeError):
                raise
            raised = f"`reset` raised {type(error).__name__}: {error}"
            cure = f"The row has only {', '.join(row)}; name rows that have the columns: `--rows FILE`."
            raise UsageError(f"{raised}. {cure}") from error
        for name in [] if is_text else tool_names(env):
            tool = getattr(env, name)
            print(f"--- tool {name}{inspect.signature(tool)}\n{inspect.getdoc(tool) or ''}")
        print(f"--- prompt\n{row.get('prompt', '')}")
        print(f"--- observation\n{opening[0] if isinstance(opening, tuple) else opening}")
        for action in iter(_read_action, None):
            turns, ended, before, info = turns + 1, False, total, {}
            if is_text:
                text, reward, terminated, truncated, info = call(env.step, action)
                total, ended = total + reward, terminated or truncated
            else:
                name, _, arguments = action.strip().partition(" ")
                try:
                    tool = {known: getattr(env, known) for known in tool_names(env)}[name]
                    text = call(tool, **parsed_json(arguments or "{}", name))
                except Exception as error:  # the model sees the error as an observation
                    text = f"{type(error).__name__}: {error}"
                total = sum(getattr(env, "turn_rewards", None) or [])
            print(f"--- observation\n{text}")
            flags = "".join(f"  {k}={info[k]}" for k in ("valid_action", "success") if k in info)
            print(f"--- turn {turns}  reward={total - before:g}  return={total:g}{flags}")
            if ended:
                break
        if not is_text and callable(getattr(env, "get_reward", None)):
            total += call(env.get_reward) or 0.0
        if callable(getattr(env, "close", None)):
            call(env.close)
    print(f"=== {type(env).__name__}: {turns} turns, return {total:g}")
    return 0


def _read_action() -> str | None:
    """Read the next turn from standard input; return None at `:q` or at the end of the input."""
    lines = [""]
    try:
        while not lines[0] or lines[-1].endswith("\\"):
            line = input("... " if lines[0] else "> ")
            lines = [*lines, line] if lines[0] else [line]
            if lines == [""]:
                break
    except EOFError:
        return None
    return None if lines == [":q"] else "\n".join(line.removesuffix("\\") for line in lines)
