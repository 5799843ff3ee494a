"""The policy's step: importance ratios, the clipped objective, its default range, and its scale.

Ratios are logarithms until `clipped_surrogate` takes exp once. The scale of a step comes from the norms of g,
the gradient of the clipped objective, and of C, the gradient of the terms that the clip removed. Both norms
are over one optimizer step: all micro-batches, all processes, all trainable policy parameters. The scale is a
constant of the step and carries no gradient. The trainer decides whether it multiplies the gradient or the
optimizer's step.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trl_stppo.core.masking import (
    check_choice,
    check_float,
    check_like,
    check_mask,
    check_turn_index,
    upcast,
    zero_off_mask,
)
from trl_stppo.core.turns import broadcast_turns, reduce_turns

RATIO_LEVELS = ("token", "turn", "sequence")
NORMALIZATION_MODES = ("triggered", "share")

# A norm up to this value means that nothing is clipped. The value is far below the rounding error of any
# gradient that moves a parameter (float32 keeps 7 digits, and Adam's own epsilon is 1e-8), and far above
# 1e-19, at which the squares inside a float32 norm start to vanish.
CLIP_BIAS_EPS = 1e-12
MAX_LOG_RATIO = 20.0
TOKEN_CLIPRANGE = 0.2


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
        [B, T] float, nats; 0 with zero gradient on tokens that do not count.

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
    index = turn_index.masked_fill(~mask, -1)
    if level == "sequence":
        # The mean over an episode is the mean over one turn with all its tokens.
        index = index.clamp(max=0)
    # Allow T turns, because reading the true count would synchronise with the device.
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
        sampling_logprobs: [B, T] float, nats, from the sampler; NaN where it returned none.
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        level: "token", "turn" or "sequence", means as in `log_importance_ratio`; or "product", over all
            agent tokens of the episode, which TRL calls "sequence".
        truncate: clamp if True, else mask.
        clip_min: lower bound of the ratio, at most `clip_max`; None for no bound.
        clip_max: upper bound of the ratio, None for no bound.

    Returns:
        [B, T] float, 1 on tokens outside turns; [B, 1] for "product".

    Source: truncated importance sampling, Ionides 2008; per turn: ours.
    """
    check_turn_index(turn_index)
    check_float(old_logprobs=old_logprobs, sampling_logprobs=sampling_logprobs)
    low = 0.0 if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if not low <= high:
        raise ValueError(f"clip_min must not exceed clip_max, got {low!r} and {high!r}")
    # Check the shapes first, because `where` would broadcast them.
    check_like("turn_index", turn_index, old_logprobs=old_logprobs, sampling_logprobs=sampling_logprobs)
    known = torch.where(sampling_logprobs.isnan(), old_logprobs, sampling_logprobs)
    product, mask = level == "product", turn_index >= 0
    log_ratio = log_importance_ratio(old_logprobs, known, turn_index, "token" if product else level)
    ratio = log_ratio.sum(dim=1, keepdim=True).exp() if product else log_ratio.exp()
    outside = (ratio < low) | (ratio > high)
    bounded = ratio.clamp(low, high) if truncate else ratio.masked_fill(outside, 0.0)
    return bounded if product else bounded.masked_fill(~mask, 1.0)


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, log_ratio: Tensor) -> Tensor:
        return log_ratio.clamp(max=MAX_LOG_RATIO)

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def held(log_ratio: Tensor) -> Tensor:
    """Cap log ratios at MAX_LOG_RATIO. The gradient passes through unchanged.

    A plain clamp would zero the gradient of exactly the tokens that need the largest correction.
    """
    return _Held.apply(log_ratio)


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(`log_ratio`). Log ratios above 20 are capped at 20.

    Args:
        log_ratio: any shape, float, nats.

    Returns:
        Same shape, dimensionless, at most exp(20), with the gradient that exp has there.
    """
    return held(upcast(log_ratio)).exp()


class SurrogateStats(NamedTuple):
    """Statistics of the clipped surrogate over the tokens that count, as detached scalar tensors.

    Attributes:
        tokens: number of tokens.
        clipped_low: tokens clipped from below (A < 0, ratio under 1 - cliprange_low).
        clipped_high: tokens clipped from above (A > 0, ratio over 1 + cliprange_high; or A < 0,
            ratio over delta).
        ratio_sum: sum of the ratios.
        ratio_max: largest ratio, 0 if there are no tokens. Parts combine by max, not by sum.
        approx_kl_sum: sum of ratio - 1 - log ratio (k3 of old against new policy), nats.
    """

    tokens: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    approx_kl_sum: Tensor


class ClippedSurrogate(NamedTuple):
    """Result of `clipped_surrogate`: the objective, split into its kept and its clipped terms.

    Attributes:
        kept: [B, T] float, ratio * A on kept tokens, 0 elsewhere; its gradient is the gradient of
            the usual min/clip objective.
        clipped: [B, T] float, ratio * A on clipped tokens, 0 elsewhere; its gradient is the
            clipping bias. kept + clipped is the unclipped objective.
        objective: [B, T] float, detached value of the usual min/clip objective.
        is_clipped: [B, T] bool, True = the clip stops this token's gradient.
        stats: sums for the metrics.
    """

    kept: Tensor
    clipped: Tensor
    objective: Tensor
    is_clipped: Tensor
    stats: SurrogateStats


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cliprange_low: float,
    cliprange_high: float,
    *,
    delta: float | None = None,
    weights: Tensor | None = None,
) -> ClippedSurrogate:
    """Compute the clipped surrogate (to be maximised), split into its kept and its clipped terms.

    With w = exp(log_ratio), a token is clipped when

        A > 0 and w > 1 + cliprange_high,   or   A < 0 and (w < 1 - cliprange_low or w > delta)

    which is exactly when min(min(w, delta) A, clip(w, 1 - cliprange_low, 1 + cliprange_high) A) has
    no gradient; a ratio on the bound itself is kept. Tokens are clipped one by one, because A may
    change sign inside a turn although w is the same.

    Log ratios are capped at 20, in the value and in the gradient (which stays w A, not 0),
    so that no token can overflow the sum of a batch; smaller values are not changed.

    Args:
        log_ratio: [B, T] float, nats, at the level chosen; carries the gradient.
        advantages: [B, T] float, unitless once whitened; detached here.
        loss_mask: [B, T] bool, True = token counts.
        cliprange_low: lower half-width, dimensionless, >= 0; from 1 on there is no lower clip.
        cliprange_high: upper half-width, dimensionless, >= 0.
        delta: upper bound on the ratio where A < 0 (two-sided clip), dimensionless, above
            1 + cliprange_high. Default: none.
        weights: [B, T] or [B, 1] float, dimensionless; detached here. Multiplies kept, clipped and
            objective alike, for example a truncated correction of the sampler. Default: 1.

    Returns:
        ClippedSurrogate; all of it 0 (False), with zero gradient, where `loss_mask` is False.

    Source: arXiv:1707.06347 Eq. 7; split into kept and clipped part as in Lemma 4.1 of
        arXiv:2511.20718v1; delta as in arXiv:2505.07291.
    """
    for name, value in (("low", cliprange_low), ("high", cliprange_high)):
        if not value >= 0.0:
            raise ValueError(f"cliprange_{name} must be at least 0, got {value!r}")
    if delta is not None and not delta > 1.0 + cliprange_high:
        raise ValueError(f"delta must exceed 1 + cliprange_high = {1.0 + cliprange_high}, got {delta!r}")
    check_mask("loss_mask", loss_mask)
    check_float(log_ratio=log_ratio, advantages=advantages)
    check_like("loss_mask", loss_mask, log_ratio=log_ratio, advantages=advantages)

    log_ratio = zero_off_mask(upcast(log_ratio), loss_mask)
    advantages = zero_off_mask(upcast(advantages.detach()), loss_mask)
    log_ratio = held(log_ratio)
    ratio = log_ratio.exp()
    weighted = advantages if weights is None else advantages * _constant_weights(weights, loss_mask)

    fixed = ratio.detach()
    clipped_low, clipped_high, held_ratio = _clip(
        fixed, advantages, 1.0 - cliprange_low, 1.0 + cliprange_high, delta
    )
    is_clipped = clipped_low | clipped_high
    counted, log_ratio = zero_off_mask(fixed, loss_mask), log_ratio.detach()
    stats = SurrogateStats(
        tokens=loss_mask.sum().to(fixed.dtype),
        clipped_low=clipped_low.sum().to(fixed.dtype),
        clipped_high=clipped_high.sum().to(fixed.dtype),
        ratio_sum=counted.sum(),
        # An empty tensor has no maximum. Ratios are positive, so 0 means that there is none.
        ratio_max=counted.max() if counted.numel() else counted.sum(),
        approx_kl_sum=zero_off_mask(fixed - 1.0 - log_ratio, loss_mask).sum(),
    )
    return ClippedSurrogate(
        kept=zero_off_mask(ratio, ~is_clipped) * weighted,
        clipped=zero_off_mask(ratio, is_clipped) * weighted,
        objective=held_ratio * weighted,
        is_clipped=is_clipped,
        stats=stats,
    )


def default_cliprange(tokens: float, ratios: float) -> float:
    """Return the half-width of the clip interval for ratios that are means over several tokens.

    If one token of n changes its log-probability by d, their mean changes by d / n. PPO's 0.2 for one
    token is 0.2 / n for the mean.

    Args:
        tokens: number of tokens.
        ratios: number of different ratios among them: of turns, or of episodes.

    Returns:
        Dimensionless, at most 0.2.

    Source: this package's own. The ranges of arXiv:2507.18071, 3e-4 and 4e-4 for means over whole answers,
        have this size for 600 tokens.
    """
    return TOKEN_CLIPRANGE * min(ratios / max(tokens, 1.0), 1.0)


def winner_weights(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return weight 1 for each episode whose advantages have a positive sum, and 0 for the others.

    An episode that went worse than expected lowers the probability of its own tokens, which raises arbitrary
    other tokens. With stale data this is the first effect that does damage.

    Args:
        advantages: [B, T] float.
        loss_mask: [B, T] bool, True = counts.

    Returns:
        [B] float, detached, in at least float32; 0 for an episode without a token that counts.

    Source: this package's own, found as the control of a study (docs/lab/rivals.md). Precedents: TOPR
        learns less from failures (arXiv:2503.14286); RAFT leaves them out (arXiv:2304.06767).
    """
    check_mask("loss_mask", loss_mask)
    check_float(advantages=advantages)
    check_like("loss_mask", loss_mask, advantages=advantages)
    total = zero_off_mask(upcast(advantages.detach()), loss_mask).sum(dim=1)
    return (total > 0).to(total.dtype)


