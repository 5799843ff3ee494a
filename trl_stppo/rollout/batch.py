"""Turns a rollout's Python record into the padded tensors that `core` works on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.turns import turn_index_from_mask, turn_index_from_spans
from .record import RolloutRecord


@dataclass
class TurnBatch:
    """The turn structure of a local rollout batch.

    Attributes:
        turn_index: [B, T] int64, k at the tokens of turn k, -1 elsewhere.
        turn_rewards: [B, K] float, 0 where an episode has fewer turns, or None.
        terminated: [B] bool, the task's own end.
    """

    turn_index: Tensor
    turn_rewards: Tensor | None
    terminated: Tensor

    @property
    def action_mask(self) -> Tensor:
        """[B, T] bool, True where the policy sampled the token."""
        return self.turn_index >= 0


def build_turn_batch(
    record: RolloutRecord, action_mask: Tensor, ends_with_eos: Tensor, dtype: torch.dtype
) -> TurnBatch:
    """Collate the record with the padded batch that TRL made of the same rollout.

    Args:
        record: what the rollout wrote down.
        action_mask: [B, T] bool from TRL's masks; False also where TRL masked a whole episode.
        ends_with_eos: [B] bool, the stand-in for `terminated` where the rollout did not say.
        dtype: of the rewards.

    Returns:
        The batch, on `action_mask`'s device.
    """
    device = action_mask.device
    if record.turn_spans is not None:
        turn_index = turn_index_from_spans(record.turn_spans, action_mask.size(1)).to(device)
        turn_index = turn_index.masked_fill(~action_mask, -1)
    else:
        # A record without spans: the runs of the mask, which empty observations would join.
        turn_index = turn_index_from_mask(action_mask)
    rewards = None
    if record.turn_rewards is not None:
        rewards = _padded(record.turn_rewards, turn_index, dtype)
    if record.terminated is not None:
        terminated = torch.tensor(record.terminated, device=device)
    elif record.truncated is not None:
        terminated = ~torch.tensor(record.truncated, device=device)
    else:
        terminated = ends_with_eos
    return TurnBatch(turn_index, rewards, terminated)


def _padded(turn_rewards: list[list[float]], turn_index: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, K]; rewards past an episode's last turn (a turn cut to nothing) go to that last turn."""
    counts = (turn_index.amax(dim=1) + 1).tolist()
    width = max(1, *counts)
    table = torch.zeros(len(turn_rewards), width, dtype=dtype)
    for episode, (rewards, turns) in enumerate(zip(turn_rewards, counts, strict=True)):
        for turn, reward in enumerate(rewards):
            if turns:
                table[episode, min(turn, turns - 1)] += reward
    return table.to(turn_index.device)


def ends_with_eos(
    completion_ids: Tensor, completion_mask: Tensor, eos_token_ids: list[int]
) -> Tensor:
    """[B] bool, whether the last counted token of each completion ends a turn."""
    last = completion_mask.long().sum(dim=1).clamp(min=1) - 1
    final = completion_ids.gather(1, last.unsqueeze(1)).squeeze(1)
    return torch.isin(final, torch.tensor(eos_token_ids, device=final.device))
