"""Metrics of `docs/watching.md`: sums over all micro-batches and processes, divided once."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core import ClippedSurrogate, log_importance_ratio, turn_starts
from ..rollout.contexts import OPENED
from ..rollout.record import StopReason
from .batch import Batch, Targets, TurnBatch
from .loop.rollout import Rollout
from .sums import RatioOfSums, wide

Gather = Callable[[Tensor], Tensor]
# Largest ratio in an effective sample size, as in VCPO.
MAX_RATIO = 8.0
# A variance below this share of the mean square is noise: a few float32 rounding errors can cause it.
NOISE = (8 * torch.finfo(torch.float32).eps) ** 2


class MiniBatchMetrics:
    """Collects the metrics of one optimizer step over its micro-batches."""

    def __init__(self) -> None:
        self._sums = RatioOfSums()
        self._scalars: dict[str, float] = {}
        self._tokens: Tensor | int = 0

    def add_policy(
        self, surrogate: ClippedSurrogate, entropies: Tensor, loss_mask: Tensor, tokens: Tensor
    ) -> None:
        """Add ratio, clipping and entropy of a micro-batch that has `tokens` tokens without padding."""
        stats = surrogate.stats
        add = self._sums.add
        add("policy/clip_fraction", stats.clipped_low + stats.clipped_high, stats.tokens)
        add("policy/clip_fraction_low", stats.clipped_low, stats.tokens)
        add("policy/clip_fraction_high", stats.clipped_high, stats.tokens)
        add("policy/ratio_mean", stats.ratio_sum, stats.tokens)
        add("policy/approx_kl", stats.approx_kl_sum, stats.tokens)
        self._sums.maximum("policy/ratio_max", stats.ratio_max)
        self.add_mean("policy/entropy", entropies, loss_mask)
        self._tokens = self._tokens + tokens

    def add_drift(self, inputs: Batch, logprobs: Tensor) -> None:
        """Add the distance from the policy that played, per token, turn and episode."""
        mask, now = inputs["loss_mask"], wide(logprobs.detach())
        old = wide(inputs.get("old_per_token_logps", now))
        change = (now.exp() - old.exp()).abs().masked_fill(~mask, 0.0)
        self._sums.maximum("policy/divergence_max", change.max())
        index = inputs["turn_index"].masked_fill(~mask, -1)
        by_turn = log_importance_ratio(now, old, index, "turn")
        by_episode = (now - old).masked_fill(~mask, 0.0).sum(dim=1)
        for name, log_ratio, counts in (
            ("turn", by_turn, turn_starts(index)),
            ("episode", by_episode, mask.any(dim=1)),
        ):
            capped = log_ratio.clamp(max=math.log(MAX_RATIO))
            for power, kind in enumerate(("count", "ratio", "square")):
                terms = (power * capped).masked_fill(~counts, -torch.inf)
                self._sums.log_sum(f"_{name}_{kind}", terms.flatten().logsumexp(0))

    def add_episode_weights(self, weights: Tensor, counts: Tensor) -> None:
        """Add episode weights, [B]; `counts`, [B] bool, is True for episodes with tokens in the loss."""
        self.add_mean("policy/episode_weight_mean", weights, counts)
        lowest = weights.masked_fill(~counts, 1.0).min()
        self._sums.maximum("_minus_lowest_weight", -lowest)

    def add_value(self, per_token: Tensor, clipped: Tensor, value_mask: Tensor) -> None:
        """Add loss and clipping of the critic."""
        self.add_mean("value/loss", per_token, value_mask)
        self.add_mean("value/clip_fraction", clipped, value_mask)

    def add_mean(self, name: str, x: Tensor, mask: Tensor) -> None:
        """Add the values of `x` under `mask` to the mean `name` of the mini-batch."""
        self._sums.add(name, x.detach().masked_fill(~mask, 0).sum(), mask.sum())

    def add_scalars(self, figures: Mapping[str, Tensor | float]) -> None:
        """Add metrics that are equal on all processes."""
        self._scalars |= {name: float(value) for name, value in figures.items()}

    def flush(self, gather: Gather, seconds: float) -> dict[str, float]:
        """Return metrics since the last flush; `seconds` is the update's duration, 0 if unknown."""
        result = self._sums.flush(gather) | self._scalars
        for name in ("turn", "episode"):
            if f"_{name}_count" in result:
                count, ratio, square = (
                    result.pop(f"_{name}_{kind}") for kind in ("count", "ratio", "square")
                )
                empty = square == -math.inf
                result[f"policy/{name}_ess"] = (
                    1.0 if empty else math.exp(2 * ratio - square - count)
                )
        if "_minus_lowest_weight" in result:
            result["policy/episode_weight_min"] = -result.pop("_minus_lowest_weight")
        tokens, self._tokens = int(self._tokens), 0
        if seconds > 0 and tokens:
            result["perf/update_tokens_per_second"] = tokens / seconds
            result["perf/peak_memory_gb"] = peak_memory_gb()
        self._scalars = {}
        return result


