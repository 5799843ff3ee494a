"""What the engine asks of either kind of environment, and what it gets back.

A driver turns one step of an episode into a call for a worker: a function without arguments, or a
coroutine function, that returns an `Opening` or an `Outcome`. Whatever the environment returns is
checked inside that call, so that a broken contract is an error of this episode and of no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .chat import Message
from .episode import Episode

Call = Callable[[], Any]
TRUSTED_TEXT = "trusted_text"  # attribute of an environment, or of a tool


def readable(text: str) -> str:
    """The text without lone surrogates, as undecodable output of other programs leaves them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def trusts(*speakers: Any) -> bool:
    """Whether each environment and tool says of itself that its text may hold control tokens."""
    return bool(speakers) and all(getattr(s, TRUSTED_TEXT, False) is True for s in speakers)


@dataclass
class Opening:
    """The environment is ready."""

    env: Any  # the instance
    text: Any = ""  # its opening words, appended to the last message of the prompt
    pays_turns: bool = False  # whether it turns out to pay turns


@dataclass
class Outcome:
    """What one turn led to."""

    messages: list[Message] = field(default_factory=list)  # what the environment says, as messages
    reward: float | None = None  # of this turn alone, None if the environment does not pay turns
    # Whether the episode ends here, by the task or from outside.
    terminated: bool = False
    truncated: bool = False
    # Whether the environment could read the action, None if it does not say.
    valid_action: bool | None = None
    success: bool | None = None  # whether the task is solved, None if the environment does not say
    # Counts of a tool environment.
    tool_calls: int = 0
    tool_failures: int = 0


class Driver(Protocol):
    """Plays one kind of environment.

    `episode.pays_turns` may be set when a call is made, not while it runs: a call that has been given
    up may come to an end long after its episode has, so it writes at most `turn_rewards_seen`.
    """

    tools: list[Any]  # that the model can call
    trusted_text: bool  # whether what the environment says may hold control tokens

    @property
    def type_name(self) -> str | None:
        """Of the environment; None where nobody answers."""
        ...

    def opening(self, episode: Episode, index: int, seed: int) -> Call | None:
        """The call that resets the environment and returns an `Opening`, None if there is none."""
        ...

    def message(self, episode: Episode, ids: list[int]) -> Message:
        """A turn that the episode may take, as a message."""
        ...

    def turn(self, episode: Episode, message: Message) -> Call | None:
        """The call that plays the turn and returns an `Outcome`, None if it asks for nothing."""
        ...

    def scoring(self, episode: Episode) -> Call | None:
        """The call that scores the ended episode, None if there is nothing to ask.

        It returns the final reward and what the last turn is paid on top, None for either if there
        is none.
        """
        ...
