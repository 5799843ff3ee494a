"""Play an environment yourself.

What is shown is the text; the tokens that a model reads and says are what `trl-stppo show` prints.

One line is one turn; a backslash at its end continues it on the next line. `:q` or the end of the input
stops. A call of a tool is written `name {"argument": "value"}`.

Examples:
    trl-stppo env play --config run.yaml --index 3
    trl-stppo env play --environment my_env:MyEnv --row '{"prompt": "Go."}'
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from transformers.utils import get_json_schema

from ..envs._check_values import check_number, check_opening, check_step
from ..envs.base import is_text_environment, tool_names
from ..rollout.chat import with_opening
from .agents import load_splits, played_environment
from .arguments import PlayArguments
from .flags import read_flags
from .objects import offered_by, parsed_object
from .usage import UsageError

QUIT = ":q"


def pick_row(args: PlayArguments) -> dict[str, Any]:
    """The dataset row that the flags name."""
    if args.row is not None:
        return parsed_object(args.row, "row", '{"prompt": "Hi"}')
    if args.dataset_name is None and not offered_by(args.environment, "datasets"):
        return {"prompt": ""}
    return row_at(load_splits(args)[0], args.index)


def row_at(rows: Any, index: int) -> dict[str, Any]:
    """A row of a dataset or of a stream."""
    if index < 0:
        raise UsageError(f"`--index {index}`: rows are counted from 0.")
    if hasattr(rows, "__len__"):
        found = [rows[index]] if index < len(rows) else []
    else:
        found = list(rows.skip(index).take(1))
    if not found:
        number = f"{len(rows)} rows" if hasattr(rows, "__len__") else "fewer rows"
        raise UsageError(f"`--index {index}`: there are {number}, counted from 0.")
    return dict(found[0])


def show_prompt(prompt: Any, opening: Any) -> None:
    """Everything before the first turn."""
    prompt = with_opening(prompt, opening)
    print("--- prompt")
    if isinstance(prompt, str):
        print(prompt)
        return
    for message in prompt:
        print(f"{message['role']}: {message['content']}")


def read_action() -> str | None:
    """The next turn from the standard input; None at the end."""
    lines: list[str] = []
    while True:
        print("... " if lines else "> ", end="", flush=True)
        line = sys.stdin.readline()
        if not sys.stdin.isatty():  # nobody has seen it
            print(line, end="")
        if not line or (not lines and line.strip() == QUIT):
            print()
            return "\n".join(lines) or None
        lines.append(line.rstrip("\n").removesuffix("\\"))
        if not line.rstrip("\n").endswith("\\"):
            return "\n".join(lines)


def play_text(env: Any, call: Callable[..., Any]) -> tuple[int, float, str]:
    """Turns until the episode ends: how many, what they earned, and why it ended."""
    turns, total = 0, 0.0
    while (action := read_action()) is not None:
        step = check_step(f"{type(env).__name__}.step", call(env.step, action))
        turns, total = turns + 1, total + step.reward
        ignored = " (ignored, the episode is over)" if step.ended else ""
        print(f"--- observation{ignored}\n{step.observation}")
        info = "  ".join(f"{name}={value}" for name, value in step.info.items())
        print(f"--- turn {turns}  reward={step.reward:g}  return={total:g}  {info}")
        if step.ended:
            return turns, total, "terminated" if step.terminated else "truncated"
    return turns, total, "stopped by you"


def use_tool(env: Any, call: Callable[..., Any], line: str) -> str:
    """The text that the model would read after this call."""
    name, _, arguments = line.strip().partition(" ")
    try:
        if name not in tool_names(env):
            raise ValueError(f"Tool {name} not found; there are {', '.join(tool_names(env))}.")
        return str(call(getattr(env, name), **json.loads(arguments or "{}")))
    except Exception as error:  # a failed call is an answer to the model, too
        return str({"error": str(error)})


def play_tools(env: Any, call: Callable[..., Any]) -> tuple[int, float, str]:
    """Calls of tools until the player stops: how many, what they earned, and why it ended."""
    turns = 0
    while (line := read_action()) is not None:
        before = sum(getattr(env, "turn_rewards", None) or [])
        print(f"--- result\n{use_tool(env, call, line)}")
        turns, total = turns + 1, sum(getattr(env, "turn_rewards", None) or [])
        print(f"--- turn {turns}  reward={total - before:g}  return={total:g}")
    total = sum(getattr(env, "turn_rewards", None) or [])
    if callable(getattr(env, "get_reward", None)):
        reward = call(env.get_reward)
        print(f"--- get_reward: {reward}")
        total += check_number(f"{type(env).__name__}.get_reward returned", reward or 0.0)
    return turns, total, "stopped by you"


def run(words: list[str]) -> int:
    """Play what the flags name; the exit code."""
    if any(word.startswith("--model") for word in words):
        raise UsageError(
            "`--model_name_or_path`: removed in 0.2. `trl-stppo show` prints the tokens of episodes."
        )
    play(*read_flags([PlayArguments], words))
    return 0


def play(args: PlayArguments) -> None:
    """Play until the episode or the input ends."""
    factory = played_environment(args)
    row = pick_row(args)
    with asyncio.Runner() as runner:

        def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            return runner.run(result) if inspect.iscoroutine(result) else result

        env = factory()
        is_text = is_text_environment(env)
        tools = [] if is_text else [getattr(env, name) for name in tool_names(env)]
        name = type(env).__name__
        opening = check_opening(f"{name}.reset", call(env.reset, **row), tools=not is_text)
        for tool in tools:
            print(f"--- tool\n{json.dumps(get_json_schema(tool)['function'])}")
        show_prompt(row.get("prompt", ""), opening)
        turns, total, ending = (play_text if is_text else play_tools)(env, call)
        if is_text and callable(getattr(env, "close", None)):
            call(env.close)
    print(f"=== {name}: {turns} turn{'s' * (turns != 1)}, return {total:g}, {ending}")
    told = {key: value for key, value in row.items() if key != "prompt" and len(str(value)) <= 200}
    if told:
        print(f"--- row: {'  '.join(f'{key}={value}' for key, value in told.items())}")
