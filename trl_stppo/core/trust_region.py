"""The trust region of an update: the KL that it allows, and the factor on optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trl_stppo.core.masking import widest
from trl_stppo.core.policy import MAX_LOG_RATIO, log_importance_ratio
from trl_stppo.core.turns import reduce_turns

# Number of rollouts over which a spread is averaged; number after which the largest average counts half.
AVERAGED, HALF_LIFE = 3, 50
LEAST_GAIN = 0.01
# A mini-batch, or updates together, need this many turns to decide anything.
LEAST_TURNS = 32
# At the start the effect of a step on the policy is unknown, so begin with small steps.
FIRST_FACTOR, SMALLEST_FACTOR = 0.1, 0.001
# The factor stays the same while the KL is between half and twice the allowed KL.
TOLERANCE, GROWTH, FIRST_GROWTH, LEAST_CHANGE = 2.0, 1.5, 10.0, 0.25
# A KL is too large above this multiple of the allowed KL and of the rounding error.
LIMIT = 4.0


def kl_per_turn(
    logprobs: Tensor, start_logprobs: Tensor, turn_index: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over turns the KL from the policy at the start of the update to the current policy; count turns.

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


@dataclass(frozen=True)
class Region:
    """State of the trust region between two mini-batches; each method returns the next state.

    The factor follows the ratio r = K / T of an update's KL and its allowed KL. K grows with the square of a
    step, so the factor changes by sqrt(1 / r).

    Attributes:
        factor: factor on optimizer steps, within [0.001, 1].
        starts: whether no update has come near its allowed KL yet.
        spreads: standard deviations of the raw advantages of the last rollouts, reward units, newest last.
        largest: largest mean spread of three rollouts in a row, of which older ones count less; 0 before
            there are three.
        measured: sum of r times turns, over the updates since the factor was last decided.
        turns: number of turns in these updates.

    Source: this package's own; the adaptive learning rate of RSL-RL (arXiv:2509.10771).
    """

    factor: float = FIRST_FACTOR
    starts: bool = True
    spreads: tuple[float, ...] = ()
    largest: float = 0.0
    measured: float = 0.0
    turns: float = 0.0

    def after_rollout(self, spread: float) -> Region:
        """Record the spread of a rollout whose update trains the policy."""
        spreads = (*self.spreads, spread)[-AVERAGED:]
        mean = math.fsum(spreads) / AVERAGED if len(spreads) == AVERAGED else 0.0
        return replace(self, spreads=spreads, largest=max(self.largest * 0.5 ** (1 / HALF_LIFE), mean))

    def gain(self, spread: float) -> float:
        """Return the share of `desired_kl` that an update may use, within [0.01, 1].

        A natural gradient at constant temperature moves the policy by a KL proportional to the variance of
        the advantages. If advantages are small, there is little to gain, and whitening makes their noise
        large.
        """
        if not self.largest > 0.0:
            return 1.0
        return min(1.0, max((spread / self.largest) ** 2, LEAST_GAIN))

    def after_refusal(self, ratio: float) -> Region:
        """Shorten later steps after a step whose KL was too large, r > 4 or not finite."""
        return replace(self._after(ratio, may_grow=False), starts=False)

    def after_update(
        self, ratio: float, turns: float, *, may_grow: bool, least_turns: int = LEAST_TURNS
    ) -> Region:
        """Change the factor by the mean r of updates, once these have enough turns together."""
        measured, total = self.measured + turns * ratio, self.turns + turns
        if total < least_turns:
            return replace(self, measured=measured, turns=total)
        return self._after(measured / total, may_grow=may_grow)

    def _after(self, ratio: float, *, may_grow: bool) -> Region:
        if ratio <= 0.0:
            # The KL is lost in rounding, so it tells nothing of the steps.
            return replace(self, measured=0.0, turns=0.0)
        # A KL that is not finite shortens steps most.
        root = math.sqrt(1.0 / ratio) if ratio > 0.0 else 0.0
        # In the first updates r may be far below 1: go to half of the step that the KL allows.
        growth = max(GROWTH, min(FIRST_GROWTH, 0.5 * root)) if self.starts else GROWTH
        change = 1.0
        if not ratio <= TOLERANCE:
            change = max(LEAST_CHANGE, min(1.0 / GROWTH, root))
        elif may_grow and ratio < 1.0 / TOLERANCE:
            change = min(growth, root)
        factor = min(max(self.factor * change, SMALLEST_FACTOR), 1.0)
        return replace(self, factor=factor, starts=growth > GROWTH, measured=0.0, turns=0.0)
