"""From a scored rollout batch to advantages: rewards, then GAE, then whitening. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core import token_gae, token_rewards, turn_gae, turn_starts, whiten
from ...rollout.turn_batch import TurnBatch
from ..ppo_config import PPOConfig

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Targets:
    """Per-token targets of one rollout batch, all [B, T]."""

    rewards: Tensor  # reward units, as they enter GAE
    raw_advantages: Tensor  # before whitening
    advantages: Tensor  # as they enter the loss; 0 off `loss_mask`
    values: Tensor  # the critic's, before the update
    returns: Tensor  # regression targets; meaningful on `value_mask`
    value_mask: Tensor  # bool, where the critic regresses


def compute_targets(
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
        scores: [B], reward units. On the last token of the last turn.
        values: [B, T]. State before each token.
        final_values: [B]. State after the episode's last token.
        kl: [B, T] nats per token against the reference policy, or None.
        loss_mask: [B, T] bool, tokens that train; a subset of the action mask.
        args: options.
        lam: of GAE, in place of the options' one.
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
