"""The interface between the rollout engine and environments of every kind.

A driver turns one step of an episode into a call for a worker: a function without arguments, or a
coroutine function, that returns an `Opening` or an `Outcome`. The call checks what the environment
returns, so that a broken contract is an error of this episode alone.
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
# Name of an attribute of an environment, or of a tool.
TRUSTED_TEXT = "trusted_text"


def trusts(*speakers: Any) -> bool:
    """Return whether each environment and tool declares that its text may hold control tokens."""
    return bool(speakers) and all(getattr(s, TRUSTED_TEXT, False) is True for s in speakers)


@dataclass
class Opening:
    """Result of an environment's reset.

    Attributes:
        env: the environment.
        text: the opening text, appended to the last message of the prompt.
        has_turn_rewards: whether it gives turn rewards.
        picture: the environment as text or SVG.
    """

    env: Any
    text: Any = ""
    has_turn_rewards: bool = False
    picture: str | None = None


@dataclass
class Outcome:
    """The environment's response to one turn.

    Attributes:
        messages: the observation, as messages.
        reward: the reward of this turn alone, None without turn rewards.
        terminated, truncated: whether the episode ends here, by the task or from outside.
        valid_action: whether the environment could read the action, None if it does not report it.
        success: whether the task is solved, None if not reported.
        picture: the environment after the turn as text or SVG.
        tool_calls, tool_failures: counts of a tool environment's calls.
        request: an agent's next call.
        turn_rewards: rewards of all turns, set when an agent ends.
        over: the limit that has ended an agent's episode.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    valid_action: bool | None = None
    success: bool | None = None
    picture: str | None = None
    tool_calls: int = 0
    tool_failures: int = 0
    request: AgentRequest | None = None
    turn_rewards: list[float] | None = None
    over: StopReason | None = None


class Driver:
    """Base class of drivers. A driver plays one kind of environment, by default without reset and score.

    `episode.has_turn_rewards` may be set when a call is made, not while it runs: an abandoned call may end
    long after its episode, so it writes at most `turn_rewards_seen`.

    Attributes:
        tools: tools that the model can call.
        trusted_text: whether observations may hold control tokens.
        type_name: the environment's class; None without an environment.
    """

    tools: list[Any]
    trusted_text: bool
    type_name: str | None

    def opening(self, episode: Episode, seed: int) -> Call | None:
        """Return the call that resets the environment, or None without a reset.

        It returns an `Opening`; of an agent the `Outcome` with its first request, or its end.
        """
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
