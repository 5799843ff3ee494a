"""Advantages: GAE over agent tokens or over turns, whitening, and estimators without a critic.

Both forms of GAE step *across* observations: the successor of a turn's last token is the next
turn's first token, whose value already contains the observation. Advantages are constants of the
update; pass values without a gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trl_stppo.core.masking import (
    check_choice,
    check_float,
    check_like,
    check_mask,
    check_shape,
    check_turn_columns,
    check_turn_index,
    upcast,
    widest,
    zero_off_mask,
)
from trl_stppo.core.turns import broadcast_turns, num_turns, reduce_turns, turn_ends, turn_starts

WHITEN_EPS = 1e-8
# TRL's epsilon.
GROUP_EPS = 1e-4
# GEM's epsilon.
RETURN_EPS = 1e-9
GROUP_SCALES = ("group", "batch", "none")
TURN_LAM = 0.9


def token_rewards(
    turn_index: Tensor,
    *,
    scores: Tensor,
    turn_rewards: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """Return the reward of every token.

        r_t = -kl_coef KL_t  +  turn k's reward if t is the last token of turn k
                             +  the score if t is the last token of the last turn

    Args:
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        scores: [B] float, reward units; the episode's outcome.
        turn_rewards: [B, K] float, reward units, from the environment; any value for turns that an
            episode does not have. Default: none.
        kl: [B, T] float, nats per token, against the reference policy (`losses.kl_penalty`).
            Default: none.
        kl_coef: reward units per nat.

    Returns:
        [B, T] float, reward units; 0 outside turns, hence 0 everywhere (its score too) for an
        episode without turns.

    Source: arXiv:2511.20718v1 (outcome reward at the end, turn-level MDP); the KL inside the reward
        as in arXiv:2203.02155, Eq. 2.
    """
    check_turn_index(turn_index)
    check_float(scores=scores)
    check_shape("scores", scores, turn_index.shape[:1], "one per episode, [B]")
    ends = turn_ends(turn_index)
    is_final = ends & (turn_index == (num_turns(turn_index) - 1).unsqueeze(1))
    rewards = zero_off_mask(upcast(scores).unsqueeze(1), is_final)
    if turn_rewards is not None:
        check_float(turn_rewards=turn_rewards)
        check_turn_columns("turn_rewards", turn_rewards, turn_index)
        rewards = rewards + zero_off_mask(broadcast_turns(upcast(turn_rewards), turn_index), ends)
    if kl is not None:
        check_float(kl=kl)
        check_like("turn_index", turn_index, kl=kl)
        rewards = rewards - kl_coef * zero_off_mask(upcast(kl), turn_index >= 0)
    return rewards


def default_lam(turns: float, steps: float) -> float:
    """Return GAE's lambda per step that amounts to 0.9 per turn.

    A fixed lambda per token weighs only the end of a long turn: 0.95 to the power of 100 tokens is 0.006.

    Args:
        turns: number of turns.
        steps: number of GAE steps in these turns: tokens, or turns.

    Returns:
        0.9 to the power of turns / steps: 0.949 for two tokens per turn, 0.995 for 22.

    Source: this package's own; VC-PPO (arXiv:2503.01491) finds that lambda below 1 loses the reward of long
        answers.
    """
    return TURN_LAM ** (turns / max(steps, 1.0))


def token_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    gamma: float,
    lam: float,
    *,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute GAE with one time step per agent token. Environment tokens take no time step and no discount.

    With t+1 the next *agent* token of the episode:

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1}

    Args:
        rewards: [B, T] float, reward units.
        values: [B, T] float, reward units. Value of the state before token t.
        action_mask: [B, T] bool, True = the policy sampled this token.
        gamma: discount per agent token, 0 <= gamma <= 1.
        lam: GAE's lambda per agent token, 0 <= lam <= 1. With gamma = lam = 1 the returns are the
            undiscounted sums of the rewards still to come (Monte Carlo).
        bootstrap_values: [B] float, value of the state after the last agent token, for truncated
            episodes; 0 for terminated episodes. Default: 0.

    Returns:
        advantages: [B, T] float, reward units, 0 where `action_mask` is False.
        returns: [B, T] float, A_t + V_t, the critic's targets, 0 where `action_mask` is False.

    Source: Schulman et al. 2016, arXiv:1506.02438, Eq. 16; over agent tokens as in
        arXiv:2511.20718v1.
    """
    check_mask("action_mask", action_mask)
    _check_inputs("action_mask", action_mask, rewards, values, gamma, lam, bootstrap_values)
    # Number the agent tokens: each agent token is a step, and other tokens are no steps.
    step = (action_mask.cumsum(dim=1) - 1).masked_fill(~action_mask, -1)
    advantages, returns = _gae_over_steps(
        _steps(rewards, step), _steps(values, step), num_turns(step), gamma, lam, bootstrap_values
    )
    return broadcast_turns(advantages, step), broadcast_turns(returns, step)


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    turn_index: Tensor,
    gamma: float,
    lam: float,
    *,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute GAE with one time step per turn. The states are the turn starts.

    With R_k the sum of the rewards of turn k's tokens and V_k the value at its first token:

        delta_k = R_k + gamma V_{k+1} - V_k,    A_k = delta_k + gamma lam A_{k+1}

    Args:
        rewards: [B, T] float, reward units.
        values: [B, T] float, reward units; only the values at the first token of each turn are used.
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        gamma: discount per turn, 0 <= gamma <= 1.
        lam: GAE's lambda per turn, 0 <= lam <= 1.
        bootstrap_values: [B] float, value of the state after the last turn, for truncated
            episodes; 0 for terminated episodes. Default: 0.

    Returns:
        advantages: [B, T] float, reward units, A_k at every token of turn k, 0 outside turns.
        returns: [B, T] float, A_k + V_k at the first token of turn k, 0 elsewhere: the critic
            regresses at turn starts only.

    Source: arXiv:1506.02438 Eq. 16, over turns as in arXiv:2512.17008 (which calls this Turn-PPO;
        the Turn-PPO of arXiv:2511.20718v1 is a turn-level ratio).
    """
    check_turn_index(turn_index)
    _check_inputs("turn_index", turn_index, rewards, values, gamma, lam, bootstrap_values)
    starts = turn_starts(turn_index)
    gains, states = _steps(rewards, turn_index), _steps(zero_off_mask(values, starts), turn_index)
    count = num_turns(turn_index)
    advantages, returns = _gae_over_steps(gains, states, count, gamma, lam, bootstrap_values)
    returns = zero_off_mask(broadcast_turns(returns, turn_index), starts)
    return broadcast_turns(advantages, turn_index), returns


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    center: bool = True,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Shift and scale the elements that count to mean 0 and (unbiased) variance 1.

    (x - mean) * rsqrt(var + 1e-8), with var = sum of squared deviations / (count - 1).

    Args:
        x: [B, T] float.
        mask: [B, T] bool, True = counts.
        center: if False, the mean is added back after scaling.
        reduce: sums a tensor over all processes, so that their tokens are whitened together. It is
            called exactly twice (with [2] tensors) on every process, also where the mask is empty,
            so collectives cannot get out of step. Default: this process only.

    Returns:
        [B, T] float, unitless, 0 where `mask` is False; equal values, or a single value, give exactly
        0 (their own value if not `center`). NaN, not 0, where squares overflow on a device without float64.
    """
    check_mask("mask", mask)
    check_float(x=x)
    check_like("mask", mask, x=x)
    precise = upcast(x)
    deviations, mean, squares, count = _moments(widest(zero_off_mask(precise, mask)), mask, reduce)
    scale = torch.rsqrt(_variance(squares, count - 1) + WHITEN_EPS)
    whitened = deviations * scale
    if not center:
        whitened = zero_off_mask(whitened + mean, mask)
    return whitened.to(precise.dtype)


