"""Play an environment yourself.

One line is one turn. `:q` or the end of the input stops. A tool call is a line such as
`name {"argument": "value"}`. Without --rows and --row it plays the class's
rows.

Examples:
    trl-stppo env play my_env:MyEnv --rows rows.jsonl --index 3
    trl-stppo env play my_env:MyEnv --row '{"prompt": "Go."}'
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
from typing import Any

from ..envs.base import Step, is_picture, is_text_environment
from ..envs.check import HandPlayer, tools_of
from ..errors import EnvironmentContractError
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
    rows = rows_for(options.environment, options.rows, options.row) or [{"prompt": ""}]
    if not 0 <= options.index < len(rows):
        raise UsageError(f"`--index {options.index}`: there are {len(rows)} rows, counted from 0.")
    row, player, total, turns = rows[options.index], HandPlayer(), 0.0, 0
    env = player.make(factory)
    opening, is_text = player.reset(env, row), is_text_environment(env)
    for name in tools_of(env):
        tool = getattr(env, name)
        print(f"--- tool {name}{inspect.signature(tool)}\n{inspect.getdoc(tool) or ''}")
    print(f"--- prompt\n{row.get('prompt', '')}\n--- observation\n{_shown(opening)}")
    for words in iter(_read_action, None):
        try:
            step = player.play(env, words if is_text else tool_call(words))
        except (EnvironmentContractError, ValueError) as error:
            if is_text:
                raise
            # A model gets the error as its observation, so show it here.
            step = Step(f"Error: {error}", 0.0, False, False, {})
        turns, total = turns + 1, total + step.reward
        info = (f"  {k}={step.info[k]}" for k in ("valid_action", "success") if k in step.info)
        print(f"--- observation\n{_shown(step.observation)}")
        print(f"--- turn {turns}  reward={step.reward:g}  return={total:g}{''.join(info)}")
        if step.ended:
            break
    total += player.final_reward(env)
    player.close()
    print(f"=== {type(env).__name__}: {turns} turns, return {total:g}")
    return 0


def _shown(content: Any) -> str:
    """Return an observation as text. Each image is written to a file, whose path is in the text."""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(block.get("text") or _written(block.get("image", block)) for block in content)


def _written(image: Any) -> str:
    if not is_picture(image):
        return str(image)
    with tempfile.NamedTemporaryFile(suffix=".png", delete=False) as file:
        image.save(file, "PNG")
    return f"[image {image.width}x{image.height}: {file.name}]"


def tool_call(words: str) -> tuple[str, dict[str, object]]:
    """Parse a tool call `name {arguments}`."""
    name, _, arguments = words.strip().partition(" ")
    return name, parsed_json(arguments or "{}", name)


def _read_action() -> str | None:
    """Read the next turn from standard input; return None at `:q` or at the end of the input."""
    try:
        turn = input("> ")
    except EOFError:
        return None
    return None if turn == ":q" else turn
