"""One rollout of one process: what was asked, played and paid, before its tokens become tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...rollout.episode import Durations, Episode
from ..planning.rows import Row

EpisodeKey = tuple[int, int]  # of an evaluation: row, repetition


@dataclass
class Rollout:
    """Who was asked what, what came of it, and what it has earned.

    Rows and episodes are numbered apart: `episodes[i]` answers `rows[episodes[i].row]`.
    """

    # Of the dataset, each with a `prompt`, and with what a `rollout_func` has said of it.
    rows: list[Row]
    episodes: list[Episode]  # as they were played
    durations: Durations  # of the playing
    seed: tuple[int, ...] | None  # names its randomness; None where a `rollout_func` has played
    has_logprobs: bool  # whether the sampler tells log-probabilities
    names: list[EpisodeKey] | None = None  # of the episodes of an evaluation, None in training
    # Numbers of episodes that only fill up a batch of an evaluation.
    repeated: frozenset[int] = frozenset()
    # [B, F], of each reward function, NaN where it has said None.
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    # Per episode and turn, None where nobody pays turns.
    turn_rewards: list[list[float]] | None = None
    # Per episode whether its turns are paid, so that a missing score is no gap.
    pays_turns: list[bool] = field(default_factory=list)
    # Per episode its score, turn rewards included.
    earnings: list[float] = field(default_factory=list)
    # Sum and count by name, of what vLLM and turn reward functions have said.
    metric_sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pays_turns = [episode.pays_turns for episode in self.episodes]
        if any(self.pays_turns):
            self.turn_rewards = [episode.turn_rewards for episode in self.episodes]

    @property
    def by_engine(self) -> bool:
        """Whether environments or tools have answered, so that ends and actions are known."""
        return any(episode.env_type is not None for episode in self.episodes)

    @property
    def prompts(self) -> list[Any]:
        """Of the episodes, the environments' opening words included."""
        return [episode.prompt for episode in self.episodes]

    def completions(self, decode: Callable[[list[int]], str]) -> list[Any]:
        """Messages after the prompt, or text where the prompt is text."""
        return [e.messages if e.conversational else decode(e.ids) for e in self.episodes]

    def columns(self) -> list[Row]:
        """A row for each episode."""
        return [self.rows[episode.row] for episode in self.episodes]

    def ended(self, ends: set[int]) -> list[bool]:
        """Of each episode, whether its last token is one of these."""
        return [episode.ids[-1] in ends for episode in self.episodes]
