"""`winners`: the policy is trained on the episodes that went better than expected."""

from __future__ import annotations

from torch import Tensor

from ...core import winner_weights
from .base import Stabilizer, register


@register
class Winners(Stabilizer):
    """Gives weight 0 to episodes whose advantages do not add up to more than 0.

    Source: `core.winner_weights`.
    """

    name = "winners"
    meaning = "trains the policy on the episodes that went better than expected"

    def episode_weights(self, advantages: Tensor, loss_mask: Tensor) -> Tensor:
        """Return 1 or 0 for each episode."""
        return winner_weights(advantages, loss_mask)
