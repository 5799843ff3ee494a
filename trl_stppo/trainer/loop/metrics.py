"""Metrics of `docs/watching.md`: sums over all micro-batches and processes, divided once."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ...rollout.contexts import OPENED
from ..batch import Estimates, UpdateData, row_tokens
from ..step import Terms
from ..sums import NOISE, RatioOfSums, wide
from .rollout import Played, Scored

Gather = Callable[[Tensor], Tensor]


class MiniBatchMetrics:
    """Collects the metrics of one optimizer step over its micro-batches."""

    def __init__(self) -> None:
        self._sums = RatioOfSums()
        self._tokens: Tensor | int = 0

    def add_pass(self, inputs: UpdateData, terms: Terms, *, packed: bool) -> None:
        """Add ratio, clipping and entropy of a pass, which was packed or padded."""
        stats, mask = terms.surrogate.stats, terms.loss_mask
        add = self._sums.add
        add("policy/clip_fraction", stats.clipped_low + stats.clipped_high, stats.tokens)
        add("policy/clip_fraction_low", stats.clipped_low, stats.tokens)
        add("policy/clip_fraction_high", stats.clipped_high, stats.tokens)
        add("policy/ratio_mean", stats.ratio_sum, stats.tokens)
        add("policy/approx_kl", stats.approx_kl_sum, stats.tokens)
        self._sums.maximum("policy/ratio_max", stats.ratio_max)
        self.add_mean("policy/entropy", terms.entropies, mask)
        self.add_mean("perf/packed_share", torch.full_like(terms.weights, float(packed)), mask)
        self._tokens = self._tokens + row_tokens(inputs).sum()

    def add_drift(self, inputs: UpdateData, logprobs: Tensor, old_logprobs: Tensor) -> None:
        """Add the largest change of a token's probability since it was sampled."""
        change = (wide(logprobs.detach()).exp() - wide(old_logprobs).exp()).abs()
        self._sums.maximum("policy/divergence_max", change.masked_fill(~inputs["loss_mask"], 0.0).max())

    def add_episode_weights(self, weights: Tensor, counts: Tensor) -> None:
        """Add episode weights, [B]; `counts`, [B] bool, is True for episodes with tokens in the loss."""
        self.add_mean("policy/episode_weight_mean", weights, counts)
        lowest = weights.masked_fill(~counts, 1.0).min()
        self._sums.maximum("_minus_lowest_weight", -lowest)

    def add_mean(self, name: str, x: Tensor, mask: Tensor) -> None:
        """Add the values of `x` under `mask` to the mean `name` of the mini-batch."""
        self._sums.mean(name, x, mask)

    def flush(self, gather: Gather, seconds: float) -> dict[str, float]:
        """Return metrics since the last flush; `seconds` is the update's duration, 0 if unknown."""
        result = self._sums.flush(gather)
        if "_minus_lowest_weight" in result:
            result["policy/episode_weight_min"] = -result.pop("_minus_lowest_weight")
        tokens, self._tokens = int(self._tokens), 0
        if seconds > 0 and tokens:
            result["perf/update_tokens_per_second"] = tokens / seconds
            result["perf/peak_memory_gb"] = peak_memory_gb()
        return result


