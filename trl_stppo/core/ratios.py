"""Importance ratios of the updated policy to the sampling policy, at three levels.

All functions return logarithms; `losses.clipped_surrogate` takes exp once.
"""

import math

import torch
from torch import Tensor

from trl_stppo.core.masking import (
    check_choice,
    check_float,
    check_like,
    check_mask,
    check_turn_index,
    masked_mean,
    upcast,
    zero_off_mask,
)
from trl_stppo.core.turns import broadcast_turns, reduce_turns

RATIO_LEVELS = ("token", "turn", "sequence")


def log_importance_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    turn_index: Tensor,
    level: str,
    *,
    loss_mask: Tensor | None = None,
) -> Tensor:
    """Return the log importance ratio of every agent token, at the given level.

    With d_t = logprobs_t - old_logprobs_t:

        token     d_t
        turn      (1 / |y^k|) sum of d_s over the tokens s of turn k, the same at each of them
        sequence  the same mean over all agent tokens of the episode

    Its exp is the token ratio, or the geometric mean of the token ratios. The gradient
    flows through the mean: all tokens of a turn share the turn's credit, as in Lemma 4.1. With
    one-token turns "turn" equals "token"; with one turn per episode it equals "sequence".

    Args:
        logprobs: [B, T] float, nats. Policy being updated; carries the gradient.
        old_logprobs: [B, T] float, nats. Same tokens under the policy that sampled them; constant.
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        level: "token", "turn" or "sequence".
        loss_mask: [B, T] bool, True = token counts; tokens outside turns never do. If given, the
            means run over the tokens that count. Default: every agent token.

    Returns:
        [B, T] float, nats; 0 with zero gradient on tokens that do not count. Float32 for half
        precision input.

    Raises:
        ValueError: unknown `level`, wrong dtypes, or shapes that differ from `turn_index`'s.

    Source: token level arXiv:1707.06347 Eq. 6; turn level arXiv:2511.20718v1 (Turn-PPO, the ratio
        of Lemma 4.1); sequence level arXiv:2507.18071 (GSPO), for comparison.
    """
    check_turn_index(turn_index)
    check_choice("level", level, RATIO_LEVELS)
    check_float(logprobs=logprobs, old_logprobs=old_logprobs)
    check_like("turn_index", turn_index, logprobs=logprobs, old_logprobs=old_logprobs)
    mask = turn_index >= 0
    if loss_mask is not None:
        check_mask("loss_mask", loss_mask)
        check_like("turn_index", turn_index, loss_mask=loss_mask)
        mask = mask & loss_mask

    difference = zero_off_mask(upcast(logprobs) - upcast(old_logprobs), mask)
    if level == "token":
        return difference
    if level == "sequence":
        return zero_off_mask(masked_mean(difference, mask, dim=1).unsqueeze(1), mask)
    index = turn_index.masked_fill(~mask, -1)
    # T turns always suffice; reading the true count would synchronise with the device.
    means = reduce_turns(difference, index, num_turns=index.shape[1], op="mean")
    return broadcast_turns(means, index)


def sampler_correction(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    turn_index: Tensor,
    level: str,
    *,
    truncate: bool,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> Tensor:
    """Return constant weights that correct for the difference between the policy and the sampling engine.

    The same weights in another engine, or in another precision, are not quite the same policy. The
    ratio policy / sampler, at the given level, is clamped into the bounds (`truncate`) or set to
    zero outside them. The product over an episode lets small drifts add up until a long episode
    vanishes; at turn level they do not add up.

    Args:
        old_logprobs: [B, T] float, nats. Policy before the update, computed for training.
        sampling_logprobs: [B, T] float, nats. The sampler's own; NaN where it gave none.
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        level: "token", "turn" or "sequence", means as in `log_importance_ratio`; or "product", over all
            agent tokens of the episode, which TRL calls "sequence".
        truncate: clamp if True, else mask.
        clip_min: lower bound of the ratio, None for no bound.
        clip_max: upper bound of the ratio, None for no bound.

    Returns:
        [B, T] float, 1 on tokens outside turns; [B, 1] for "product".

    Raises:
        ValueError: unknown `level`, `clip_min` above `clip_max`, wrong dtypes, or shapes that differ
            from `turn_index`'s.

    Source: truncated importance sampling, Ionides 2008; per turn: ours.
    """
    check_turn_index(turn_index)
    check_float(old_logprobs=old_logprobs, sampling_logprobs=sampling_logprobs)
    low = 0.0 if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if not low <= high:
        raise ValueError(f"clip_min must not exceed clip_max, got {low!r} and {high!r}")
    # Checked before `where`, which would broadcast.
    check_like(
        "turn_index", turn_index, old_logprobs=old_logprobs, sampling_logprobs=sampling_logprobs
    )
    known = torch.where(sampling_logprobs.isnan(), old_logprobs, sampling_logprobs)
    product, mask = level == "product", turn_index >= 0
    log_ratio = log_importance_ratio(old_logprobs, known, turn_index, "token" if product else level)
    ratio = log_ratio.sum(dim=1, keepdim=True).exp() if product else log_ratio.exp()
    outside = (ratio < low) | (ratio > high)
    bounded = ratio.clamp(low, high) if truncate else ratio.masked_fill(outside, 0.0)
    return bounded if product else bounded.masked_fill(~mask, 1.0)
