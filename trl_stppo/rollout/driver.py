"""The interface between the rollout engine and environments of every kind.

A driver turns one step of an episode into a call for a worker: a function without arguments, or a
coroutine function, that returns an `Opening` or an `Outcome`. The call checks the environment's return
values, so that a broken contract is an error of this episode alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .chat import Message
from .contexts import AgentRequest
from .episode import Episode
from .record import StopReason

Call = Callable[[], Any]
TRUSTED_TEXT = "trusted_text"  # attribute of an environment, or of a tool


def readable(text: str) -> str:
    """Replace lone surrogates in a text. Undecodable output of other programs contains them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def trusts(*speakers: Any) -> bool:
    """Return whether each environment and tool declares that its text may hold control tokens."""
    return bool(speakers) and all(getattr(s, TRUSTED_TEXT, False) is True for s in speakers)


@dataclass
class Opening:
    """Result of an environment's reset."""

    env: Any  # the instance
    text: Any = ""  # its opening text, appended to the last message of the prompt
    pays_turns: bool = False  # whether it gives turn rewards
    picture: str | None = None  # of the environment, text or SVG
    outcome: Outcome | None = None  # of an agent: its first request, or its end without one


@dataclass
class Outcome:
    """The environment's response to one turn."""

    messages: list[Message] = field(default_factory=list)  # the observation, as messages
    reward: float | None = None  # of this turn alone, None without turn rewards
    # Whether the episode ends here, by the task or from outside.
    terminated: bool = False
    truncated: bool = False
    # Whether the environment could read the action, None if it does not report it.
    valid_action: bool | None = None
    success: bool | None = None  # whether the task is solved, None if not reported
    picture: str | None = None  # of the environment after the turn, text or SVG
    # Counts of a tool environment.
    tool_calls: int = 0
    tool_failures: int = 0
    request: AgentRequest | None = None  # of an agent: its next call
    turn_rewards: list[float] | None = None  # of all turns, at an agent's end
    over: StopReason | None = None  # the limit that has ended an agent's episode


class Driver:
    """Base class of drivers. A driver plays one kind of environment, by default without reset and score.

    `episode.pays_turns` may be set when a call is made, not while it runs: an abandoned call may end
    long after its episode, so it writes at most `turn_rewards_seen`.
    """

    tools: list[Any]  # tools that the model can call
    trusted_text: bool  # whether observations may hold control tokens
    type_name: str | None  # the environment's class; None without an environment

    def opening(self, episode: Episode, index: int, seed: int) -> Call | None:
        """Return the call that resets the environment and returns an `Opening`, or None without a reset."""
        return None

    def message(self, episode: Episode, ids: list[int]) -> Message:
        """Return a sampled turn of the episode as a message."""
        raise NotImplementedError

    def turn(self, episode: Episode, message: Message) -> Call | None:
        """Return the call that plays the turn and returns an `Outcome`, or None if the turn has no action."""
        return None

    def scoring(self, episode: Episode) -> Call | None:
        """Return the call that scores the ended episode, or None if the environment has no score.

        It returns the final reward and the last turn's additional reward, None for either if there
        is none.
        """
        return None

    def release(self, episode: Episode) -> None:
        """Release the resources of an ended episode, such as its agent."""

    def close(self) -> None:
        """Release the driver's resources, such as the HTTP endpoint that agents call."""
