"""What an agent's episode came to, for whoever let it play."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rollout.episode import Episode


@dataclass(frozen=True)
class AgentEpisode:
    """What came of one episode.

    Attributes:
        messages: the conversation, prompt included where that was messages.
        turns: what the agent has said in each turn.
        rewards: what the environment has paid for each turn.
        final_reward: what it has paid for the episode at its end (`get_reward`), None for nothing.
        success: whether the task was solved, None where the environment does not say.
        stop_reason: why the episode ended, as in docs/environments.md.
        error: what went wrong in the environment, None for nothing.
        prompt: as given, with the environment's opening words.
        prompt_ids: its tokens.
        ids: tokens after the prompt.
        turn_spans: where the turns are in `ids`.
        logprobs: of `ids` when they were sampled, nats; 0 of what the environment has written, and
            everywhere with a model that keeps nothing between turns (docs/many_gpus.md).
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
        """All that the environment has paid."""
        return sum(self.rewards) + (self.final_reward or 0.0)

    @classmethod
    def of(cls, episode: Episode, decode: Callable[..., str]) -> AgentEpisode:
        """What is told of an episode that has been played."""
        assert episode.stop_reason is not None, "it is over"
        before = [] if isinstance(episode.prompt, str) else list(episode.prompt)
        return cls(
            messages=[*before, *episode.messages],
            turns=[
                decode(episode.ids[start:end], skip_special_tokens=True)
                for start, end in episode.turn_spans
            ],
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