def normalization_scale(grad_norm: Tensor, clip_bias_norm: Tensor, mode: str) -> Tensor:
    """Return the factor s by which the clipping-bias correction scales the gradient or the optimizer's step.

    With g = grad_norm and C = clip_bias_norm:

        triggered  1 / C         the paper's; needs gradient clipping behind it
        share      g / (g + C)   never amplifies, unit-free, smooth

    and 1 in both modes if nothing is clipped (C <= 1e-12, so 0 / 0 counts as 1), which holds exactly
    at the first step after a fresh rollout. A norm that is not finite gives 1 as well, so that the
    trainer's guard still detects a gradient that is not finite.

    Args:
        grad_norm: float, any shape, norm of g, >= 0.
        clip_bias_norm: float, the same shape, norm of C, >= 0, in the unit of grad_norm.
        mode: one of the above.

    Returns:
        s, dimensionless, detached, in at least float32, computed without waiting for the device.

    Source: "triggered" is the clipping-triggered normalisation of arXiv:2511.20718v1 (Eqs. 7-8,
        as far as known), with a guard if nothing is clipped; "share" is this package's own
        signal. VCPO (arXiv:2602.17616) also scales the step by how far off policy a batch is; its
        signal is the effective sample size.
    """
    check_choice("mode", mode, NORMALIZATION_MODES)
    g, c = upcast(grad_norm.detach()), upcast(clip_bias_norm.detach())
    # Halve both norms, which is exact, because their sum may overflow although neither norm does.
    scale = 1.0 / c if mode == "triggered" else 0.5 * g / (0.5 * g + 0.5 * c)
    return torch.where((c > CLIP_BIAS_EPS) & torch.isfinite(c) & torch.isfinite(g), scale, 1.0)


