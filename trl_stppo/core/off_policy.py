"""Episode weights for off-policy updates.

The weights are constants of the step: they carry no gradient. They multiply the kept part of the
surrogate (see `losses.clipped_surrogate`).
"""

import torch
from torch import Tensor

from trl_stppo.core.masking import check_float, check_like, check_mask, zero_off_mask


def winner_weights(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """1 for episodes whose advantages have a positive sum, else 0.

    An episode that went worse than expected pushes its own tokens down, which raises arbitrary other
    tokens; with stale data this push is the first to do damage.

    Args:
        advantages: [B, T] float.
        loss_mask: [B, T] bool, True = counts.

    Returns:
        [B] float, detached, in at least float32; 0 for an episode without a token that counts.

    Raises:
        ValueError: wrong dtypes, or shapes that differ.

    Source: this package's own, found as the control of a study (docs/stability.md). Precedents: TOPR
        learns less from failures (arXiv:2503.14286); RAFT leaves them out (arXiv:2304.06767).
    """
    check_mask("loss_mask", loss_mask)
    check_float(advantages=advantages)
    check_like("loss_mask", loss_mask, advantages=advantages)
    wide = torch.promote_types(advantages.dtype, torch.float32)
    total = zero_off_mask(advantages.detach().to(wide), loss_mask).sum(dim=1)
    return (total > 0).to(wide)
