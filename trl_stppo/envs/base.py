"""The contract between an environment and the rollout: text in, text out.

An environment never sees tokens. It needs these two methods, and need not inherit from `TextEnv`. Keep other
methods private: a trainer may offer public ones as tools. The commands use two optional class methods,
`datasets()` and `figures()` (docs/environments.md).
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TextEnv(Protocol):
    """Protocol of a text environment. An instance plays one episode at a time; `reset` starts the next.

    Control tokens in its observations are tokenised as plain text, unless `trusted_text = True` is set.
    """

    def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            **row: every column of the dataset row the episode is made from, `prompt` included.

        Returns:
            observation: text appended to the last user message of the row's prompt; "" for nothing.
            info: free-form; not read by the trainer.
        """
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn of the model.

        Args:
            action: the decoded text of the turn, without the end-of-turn token.

        Returns:
            observation: the next user message; ignored once the episode has ended.
            reward: of this turn alone (not cumulative).
            terminated: the task is over.
            truncated: the environment stops for another reason, such as a budget. The last state still
                has a value.
            info: `valid_action` (bool) on every step; `success` (bool) on the step that ends the
                episode.
        """
        ...


def is_text_environment(env: Any) -> bool:
    """Return whether `env.step` is the step of a text environment, not a TRL tool of that name.

    A TRL tool that is called `step` is annotated `-> str`; a step returns a tuple.
    """
    step = getattr(env, "step", None)
    return callable(step) and inspect.signature(step).return_annotation not in (str, "str")


def taken_columns(reset: Callable[..., Any], row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return what a text environment's `reset` gets: the columns that it names, or all, and a seed."""
    parameters = inspect.signature(reset).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    columns = {"seed": seed, **row}.items()
    return {name: v for name, v in columns if name in parameters or (takes_all and name in row)}


def without_prompt(rows: str, columns: Iterable[str]) -> str | None:
    """Return a warning if the rows have no prompt, else None. `rows` is the data set's name."""
    columns = list(columns)
    if {"prompt", "input_ids"} & set(columns):
        return None
    return (
        f"`{rows}` has the columns {columns} and no `prompt`: the model reads only the text of `reset`. If a "
        f"column holds the task, rename it to `prompt`."
    )


def tool_names(env: Any) -> list[str]:
    """Return the names of the class's public functions, which TRL offers to the model as tools."""
    names = [name for name, _ in inspect.getmembers(type(env), inspect.isfunction)]
    return [n for n in names if not n.startswith("_") and n not in ("reset", "get_reward")]
