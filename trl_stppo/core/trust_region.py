"""The trust region of an update: the KL that it allows, and the factor on optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trl_stppo.core.masking import widest
from trl_stppo.core.policy import MAX_LOG_RATIO, log_importance_ratio
from trl_stppo.core.turns import reduce_turns

# Rollouts over which a spread is averaged, and rollouts after which the largest average counts half.
AVERAGED, HALF_LIFE = 3, 50
LEAST_GAIN = 0.01
# The factor stays the same while the KL is between half and twice the allowed KL.
TOLERANCE, GROWTH = 2.0, 1.5
FIRST_GROWTH, SMALLEST_FACTOR = 10.0, 0.001


def kl_per_turn(
    logprobs: Tensor, start_logprobs: Tensor, turn_index: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum the KL from the policy at the start of the update to the current policy over turns; count turns.

    A token's term is expm1(x) - x with x = log pi - log pi_start, which is never negative and whose mean
    under pi_start is the KL. A turn without a token in the loss is not counted.

    Args:
        logprobs: [B, T] nats, of the current policy.
        start_logprobs: [B, T] nats, of the policy at the start of the update.
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        loss_mask: [B, T] bool, True = counts.

    Returns:
        The sum in nats and the number of turns, [] each, in the widest dtype, without a graph.

    Source: Schulman 2020, "Approximating KL divergence", the estimator k3, here with the ratio pi / pi_start.
    """
    new, start = widest(logprobs.detach()), widest(start_logprobs.detach())
    x = log_importance_ratio(new, start, turn_index, "token", loss_mask=loss_mask)
    terms = x.clamp(max=MAX_LOG_RATIO).expm1() - x
    index = turn_index.masked_fill(~loss_mask, -1)
    counts = reduce_turns(torch.ones_like(x), index, num_turns=x.size(1), op="sum")
    return terms.sum(), (counts > 0).sum().to(x.dtype)


def largest_spread(largest: float, spreads: Sequence[float]) -> float:
    """Return the largest mean spread of three rollouts in a row, of which older ones count less.

    Args:
        largest: result for the rollout before, reward units; 0 before there are three.
        spreads: standard deviations of the raw advantages of the last rollouts, newest last.
    """
    recent = spreads[-AVERAGED:]
    mean = math.fsum(recent) / AVERAGED if len(recent) == AVERAGED else 0.0
    return max(largest * 0.5 ** (1 / HALF_LIFE), mean)


def spread_gain(spread: float, largest: float) -> float:
    """Return the share of `desired_kl` that an update may use, within [0.01, 1].

    A natural gradient at constant temperature moves the policy by a KL proportional to the variance of the
    advantages. If advantages are small, there is little to gain, and whitening makes their noise large.

    Args:
        spread: standard deviation of the rollout's raw advantages, reward units.
        largest: result of `largest_spread`; if it is 0, the share is 1.
    """
    if not largest > 0.0:
        return 1.0
    return min(1.0, max((spread / largest) ** 2, LEAST_GAIN))


def shortened_factor(factor: float, kl: float, allowed_kl: float) -> float:
    """Return the factor on optimizer steps after an update whose KL was too large.

    Args:
        factor: factor of that update.
        kl: its KL in nats per turn; a KL that is not finite counts as very large.
        allowed_kl: allowed KL in nats per turn.
    """
    ratio = kl / allowed_kl if math.isfinite(kl) else math.inf
    change = min(max(max(ratio, 1.0) ** -0.5, 0.25), 0.7)
    return max(factor * change, SMALLEST_FACTOR)


def first_growth(kl: float, allowed_kl: float) -> float:
    """Return the largest growth of the factor in the first updates, whose KL is far below the allowed KL.

    The KL grows with the square of a step, so this goes to half of the step that the KL allows.

    Args:
        kl: KL of the update that has ended, nats per turn.
        allowed_kl: allowed KL in nats per turn.

    Returns:
        At most 10; `GROWTH` or less ends the first updates.
    """
    return min(FIRST_GROWTH, 0.5 * math.sqrt(allowed_kl / kl)) if kl > 0.0 else GROWTH


def next_step_factor(
    factor: float, kl: float, allowed_kl: float, *, may_grow: bool = True, growth: float = GROWTH
) -> float:
    """Move the factor on optimizer steps so that an update's KL per turn comes near the allowed KL.

    Args:
        factor: factor of the update that has ended.
        kl: KL of this update in nats per turn.
        allowed_kl: allowed KL in nats per turn.
        may_grow: whether the factor may grow.
        growth: largest growth.

    Returns:
        The factor of the next update, within [0.001, 1].

    Source: the adaptive learning rate of RSL-RL (arXiv:2509.10771), here in proportion to the square root of
    the KL, which grows with the square of a step.
    """
    change = 1.0
    if kl > TOLERANCE * allowed_kl:
        change = max(0.25, min(1.0 / GROWTH, math.sqrt(allowed_kl / kl)))
    elif may_grow and 0.0 < kl < allowed_kl / TOLERANCE:
        change = min(growth, math.sqrt(allowed_kl / kl))
    return min(max(factor * change, SMALLEST_FACTOR), 1.0)
