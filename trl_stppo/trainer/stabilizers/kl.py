"""`kl`: optimizer steps whose size follows the policy's measured change."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.desired_kl import SMALLEST_FACTOR, kl_per_turn, next_step_factor
from ...core.masking import widest
from .base import Reduce, Stabilizer, register

logger = logging.getLogger(__name__)

# At the start the effect of a step on the policy is unknown, so begin with small steps.
FIRST_FACTOR = 0.1
# A mini-batch whose KL is more than this many times the desired KL halves the factor, if it has enough turns.
BRAKE, ENOUGH_TURNS = 4.0, 32


@dataclass
class Update:
    """State of the current update.

    Attributes:
        kl: sum of the KL over turns of `epoch`, in mini-batches that follow a step of this update.
        turns: number of these turns.
        epoch: the last epoch that was measured, -1 if none; `target_kl` may end an update before its last.
        has_stepped: whether a step was taken.
        may_grow: whether all steps were taken and the brake did not act.
        keeps: whether the clip kept a gradient in the last epoch.
        braked_epoch: the last epoch in which the brake acted, -1 if none.
    """

    kl: float = 0.0
    turns: float = 0.0
    epoch: int = -1
    has_stepped: bool = False
    may_grow: bool = True
    keeps: bool = False
    braked_epoch: int = -1


@register
class Kl(Stabilizer):
    """Scales optimizer steps by a factor that adapts after each update to keep its KL near `desired_kl`.

    The KL per turn is measured in the last epoch, over mini-batches that follow a step of the update, against
    the policy that played. With stale rollouts it contains earlier updates.

    Source: `core.desired_kl.next_step_factor`; the brake is this package's own.
    """

    name, meaning = "kl", "scales steps so that an update's KL per turn comes near `desired_kl`"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.factor = FIRST_FACTOR
        self._update = Update()
        self._step, self._kl, self._turns = 0, 0.0, 0.0
        self._sums: Tensor | None = None
        if config.steps_per_rollout == 1:
            logger.warning(
                "'kl' in `stabilizers`: an update is one step, so nothing is measured after it and all steps "
                "are scaled by %s. Set num_iterations or num_mini_batches above 1.",
                FIRST_FACTOR,
            )

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
        limit = BRAKE * self.config.desired_kl * self._turns
        brakes = (
            self._kl > limit and self._turns >= ENOUGH_TURNS and self.config.steps_per_rollout > 1
        )
        if brakes and epoch != update.braked_epoch:
            update.may_grow, update.braked_epoch = False, epoch
            self.factor = max(self.factor / 2, SMALLEST_FACTOR)
        mean = self._kl / self._turns if self._turns else 0.0
        return self.factor, {"step/kl_per_turn": mean, "step/eta": self.factor}

    def end_step(self, *, taken: bool, clip_fraction: float) -> None:
        """Count the mini-batch; after the update's last mini-batch, move the factor."""
        config, update = self.config, self._update
        epoch = self._step // config.num_mini_batches
        if self._turns and update.has_stepped:
            if epoch != update.epoch:
                update.kl, update.turns, update.epoch = 0.0, 0.0, epoch
            update.kl, update.turns = update.kl + self._kl, update.turns + self._turns
        if self._step >= config.steps_per_rollout - config.num_mini_batches:
            update.keeps |= clip_fraction < 1.0
        update.has_stepped |= taken
        update.may_grow &= taken
        if self._step == config.steps_per_rollout - 1 and update.turns:
            self.factor = next_step_factor(
                self.factor,
                update.kl / update.turns,
                config.desired_kl,
                may_grow=update.may_grow and update.keeps,
                delay=config.rollout_staleness,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the state of the current update."""
        return {"factor": self.factor, "update": asdict(self._update)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        if state:
            self.factor, self._update = state["factor"], Update(**state["update"])
