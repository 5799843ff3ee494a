"""Advantages without a critic, by comparison with other episodes or other turns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import (
    group_advantages,
    leave_one_out_advantages,
    return_batch_norm,
    token_rewards,
    turn_gae,
)
from ..batch import Targets, TurnBatch
from ..stgrpo_config import STGRPOConfig
from ..sums import centred, deviation, spread


def group_targets(
    turns: TurnBatch,
    scores: Tensor,
    scored: Tensor,
    mask: Tensor,
    args: STGRPOConfig,
    group: int,
    accelerator: Any,
) -> Targets:
    """Compute advantages without a critic, one per episode (ReBN: one per turn), with metrics of the scores.

    `scores`: [B], reward units. `scored`: [B] bool; an episode without a score does not count in its group
    of `group` episodes. `mask`: [B, T] bool, tokens that train.
    """
    totals = turns.totals(scores)
    every, counts = (accelerator.gather(x).view(-1, group) for x in (totals, scored))
    known = every.where(counts, torch.nan)
    figures = {"reward_std": spread(known).item() if counts.sum() > 1 else 0.0}
    if not args.needs_groups:
        rewards = token_rewards(turns.turn_index, scores=scores, turn_rewards=turns.turn_rewards)
        total = accelerator.reduce
        advantages = return_batch_norm(rewards, turns.turn_index, mask, args.gamma, reduce=total)
        raw, _ = turn_gae(rewards, torch.zeros_like(rewards), turns.turn_index, args.gamma, 1.0)
        return _without_critic(advantages, mask, deviation(raw, mask, total), figures)
    if args.advantage_estimator == "group":
        relative = group_advantages(every, counts, args.scale_rewards)
    else:
        relative = leave_one_out_advantages(every, counts)
    # A score equal to its group's mean gets exactly 0, because rounding depends on the order of rewards.
    relative = relative.masked_fill(centred(known, 1) == 0, 0.0)
    figures["frac_reward_zero_std"] = (relative == 0).all(dim=1).float().mean().item()
    first, raw = accelerator.process_index * len(scores), group_advantages(every, counts, "none")
    own = [x.flatten()[first : first + len(scores), None] * mask for x in (relative, raw)]
    return _without_critic(own[0], mask, deviation(own[1], mask, accelerator.reduce), figures)


def _without_critic(
    advantages: Tensor, mask: Tensor, spread: float, figures: dict[str, float]
) -> Targets:
    nothing, off = torch.zeros_like(advantages), torch.zeros_like(mask)
    return Targets(nothing, advantages, advantages, nothing, nothing, off, spread, figures)
