"""`winners`: trains the policy only on episodes that went better than expected."""

from __future__ import annotations

from torch import Tensor

from ...core import winner_weights
from .base import Stabilizer, register


@register
class Winners(Stabilizer):
    """Weights of episodes: 1 if the advantages add up to more than 0, else 0.

    Source: `core.winner_weights`.
    """

    name = "winners"
    meaning = "trains the policy on the episodes that went better than expected"

    def episode_weights(self, advantages: Tensor, loss_mask: Tensor) -> Tensor:
        """Return the weight of each episode, 1 or 0, [B]."""
        return winner_weights(advantages, loss_mask)
