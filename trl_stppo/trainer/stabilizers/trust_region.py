"""`trust_region`: takes back an optimizer step that moves the policy too far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...core.masking import widest
from ...core.trust_region import (
    AVERAGED,
    GROWTH,
    LARGEST_FACTOR,
    kl_per_turn,
    largest_spread,
    next_step_factor,
    shortened_factor,
    spread_gain,
)
from ..sums import Reduce
from .base import Stabilizer, register

# At the start the effect of a step on the policy is unknown, so begin with small steps.
FIRST_FACTOR = 0.1
# A KL is too large above this many times the allowed KL, and above as many times its rounding error.
LIMIT = 4.0


@dataclass
class RegionState:
    """State between two rollouts.

    Attributes:
        factor: factor on optimizer steps.
        spreads: standard deviations of the raw advantages of the last rollouts.
        largest: result of `largest_spread`.
        taken_back: number of steps taken back so far.
        measured: sum of K / T times turns, over the updates since the last decision on the factor.
        turns: number of turns in these updates.
    """

    factor: float = FIRST_FACTOR
    spreads: list[float] = field(default_factory=list)
    largest: float = 0.0
    taken_back: int = 0
    measured: float = 0.0
    turns: float = 0.0


@register
class TrustRegion(Stabilizer):
    """Allows an update a KL that follows what there is to gain; takes back a step that exceeds it.

    The KL per turn is measured from the policy at the start of the update, in the loss's passes over the
    mini-batch after a step, and in one pass without gradient over the last mini-batch after the last step.
    Steps are scaled by a factor that adapts after each update.

    Source: this package's own; TRPO's line search (arXiv:1502.05477), the adaptive learning rate of RSL-RL
    (arXiv:2509.10771).
    """

    name = "trust_region"
    meaning = "lets steps follow the policy's KL per turn, and takes back a step that is too large"
    has_factor = True
    # Turns of all processes that a verdict, or a change of the factor, needs.
    least_turns: ClassVar[int] = 32
    # Studies override these.
    exponent: ClassVar[float] = 2.0
    growth: ClassVar[float] = GROWTH
    largest_factor: ClassVar[float] = LARGEST_FACTOR
    looks: ClassVar[bool] = True
    # Whether weights are restored; without, a step taken back only shortens later steps.
    restores = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.state = RegionState()
        self._weights: list[Tensor] = []
        self.allowed_kl = config.desired_kl
        self._is_flat = True
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
        return self.state.factor

    def begin_update(self, spread: float, *, trains: bool) -> None:
        """Set the allowed KL of an update.

        Args:
            spread: standard deviation of the rollout's raw advantages, reward units, over all processes.
            trains: whether the update trains the policy.
        """
        state = self.state
        if trains:
            state.spreads = [*state.spreads, spread][-AVERAGED:]
            state.largest = largest_spread(state.largest, state.spreads)
        gain = spread_gain(spread, state.largest, exponent=self.exponent)
        self.allowed_kl, self._is_flat = self.config.desired_kl * gain, not spread > 0.0
        self._begin_update()

    def _begin_update(self) -> None:
        # Rounding error of the KL: its mean over the mini-batches before the first step.
        self._rounding, self._rounding_turns = 0.0, 0.0
        # Whether the update has taken a step; whether its last step stands; whether nothing has measured it.
        self._has_stepped = self.has_moved = self.is_unseen = False
        self._may_grow, self.has_ended = True, False
        # The last measured KL, and its number of turns.
        self._seen = 0.0, 0.0

    def start_mini_batch(self) -> None:
        """Reset the measurement for a mini-batch."""
        self._sums: Tensor | None = None
        self.kl = self._turns = 0.0

    def observe(
        self, logprobs: Tensor, start_logprobs: Tensor, turn_index: Tensor, loss_mask: Tensor
    ) -> None:
        """Add the KL and the turns of some rows; arguments as in `kl_per_turn`."""
        sums = torch.stack(kl_per_turn(logprobs, start_logprobs, turn_index, loss_mask))
        self._sums = sums if self._sums is None else self._sums + sums

    def measure(self, reduce: Reduce, device: torch.device) -> None:
        """Set the KL of the rows of all processes; `reduce` sums over processes."""
        sums = widest(torch.zeros(2, device=device)) if self._sums is None else self._sums
        total, turns = reduce(sums).tolist()
        if not self._has_stepped and math.isfinite(total):
            # The policy has its weights from the start of the update, so only rounding is measured.
            self._rounding, self._rounding_turns = (
                self._rounding + total,
                self._rounding_turns + turns,
            )
        self.kl, self._turns = total / max(turns, 1.0) - self.floor, turns
        if turns:
            self._seen, self.is_unseen = (self.kl, turns), False

    @property
    def floor(self) -> float:
        """Return the rounding error of the KL, nats per turn."""
        return self._rounding / max(self._rounding_turns, 1.0)

    @property
    def exceeds(self) -> bool:
        """Return whether the measured KL is too large, or not finite."""
        limit = LIMIT * max(self.allowed_kl, self.floor)
        return self._turns >= self.least_turns and not self.kl <= limit

    @torch.no_grad()
    def keep(self, parameters: Sequence[nn.Parameter], *, on_device: bool) -> None:
        """Copy the policy's weights before a step, to main memory unless `on_device`."""
        self._has_stepped = self.has_moved = self.is_unseen = True
        if not self.restores:
            return
        local = [_local(parameter) for parameter in parameters]
        if not self._weights:
            self._weights = [_buffer(weight, on_device=on_device) for weight in local]
        for kept, weight in zip(self._weights, local, strict=True):
            kept.copy_(weight, non_blocking=True)

    @torch.no_grad()
    def take_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Restore the weights before the last step, and shorten later steps."""
        for kept, parameter in zip(self._weights, parameters, strict=bool(self._weights)):
            _local(parameter).copy_(kept)
        state = self.state
        state.factor = shortened_factor(state.factor, self.kl, self.allowed_kl)
        state.taken_back += 1
        state.measured = state.turns = 0.0
        self.has_moved = self.is_unseen = False
        self.refuse()

    def refuse(self) -> None:
        """Note that a mini-batch gives the policy no step, so that this update does not enlarge steps."""
        self._may_grow = False

    def end_update(self) -> None:
        """Move the factor by the last measured KL of an update whose last step stands."""
        state, (kl, turns) = self.state, self._seen
        if self.has_ended:
            return
        self.has_ended = True
        if not self.has_moved or not math.isfinite(kl):
            return
        state.measured += turns * kl / self.allowed_kl
        state.turns += turns
        if state.turns < self.least_turns:
            return
        state.factor = next_step_factor(
            state.factor,
            state.measured / state.turns,
            1.0,
            may_grow=self._may_grow and not self._is_flat,
            growth=self.growth,
            largest=self.largest_factor,
        )
        state.measured = state.turns = 0.0

    def figures(self) -> dict[str, float]:
        """Return the newest metrics."""
        return {
            "step/kl_per_turn": self._seen[0],
            "step/kl_floor": self.floor,
            "step/allowed_kl": self.allowed_kl,
            "step/factor": self.state.factor,
            "step/taken_back": self.state.taken_back,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rollouts."""
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`; {} stands for a new run."""
        self.state = RegionState(**state)
        self._begin_update()


def _local(parameter: Tensor) -> Tensor:
    """Return this process's part of a parameter."""
    part: Tensor = getattr(parameter, "to_local", lambda: parameter)()
    return part


def _buffer(weight: Tensor, *, on_device: bool) -> Tensor:
    if on_device or weight.device.type == "cpu":
        return torch.empty_like(weight, requires_grad=False)
    return torch.empty_like(weight, device="cpu", pin_memory=weight.device.type == "cuda")
