"""The gap between the log-probabilities of the sampler and of training, for the same weights."""

from __future__ import annotations

import dataclasses

EXACT = 1e-3  # nats per token, our own sampler in float32: a hundred times its rounding
ROUGH = 0.05  # an engine of its own, or 16 bits
PATIENCE = 3
RISE = 1.25  # of a rough sampler's gap, from one rollout batch to the next


@dataclasses.dataclass
class SamplerWatch:
    """Tells a sampler with other weights than the policy's from mere staleness.

    Attributes:
        blocks: all rollout batches with a gap beyond the limit.
        strikes: those in a row up to now; with a rough sampler only as long as the gap rises.
        last: gap of the last rollout batch.
    """

    blocks: int = 0
    strikes: int = 0
    last: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the run ends."""
        return self.strikes >= PATIENCE

    def look(self, gap: float, *, exact: bool) -> str | None:
        """Look at a rollout batch's mean absolute gap in nats; return a message if it is new.

        `exact`: sampler and training differ by rounding in float32 alone.
        """
        limit, rises = EXACT if exact else ROUGH, exact or gap > RISE * self.last
        self.last = gap
        if not gap > limit:
            self.strikes = 0
            return None
        self.blocks += 1
        self.strikes = self.strikes + 1 if rises else 1
        if not self.is_over and self.blocks > 1:
            return None
        return (
            f"the sampler does not have the policy's weights: its log-probabilities are {gap:.2g} nats per "
            f"token off those of training (allowed: {limit:g})"
        )
