"""Logging of rollouts: metrics of episodes, and the table of completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerState

from ...rollout.images import as_blocks, replaced
from ...rollout.record import StopReason
from ..batch import Estimates
from ..bridge import Bridge
from ..sums import spread
from .metrics import rollout_metrics
from .rollout import EpisodeKey, Played, Scored


@dataclass(frozen=True)
class PlayedEpisode:
    """The results of one episode as plain numbers.

    Attributes:
        name: index of the dataset row, and the repetition; in training the number of the episode.
        score: turn rewards plus score.
        tokens: number of sampled tokens.
        ended: whether its last token ends a turn.
        rewards: one per reward function, NaN if it returned None.
        reward: weighted sum of `rewards`, NaN if all are NaN.
        stop_reason: None if no engine played.
    """

    name: EpisodeKey
    score: float
    success: bool | None
    turns: int
    tokens: int
    ended: bool
    rewards: tuple[float, ...]
    reward: float
    valid_actions: tuple[bool, ...] = ()
    stop_reason: str | None = None
    env_type: str | None = None
    tool_calls: int = 0
    tool_failures: int = 0
    prompt_tokens: int = 0


def played_episodes(
    rollout: Played,
    scored: Scored,
    names: Sequence[EpisodeKey],
    ends: set[int],
    weights: Sequence[float],
) -> list[PlayedEpisode]:
    """Return the results of a played and scored batch, without episodes that only fill the batch.

    `ends`: tokens that end an episode. `weights`: weights of the reward functions.
    """
    ended, table, results = rollout.ended(ends), scored.rewards.tolist(), []
    totals = scored.totals
    for i, (name, episode) in enumerate(zip(names, rollout.episodes, strict=True)):
        if i in rollout.repeated:
            continue
        rewards = table[i]
        parts = [w * r for w, r in zip(weights, rewards, strict=True) if not math.isnan(r)]
        played = episode.env_type is not None and episode.stop_reason is not None
        results.append(
            PlayedEpisode(
                name,
                score=totals[i],
                success=episode.success,
                turns=episode.num_turns,
                tokens=episode.num_sampled,
                ended=ended[i],
                rewards=tuple(rewards),
                reward=sum(parts) if parts else math.nan,
                valid_actions=tuple(episode.valid_actions),
                stop_reason=str(episode.stop_reason) if played else None,
                env_type=episode.env_type,
                tool_calls=episode.tool_calls,
                tool_failures=episode.tool_failures,
                prompt_tokens=sum(len(context.prompt_ids) for context in episode.contexts),
            )
        )
    return results


def episode_figures(every: Sequence[PlayedEpisode], *, uses_tools: bool) -> dict[str, float]:
    """Return the metrics that training and evaluation share, of the episodes in `every` (at least one).

    TRL's metrics of completion lengths count sampled tokens per episode.
    """
    turns, lengths = sum(e.turns for e in every), [e.tokens for e in every]
    ended = [e.tokens for e in every if e.ended] or [0]
    result = {
        "turns/mean": turns / len(every),
        "turns/max": max(e.turns for e in every),
        "turns/tokens_mean": sum(lengths) / turns if turns else 0.0,
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(not e.ended for e in every) / len(every),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
    }
    # These metrics are optional, because an environment need not report success or valid actions.
    optional = {
        "episode/success_rate": [e.success for e in every if e.success is not None],
        "turns/valid_action_rate": [flag for e in every for flag in e.valid_actions],
    }
    result |= {name: sum(flags) / len(flags) for name, flags in optional.items() if flags}
    reasons = [e.stop_reason for e in every]
    if any(reasons):
        result |= {f"stop_reason/{r.value}": reasons.count(r.value) / len(every) for r in StopReason}
    if uses_tools:
        calls = sum(e.tool_calls for e in every)
        result["tools/call_frequency"] = calls / len(every)
        result["tools/failure_frequency"] = sum(e.tool_failures for e in every) / max(1, calls)
    return result


def reward_figures(every: Sequence[PlayedEpisode], names: Sequence[str]) -> dict[str, float]:
    """Return mean and deviation of the functions in `names`, and of the reward; NaN without rewards."""
    rows = [[*e.rewards[: len(names)], e.reward] for e in every]
    table = torch.tensor(rows, dtype=torch.float64)
    keys = [(f"rewards/{name}/mean", f"rewards/{name}/std") for name in names]
    result: dict[str, float] = {}
    for (mean, deviation), column in zip([*keys, ("reward", "reward_std")], table.T, strict=True):
        # Rewards are float32 numbers, so smaller differences are rounding errors.
        result |= {mean: column.nanmean().item(), deviation: spread(column.float()).item()}
    return result


@dataclass(eq=False, repr=False)
class RolloutLog:
    """Adds the metrics and completions of rollouts to upstream's next log.

    Attributes:
        metrics, completions: values of the next log, and columns of its table, by name.
        pending_metrics, pending_columns: what reward functions passed to `log_metric` and `log_extra`.
        names: names of the reward functions.
        end_ids: token ids that can end a complete completion.
    """

    accelerator: Accelerator
    metrics: dict[str, list[float]]
    completions: dict[str, Any]
    pending_metrics: dict[str, list[float]]
    pending_columns: dict[str, list[Any]]
    names: Sequence[str]
    decode: Callable[[list[int]], str]
    end_ids: set[int]
    num_generations: int
    uses_tools: bool
    has_critic: bool
    sees: bool = False

    def add(self, metrics: dict[str, float]) -> None:
        """Add metrics, equal on all processes, to the next log."""
        for name, value in metrics.items():
            self.metrics[name].append(value)

    def set(self, metrics: dict[str, float]) -> None:
        """Replace metrics in the next log, because upstream averages added values."""
        for name, value in metrics.items():
            self.metrics[name] = [value]

    def rollout(
        self, played: Played, scored: Scored, estimates: Estimates, seconds: float, host: Bridge
    ) -> dict[str, float]:
        """Add a rollout's metrics and completions to the log; return the metrics of its estimates."""
        state, weights, targets = host.state, host.reward_weights, estimates.targets
        self.add(targets.figures)
        self._episodes(played, scored, weights, state)
        shown = targets.advantages.sum(1) / estimates.mask.sum(1).clamp(min=1)
        gather = self.accelerator.gather
        self.table(played, scored.everyone, gather(shown.contiguous()).tolist())
        self._means(played.sums | scored.sums)
        pending = self.pending_metrics
        self._means({name: (sum(values), len(values)) for name, values in pending.items()})
        pending.clear()
        figures = rollout_metrics(played, scored, estimates, seconds, gather, values=self.has_critic)
        self.add(figures)
        return figures

    def _episodes(self, rollout: Played, scored: Scored, weights: Tensor, state: TrainerState) -> None:
        """Add the metrics of episodes and their rewards, and the number of tokens seen."""
        names = [(number, 0) for number in range(len(rollout.episodes))]
        own = played_episodes(rollout, scored, names, self.end_ids, weights.tolist())
        every = gather_object(own)
        self.add(episode_figures(every, uses_tools=self.uses_tools))
        rewards = reward_figures(every, self.names)
        if not self.has_critic:
            # The metrics of the advantages already include `reward_std`.
            del rewards["reward_std"]
        elif self.num_generations > 1:
            groups = torch.tensor([e.reward for e in every]).view(-1, self.num_generations)
            rewards["frac_reward_zero_std"] = (spread(groups, dim=1) == 0).float().mean().item()
        self.add(rewards)
        state.num_input_tokens_seen += sum(e.prompt_tokens + e.tokens for e in every)
        self.metrics["num_tokens"] = [state.num_input_tokens_seen]

    def table(self, rollout: Played, rewards: Tensor, advantages: Sequence[float]) -> None:
        """Add the episodes of all processes to the table of completions."""
        logs = self.completions

        def emptied(messages: Any) -> Any:
            empty = replaced(messages, lambda block: {"type": "image"})
            if not self.sees or isinstance(empty, str):
                return empty
            # The table is written as Parquet, whose columns have one form.
            return [{**m, "content": as_blocks(m.get("content") or "")} for m in empty]

        prompts = [emptied(row["prompt"]) for row in rollout.rows_of_episodes()]
        logs["prompt"].extend(gather_object(prompts))
        logs["completion"].extend(gather_object(rollout.completions(self.decode, emptied)))
        for name, column in zip(self.names, rewards.T, strict=True):
            logs["rewards"][name].extend(column.tolist())
        logs["advantages"].extend(advantages)
        # All processes need the same order, so that values keep their names.
        pending = self.pending_columns
        for column_name in sorted(set(gather_object(list(pending)))):
            values = pending.get(column_name, [None] * len(prompts))
            logs["extra"][column_name].extend(gather_object(values))
        pending.clear()

    def _means(self, sums: dict[str, tuple[float, float]]) -> None:
        """Log each metric's mean over all processes, from this process's (sum, count) in `sums`."""
        accelerator = self.accelerator
        # Sort all names, so that every process reduces the same metric, even if only some processes have it.
        for name in sorted(set(gather_object(list(sums)))):
            local = torch.tensor(sums.get(name, (0.0, 0)), device=accelerator.device)
            total, count = accelerator.reduce(local.float(), reduction="sum").tolist()
            if count:
                self.add({name: total / count})