def _moments(
    x: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the deviations from the mean (0 where `mask` is False), the mean, the sum of squares, the count.

    `reduce` sums over processes, exactly twice; `x` is 0 where `mask` is False.
    """
    totals = torch.stack([x.sum(), mask.sum().to(x.dtype)])
    if reduce is not None:
        totals = reduce(totals)
    count = totals[1].clamp(min=1)
    mean = totals[0] / count
    # Use two passes: sum(x^2) - n mean^2 in one pass loses digits if the mean is far above the spread.
    deviations = zero_off_mask(x - mean, mask)
    sums = torch.stack([deviations.sum(), deviations.square().sum()])
    if reduce is not None:
        sums = reduce(sums)
    # Rounding moves the mean of equal values off that value; the mean of the deviations corrects it.
    rest = sums[0] / count
    squares = (sums[1] - rest * sums[0]).clamp(min=0)
    return zero_off_mask(deviations - rest, mask), mean + rest, squares, count


def _check_inputs(
    index_name: str,
    index: Tensor,
    rewards: Tensor,
    values: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None,
) -> None:
    """Check the arguments that the estimators over tokens and over turns have in common."""
    check_float(rewards=rewards, values=values)
    check_like(index_name, index, rewards=rewards, values=values)
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {factor!r}")
    if bootstrap_values is not None:
        check_float(bootstrap_values=bootstrap_values)
        check_shape("bootstrap_values", bootstrap_values, (index.shape[0],), "one per episode, [B]")


def _steps(x: Tensor, index: Tensor) -> Tensor:
    """Sum `x` [B, T] over the tokens of each GAE step k, into column k. Columns without a step are 0."""
    return reduce_turns(x, index, num_turns=index.shape[1], op="sum")


def _gae_over_steps(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return GAE advantages and returns, [B, K] each. A row's columns from `lengths` on are arbitrary.

    `rewards` and `values` [B, K] are 0 from `lengths` [B] on; `bootstrap_values`: [B], None for 0.
    """
    position = torch.arange(rewards.shape[1], device=rewards.device)
    successors = torch.nn.functional.pad(values[:, 1:], (0, 1))
    if bootstrap_values is not None:
        is_last = position == (lengths - 1).unsqueeze(1)
        successors = torch.where(is_last, upcast(bootstrap_values).unsqueeze(1), successors)
    advantages = rewards + gamma * successors - values
    # A_t = sum of c^i delta_{t+i}, by doubling: after the pass with shift s every entry holds the
    # first 2s terms of its sum. This takes log2(K) vector operations instead of a Python loop over K.
    shift, factor = 1, gamma * lam
    while shift < rewards.shape[1] and factor > 0.0:
        tail = torch.nn.functional.pad(advantages[:, shift:], (0, shift))
        advantages = advantages + factor * tail
        shift, factor = 2 * shift, factor * factor
    return advantages, advantages + values


def group_advantages(scores: Tensor, counts: Tensor, scale: str = "group") -> Tensor:
    """Return each episode's score relative to the mean score of all episodes of its prompt.

        A = (score - mean(group)) / (std + 1e-4)

    Args:
        scores: [N, G] float, reward units: N prompts, G episodes each.
        counts: [N, G] bool, False for an episode without a score: mean and deviation leave it out.
        scale: the divisor: the standard deviation of the `"group"` or of the `"batch"` (unbiased; 0 for
            fewer than two episodes), or `"none"`.

    Returns:
        [N, G] float, 0 where `counts` is False.

    Source: Shao et al. 2024, arXiv:2402.03300, Section 4.1; `"batch"` and `"none"` as in TRL 1.16.
    """
    check_choice("scale", scale, GROUP_SCALES)
    check_float(scores=scores)
    check_mask("counts", counts)
    check_like("counts", counts, scores=scores)
    precise = upcast(scores)
    scores = widest(zero_off_mask(precise, counts))
    centred = _centred(scores, counts, dim=1)
    if scale == "none":
        return centred.to(precise.dtype)
    if scale == "group":
        squares, number = centred.square().sum(dim=1, keepdim=True), counts.sum(1, keepdim=True)
    else:
        squares, number = _centred(scores, counts).square().sum(), counts.sum()
    return (centred / (_variance(squares, number - 1).sqrt() + GROUP_EPS)).to(precise.dtype)


def leave_one_out_advantages(scores: Tensor, counts: Tensor) -> Tensor:
    """Return each episode's score relative to the mean score of its prompt's other episodes (RLOO).

        A_i = score_i - mean(score_j, j != i)  =  n / (n - 1) (score_i - mean(group))

    Args:
        scores: [N, G] float, reward units: N prompts, G episodes each.
        counts: [N, G] bool, False for an episode without a score: no mean contains it.

    Returns:
        [N, G] float, reward units, 0 where `counts` is False, and for the only counting episode of a prompt.

    Source: Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019. TRL's RLOOTrainer with
        normalize_advantages=False and beta=0.
    """
    centred = group_advantages(scores, counts, "none")
    number = counts.sum(dim=1, keepdim=True)
    return centred * number / (number - 1).clamp(min=1)


def return_batch_norm(
    rewards: Tensor,
    turn_index: Tensor,
    counts: Tensor,
    gamma: float,
    *,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Normalise each turn's discounted return over the turns of all episodes (ReBN).

        G_k = R_k + gamma G_{k+1},    A_k = (G_k - mean(G)) / (std(G) + 1e-9)

    with R_k the sum of the rewards of turn k's tokens. Mean and deviation run over turns, so an episode
    of n turns has n times the weight.

    Args:
        rewards: [B, T] float, reward units.
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        counts: [B, T] bool, True = trains. Mean and deviation leave out a turn without such a token.
        gamma: discount per turn, 0 <= gamma <= 1.
        reduce: as for `whiten`: sums a tensor over all processes, called exactly twice on each.

    Returns:
        [B, T] float, unitless, A_k at every counting token of turn k, 0 elsewhere; equal returns, or a
        single turn, give 0.

    Source: GEM, arXiv:2510.01051. The deviation is the population's, as in GEM; AgileRL takes the
        unbiased deviation, which is larger by sqrt(n / (n - 1)).
    """
    check_turn_index(turn_index)
    check_mask("counts", counts)
    check_like("turn_index", turn_index, counts=counts)
    _check_inputs("turn_index", turn_index, rewards, rewards, gamma, 1.0, None)
    precise, counts = upcast(rewards), counts & (turn_index >= 0)
    steps, trains = (_steps(widest(x), turn_index) for x in (precise, counts))
    nothing = torch.zeros_like(steps)
    returns, _ = _gae_over_steps(steps, nothing, num_turns(turn_index), gamma, 1.0, None)
    mask = trains > 0
    deviations, _, squares, number = _moments(zero_off_mask(returns, mask), mask, reduce)
    normed = deviations / (_variance(squares, number).sqrt() + RETURN_EPS)
    return zero_off_mask(broadcast_turns(normed, turn_index), counts).to(precise.dtype)


def _centred(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Subtract the mean of the elements that count. `x` and the result are 0 elsewhere."""
    # Centre twice, because rounding moves the mean of equal values off that value.
    for _ in range(2):
        mean = x.sum(dim, keepdim=True) / mask.sum(dim, keepdim=True).clamp(min=1)
        x = zero_off_mask(x - mean, mask)
    return x


def _variance(squares: Tensor, freedom: Tensor) -> Tensor:
    """Return the variance; NaN if `squares` overflowed, because infinity would make all advantages 0."""
    variance = squares / freedom.clamp(min=1)
    return variance.masked_fill(variance.isinf(), torch.nan)
