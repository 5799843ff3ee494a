"""The interface between the rollout engine and environments of every kind.

A driver turns one step of an episode into a call for a worker: a function without arguments, or a
coroutine function, that returns an `Outcome`. The call checks what the environment
returns, so that a broken contract is an error of only this episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..envs.base import check_opening, check_step, readable, taken_columns
from ..errors import EnvironmentContractError
from ..generation.protocol import TurnResult
from .chat import Message
from .contexts import AgentRequest
from .environments import EnvironmentPool
from .episode import Episode
from .images import TEXTS_ONLY, Content, ImageReader
from .messages import has_image
from .record import StopReason

Call = Callable[[], Any]


def trusts(*speakers: Any) -> bool:
    """Return whether each environment and tool declares that its text may hold control tokens."""
    return bool(speakers) and all(getattr(s, "trusted_text", False) is True for s in speakers)


@dataclass
class Outcome:
    """The environment's response to a reset or to one turn.

    None means that the environment does not report a value.

    Attributes:
        text: the opening, appended to the last message of the prompt.
        has_turn_rewards: whether a tool environment gives turn rewards, after its reset.
        reward: the reward of only this turn.
        terminated, truncated: whether the episode ends here, by the task or from outside.
        picture: the environment as text or SVG.
        request: an agent's next call.
        turn_rewards: rewards of all turns, set when an agent ends.
        over: the limit that has ended an agent's episode.
    """

    env: Any = None
    text: Content = ""
    has_turn_rewards: bool = False
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
        trusted_text: whether observations may hold control tokens.
        type_name: the environment's class; None without an environment.
        calls_model: whether the environment calls the model with messages of its own, and so begins contexts.
        reader: reads images; None if the policy reads only text.
    """

    calls_model = False
    reader: ImageReader | None = None
    tools: list[Any]
    trusted_text: bool
    type_name: str | None
    _run_async: Callable[[Any], Any]

    def opening(self, episode: Episode, seed: int) -> Call | None:
        """Return the call that resets the environment or starts the agent, or None without a reset."""
        return None

    def message(self, episode: Episode, ids: list[int]) -> Message:
        """Return a sampled turn of the episode as a message."""
        raise NotImplementedError

    def turn(self, episode: Episode, message: Message) -> Call | None:
        """Return the call that plays the turn and returns an `Outcome`, or None if the turn has no action."""
        return None

    def begin(self, episode: Episode) -> AgentRequest | None:
        """Prepare the turn that answers the pending request. Return None if the messages cannot be used."""
        raise NotImplementedError

    def answer(self, episode: Episode, result: TurnResult) -> tuple[Call, bool] | None:
        """Append a sampled turn, or return None to leave it to the engine.

        Return the call that answers the request, and whether a stop string cut the turn.
        """
        return None

    def refuse(self, episode: Episode, reason: StopReason) -> Call:
        """Return the call that answers the pending request with an error, for the given reason."""
        raise NotImplementedError

    def scoring(self, episode: Episode) -> Call | None:
        """Return the call that scores the ended episode, or None if the environment has no score.

        It returns the final reward and the last turn's additional reward, each of which may be None.
        """
        return None

    def release(self, episode: Episode) -> None:
        """Release the resources of an ended episode, such as its agent."""

    def close(self) -> None:
        """Release the driver's resources, such as the HTTP endpoint that agents call."""

    def _read(self, name: str, content: Any) -> Any:
        """Read the images in the result of `name`. This takes long, so do it on the environment's worker."""
        if not has_image(content):
            return content
        if self.reader is None:
            raise EnvironmentContractError(f"{name} returned an image, and {TEXTS_ONLY}.")
        try:
            return self.reader.read_content(content)
        except ValueError as error:
            raise EnvironmentContractError(f"{name} returned what is refused: {error}.") from error

    def _finished(self, result: Any) -> Any:
        """Return the result of an environment's method; await it first if it can be awaited."""
        return self._run_async(result) if inspect.isawaitable(result) else result


class TextDriver(Driver):
    """Driver of the text environments of one factory."""

    def __init__(
        self,
        pool: EnvironmentPool,
        name: str | None,
        probe: Any,
        decode: Callable[[list[int]], str],
        run_async: Callable[[Any], Any],
    ) -> None:
        self.tools: list[Any] = []
        self.type_name, self.trusted_text = type(probe).__name__, trusts(probe)
        self._pool, self._name = pool, name
        self._decode, self._run_async = decode, run_async
        render = getattr(probe, "render", None)
        self._renders = callable(render) and not inspect.iscoroutinefunction(render)
        self._reset = probe.reset

    def opening(self, episode: Episode, seed: int) -> Call:
        """Return the call of `reset`, with those columns of the row that it accepts."""
        columns = taken_columns(self._reset, episode.columns, seed)
        # Set this flag now, so that it holds even if `reset` fails.
        episode.has_turn_rewards = True

        def opening() -> Outcome:
            env = self._pool.take(self._name, episode.instance)
            result = self._finished(env.reset(**columns))
            name = f"{self.type_name}.reset"
            opening = self._read(name, check_opening(name, result))
            return Outcome(env, opening, picture=self._picture(env))

        return opening

    def message(self, episode: Episode, ids: list[int]) -> Message:
        """Return the turn's text as an assistant message."""
        return {"role": "assistant", "content": self._decode(ids)}

    def turn(self, episode: Episode, message: Message) -> Call:
        """Return the call that steps the environment with the turn's text."""
        env, action = episode.env, message["content"]

        def stepping() -> Outcome:
            result = self._finished(env.step(action))
            name = f"{self.type_name}.step"
            step = check_step(name, result)
            observation = self._read(name, step.observation)
            valid, success = step.info.get("valid_action"), step.info.get("success")
            return Outcome(
                messages=[{"role": "user", "content": observation}],
                reward=step.reward,
                terminated=step.terminated,
                truncated=step.truncated,
                valid_action=None if valid is None else bool(valid),
                success=None if success is None else bool(success),
                picture=self._picture(env),
            )

        return stepping

    def _picture(self, env: Any) -> str | None:
        """Return the text or SVG of the environment's `render`; an error becomes the text."""
        if not self._renders:
            return None
        try:
            picture = env.render()
        except Exception as error:
            picture = f"{self.type_name}.render raised {error!r}"
        return readable(picture) if isinstance(picture, str) else None
