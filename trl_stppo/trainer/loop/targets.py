"""Advantages of a scored rollout batch, with a critic or relative to other episodes. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import (
    group_advantages,
    leave_one_out_advantages,
    return_batch_norm,
    token_gae,
    token_rewards,
    turn_gae,
    turn_starts,
    whiten,
)
from ...rollout.turn_batch import TurnBatch
from ..ppo_config import PPOConfig
from ..stgrpo_config import STGRPOConfig

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Targets:
    """Per-token targets of one rollout batch, all [B, T]."""

    rewards: Tensor  # reward units, as they enter GAE
    raw_advantages: Tensor  # before whitening
    advantages: Tensor  # as they enter the loss; 0 off `loss_mask`
    values: Tensor  # the critic's values before the update
    returns: Tensor  # regression targets; meaningful on `value_mask`
    value_mask: Tensor  # bool, True at the critic's regression targets


def critic_targets(
    turns: TurnBatch,
    scores: Tensor,
    values: Tensor,
    final_values: Tensor,
    kl: Tensor | None,
    loss_mask: Tensor,
    args: PPOConfig,
    lam: float,
    reduce: Reduce,
) -> Targets:
    """Rewards, advantages and returns of a rollout batch.

    Args:
        turns: turn structure and turn rewards.
        scores: [B], reward units, placed on the last token of the last turn.
        values: [B, T], of the state before each token.
        final_values: [B], of the state after the episode's last token.
        kl: [B, T] nats per token against the reference policy, or None.
        loss_mask: [B, T] bool, tokens that train; a subset of the action mask.
        args: options.
        lam: GAE's lambda, in place of the option's.
        reduce: sums a tensor over processes.
    """
    index = turns.turn_index
    rewards = token_rewards(
        index, scores=scores, turn_rewards=turns.turn_rewards, kl=kl, kl_coef=args.kl_coef
    )
    if args.whiten_rewards:
        rewards = whiten(rewards, turns.action_mask, center=False, reduce=reduce)
    bootstrap = None
    if args.bootstrap_truncated:
        bootstrap = torch.where(turns.terminated, torch.zeros_like(final_values), final_values)
    factors = (args.gamma, lam)
    if args.advantage_level == "turn":
        raw, returns = turn_gae(rewards, values, index, *factors, bootstrap_values=bootstrap)
        value_mask = loss_mask & turn_starts(index)
    else:
        raw, returns = token_gae(
            rewards, values, turns.action_mask, *factors, bootstrap_values=bootstrap
        )
        value_mask = loss_mask
    advantages = whiten(raw, loss_mask, reduce=reduce) if args.whiten_advantages else raw
    advantages = advantages.masked_fill(~loss_mask, 0.0)
    return Targets(rewards, raw, advantages, values, returns, value_mask)


def group_targets(
    turns: TurnBatch,
    scores: Tensor,
    scored: Tensor,
    mask: Tensor,
    args: STGRPOConfig,
    group: int,
    accelerator: Any,
) -> tuple[Targets, dict[str, float]]:
    """Advantages without a critic (one per episode, or per turn with ReBN), and metrics of the scores.

    Args:
        turns: turn structure and turn rewards.
        scores: [B], reward units.
        scored: [B] bool, episodes that have a score; the others do not count in their group.
        mask: [B, T] bool, tokens that train.
        args: options.
        group: episodes per prompt.
        accelerator: connects all processes.
    """
    earned = turns.earned(scores)
    every, counts = (accelerator.gather(x).view(-1, group) for x in (earned, scored))
    known = every[counts]
    figures = {"reward_std": known.std().item() if len(known) > 1 else 0.0}
    if not args.needs_groups:
        rewards = token_rewards(turns.turn_index, scores=scores, turn_rewards=turns.turn_rewards)
        total = accelerator.reduce
        advantages = return_batch_norm(rewards, turns.turn_index, mask, args.gamma, reduce=total)
        return _without_critic(advantages, mask), figures
    if args.advantage_estimator == "group":
        relative = group_advantages(every, counts, args.scale_rewards)
    else:
        relative = leave_one_out_advantages(every, counts)
    # A score that equals its group's mean gets 0, whatever the order in which its rewards were added.
    noise = 4 * torch.finfo(every.dtype).eps * every.where(counts, 0.0).abs().amax(1, True)
    relative = relative.masked_fill(group_advantages(every, counts, "none").abs() <= noise, 0.0)
    figures["frac_reward_zero_std"] = (relative == 0).all(dim=1).float().mean().item()
    first = accelerator.process_index * len(scores)
    return _without_critic(
        relative.flatten()[first : first + len(scores), None] * mask, mask
    ), figures


def _without_critic(advantages: Tensor, mask: Tensor) -> Targets:
    nothing = torch.zeros_like(advantages)
    return Targets(nothing, advantages, advantages, nothing, nothing, torch.zeros_like(mask))
