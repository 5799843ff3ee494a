"""The stabilizer `kl`: optimizer steps whose size follows the policy's measured change (docs/lab/step.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trl_stppo.core.masking import check_like, widest
from trl_stppo.core.policy import MAX_LOG_RATIO
from trl_stppo.core.turns import check_turn_index, reduce_turns
from trl_stppo.trainer.stabilizers.base import Reduce, Stabilizer, register

# At the start the effect of a step on the policy is unknown, so begin with small steps.
FIRST_FACTOR = 0.1
# A mini-batch this many times above the desired KL halves the factor at once, if it has enough turns.
BRAKE, ENOUGH_TURNS = 4.0, 32
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
    """Move the factor on optimizer steps so that an update's KL per turn comes near the desired KL.

    Args:
        factor: factor of the update that has ended, within [0.001, 1].
        kl: KL of this update in nats per turn; a KL that is not finite counts as too large.
        desired_kl: desired KL in nats per turn.
        may_grow: whether the factor may grow.
        delay: number of updates after which a factor shows in `kl`; a longer delay makes the change smaller.

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


@dataclass
class Update:
    """State of the current update.

    Attributes:
        kl: sum of the KL over the last epoch's turns, in mini-batches that follow a step of this update.
        turns: number of these turns.
        has_stepped: whether a step was taken.
        may_grow: whether all steps were taken and the brake did not act.
        keeps: whether the clip kept a gradient in the last epoch.
        braked_epoch: the last epoch in which the brake acted, -1 if none.
    """

    kl: float = 0.0
    turns: float = 0.0
    has_stepped: bool = False
    may_grow: bool = True
    keeps: bool = False
    braked_epoch: int = -1


@register
class Kl(Stabilizer):
    """Scales optimizer steps by a factor that adapts after each update to keep its KL near `desired_kl`.

    The KL per turn is measured in the last epoch, over mini-batches that follow a step of the update.

    Source: `next_step_factor`; the brake is this package's own.
    """

    name, meaning = "kl", "scales steps so that an update's KL per turn comes near `desired_kl`"
    desired_kl = 0.1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.factor = FIRST_FACTOR
        self._update = Update()
        self._step, self._kl, self._turns = 0, 0.0, 0.0
        self._sums: Tensor | None = None

    def start_mini_batch(self, step: int) -> None:
        """Reset the mini-batch's sums; before an update's first mini-batch reset the update's sums, too."""
        self._step, self._sums, self._kl, self._turns = step, None, 0.0, 0.0
        if step == 0:
            self._update = Update()

    def observe(
        self, logprobs: Tensor, old_logprobs: Tensor, turn_index: Tensor, loss_mask: Tensor
    ) -> None:
        """Add the KL and the turns of some rows."""
        sums = torch.stack(kl_per_turn(logprobs, old_logprobs, turn_index, loss_mask))
        self._sums = sums if self._sums is None else self._sums + sums

    def before_step(self, reduce: Reduce, device: torch.device) -> tuple[float, dict[str, float]]:
        """Return the factor on this step, halved if the policy has already moved too far."""
        sums = widest(torch.zeros(2, device=device)) if self._sums is None else self._sums
        self._kl, self._turns = reduce(sums).tolist()
        epoch, update = self._step // self.config.num_mini_batches, self._update
        limit = BRAKE * self.desired_kl * self._turns
        if self._kl > limit and self._turns >= ENOUGH_TURNS and epoch != update.braked_epoch:
            update.may_grow, update.braked_epoch = False, epoch
            self.factor = max(self.factor / 2, SMALLEST_FACTOR)
        mean = self._kl / self._turns if self._turns else 0.0
        return self.factor, {"step/kl_per_turn": mean, "step/eta": self.factor}

    def end_step(self, *, taken: bool, clip_fraction: float) -> None:
        """Count the mini-batch; after the update's last mini-batch, move the factor."""
        update, steps = self._update, self.config.steps_per_rollout
        if self._step >= steps - self.config.num_mini_batches:
            update.keeps |= clip_fraction < 1.0
            if update.has_stepped:
                update.kl, update.turns = update.kl + self._kl, update.turns + self._turns
        update.has_stepped |= taken
        update.may_grow &= taken
        if self._step == steps - 1 and update.turns:
            may_grow = update.may_grow and update.keeps
            self.factor = self.next_factor(update.kl / update.turns, may_grow=may_grow)

    def next_factor(self, kl: float, *, may_grow: bool) -> float:
        """Return the factor of the next update, given this update's KL in nats per turn."""
        delay = self.config.rollout_staleness
        return next_step_factor(self.factor, kl, self.desired_kl, may_grow=may_grow, delay=delay)

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the state of the current update."""
        return {"factor": self.factor, "update": asdict(self._update)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        if state:
            self.factor, self._update = state["factor"], Update(**state["update"])


@register
class HalfKl(Kl):
    """`kl` with half of the desired KL."""

    name, desired_kl = "kl-0.05", 0.05
