"""Corrections for off-policy updates, as functions of tensors: what the study of rivals compares.

Axes are B episodes, T tokens, K turns. `index` [B, T] int64 is k at the tokens of turn k that train, -1
elsewhere; d_t is log policy minus log player, w_k = exp of its mean over a turn, W_k = exp of its sum.
Nothing here carries a gradient but the terms of `kernel_terms`.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-12  # squared norms of clipped terms up to its square count as nothing
MOST = 20.0  # of log ratios, as in TRL

# ------------------------------------------------------------------------------------ turns


def turn_sums(x: Tensor, index: Tensor) -> Tensor:
    """Sum over the tokens of each turn.

    Args:
        x: [B, T] float; anything outside turns.
        index: [B, T] int64.

    Returns:
        [B, K], K the largest number of turns, at least 1.
    """
    turns = max(1, int(index.max()) + 1) if index.numel() else 1
    # Bucket 0 takes what lies outside turns.
    buckets = x.new_zeros(x.shape[0], turns + 1)
    return buckets.scatter_add(1, index + 1, x.masked_fill(index < 0, 0.0))[:, 1:]


def turn_counts(index: Tensor) -> Tensor:
    """Tokens of each turn, [B, K] float64."""
    return turn_sums(torch.ones(index.shape, dtype=torch.float64, device=index.device), index)


def turn_means(x: Tensor, index: Tensor) -> Tensor:
    """Mean over the tokens of each turn, [B, K]; 0 for turns that there are not."""
    return turn_sums(x, index) / turn_counts(index).clamp(min=1).to(x.dtype)


def at_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Each turn's number [B, K] at its tokens, [B, T]; 0 outside turns."""
    return torch.nn.functional.pad(x, (1, 0)).gather(1, index + 1)


# ----------------------------------------------------------- weights of episodes and turns


def token_squares(coefficient: Tensor, logprobs: Tensor, entropies: Tensor, mask: Tensor) -> Tensor:
    """Squared norm, in the space of the logits, of each token's part of a gradient.

    c_t^2 max(1 - 2 p_t + exp(-H_t), (1 - p_t)^2).

    Args:
        coefficient: [B, T] float, c_t, derivative of the terms' sum with respect to log p_t.
        logprobs: [B, T] float, log p_t.
        entropies: [B, T] float, H_t in nats.
        mask: [B, T] bool, True = counts.

    Returns:
        [B, T] float64, 0 off the mask.
    """
    c, logp, entropy = (
        x.detach().double().masked_fill(~mask, 0.0) for x in (coefficient, logprobs, entropies)
    )
    p = logp.exp()
    return c.square() * torch.maximum(1.0 - 2.0 * p + (-entropy).exp(), (1.0 - p).square())


def kept_share(kept: Tensor, clipped: Tensor, power: float) -> Tensor:
    """(g / (g + C))^power; 1 where C is nothing, 0 where g is nothing and C is not.

    Args:
        kept: any shape, squared norms of kept terms, >= 0.
        clipped: same shape, of clipped ones.
        power: exponent.
    """
    g, c = kept.sqrt(), clipped.sqrt()
    nothing = c <= EPS
    return torch.where(nothing, 1.0, (g / (g + c).masked_fill(nothing, 1.0)) ** power)


def episode_weights(kept: Tensor, clipped: Tensor, power: float = 4.0) -> Tensor:
    """u_i, from the `token_squares` of kept and of clipped terms.

    Args:
        kept: [B, T] float.
        clipped: [B, T] float.
        power: exponent.

    Returns:
        [B, 1], in [0, 1].
    """
    return kept_share(kept.sum(1, keepdim=True), clipped.sum(1, keepdim=True), power)


def winners(advantages: Tensor, mask: Tensor) -> Tensor:
    """1 for episodes whose advantages add up to more than nothing, else 0, [B, 1]."""
    return (advantages.masked_fill(~mask, 0.0).sum(1, keepdim=True) > 0).double()


def turn_weights(kept: Tensor, clipped: Tensor, index: Tensor, power: float = 4.0) -> Tensor:
    """The same of each turn, at its tokens, [B, T]."""
    return at_tokens(kept_share(turn_sums(kept, index), turn_sums(clipped, index), power), index)


# ------------------------------------------------------------------------------ critic side


