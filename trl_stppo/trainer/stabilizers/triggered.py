"""`triggered`: the paper's correction of the clipping bias."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ...core import normalization_scale
from .base import GRADIENT, Stabilizer, register


@register
class Triggered(Stabilizer):
    """Divides the gradient by the norm of the clipping bias.

    Source: arXiv:2511.20718v1, Lemma 4.2 and Section 5.
    """

    name = "triggered"
    meaning = "divides the gradient by the norm of the clipping bias, as the paper does"
    scale_target = GRADIENT
    needs_exact_norms = True

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError if gradients are not clipped."""
        if not 0 < (config.max_grad_norm or 0.0) < math.inf:
            raise ValueError(
                f"`max_grad_norm={config.max_grad_norm}`: 'triggered' in `stabilizers` needs a finite number "
                f"> 0, as it amplifies the gradient while the bias is small. Set max_grad_norm=1.0."
            )

    def scale(self, kept_norm: Tensor, clipped_norm: Tensor) -> Tensor:
        """Return the factor on the gradient."""
        return normalization_scale(kept_norm, clipped_norm, "triggered")
