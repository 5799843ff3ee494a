"""The policy's KL per turn, and the factor on optimizer steps that keeps this KL near a desired value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_stppo.core.masking import widest
from trl_stppo.core.policy import MAX_LOG_RATIO, log_importance_ratio
from trl_stppo.core.turns import reduce_turns

GROWTH = 1.5
# The factor stays the same while the KL is between half and twice the desired KL.
TOLERANCE = 2.0
SMALLEST_FACTOR, LARGEST_FACTOR = 0.001, 1.0


def kl_per_turn(
    logprobs: Tensor, old_logprobs: Tensor, turn_index: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum the KL from the policy that played to the current policy over turns, and count the turns.

    A token's term is expm1(x) - x with x = log pi - log pi_old, which is never negative and whose mean
    under pi_old is the KL. A turn without a token in the loss is not counted.

    Args:
        logprobs: [B, T] nats, of the current policy.
        old_logprobs: [B, T] nats, of the policy that played.
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        loss_mask: [B, T] bool, True = counts.

    Returns:
        The sum in nats and the number of turns, [] each, in the widest dtype, without a graph.

    Source: Schulman 2020, "Approximating KL divergence", the estimator k3, here with the ratio pi / pi_old.
    """
    new, old = widest(logprobs.detach()), widest(old_logprobs.detach())
    x = log_importance_ratio(new, old, turn_index, "token", loss_mask=loss_mask)
    terms = x.clamp(max=MAX_LOG_RATIO).expm1() - x
    index = turn_index.masked_fill(~loss_mask, -1)
    counts = reduce_turns(torch.ones_like(x), index, num_turns=x.size(1), op="sum")
    return terms.sum(), (counts > 0).sum().to(x.dtype)


def next_step_factor(
    factor: float, kl: float, desired_kl: float, *, may_grow: bool = True, delay: int = 0
) -> float:
    """Move the factor on optimizer steps so that an update's KL per turn comes near the desired KL.

    Args:
        factor: factor of the update that has ended, within [0.001, 1].
        kl: KL of this update in nats per turn; a KL that is not finite counts as too large.
        desired_kl: desired KL in nats per turn.
        may_grow: whether the factor may grow.
        delay: age of the rollout in updates; the older, the smaller the change.

    Returns:
        The factor of the next update, within [0.001, 1].

    Source: the adaptive learning rate of Isaac Gym (arXiv:2108.10470) and RSL-RL (arXiv:2509.10771).
    """
    change = 1.0
    if not (math.isfinite(kl) and kl <= TOLERANCE * desired_kl):
        change = 1.0 / GROWTH
    elif may_grow and kl < desired_kl / TOLERANCE:
        change = GROWTH
    moved = factor * change ** (1.0 / (1 + delay))
    return min(max(moved, SMALLEST_FACTOR), LARGEST_FACTOR)