def vtrace(
    rewards: Tensor,
    values: Tensor,
    drift: Tensor,
    index: Tensor,
    gamma: float,
    lam: float,
    *,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    """V-trace over turns, both bounds 1, the state after the last turn worth nothing.

        delta_k = R_k + gamma V_{k+1} - V_k,   E_k = min(1, W_k) (delta_k + gamma lam E_{k+1})
        target V_k + E_k,   A_k = delta_k + gamma lam E_{k+1}

    Without drift this is GAE over turns.

    Args:
        rewards: [B, T] float, R_k is their sum over a turn.
        values: [B, T] float, of the state before each token; a turn's is that at its first.
        drift: [B, T] float, d_t.
        index: [B, T] int64.
        gamma: discount per turn.
        lam: lambda per turn.
        mean: w_k in place of W_k.

    Returns:
        advantages [B, T], at every token of a turn, and targets [B, T], at its first; 0 elsewhere.

    Source: arXiv:1802.01561 Eq. 1 with lambda; for advantages of language models arXiv:2603.01365.
    """
    before = torch.nn.functional.pad(index[:, :-1], (1, 0), value=-1)
    starts = (index >= 0) & (index != before)
    log_weight = turn_means(drift, index) if mean else turn_sums(drift, index)
    weight = log_weight.clamp(max=0.0).exp()
    reward, value = turn_sums(rewards, index), turn_sums(values.masked_fill(~starts, 0.0), index)
    error = torch.zeros_like(reward[:, 0])
    advantages, targets = torch.zeros_like(reward), torch.zeros_like(reward)
    successor = torch.zeros_like(error)
    for k in reversed(range(reward.shape[1])):  # past an episode's end all of this is 0
        advantages[:, k] = reward[:, k] + gamma * successor - value[:, k] + gamma * lam * error
        error = weight[:, k] * advantages[:, k]
        targets[:, k], successor = value[:, k] + error, value[:, k]
    return at_tokens(advantages, index), at_tokens(targets, index).masked_fill(~starts, 0.0)


# ------------------------------------------------------------------------------------ masks


def outside_trust_region(
    logprobs: Tensor, old: Tensor, advantages: Tensor, index: Tensor, delta: float
) -> Tensor:
    """Tokens of turns that have drifted too far in one token, and are pushed further.

    max over the turn of |p_t - p_old,t| > delta, and A_t > 0 with w_k > 1 or A_t < 0 with w_k < 1.

    Args:
        logprobs: [B, T] float, log p_t.
        old: [B, T] float, log p_old,t.
        advantages: [B, T] float.
        index: [B, T] int64.
        delta: 0 < delta < 1.

    Returns:
        [B, T] bool, True = loses its gradient.

    Source: arXiv:2512.23075, whose rule is of whole sequences; the direction as in arXiv:2602.04879.
    """
    inside = index >= 0
    logprobs, old = (x.detach().masked_fill(~inside, 0.0) for x in (logprobs, old))
    far = ((logprobs.exp() - old.exp()).abs() > delta).to(logprobs.dtype)
    push = at_tokens(turn_means(logprobs - old, index), index) * advantages
    return (at_tokens(turn_sums(far, index), index) > 0) & (push > 0)


def beyond_second_moment(drift: Tensor, index: Tensor, limit: float = 0.04) -> Tensor:
    """Tokens of the turns of largest (mean d)^2, as many as hold the mean of the rest to the limit.

    Args:
        drift: [B, T] float, d_t.
        index: [B, T] int64.
        limit: nats squared.

    Returns:
        [B, T] bool, True = loses its gradient.

    Source: arXiv:2510.01161, there of tokens.
    """
    there = turn_counts(index) > 0
    moment = turn_means(drift.detach(), index).square()[there]
    smallest_first = moment.argsort()
    count = torch.arange(1, moment.numel() + 1, device=moment.device)
    below = moment[smallest_first].cumsum(0) / count <= limit
    dropped = torch.ones_like(moment)
    dropped[smallest_first[below]] = 0.0
    table = torch.zeros(there.shape, dtype=moment.dtype, device=moment.device)
    return at_tokens(table.masked_scatter(there, dropped), index) > 0


# ----------------------------------------------------------- anchors, and size of the step


def behaviour_weights(proximal: Tensor, old: Tensor, index: Tensor, most: float = 2.0) -> Tensor:
    """min(most, exp(mean over the turn of log proximal - log player)), [B, T], 1 outside turns.

    Source: arXiv:2110.00641, arXiv:2505.24298, there of tokens.
    """
    weight = turn_means(proximal - old, index).exp().clamp(max=most)
    return at_tokens(weight, index).masked_fill(index < 0, 1.0)


def effective_share(log_weights: Tensor, most: float = 8.0) -> Tensor:
    """(sum W)^2 / (n sum W^2) of n weights min(W, most), [] in (0, 1]; 1 of none.

    Source: arXiv:2602.17616.
    """
    if not log_weights.numel():
        return torch.ones(())
    weights = log_weights.detach().double().clamp(-MOST, MOST).exp().clamp(max=most)
    return weights.sum().square() / (weights.numel() * weights.square().sum())


def share_scale(share: float, base: float) -> float:
    """sqrt(min(1, share / base)), factor of a step. Source: arXiv:2602.17616."""
    return min(1.0, share / base) ** 0.5


def adapted(factor: float, kl: float, target: float, least: float, most: float) -> float:
    """The learning rate's factor, / 1.5 above twice the target, x 1.5 below half of it.

    Args:
        factor: so far.
        kl: nats per token, of the present policy to the player.
        target: likewise.
        least: bound of the factor.
        most: likewise.

    Source: the adaptive schedule of arXiv:1707.06347 (Section 4), with the steps of rsl_rl.
    """
    if kl > 2.0 * target:
        factor /= 1.5
    elif kl < 0.5 * target:
        factor *= 1.5
    return min(max(factor, least), most)


# ---------------------------------------------------------------------- objectives of others


def kernel_terms(
    name: str, logprobs: Tensor, old: Tensor, advantages: Tensor, index: Tensor
) -> Tensor:
    """Terms to be maximised in place of the clipped surrogate's; TRL's formulas and constants.

        sapo   4 / tau sigmoid(tau (w_k - 1)) A_t,   tau 1 where A_t > 0, else 1.05
        cispo  sg(min(w_k, 5)) A_t log p_t
        vespo  sg(phi(W_k)) A_t log p_t,   phi(W) = e^l W^k e^(-l W),   k, l = 2, 3 where A_t >= 0, else 3, 2
        tis    sg(min(W, 8)) A_t log p_t,   W of the whole episode
        topr   the same with min(W, 1) where A_t < 0 and 1 elsewhere

    Args:
        name: one of these.
        logprobs: [B, T] float, log p_t; carries the gradient.
        old: [B, T] float, log p_old,t.
        advantages: [B, T] float.
        index: [B, T] int64.

    Returns:
        [B, T], 0 with zero gradient outside turns.

    Source: arXiv:2511.20347, 2506.13585, 2602.10693, 2602.17616, 2503.14286; the first three as in
        TRL 1.16, with turns for its sequences.
    """
    inside = index >= 0
    logprobs, old = (x.masked_fill(~inside, 0.0) for x in (logprobs, old))
    advantages = advantages.masked_fill(~inside, 0.0)
    drift = logprobs - old
    if name == "sapo":
        ratio = at_tokens(turn_means(drift, index), index).clamp(max=MOST).exp()
        tau = torch.full_like(advantages, 1.05).masked_fill(advantages > 0, 1.0)
        return torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau * advantages
    fixed = drift.detach()
    if name == "cispo":
        weight = at_tokens(turn_means(fixed, index), index).clamp(max=MOST).exp().clamp(max=5.0)
    elif name == "vespo":
        log_w = at_tokens(turn_sums(fixed.clamp(-MOST, MOST), index), index).clamp(-18.42, MOST)
        up = advantages >= 0
        k, rate = torch.where(up, 2.0, 3.0), torch.where(up, 3.0, 2.0)
        weight = (rate + k * log_w - rate * log_w.exp()).exp()
    elif name in ("tis", "topr"):
        whole = fixed.sum(1, keepdim=True).clamp(-MOST, MOST).exp()
        limited = whole.clamp(max=1.0).expand_as(fixed).masked_fill(advantages >= 0, 1.0)
        weight = whole.clamp(max=8.0) if name == "tis" else limited
    else:
        raise ValueError(f"no kernel {name!r}: sapo, cispo, vespo, tis, topr")
    return weight * advantages * logprobs
