"""The step follows the policy: its KL per turn, and the factor on the step that this KL moves."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_stppo.core.masking import check_like, widest
from trl_stppo.core.policy import MAX_LOG_RATIO
from trl_stppo.core.turns import check_turn_index, reduce_turns

GROWTH = 1.5
# The KL may be half or twice the desired one before the factor moves.
TOLERANCE = 2.0
SMALLEST_FACTOR, LARGEST_FACTOR = 0.001, 1.0


def kl_per_turn(
    logprobs: Tensor, old_logprobs: Tensor, turn_index: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum the KL of the policy that played to the present policy over turns, and count the turns.

    A token's term is expm1(x) - x with x = log pi - log pi_old, which is never negative and whose mean
    under pi_old is the KL. A turn without a token in the loss does not exist.

    Args:
        logprobs: [B, T] nats, of the present policy.
        old_logprobs: [B, T] nats, of the policy that played.
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        loss_mask: [B, T] bool, True = counts.

    Returns:
        The sum in nats and the number of turns, [] each, in the widest dtype, without a graph.

    Raises:
        ValueError: a shape or dtype is wrong.

    Source: Schulman 2020, "Approximating KL divergence", the estimator k3, here with the ratio pi / pi_old.
    """
    check_turn_index(turn_index)
    check_like("logprobs", logprobs, old_logprobs=old_logprobs, turn_index=turn_index)
    check_like("logprobs", logprobs, loss_mask=loss_mask)
    x = (widest(logprobs.detach()) - widest(old_logprobs.detach())).masked_fill(~loss_mask, 0.0)
    terms = x.clamp(max=MAX_LOG_RATIO).expm1() - x
    index = turn_index.masked_fill(~loss_mask, -1)
    counts = reduce_turns(torch.ones_like(x), index, num_turns=x.size(1), op="sum")
    return terms.masked_fill(index < 0, 0.0).sum(), (counts > 0).sum().to(x.dtype)


def next_step_factor(
    factor: float, kl: float, desired_kl: float, *, may_grow: bool = True, delay: int = 0
) -> float:
    """Move the factor on optimizer steps so that an update's KL per turn comes near the desired one.

    Args:
        factor: of the update that has ended, within [0.001, 1].
        kl: its KL in nats per turn; one that is not finite counts as too large.
        desired_kl: in nats per turn.
        may_grow: whether the factor may grow.
        delay: number of updates after which a factor shows in `kl`; the change is the smaller for it.

    Returns:
        The factor of the next update, within [0.001, 1].

    Source: the adaptive learning rate of Isaac Gym (arXiv:2108.10470) and RSL-RL (arXiv:2509.10771).
    """
    change = 1.0
    if not kl <= TOLERANCE * desired_kl:
        change = 1.0 / GROWTH
    elif may_grow and kl < desired_kl / TOLERANCE:
        change = GROWTH
    moved = factor * change ** (1.0 / (1 + delay))
    return min(max(moved, SMALLEST_FACTOR), LARGEST_FACTOR)
