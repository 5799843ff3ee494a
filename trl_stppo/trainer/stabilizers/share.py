"""`share`: scales an optimizer step down as the clipped part of the gradient grows."""

from __future__ import annotations

from torch import Tensor

from ...core import normalization_scale
from .base import STEP, Stabilizer, register


@register
class Share(Stabilizer):
    """Scales the optimizer step by kept / (kept + clipped), a ratio of gradient norms.

    Source: this package's own; VCPO (arXiv:2602.17616) scales the step by the effective sample size.
    """

    name = "share"
    meaning = "scales the step by how much of the gradient the clip leaves"
    scale_target = STEP

    def scale(self, kept_norm: Tensor, clipped_norm: Tensor) -> Tensor:
        """Return the factor on the optimizer step."""
        return normalization_scale(kept_norm, clipped_norm, "share")
