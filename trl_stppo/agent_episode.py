"""The result of an agent's episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rollout.episode import Episode


@dataclass(frozen=True)
class AgentEpisode:
    """The result of one episode.

    Attributes:
        messages: the conversation, with the prompt if that was messages.
        turns: text of each turn.
        rewards: of each turn, by the environment.
        final_reward: of the episode at its end (`get_reward`), None without one.
        success: whether the task was solved, None if the environment does not return it.
        stop_reason: the reason of the end, as in docs/environments.md.
        error: of the environment.
        prompt: with the first observation.
        prompt_ids: tokens of the prompt; this and what follows are of the first context of an agent.
        ids: tokens after the prompt.
        turn_spans: half-open spans of the turns in `ids`.
        logprobs: of `ids` at sampling, nats; 0 for observations, and everywhere with a model that has
            no cache between turns (docs/many_gpus.md).
    """

    messages: list[dict[str, Any]]
    turns: list[str]
    rewards: list[float]
    final_reward: float | None
    success: bool | None
    stop_reason: str
    error: str | None
    prompt: list[dict[str, Any]] | str
    prompt_ids: list[int] = field(repr=False)
    ids: list[int] = field(repr=False)
    turn_spans: list[tuple[int, int]] = field(repr=False)
    logprobs: list[float] = field(repr=False)

    @property
    def score(self) -> float:
        """Return the sum of the environment's rewards, the final reward included."""
        return sum(self.rewards) + (self.final_reward or 0.0)

    def __str__(self) -> str:
        """Return the conversation as a dialogue, and how it ended."""
        lines = [
            f"{m.get('role', '?')}: {m.get('content') or m.get('tool_calls')}"
            for m in self.messages
        ]
        solved = {True: "solved", False: "failed", None: "not judged"}[self.success]
        return "\n".join([*lines, f"({solved}, score {self.score:g}, {self.stop_reason})"])

    @classmethod
    def of(cls, episode: Episode, decode: Callable[..., str]) -> AgentEpisode:
        """Make an `AgentEpisode` from a finished episode of the rollout engine."""
        assert episode.stop_reason is not None
        before = [] if isinstance(episode.prompt, str) else list(episode.prompt)
        return cls(
            messages=[*before, *episode.messages],
            turns=[decode(ids, skip_special_tokens=True) for ids in episode.turns_of_tokens()],
            rewards=list(episode.turn_rewards),
            final_reward=episode.final_reward,
            success=episode.success,
            stop_reason=episode.stop_reason.value,
            error=episode.error,
            prompt=episode.prompt,
            prompt_ids=list(episode.prompt_ids),
            ids=list(episode.ids),
            turn_spans=list(episode.turn_spans),
            logprobs=list(episode.logprobs),
        )
