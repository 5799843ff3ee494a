"""The gap between the log-probabilities of the sampler and of training, for the same weights."""

from __future__ import annotations

import dataclasses

EXACT = 1e-3  # nats per token, our own sampler in float32: a hundred times its rounding
ROUGH = 0.05  # an engine of its own, or 16 bits
RISE = 1.25  # of a rough sampler's gap, from one rollout batch to the next
PATIENCE = 3


@dataclasses.dataclass
class SamplerWatch:
    """Distinguishes a sampler with wrong weights from one that is only stale."""

    blocks: int = 0  # all rollout batches with a gap beyond the limit
    strikes: int = 0  # in a row; of a rough sampler only while the gap rises
    last: float = 0.0  # gap of the last rollout batch

    def look(self, gap: float, *, exact: bool) -> str | None:
        """Return a message if a gap in nats is too large; `exact`: float32's rounding alone causes gaps."""
        limit, rises = EXACT if exact else ROUGH, exact or gap > RISE * self.last
        self.last = gap
        if not gap > limit:
            self.strikes = 0
            return None
        self.blocks += 1
        self.strikes = self.strikes + 1 if rises else 1
        return (
            f"the sampler does not have the policy's weights: its log-probabilities are {gap:.2g} nats per "
            f"token off those of training (allowed: {limit:g})"
        )
