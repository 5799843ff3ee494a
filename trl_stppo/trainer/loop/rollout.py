"""One rollout of one process: rows, episodes and rewards, before its tokens become tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...rollout.episode import Context, Durations, Episode
from ..planning.data import Row

# Row and repetition of an evaluation's episode.
EpisodeKey = tuple[int, int]


@dataclass
class Rollout:
    """Prompts, episodes and rewards of one process; `episodes[i]` belongs to `rows[episodes[i].row]`.

    Attributes:
        rows: Dataset rows, each with a `prompt`, and with the columns that a `rollout_func`
            returned.
        seed: seed of the rollout; None if a `rollout_func` played.
        names: names of an evaluation's episodes, None in training.
        repeated: Indices of episodes that only pad an evaluation batch.
        rewards: [B, F], one column per reward function, NaN for None.
        turn_rewards: Rewards per episode and turn, or None.
        has_turn_rewards: For each episode, whether its turns have rewards, so that it needs no score.
        totals: Score of each episode, turn rewards included.
        ages: Optimizer steps since the weights that sampled each turn; None if the trained policy
            itself samples.
        metric_sums: Sum and count by name, of the metrics of vLLM and turn reward functions.
    """

    rows: list[Row]
    episodes: list[Episode]
    durations: Durations
    seed: tuple[int, ...] | None
    has_logprobs: bool
    names: Sequence[EpisodeKey] | None = None
    repeated: frozenset[int] = frozenset()
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    turn_rewards: list[list[float]] | None = None
    has_turn_rewards: list[bool] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    ages: list[int] | None = None
    has_contexts: bool = False
    metric_sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.has_turn_rewards = [episode.has_turn_rewards for episode in self.episodes]
        if any(self.has_turn_rewards):
            self.turn_rewards = [episode.turn_rewards for episode in self.episodes]

    @property
    def has_environment(self) -> bool:
        """Return whether an environment, tools or an agent took part; False for plain prompts."""
        return any(episode.env_type is not None for episode in self.episodes)

    def completions(self, decode: Callable[[list[int]], str]) -> list[Any]:
        """Return each episode's messages after the prompt, or its text if the prompt is text."""
        return [e.messages if e.conversational else decode(e.ids) for e in self.episodes]

    @property
    def contexts(self) -> list[tuple[int, Context]]:
        """Return all contexts, each with the index of its episode, in the order of batch rows."""
        return [
            (n, context) for n, episode in enumerate(self.episodes) for context in episode.contexts
        ]

    def rows_of_episodes(self) -> list[Row]:
        """Return the dataset row of each episode."""
        return [self.rows[episode.row] for episode in self.episodes]

    def ended(self, ends: set[int]) -> list[bool]:
        """Return for each episode whether its last token is in `ends`."""
        return [episode.last.ids[-1] in ends for episode in self.episodes]
