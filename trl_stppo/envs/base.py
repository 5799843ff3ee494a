"""The contract between an environment and the rollout: text in, text out.

An environment never sees tokens. Anything with these two methods qualifies; inheriting from
`TextEnv` is not needed. Keep other methods private: a trainer may offer public ones as tools. Two class
methods, `datasets()` and `figures()`, are optional, and for the commands alone (docs/environments.md).
"""

import inspect
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TextEnv(Protocol):
    """One episode at a time; a new `reset` starts the next one.

    Control tokens in what it says are tokenised as plain text, unless it has `trusted_text = True`.
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
        """Take one turn of the model.

        Args:
            action: the decoded text of the turn, without the end-of-turn token.

        Returns:
            observation: the next user message; ignored once the episode has ended.
            reward: of this turn alone (not cumulative).
            terminated: the task itself is over, so nothing can follow.
            truncated: cut off from outside the task (for instance a budget of the environment);
                the state still has a value, which is why this is not `terminated`.
            info: `valid_action` (bool) on every step; `success` (bool) on the step that ends the
                episode.
        """
        ...


def is_text_environment(env: Any) -> bool:
    """Whether `env.step(action)` is the environment's step rather than one tool among others.

    A TRL tool must be annotated `-> str`; a step returns a tuple. That annotation is what tells a
    tool that happens to be called `step` apart.
    """
    step = getattr(env, "step", None)
    if not callable(step):
        return False
    return inspect.signature(step).return_annotation not in (str, "str")


def without_prompt(rows: str, columns: Iterable[str]) -> str | None:
    """What to say of rows that leave the whole task to `reset`; None where they have a prompt.

    Args:
        rows: what they are called, as `train_dataset`.
        columns: of the rows.
    """
    columns = list(columns)
    if {"prompt", "input_ids"} & set(columns):
        return None
    return (
        f"`{rows}` has the columns {columns} and no `prompt`: the model reads what `reset` returns, and "
        f"nothing else. If a column holds the task, rename it to `prompt`."
    )


def tool_names(env: Any) -> list[str]:
    """The methods that TRL offers to the model: public functions of the class."""
    names = [name for name, _ in inspect.getmembers(type(env), inspect.isfunction)]
    return [n for n in names if not n.startswith("_") and n not in ("reset", "get_reward")]
