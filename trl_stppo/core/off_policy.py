"""Which episodes an off-policy update trains the policy on.

The weights are constants of the step: they carry no gradient. What they multiply is the kept part of the
surrogate (see `losses.clipped_surrogate`).
"""

import torch
from torch import Tensor

from trl_stppo.core.masking import check_float, check_like, check_mask, zero_off_mask


def winner_weights(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """1 for the episodes whose advantages add up to more than nothing, else 0.

    Trained on, an episode that went worse than expected pushes its own tokens down, and what rises
    instead nobody chose; under stale data that push is what breaks first.

    Args:
        advantages: [B, T] float.
        loss_mask: [B, T] bool, True = counts.

    Returns:
        [B] float, detached, in at least float32; 0 for an episode without a token that counts.

    Raises:
        ValueError: wrong dtypes, or shapes that differ.

    Source: this package's own, found as the control of a study (docs/stability.md). Precedents: to
        learn less from failures, TOPR (arXiv:2503.14286); to leave them out, RAFT (arXiv:2304.06767).
    """
    check_mask("loss_mask", loss_mask)
    check_float(advantages=advantages)
    check_like("loss_mask", loss_mask, advantages=advantages)
    wide = torch.promote_types(advantages.dtype, torch.float32)
    total = zero_off_mask(advantages.detach().to(wide), loss_mask).sum(dim=1)
    return (total > 0).to(wide)
