"""`trust_region`: keeps the steps of an update within a KL that follows what there is to gain."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core import trust_region as core
from ...core.masking import widest
from ..sums import Reduce
from .base import Stabilizer, register


@register
class TrustRegion(Stabilizer):
    """Limits the KL of an update by what there is to gain; a policy far beyond the limit takes no more steps.

    The KL per turn is measured from the policy at the start of the update, in the loss's passes over the
    mini-batches after a step. A mini-batch whose KL is too large gives the policy no step. A factor of at
    most 1 on the steps adapts after each update. An update of one step has nothing to measure, so its factor
    is 1.

    Source: `core.trust_region`.
    """

    name = "trust_region"
    meaning = "limits the KL per turn of an update by what there is to gain"
    has_factor = True
    # Turns of all processes that a verdict, or a change of the factor, needs.
    least_turns: ClassVar[int] = core.LEAST_TURNS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._has_several_steps = config.steps_per_rollout > 1
        self.allowed_kl, self._is_flat = config.desired_kl, True
        self.state, self.refused = core.Region(), 0
        self._begin_update()
        self.start_mini_batch()

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError if dropout would add to the KL."""
        if not config.disable_dropout:
            raise ValueError(
                f"`disable_dropout=False`: {cls.name!r} in `stabilizers` measures the policy's KL, to which "
                f"dropout adds. Set disable_dropout=True."
            )

    @property
    def factor(self) -> float:
        """Return the factor on optimizer steps."""
        return self.state.factor if self._has_several_steps else 1.0

    def begin_update(self, spread: float, *, trains: bool) -> None:
        """Set the allowed KL of an update.

        Args:
            spread: standard deviation of the rollout's raw advantages, reward units, over all processes.
            trains: whether the update trains the policy.
        """
        self.state = self.state.after_rollout(spread) if trains else self.state
        self.allowed_kl = self.config.desired_kl * self.state.gain(spread)
        self._is_flat = not spread > 0.0
        self._begin_update()

    def _begin_update(self) -> None:
        # Rounding error of the KL: its mean over the mini-batches before the first step.
        self._rounding, self._rounding_turns = 0.0, 0.0
        # Whether the policy has taken a step in the update.
        self._has_stepped = False
        # Whether the policy has taken a step since the last refusal, or since the update began.
        self._has_moved = False
        # Whether all steps of the update were taken, so that later steps may be longer.
        self._may_grow = True
        # The last KL that was measured after a step, and its number of turns.
        self._seen = 0.0, 0.0

    def start_mini_batch(self) -> None:
        """Reset the measurement for a mini-batch."""
        self._sums: Tensor | None = None
        self.kl = self._turns = 0.0

    def observe(
        self, logprobs: Tensor, start_logprobs: Tensor, turn_index: Tensor, loss_mask: Tensor
    ) -> None:
        """Add the KL and the turns of some rows; arguments as in `core.trust_region.kl_per_turn`."""
        sums = torch.stack(core.kl_per_turn(logprobs, start_logprobs, turn_index, loss_mask))
        self._sums = sums if self._sums is None else self._sums + sums

    def measure(self, reduce: Reduce, device: torch.device) -> None:
        """Set the KL of the rows of all processes; `reduce` sums over processes."""
        sums = widest(torch.zeros(2, device=device)) if self._sums is None else self._sums
        total, turns = reduce(sums).tolist()
        if not self._has_stepped and math.isfinite(total):
            # The policy has its weights from the start of the update, so only rounding is measured.
            self._rounding += total
            self._rounding_turns += turns
        self.kl, self._turns = total / max(turns, 1.0) - self.floor, turns
        if turns and self._has_stepped:
            self._seen = self.kl, turns

    @property
    def floor(self) -> float:
        """Return the rounding error of the KL, nats per turn."""
        return self._rounding / max(self._rounding_turns, 1.0)

    @property
    def exceeds(self) -> bool:
        """Return whether the measured KL is too large, or not finite."""
        limit = core.LIMIT * max(self.allowed_kl, self.floor)
        return self._turns >= self.least_turns and not self.kl <= limit

    def apply(self, *, takes: bool, refused: bool, ends_update: bool) -> None:
        """Note what becomes of the policy's step; after an update's last mini-batch, move the factor."""
        if takes:
            self._has_stepped = self._has_moved = True
        else:
            # Steps do not grow after an update that lacks one of its steps.
            self._may_grow = False
        if refused:
            self.refused += 1
            if self._has_moved:
                self.state = self.state.after_refusal(self.kl / self.allowed_kl)
                self._has_moved = False
        kl, turns = self._seen
        if ends_update and self._has_moved and turns and math.isfinite(kl):
            self.state = self.state.after_update(
                kl / self.allowed_kl,
                turns,
                may_grow=self._may_grow and not self._is_flat,
                least_turns=self.least_turns,
            )

    def figures(self) -> dict[str, float]:
        """Return the newest metrics."""
        return {
            "step/kl_per_turn": self._seen[0],
            "step/kl_floor": self.floor,
            "step/allowed_kl": self.allowed_kl,
            "step/factor": self.factor,
            "step/refused": self.refused,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rollouts, and the number of mini-batches that were refused so far."""
        return {**asdict(self.state), "refused": self.refused}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`; {} stands for a new run."""
        self.refused = state.get("refused", 0)
        own = {name: value for name, value in state.items() if name != "refused"}
        self.state = core.Region(**own)
        self._begin_update()
