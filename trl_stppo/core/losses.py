"""Per-token objectives of policy and critic, and the weights that add them up.

Nothing here averages: every loss is [B, T], and `aggregation_weights` gives the weights
whose weighted sum is a micro-batch's share of the mini-batch loss. The split into micro-batches and
processes therefore cannot change a gradient.
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
    upcast,
    zero_off_mask,
)

KL_ESTIMATORS = ("k1", "k3")
LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
MAX_LOG_RATIO = 20.0
# PPO's clip range for the ratio of one token.
TOKEN_CLIPRANGE = 0.2


class SurrogateStats(NamedTuple):
    """Sums of the clipped surrogate's statistics over the tokens that count, as detached [] tensors.

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
        kept: [B, T] float, ratio * A on kept tokens, 0 elsewhere; its gradient is that of the
            usual min/clip objective.
        clipped: [B, T] float, ratio * A on clipped tokens, 0 elsewhere; its gradient is the
            clipping bias. kept + clipped is the unclipped objective.
        objective: [B, T] float, detached value of the usual min/clip objective.
        is_clipped: [B, T] bool, True = the clip stops this token's gradient.
        stats: sums for the metrics.
        episode_weights: [B] float, the factors that `weighted` applied to `kept`; None if it was not used.
    """

    kept: Tensor
    clipped: Tensor
    objective: Tensor
    is_clipped: Tensor
    stats: SurrogateStats
    episode_weights: Tensor | None = None

    def weighted(self, weights: Tensor) -> "ClippedSurrogate":
        """Multiply each episode's kept terms by a weight, [B]. The logged `objective` is unchanged."""
        kept = self.kept * weights.unsqueeze(1).to(self.kept.dtype)
        return self._replace(kept=kept, episode_weights=weights)


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: str, *, loss_mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) per token, from the sampled tokens.

    With x = ref_logprobs - logprobs: k1 = -x (unbiased, either sign), k3 = exp(x) - 1 - x
    (unbiased, never negative). In k3 an x above 20 is taken as 20, in the value and in the gradient
    (which stays 1 - exp(20), not 0); k1 is left as it is.

    Args:
        logprobs: [B, T] float, nats.
        ref_logprobs: [B, T] float, nats.
        estimator: "k1" or "k3".
        loss_mask: [B, T] bool, True = counts. Required if the result carries a gradient and padding
            may hold any value; masking afterwards would be too late for NaN and overflow.

    Returns:
        [B, T] float, nats, 0 with zero gradient where `loss_mask` is False. Float32 for half
        precision input.

    Raises:
        ValueError: unknown `estimator`, wrong dtypes, or shapes that differ.

    Source: Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html (2020).
    """
    check_choice("estimator", estimator, KL_ESTIMATORS)
    check_float(logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_like("logprobs", logprobs, ref_logprobs=ref_logprobs)
    logprobs, ref_logprobs = upcast(logprobs), upcast(ref_logprobs)
    if loss_mask is not None:
        check_mask("loss_mask", loss_mask)
        check_like("logprobs", logprobs, loss_mask=loss_mask)
        logprobs = zero_off_mask(logprobs, loss_mask)
        ref_logprobs = zero_off_mask(ref_logprobs, loss_mask)
    if estimator == "k1":
        return logprobs - ref_logprobs
    difference = _HeldLogRatio.apply(ref_logprobs - logprobs)
    # expm1 keeps the digits that exp(x) - 1 loses near x = 0, where a healthy policy stays.
    return torch.expm1(difference) - difference


class _HeldLogRatio(torch.autograd.Function):
    """Caps the log ratio at MAX_LOG_RATIO. The gradient passes through unchanged.

    A plain clamp would zero the gradient of exactly the tokens that need the largest correction.
    """

    @staticmethod
    def forward(_ctx: object, log_ratio: Tensor) -> Tensor:
        return log_ratio.clamp(max=MAX_LOG_RATIO)

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(`log_ratio`). Log ratios above 20 are capped at 20.

    Args:
        log_ratio: any shape, float, nats.

    Returns:
        Same shape, dimensionless, at most exp(20), with the gradient that exp has there. Float32 for
        half precision input.
    """
    return _HeldLogRatio.apply(upcast(log_ratio)).exp()


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
    no gradient; a ratio on the bound itself is kept. Decided per token: A may change sign inside a
    turn although w does not.

    Log ratios above 20 are taken as 20, in the value and in the gradient (which stays w A, not 0),
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
        Float32 for half precision input.

    Raises:
        ValueError: a range or delta out of bounds, wrong dtypes, or shapes that do not fit.

    Source: arXiv:1707.06347 Eq. 7; split into kept and clipped part as in Lemma 4.1 of
        arXiv:2511.20718v1; delta as in arXiv:2505.07291.
    """
    _check_cliprange(cliprange_low, cliprange_high, delta)
    check_mask("loss_mask", loss_mask)
    check_float(log_ratio=log_ratio, advantages=advantages)
    check_like("loss_mask", loss_mask, log_ratio=log_ratio, advantages=advantages)

    log_ratio = zero_off_mask(upcast(log_ratio), loss_mask)
    advantages = zero_off_mask(upcast(advantages.detach()), loss_mask)
    log_ratio = _HeldLogRatio.apply(log_ratio)
    ratio = log_ratio.exp()
    weighted = advantages if weights is None else advantages * _constant_weights(weights, loss_mask)

    fixed = ratio.detach()
    clipped_low, clipped_high, held_ratio = _clip(
        fixed, advantages, 1.0 - cliprange_low, 1.0 + cliprange_high, delta
    )
    is_clipped = clipped_low | clipped_high
    return ClippedSurrogate(
        kept=zero_off_mask(ratio, ~is_clipped) * weighted,
        clipped=zero_off_mask(ratio, is_clipped) * weighted,
        objective=held_ratio * weighted,
        is_clipped=is_clipped,
        stats=_surrogate_stats(log_ratio.detach(), fixed, loss_mask, clipped_low, clipped_high),
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
        are of that size for 600 tokens.
    """
    return TOKEN_CLIPRANGE * min(ratios / max(tokens, 1.0), 1.0)


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


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    cliprange_value: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute the critic's clipped squared error: a large move from the old value does not lower the error.

    Per token: 0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2).

    Args:
        values: [B, T] float, reward units. Critic being updated; carries the gradient.
        old_values: [B, T] float, reward units. Critic at the time of the rollout; detached here.
        returns: [B, T] float, reward units. Regression targets; detached here.
        loss_mask: [B, T] bool, True = token counts.
        cliprange_value: half-width c, reward units, > 0; None = no clipping.

    Returns:
        loss: [B, T] float, reward units squared, 0 with zero gradient where `loss_mask` is False.
            Float32 for half precision input.
        is_clipped: [B, T] bool, True = the clipped error is the larger one.

    Raises:
        ValueError: cliprange_value is not positive, wrong dtypes, or shapes that differ.

    Source: the reference implementation of arXiv:1707.06347 (OpenAI baselines, ppo2); as in TRL.
    """
    if cliprange_value is not None and not cliprange_value > 0:
        raise ValueError(f"cliprange_value must be > 0, or None; got {cliprange_value!r}")
    check_mask("loss_mask", loss_mask)
    check_float(values=values, old_values=old_values, returns=returns)
    check_like("loss_mask", loss_mask, values=values, old_values=old_values, returns=returns)

    values = zero_off_mask(upcast(values), loss_mask)
    returns = zero_off_mask(upcast(returns.detach()), loss_mask)
    error = (values - returns).square()
    if cliprange_value is None:
        return 0.5 * error, torch.zeros_like(loss_mask)
    old_values = zero_off_mask(upcast(old_values.detach()), loss_mask)
    clipped_values = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    clipped_error = (clipped_values - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), clipped_error > error


def aggregation_weights(
    loss_mask: Tensor,
    loss_type: str,
    *,
    num_episodes: float | Tensor,
    num_tokens: float | Tensor,
    max_length: int | None = None,
    episode_tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return per-token weights. Losses, weighted and summed, give this micro-batch's share of the loss.

        grpo        1 / (num_episodes |y_b|)         mean over episodes of per-episode token means
        bnpo, dapo  1 / num_tokens                   mean over tokens
        dr_grpo     1 / (num_episodes max_length)    mean over episodes of sums over a fixed length

    Args:
        loss_mask: [B, T] bool, True = token counts. |y_b| is its number of True in episode b.
        loss_type: one of the above. "dapo" is TRL's name for the same formula over the generation
            batch; with the mini-batch's own tokens, as here, it equals "bnpo".
        num_episodes: episodes of the whole mini-batch, over all micro-batches and processes,
            those without tokens included. At least 1 is assumed.
        num_tokens: tokens that count in the whole mini-batch, over all micro-batches and processes.
        max_length: completion budget in tokens; only "dr_grpo" needs it.
        episode_tokens: [B], |y_b| of an episode that has further rows; only "grpo" needs it. Default: each
            row is an episode.
        dtype: floating point type of the result.

    Returns:
        [B, T] float, 0 where `loss_mask` is False, so an episode without tokens contributes 0.

    Raises:
        ValueError: unknown `loss_type`, `loss_mask` not [B, T] bool, or "dr_grpo" without a
            positive `max_length`.

    Source: "grpo" is the mean of arXiv:2511.20718v1; the names are TRL's.
    """
    check_choice("loss_type", loss_type, LOSS_TYPES)
    check_mask("loss_mask", loss_mask)
    counted = loss_mask.to(dtype)
    if loss_type in ("bnpo", "dapo"):
        return counted / _at_least_one(num_tokens)
    per_episode = counted / _at_least_one(num_episodes)
    if loss_type == "grpo":
        tokens = counted.sum(dim=1) if episode_tokens is None else episode_tokens
        return per_episode / tokens.unsqueeze(1).clamp(min=1)
    if max_length is None or max_length <= 0:
        raise ValueError(f"loss_type 'dr_grpo' needs max_length > 0 tokens, got {max_length!r}")
    return per_episode / max_length


