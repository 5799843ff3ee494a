"""One rollout of one process, played and scored, before its tokens become tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...envs.base import Row
from ...rollout.episode import Context, Durations, Episode
from ...rollout.images import with_pictures

# Row and repetition of an evaluation's episode.
EpisodeKey = tuple[int, int]
Sums = dict[str, tuple[float, float]]


class Raw(NamedTuple):
    """Episodes that an engine has played, and the error that ended the rollout, if any."""

    rows: list[Row]
    episodes: list[Episode]
    durations: Durations
    failure: Exception | None = None


@dataclass(frozen=True)
class Played:
    """Prompts and episodes of one process; `episodes[i]` belongs to `rows[episodes[i].row]`.

    Attributes:
        rows: dataset rows, each with a `prompt`, and with the columns that a `rollout_func` returned.
        seed: seed of the rollout; None if a `rollout_func` played.
        has_logprobs: whether the sampler gave log-probabilities.
        names: names of an evaluation's episodes, None in training.
        repeated: indices of episodes that only pad an evaluation batch.
        step: optimizer steps at which training begins, if an older policy played; else None.
        has_contexts: whether episodes may have several contexts.
        sums: sum and count by name, of the metrics of playing.
    """

    rows: list[Row]
    episodes: list[Episode]
    durations: Durations
    seed: tuple[int, ...] | None
    has_logprobs: bool = False
    names: Sequence[EpisodeKey] | None = None
    repeated: frozenset[int] = frozenset()
    step: int | None = None
    has_contexts: bool = False
    sums: Sums = field(default_factory=dict)

    @property
    def is_stale(self) -> bool:
        """Return whether an older policy played."""
        return self.step is not None

    @property
    def ages(self) -> list[int] | None:
        """Return the optimizer steps since the weights that sampled each turn; None for current weights."""
        if self.step is None:
            return None
        return [self.step - v for episode in self.episodes for v in episode.policy_versions]

    @property
    def has_environment(self) -> bool:
        """Return whether an environment, tools or an agent took part; False for plain prompts."""
        return any(episode.env_type is not None for episode in self.episodes)

    def completions(
        self, decode: Callable[[list[int]], str], shown: Callable[[Any], Any] = with_pictures
    ) -> list[Any]:
        """Return each episode's messages after the prompt, or its text if the prompt is text."""
        return [shown(e.messages) if e.conversational else decode(e.ids) for e in self.episodes]

    @property
    def contexts(self) -> list[tuple[int, Context]]:
        """Return all contexts, each with the index of its episode, in the order of batch rows."""
        return [(n, context) for n, episode in enumerate(self.episodes) for context in episode.contexts]

    def rows_of_episodes(self) -> list[Row]:
        """Return the dataset row of each episode."""
        return [self.rows[episode.row] for episode in self.episodes]

    def ended(self, ends: set[int]) -> list[bool]:
        """Return for each episode whether its last token is in `ends`."""
        return [episode.last.ids[-1] in ends for episode in self.episodes]


@dataclass(frozen=True)
class Scored:
    """Rewards of the episodes of a `Played`.

    Attributes:
        rewards: [B, F], one column per reward function, NaN for None.
        everyone: [W * B, F], of all processes.
        turn_rewards: rewards per episode and turn, or None.
        scores: [B], reward units, without turn rewards.
        counts: [B] bool, whether an episode has a score or turn rewards, and trains.
        sums: sum and count by name, of the metrics of turn reward functions.
    """

    rewards: Tensor
    everyone: Tensor
    turn_rewards: list[list[float]] | None
    scores: Tensor
    counts: Tensor
    sums: Sums = field(default_factory=dict)

    @property
    def totals(self) -> list[float]:
        """Return the score of each episode, turn rewards included."""
        turns = self.turn_rewards or [[]] * len(self.scores)
        return [s + sum(own) for s, own in zip(self.scores.tolist(), turns, strict=True)]