def cosine(dot: Tensor, norm_a: Tensor, norm_b: Tensor) -> Tensor:
    """Return the cosine of the angle between two vectors, from their inner product and norms, [] each.

    It lies in [-1, 1]. It is 0 if either vector is zero, and NaN if an argument is.
    """
    # Divide twice: the product of two small norms may underflow although neither norm does.
    quotient = dot / norm_a / norm_b
    return torch.where((norm_a == 0) | (norm_b == 0), 0.0, quotient).clamp(-1.0, 1.0)


def logit_space_squares(
    coefficient: Tensor, logprobs: Tensor, entropies: Tensor, loss_mask: Tensor
) -> Tensor:
    """Return the squared norm of each token's gradient with respect to its logits.

    A term with derivative c_t with respect to log p(y_t) has the gradient c_t (onehot(y_t) - p_t) in
    the logits of token t, whose squared norm is c_t^2 (1 - 2 p_y + sum_v p_v^2). The fused head keeps
    no table of probabilities, so exp(-entropy) replaces sum p^2. It is a lower bound, exact if p is
    uniform over its support. Sums over tokens treat these gradients as orthogonal.

    Only the ratio of two such norms carries over to the parameters behind the logits, and only as far
    as kept and clipped tokens are alike: `docs/lab/measurements.md` has the measured agreement.

    Args:
        coefficient: [B, T] float, c_t.
        logprobs: [B, T] float, log p(y_t), nats.
        entropies: [B, T] float, of p_t, nats.
        loss_mask: [B, T] bool, True = counts.

    Returns:
        [B, T] float, detached, in at least float32, 0 off the mask.

    Source: the logit-gradient proxy 1 - 2 p + sum p^2 of OTB (arXiv:2602.07078); exp(-entropy) for
        sum p^2 is this package's own.
    """
    check_mask("loss_mask", loss_mask)
    tensors = {"coefficient": coefficient, "logprobs": logprobs, "entropies": entropies}
    check_float(**tensors)
    check_like("loss_mask", loss_mask, **tensors)
    chosen = zero_off_mask(upcast(logprobs.detach()), loss_mask).exp()
    collision = (-zero_off_mask(upcast(entropies.detach()), loss_mask)).exp()
    # Use the chosen token's part as a lower bound, so that the result is never negative.
    per_token = torch.maximum(1.0 - 2.0 * chosen + collision, (1.0 - chosen).square())
    weight = zero_off_mask(upcast(coefficient.detach()), loss_mask).square()
    return weight * per_token


def _clip(
    ratio: Tensor, advantages: Tensor, low: float, high: float, delta: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masks of tokens clipped from below and above, and the clipped ratio, [B, T] each."""
    clipped_low = (advantages < 0) & (ratio < low)
    # With A < 0 a large ratio is already pessimistic, so only delta clips it.
    upper = torch.full_like(ratio, high)
    upper = upper.masked_fill(advantages < 0, math.inf if delta is None else delta)
    clipped_high = (advantages != 0) & (ratio > upper)
    return clipped_low, clipped_high, torch.where(clipped_low, low, torch.minimum(ratio, upper))


def _constant_weights(weights: Tensor, loss_mask: Tensor) -> Tensor:
    """Check the weights and return them detached, [B, T], with 0 where `loss_mask` is False."""
    check_float(weights=weights)
    if weights.shape not in (loss_mask.shape, (loss_mask.shape[0], 1)):
        raise ValueError(
            f"weights must be [B, T] or [B, 1] of {list(loss_mask.shape)}, got shape {list(weights.shape)}"
        )
    return zero_off_mask(upcast(weights.detach()).expand(loss_mask.shape), loss_mask)
