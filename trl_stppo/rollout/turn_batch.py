"""Turns the episodes of a rollout into the padded tensors that `core` works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.turns import turn_index_from_spans
from .episode import Episode


@dataclass
class TurnBatch:
    """The turn structure of a local rollout batch."""

    turn_index: Tensor  # [B, T] int64, k at the tokens of turn k, -1 elsewhere
    turn_rewards: Tensor | None  # [B, K] float, 0 where an episode has fewer turns, or None
    terminated: Tensor  # [B] bool, the task's own end

    @property
    def action_mask(self) -> Tensor:
        """[B, T] bool, True where the policy sampled the token."""
        return self.turn_index >= 0

    def earned(self, scores: Tensor) -> Tensor:
        """Total rewards of episodes, [B]: score plus turn rewards; hidden turns count as 0."""
        return scores if self.turn_rewards is None else scores + self.turn_rewards.sum(dim=1)


def build_turn_batch(
    episodes: Sequence[Episode],
    turn_rewards: Sequence[Sequence[float]] | None,
    completion_mask: Tensor,
    dtype: torch.dtype,
) -> TurnBatch:
    """Collate the turns of episodes.

    Args:
        episodes: episodes of the batch, in its order.
        turn_rewards: reward of each turn of each episode, reward units; None without turn rewards.
        completion_mask: [B, T], 0 past an episode's end, and 0 throughout a hidden episode.
        dtype: dtype of the rewards.
    """
    device = completion_mask.device
    spans = [episode.turn_spans for episode in episodes]
    turn_index = turn_index_from_spans(spans, completion_mask.size(1), device=device)
    turn_index = turn_index.masked_fill(~completion_mask.bool(), -1)
    rewards = None if turn_rewards is None else _padded(turn_rewards, turn_index, dtype)
    terminated = torch.tensor([episode.terminated for episode in episodes], device=device)
    return TurnBatch(turn_index, rewards, terminated)


def _padded(
    turn_rewards: Sequence[Sequence[float]], turn_index: Tensor, dtype: torch.dtype
) -> Tensor:
    """Turn rewards as [B, K]; a hidden episode has no turn in the index, so none of its rewards count."""
    counts = (turn_index.amax(dim=1) + 1).tolist()
    table = torch.zeros(len(turn_rewards), max(1, *counts), dtype=dtype)
    for episode, (rewards, turns) in enumerate(zip(turn_rewards, counts, strict=True)):
        if turns:
            table[episode, :turns] = torch.tensor(rewards, dtype=dtype)
    return table.to(turn_index.device)
