"""Targets of an update: advantages, and the critic's returns, by GAE or by comparison in groups."""

from __future__ import annotations

from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor

from ...core import (
    default_lam,
    group_advantages,
    kl_penalty,
    leave_one_out_advantages,
    return_batch_norm,
    sampler_correction,
    token_gae,
    token_rewards,
    turn_gae,
    turn_starts,
    whiten,
)
from ..batch import Passes, Targets, TurnBatch
from ..ppo_config import PPOConfig
from ..stgrpo_config import STGRPOConfig
from ..sums import Reduce, centred, deviation, spread
from .rollout import Scored


def sampler_weights(passes: Passes, turns: TurnBatch, args: PPOConfig) -> Tensor:
    """Return weights that correct for the gap between the policy and vLLM's sampler, [B, T] or [B, 1]."""
    assert passes.old is not None
    assert passes.sampled is not None
    level, form = args.vllm_importance_sampling_mode.split("_")
    return sampler_correction(
        passes.old,
        passes.sampled,
        turns.turn_index,
        "product" if level == "sequence" else level,
        truncate=form == "truncate",
        clip_min=args.vllm_importance_sampling_clip_min,
        clip_max=args.vllm_importance_sampling_clip_max,
    )


def reference_kl(passes: Passes, turns: TurnBatch, args: PPOConfig) -> Tensor | None:
    """Return the per-token KL to the reference for the reward, [B, T] nats; None if `kl_coef` is 0."""
    if args.kl_coef == 0.0:
        return None
    assert passes.old is not None
    assert passes.ref is not None
    return kl_penalty(passes.old, passes.ref, args.kl_estimator, loss_mask=turns.action_mask)


def critic_targets(
    passes: Passes,
    turns: TurnBatch,
    loss_mask: Tensor,
    scored: Scored,
    kl: Tensor | None,
    args: PPOConfig,
    reduce: Reduce,
    *,
    warms_up: bool,
) -> Targets:
    """Compute advantages and the critic's targets by GAE.

    Args:
        passes: results of the passes over the rollout, with a row per episode.
        turns: turns of the episodes.
        loss_mask: [B, T] bool, tokens that train.
        scored: scores, which belong to the last tokens of the episodes.
        kl: [B, T] nats, the KL in the reward, or None.
        args: the run's configuration.
        reduce: sums over processes.
        warms_up: whether the next update trains only the critic.
    """
    assert passes.values is not None
    assert passes.final_values is not None
    index, values, final_values = turns.turn_index, passes.values, passes.final_values
    raw_rewards = rewards = token_rewards(
        index,
        scores=scored.scores.to(values.dtype),
        turn_rewards=turns.turn_rewards,
        kl=kl,
        kl_coef=args.kl_coef,
    )
    if args.whiten_rewards:
        rewards = whiten(rewards, turns.action_mask, center=False, reduce=reduce)
    bootstrap = None
    if args.bootstrap_truncated:
        bootstrap = torch.where(turns.terminated, torch.zeros_like(final_values), final_values)
    lam, starts = args.lam, turn_starts(index)
    if lam is None:
        steps = turns.action_mask if args.advantage_level == "token" else starts
        lam = default_lam(*reduce(torch.stack([starts.sum(), steps.sum()]).float()).tolist())
    by_turn = args.advantage_level == "turn"
    gae, where = (turn_gae, index) if by_turn else (token_gae, turns.action_mask)
    # The warm-up regresses on Monte Carlo returns: GAE with lambda 1.
    estimate = partial(gae, gamma=args.gamma, lam=1.0 if warms_up else lam)
    raw, returns = estimate(rewards, values, where, bootstrap_values=bootstrap)
    advantages = whiten(raw, loss_mask, reduce=reduce).masked_fill(~loss_mask, 0.0)
    in_units = raw
    if args.whiten_rewards:
        # Whitened rewards have another unit in each rollout, and so have the values of the critic.
        unit = deviation(raw_rewards, turns.action_mask, reduce)
        bootstrap = None if bootstrap is None else bootstrap * unit
        in_units = estimate(raw_rewards, values * unit, where, bootstrap_values=bootstrap)[0]
    value_mask = loss_mask & starts if by_turn else loss_mask
    width = deviation(in_units, loss_mask, reduce)
    return Targets(rewards, raw, advantages, values, returns, value_mask, width)


def group_targets(
    turns: TurnBatch,
    scored: Scored,
    mask: Tensor,
    args: STGRPOConfig,
    group: int,
    accelerator: Accelerator,
) -> Targets:
    """Compute advantages without a critic, one per episode (ReBN: one per turn), with metrics of the scores.

    An episode without a score does not count in its group of `group` episodes. `mask`: [B, T] bool, tokens
    that train.
    """
    scores = scored.scores
    totals = turns.totals(scores)
    every, counts = (accelerator.gather(x).view(-1, group) for x in (totals, scored.counts))
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


def _without_critic(advantages: Tensor, mask: Tensor, width: float, figures: dict[str, float]) -> Targets:
    nothing, off = torch.zeros_like(advantages), torch.zeros_like(mask)
    return Targets(nothing, advantages, advantages, nothing, nothing, off, width, figures)
