"""`share`: scales an optimizer step down as the clipped part of the gradient grows."""

from __future__ import annotations

from torch import Tensor

from ...core import normalization_scale
from .base import STEP, Stabilizer, register

# If kept and clipped gradients have equal norms, the step is 16 times smaller; beside a trust region, which
# shortens steps too, it is halved.
POWER, POWER_IN_REGION = 4.0, 1.0


@register
class Share(Stabilizer):
    """Scales the optimizer step by (kept / (kept + clipped))^4, a ratio of gradient norms.

    Beside `trust_region` the power is 1.

    Source: this package's own; VCPO (arXiv:2602.17616) scales the step by the effective sample size.
    """

    name = "share"
    meaning = "scales the step by how much of the gradient the clip leaves"
    scale_target = STEP

    def scale(self, kept_norm: Tensor, clipped_norm: Tensor) -> Tensor:
        """Return the factor on the optimizer step."""
        power = POWER_IN_REGION if self.config.has_trust_region else POWER
        return normalization_scale(kept_norm, clipped_norm, "share", power)