def rollout_metrics(
    rollout: Played,
    scored: Scored,
    estimates: Estimates,
    seconds: float,
    gather: Gather,
    *,
    values: bool,
) -> dict[str, float]:
    """Return the metrics of a rollout with its estimates; `values`: whether there is a critic."""
    scores, turns, kl, targets = scored.scores, estimates.turns, estimates.kl, estimates.targets
    sums, device = RatioOfSums(), scores.device

    def number(value: float) -> Tensor:
        return torch.tensor(float(value), device=device)

    episodes, one, spent = number(len(scores)), number(1), rollout.durations
    returns = wide(scores)
    if turns.turn_rewards is not None:
        returns = returns + wide(turns.turn_rewards).sum(dim=1)
    sums.add("episode/score", returns.sum(), episodes)
    if kl is not None:
        sums.add("objective/kl", kl.sum(), episodes)
    if rollout.has_contexts:
        rows = [[len(c.prompt_ids) + len(c.ids) for c in e.contexts] for e in rollout.episodes]
        in_one = sum(len(e.prompt_ids) + len(e.completion_ids) for e in rollout.episodes)
        sums.add("contexts/mean", number(sum(map(len, rows))), episodes)
        sums.maximum("contexts/max", number(max(map(len, rows))))
        for reason in OPENED:
            count = sum(e.opened[reason] for e in rollout.episodes)
            sums.add(f"contexts/{reason}", number(count), episodes)
        sums.add("contexts/tokens_ratio", number(sum(map(sum, rows))), number(in_one))
    mask, advantages = estimates.mask, wide(targets.raw_advantages)
    sums.mean("advantage/mean", advantages, mask)
    sums.mean("_square", advantages.square(), mask)
    sums.maximum("advantage/max_abs", advantages.masked_fill(~mask, 0.0).abs().max())
    if values:
        # The sums for 1 - Var(returns - values) / Var(returns), over the batch.
        returns, errors = wide(targets.returns), wide(targets.returns - targets.values)
        sums.mean("value/return_mean", returns, targets.value_mask)
        sums.mean("value/mean", wide(targets.values), targets.value_mask)
        # Sums of the rewards from a token to its episode's end. A value beyond the largest sum is wrong.
        left = wide(targets.rewards).flip(1).cumsum(1).abs()
        sums.maximum("value/reward_max_abs", left.masked_fill(~mask.flip(1), 0.0).max())
        sums.mean("_return_square", returns.square(), targets.value_mask)
        sums.mean("_error_mean", errors, targets.value_mask)
        sums.mean("_error_square", errors.square(), targets.value_mask)
    tokens = sum(e.num_sampled for e in rollout.episodes)
    sums.add("perf/rollout_tokens_per_second", number(tokens), number(max(seconds, 1e-9)))
    sums.add("perf/env_seconds", number(spent.environments), one)
    sums.add("perf/wait_seconds", number(spent.waiting), one)
    sums.add("perf/generation_seconds", number(spent.generation), one)
    _add_sampler_gap(sums, estimates)
    if rollout.ages is not None:
        ages = rollout.ages or [0]
        sums.add("rollout/staleness_mean", number(sum(ages)), number(len(ages)))
        sums.maximum("rollout/staleness_max", number(max(ages)))
    result = sums.flush(gather)
    if "_minus_lowest" in result:
        result["sampling/importance_sampling_ratio/min"] = -result.pop("_minus_lowest")
    square = result.pop("_square")
    variance = square - result["advantage/mean"] ** 2
    result["advantage/std"] = variance**0.5 if variance > NOISE * square else 0.0
    if values:
        square, error_square = result.pop("_return_square"), result.pop("_error_square")
        variance = square - result["value/return_mean"] ** 2
        error = error_square - result.pop("_error_mean") ** 2
        # Equal returns have no variance to explain. Rounding errors grow with returns and with the critic's
        # error, so the limit has the squares of both.
        explains = variance > NOISE * (square + error_square)
        result["value/explained_variance"] = 1.0 - error / variance if explains else 0.0
    return result


def _add_sampler_gap(sums: RatioOfSums, estimates: Estimates) -> None:
    """Add the gap between the sampler's log-probabilities and training's, in nats."""
    turns, sampled, old = estimates.turns, estimates.passes.sampled, estimates.passes.old
    if sampled is None or old is None:
        return
    mask = turns.action_mask & ~sampled.isnan()
    gap = (wide(old) - wide(sampled)).abs()
    sums.mean("sampling/sampling_logp_difference/mean", gap, mask)
    sums.maximum("sampling/sampling_logp_difference/max", gap.masked_fill(~mask, 0.0).max())
    if estimates.sampler_weights is None:
        return
    ratio, mask = wide(estimates.sampler_weights), turns.action_mask
    if ratio.size(1) == 1:
        mask = mask.any(dim=1, keepdim=True)
    sums.maximum("_minus_lowest", -ratio.masked_fill(~mask, torch.inf).min())
    sums.mean("sampling/importance_sampling_ratio/mean", ratio, mask)
    highest = ratio.masked_fill(~mask, -torch.inf).max()
    sums.maximum("sampling/importance_sampling_ratio/max", highest)


def peak_memory_gb() -> float:
    """Return the peak memory of this process: the accelerator's if there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    # `ru_maxrss` is in bytes on macOS and in kilobytes on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
