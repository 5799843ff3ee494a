"""Test an environment for errors and common mistakes.

Makes the environment, plays a few rows and looks for what breaks the contract (an error) or is allowed
but usually a mistake (a warning): rewards that are no numbers, state that two instances share, seeds that
change the world, and more (docs/environments.md). Without --rows and --row the rows are those that the
class offers, or one that is made up.

Examples:
    trl-stppo env check my_env:MyEnv --rows rows.jsonl
    trl-stppo env check my_env:MyEnv --action 'go left' --action 'go right' --strict
"""

from __future__ import annotations

import argparse
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

from ..envs.base import is_text_environment, tool_names
from ..envs.check import MAX_ROWS, check_env
from ..redaction import redacted
from .objects import factory_of, offered_by
from .usage import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add(
        "environment", metavar="MODULE:CLASS", help="The environment, or a function that makes one."
    )
    add("--rows", metavar="FILE", help="Rows to play: .json, .jsonl, .csv or .parquet.")
    add("--row", metavar="JSON", action="append", help="One row; may be given several times.")
    add("--arguments", metavar="JSON", help="Arguments of the class.")
    add("--action", metavar="TEXT", action="append", help="A turn to play; repeat it for several.")
    add("--steps", metavar="N", type=int, default=20, help="Most turns of an episode.")
    add("--seed", metavar="N", type=int, default=0, help="Seed of a made-up row.")
    add("--strict", action="store_true", help="Warnings fail too.")


def run(options: argparse.Namespace) -> int:
    """Check and report; 0 where nothing is wrong, 1 where something is."""
    factory: Any = factory_of(options.environment, options.arguments, flag="arguments")
    if factory is None:
        raise UsageError("`none` is no environment. Name one as module:name.")
    rows = _rows(options)
    probe = _probe(factory)
    text = is_text_environment(probe)
    # Without an instance the check says what is wrong with the factory.
    given = [] if probe is None else options.action or []
    actions = [word if text else _call(probe, word) for word in given] or None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_env(factory, rows, actions=actions, steps=options.steps, seed=options.seed)
    played = "one made-up row"
    if rows is not None:
        played = f"{min(len(rows), MAX_ROWS)} of {len(rows)} rows"
    kind = "text environment" if text else f"tools {', '.join(tool_names(probe))}"
    print(f"{options.environment}: {kind}; played {played}")
    for message in found:
        print(redacted(f"warning: {message}"))
    print(f"OK, {len(found)} warning{'' if len(found) == 1 else 's'}")
    return int(bool(found) and options.strict)


def _probe(factory: Any) -> Any:
    """One instance to look at; None where the check will say why there is none."""
    try:
        return factory()
    except Exception:
        return None


def _rows(options: argparse.Namespace) -> list[dict[str, Any]] | None:
    if options.rows is None and options.row is None:
        own = offered_by(options.environment, "datasets") or {}
        return next((list(rows("train")) for rows in own.values()), None)
    rows = [] if options.rows is None else rows_of(Path(options.rows))
    rows += [_parsed(word, "--row") for word in options.row or []]
    for row in rows:
        if not isinstance(row, dict):
            raise UsageError(
                f'`--rows`: {row!r} is no row; write an object, as {{"prompt": "Hi"}}.'
            )
    return rows


def rows_of(path: Path) -> list[Any]:
    """The rows of a file."""
    if not path.is_file():
        raise UsageError(f"`--rows {path}` is no file. Check the path.")
    if path.suffix == ".jsonl":
        return [_parsed(line, f"--rows {path}") for line in path.read_text().splitlines() if line]
    if path.suffix == ".json":
        read = _parsed(path.read_text(), f"--rows {path}")
        return read if isinstance(read, list) else [read]
    if path.suffix in (".csv", ".parquet"):
        from datasets import Dataset

        read = getattr(Dataset, f"from_{path.suffix[1:]}")(str(path))
        return list(read.select(range(min(len(read), MAX_ROWS))))
    raise UsageError(f"`--rows {path}`: the ending must be .json, .jsonl, .csv or .parquet.")


def _parsed(text: str, said: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"`{said}` is no JSON: {error}. Strings need double quotes.") from error


def _call(env: Any, word: str) -> tuple[str, Any]:
    """A call of a tool, from its name and arguments."""
    name, _, arguments = word.strip().partition(" ")
    tools = tool_names(env)
    if name not in tools:
        kind = type(env).__name__
        takes = inspect.signature(getattr(env, tools[0])).parameters if tools else ()
        example = f"{tools[0]} {json.dumps(dict.fromkeys(takes, '...'))}" if tools else ""
        raise UsageError(
            f"`--action {word}`: {kind} has no `step` that reads a text, but tools, and none is called "
            f"{name!r}: {', '.join(tools) or 'it has none'}. Write a tool and its arguments as JSON, as in "
            f"--action '{example}'; or define step(action)."
        )
    return name, _parsed(arguments or "{}", "--action")
