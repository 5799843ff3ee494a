"""Per-token losses besides the policy's objective (KL, critic), and the weights that sum all losses.

Nothing here averages: every loss is [B, T], and `aggregation_weights` gives the weights
whose weighted sum is a micro-batch's share of the mini-batch loss. The split into micro-batches and
processes therefore cannot change a gradient.
"""

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
from trl_stppo.core.policy import held

KL_ESTIMATORS = ("k1", "k3")
LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: str, *, loss_mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) per token, from the sampled tokens.

    With x = ref_logprobs - logprobs: k1 = -x (unbiased, either sign), k3 = exp(x) - 1 - x
    (unbiased, never negative). In k3, x is capped at 20, in the value and in the gradient
    (which stays 1 - exp(20), not 0). In k1, x is not capped.

    Args:
        logprobs: [B, T] float, nats.
        ref_logprobs: [B, T] float, nats.
        estimator: "k1" or "k3".
        loss_mask: [B, T] bool, True = counts. Required if the result carries a gradient and padding
            may hold any value; masking afterwards would be too late for NaN and overflow.

    Returns:
        [B, T] float, nats, 0 with zero gradient where `loss_mask` is False.

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
    difference = held(ref_logprobs - logprobs)
    # expm1 keeps the digits that exp(x) - 1 loses near x = 0, where a healthy policy stays.
    return torch.expm1(difference) - difference


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    cliprange_value: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute the critic's clipped squared error: moving beyond the clip range gives no lower error.

    Per token: 0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2).

    Args:
        values: [B, T] float, reward units. Critic being updated; carries the gradient.
        old_values: [B, T] float, reward units. Critic at the time of the rollout; detached here.
        returns: [B, T] float, reward units. Regression targets; detached here.
        loss_mask: [B, T] bool, True = token counts.
        cliprange_value: half-width c, reward units, > 0; None = no clipping.

    Returns:
        loss: [B, T] float, reward units squared, 0 with zero gradient where `loss_mask` is False.
        is_clipped: [B, T] bool, True = the clipped error is larger.

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
    """Return per-token weights. A sum of losses with these weights is this micro-batch's share of the loss.

        grpo        1 / (num_episodes |y_b|)         mean over episodes of per-episode token means
        bnpo, dapo  1 / num_tokens                   mean over tokens
        dr_grpo     1 / (num_episodes max_length)    mean over episodes of sums over a fixed length

    Args:
        loss_mask: [B, T] bool, True = token counts. |y_b| is its number of True in episode b.
        loss_type: one of the above. "dapo" is TRL's name for the same formula over the generation
            batch; with the mini-batch's own tokens, as here, it equals "bnpo".
        num_episodes: episodes of the whole mini-batch, over all micro-batches and processes,
            including episodes without tokens. A number below 1 counts as 1.
        num_tokens: tokens that count in the whole mini-batch, over all micro-batches and processes.
        max_length: completion budget in tokens, above 0; only "dr_grpo" needs it.
        episode_tokens: [B], |y_b| of each row's episode, if episodes have several rows; only "grpo" needs
            it. Default: each row is an episode.
        dtype: floating point type of the result.

    Returns:
        [B, T] float, 0 where `loss_mask` is False, so an episode without tokens contributes 0.

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