class RolloutMetrics:
    """Collects the metrics of one rollout batch."""

    def __init__(self, *, values: bool) -> None:
        # These metrics are optional, because an environment need not report success or valid actions.
        self._sums = RatioOfSums("episode/success_rate", "turns/valid_action_rate")
        self._values = values

    def collect(
        self,
        batch: Batch,
        turns: TurnBatch,
        scores: Tensor,
        kl: Tensor | None,
        targets: Targets,
        rollout: Rollout,
        seconds: float,
        gather: Gather,
    ) -> dict[str, float]:
        """Return all metrics of the batch, after its advantages are computed."""
        sums, device = self._sums, scores.device
        episodes = torch.tensor(float(len(scores)), device=device)
        returns = wide(scores)
        if turns.turn_rewards is not None:
            returns = returns + wide(turns.turn_rewards).sum(dim=1)
        sums.add("episode/score", returns.sum(), episodes)
        if kl is not None:
            sums.add("objective/kl", kl.sum(), episodes)
        tokens = self._turns(rollout, episodes)
        if rollout.has_contexts:
            self._contexts(rollout, episodes)
        if rollout.has_environment:
            self._endings(rollout, episodes)
        mask = batch["loss_mask"]
        advantages = wide(targets.raw_advantages).masked_fill(~mask, 0.0)
        sums.add("advantage/mean", advantages.sum(), mask.sum())
        sums.add("_square", advantages.square().sum(), mask.sum())
        sums.maximum("advantage/max_abs", advantages.abs().max())
        if self._values:
            self._explained_variance(targets)
        sums.add("perf/rollout_tokens_per_second", tokens, seconds_of(seconds, device))
        one, spent = torch.ones((), device=device), rollout.durations
        sums.add("perf/env_seconds", seconds_of(spent.environments, device), one)
        sums.add("perf/wait_seconds", seconds_of(spent.waiting, device), one)
        sums.add("perf/generation_seconds", seconds_of(spent.generation, device), one)
        self._sampler_gap(batch, turns)
        if rollout.ages is not None:
            ages = torch.tensor(rollout.ages or [0], dtype=torch.float32, device=device)
            sums.add("rollout/staleness_mean", ages.sum(), one * len(ages))
            sums.maximum("rollout/staleness_max", ages.max())
        result = sums.flush(gather)
        if "_minus_lowest" in result:
            lowest = -result.pop("_minus_lowest")
            result["sampling/importance_sampling_ratio/min"] = lowest
        square = result.pop("_square")
        variance = square - result["advantage/mean"] ** 2
        result["advantage/std"] = variance**0.5 if variance > NOISE * square else 0.0
        if self._values:
            result["value/explained_variance"] = _explained(result)
        return result

    def _turns(self, rollout: Rollout, episodes: Tensor) -> Tensor:
        """Add metrics of the turns of all played episodes; return the number of sampled tokens."""
        lists = [
            [e.num_turns for e in rollout.episodes],
            [e.num_sampled for e in rollout.episodes],
        ]
        turns, tokens = torch.tensor(lists, device=episodes.device)
        self._sums.add("turns/mean", turns.sum(), episodes)
        self._sums.maximum("turns/max", turns.max())
        self._sums.add("turns/tokens_mean", tokens.sum(), turns.sum())
        return tokens.sum()

    def _contexts(self, rollout: Rollout, episodes: Tensor) -> None:
        """Add metrics of contexts: their number, the reasons for opening them, and their cost in tokens."""
        device, sums = episodes.device, self._sums
        rows = [[len(c.prompt_ids) + len(c.ids) for c in e.contexts] for e in rollout.episodes]
        in_one = sum(
            len(e.prompt_ids) + sum(len(c.ids) for c in e.contexts) for e in rollout.episodes
        )
        counts = torch.tensor([len(lengths) for lengths in rows], device=device)
        sums.add("contexts/mean", counts.sum(), episodes)
        sums.maximum("contexts/max", counts.max())
        for reason in OPENED:
            count = sum(e.opened[reason] for e in rollout.episodes)
            sums.add(f"contexts/{reason}", torch.tensor(count, device=device), episodes)
        tokens = torch.tensor([sum(map(sum, rows)), in_one], device=device)
        sums.add("contexts/tokens_ratio", *tokens)

    def _endings(self, rollout: Rollout, episodes: Tensor) -> None:
        def count(flags: list[Any]) -> Tensor:
            return torch.tensor(float(sum(flags)), device=episodes.device)

        played = rollout.episodes
        known = [e.success for e in played if e.success is not None]
        self._sums.add("episode/success_rate", count(known), count([1] * len(known)))
        actions = [valid for episode in played for valid in episode.valid_actions]
        self._sums.add("turns/valid_action_rate", count(actions), count([1] * len(actions)))
        for reason in StopReason:
            hits = count([episode.stop_reason is reason for episode in played])
            self._sums.add(f"stop_reason/{reason.value}", hits, episodes)

    def _sampler_gap(self, batch: Batch, turns: TurnBatch) -> None:
        """Add the gap between the sampler's log-probabilities and training's, in nats."""
        sampled, old = batch.get("sampling_per_token_logps"), batch.get("old_per_token_logps")
        if sampled is None or old is None:
            return
        mask = turns.action_mask & ~sampled.isnan()
        gap = (wide(old) - wide(sampled)).abs().masked_fill(~mask, 0.0)
        self._sums.add("sampling/sampling_logp_difference/mean", gap.sum(), mask.sum())
        self._sums.maximum("sampling/sampling_logp_difference/max", gap.max())
        ratio = batch.get("importance_sampling_ratio")
        if ratio is None:
            return
        mask = (
            turns.action_mask if ratio.size(1) > 1 else turns.action_mask.any(dim=1, keepdim=True)
        )
        ratio, sums = wide(ratio), self._sums
        sums.maximum("_minus_lowest", -ratio.masked_fill(~mask, torch.inf).min())
        total = ratio.masked_fill(~mask, 0.0).sum()
        sums.add("sampling/importance_sampling_ratio/mean", total, mask.sum())
        highest = ratio.masked_fill(~mask, -torch.inf).max()
        sums.maximum("sampling/importance_sampling_ratio/max", highest)

    def _explained_variance(self, targets: Targets) -> None:
        """Add sums for 1 - Var(returns - values) / Var(returns), over the batch."""
        mask, sums = targets.value_mask, self._sums
        count = mask.sum()
        returns = wide(targets.returns).masked_fill(~mask, 0.0)
        errors = wide(targets.returns - targets.values).masked_fill(~mask, 0.0)
        sums.add("value/return_mean", returns.sum(), count)
        sums.add("value/mean", wide(targets.values).masked_fill(~mask, 0.0).sum(), count)
        sums.add("_return_square", returns.square().sum(), count)
        sums.add("_error_mean", errors.sum(), count)
        sums.add("_error_square", errors.square().sum(), count)


def _explained(result: dict[str, float]) -> float:
    square, error_square = result.pop("_return_square"), result.pop("_error_square")
    total = square - result["value/return_mean"] ** 2
    error = error_square - result.pop("_error_mean") ** 2
    # Equal returns have no variance to explain. A return is the rounded sum of an error and a value, so
    # both squares set the noise.
    return 1.0 - error / total if total > NOISE * (square + error_square) else 0.0


def seconds_of(seconds: float, device: torch.device) -> Tensor:
    """Return a duration as a tensor that can be summed over processes."""
    return torch.tensor(max(seconds, 1e-9), device=device)


def peak_memory_gb() -> float:
    """Return the peak memory of this process: the accelerator's if there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    # `ru_maxrss` is in bytes on macOS and in kilobytes on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