def _at_least_one(count: float | Tensor) -> float | Tensor:
    """Return the larger of `count` and 1, without copying a tensor from its device."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1.0)


def _check_cliprange(low: float, high: float, delta: float | None) -> None:
    """Raise ValueError unless the bounds of `clipped_surrogate` are valid."""
    for name, value in (("low", low), ("high", high)):
        if not value >= 0.0:
            raise ValueError(f"cliprange_{name} must be at least 0, got {value!r}")
    if delta is not None and not delta > 1.0 + high:
        raise ValueError(f"delta must exceed 1 + cliprange_high = {1.0 + high}, got {delta!r}")


def _constant_weights(weights: Tensor, loss_mask: Tensor) -> Tensor:
    """Check the weights and return them detached, [B, T], with 0 where `loss_mask` is False."""
    check_float(weights=weights)
    if weights.shape not in (loss_mask.shape, (loss_mask.shape[0], 1)):
        raise ValueError(
            f"weights must be [B, T] or [B, 1] of {list(loss_mask.shape)}, got shape {list(weights.shape)}"
        )
    return zero_off_mask(upcast(weights.detach()).expand(loss_mask.shape), loss_mask)


def _surrogate_stats(
    log_ratio: Tensor, ratio: Tensor, loss_mask: Tensor, clipped_low: Tensor, clipped_high: Tensor
) -> SurrogateStats:
    """Compute the SurrogateStats of detached [B, T] tensors. `log_ratio` is 0 where `loss_mask` is False."""
    counted = zero_off_mask(ratio, loss_mask)
    return SurrogateStats(
        tokens=loss_mask.sum().to(ratio.dtype),
        clipped_low=clipped_low.sum().to(ratio.dtype),
        clipped_high=clipped_high.sum().to(ratio.dtype),
        ratio_sum=counted.sum(),
        # An empty tensor has no maximum; ratios are positive, so 0 means "none".
        ratio_max=counted.max() if counted.numel() else counted.sum(),
        approx_kl_sum=zero_off_mask(ratio - 1.0 - log_ratio, loss_mask).sum(),
    )


def winner_weights(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return weight 1 for each episode whose advantages have a positive sum, and 0 for the others.

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
