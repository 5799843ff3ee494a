"""How far an off-policy update should trust each episode.

The weights are constants of the step: none carries a gradient. What they multiply is the kept part of the
surrogate (see `losses.clipped_surrogate`).
"""

import torch
from torch import Tensor

from trl_stppo.core.clip_bias import logit_space_squares, normalization_scale
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


def episode_weights(
    kept: Tensor,
    clipped: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
    loss_mask: Tensor,
    power: float,
) -> Tensor:
    """u_i = (g_i / (g_i + C_i))^power: how much of each episode's gradient the clip leaves.

    g_i and C_i are the norms of the episode's kept and clipped terms in the space of the logits
    (`clip_bias.logit_space_squares`). A factor that an episode's tokens share cancels, so that u does not
    depend on how the loss is averaged, on the split into micro-batches, or on the number of processes.

    Args:
        kept: [B, T] float, derivative of the kept terms by log p(y_t).
        clipped: [B, T] float, of the clipped ones.
        logprobs: [B, T] float, log p(y_t), nats.
        entropies: [B, T] float, of p_t, nats.
        loss_mask: [B, T] bool, True = counts.
        power: exponent, > 0.

    Returns:
        [B] float, detached, in at least float32, in [0, 1]; 1 where nothing is clipped, 0 where all is.

    Raises:
        ValueError: wrong dtypes or shapes, or `power` not positive and finite.

    Source: this package's own; downweighting samples that are off policy is what the abstract of
        arXiv:2511.20718v1 describes.
    """
    kept_norm, clipped_norm = (
        logit_space_squares(part, logprobs, entropies, loss_mask).sum(dim=1).sqrt()
        for part in (kept, clipped)
    )
    return normalization_scale(kept_norm, clipped_norm, "share", power)
