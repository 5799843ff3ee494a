"""`share`: a step shrinks as the clipped part of the gradient outgrows the rest."""

from __future__ import annotations

from torch import Tensor

from ...core import normalization_scale
from .base import UPDATE, Stabilizer, register


@register
class Share(Stabilizer):
    """Scales the update by (kept / (kept + clipped))^clip_bias_power.

    Source: this package's own; VCPO (arXiv:2602.17616) scales the step by the effective sample size.
    """

    name = "share"
    meaning = "scales the step by how much of the gradient the clip leaves"
    scales = UPDATE

    def scale(self, kept: Tensor, clipped: Tensor) -> Tensor:
        """Return the factor."""
        return normalization_scale(kept, clipped, "share", self.config.clip_bias_power)
