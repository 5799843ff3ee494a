"""Metrics of an evaluation, computed from the results of its episodes in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...rollout.record import StopReason, cut_off_as_failed
from ...statistics import mean_interval, rate_interval
from ..loop.rollout import EpisodeKey, Rollout
from ..sums import spread

# [objects of this process] -> [objects of all processes], in process order
GatherObjects = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class PlayedEpisode:
    """The results of one episode as plain numbers.

    Attributes:
        name: index of the dataset row, and the repetition.
        score: turn rewards plus score, as in training.
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


@dataclass
class EvaluationRun:
    """Results that this process has collected in one evaluation."""

    reward_names: list[str]
    uses_tools: bool = False
    process: tuple[int, int] = (0, 1)
    episodes: list[PlayedEpisode] = field(default_factory=list)
    _seen: set[EpisodeKey] = field(default_factory=set)
    _sums: list[tuple[str, float, float]] = field(default_factory=list)

    def running_names(self, count: int) -> list[EpisodeKey]:
        """Number the episodes of a dataloader without names; return unique names."""
        index, processes = self.process
        start = len(self.episodes)
        return [((start + i) * processes + index, 0) for i in range(count)]

    def mark_new(self, names: Sequence[EpisodeKey], gather: GatherObjects) -> list[bool]:
        """Mark the named episodes as seen on all processes; return for each name whether it is new."""
        new: list[list[bool]] = []
        for batch in gather([list(names)]):
            new.append([])
            for name in batch:
                new[-1].append(name not in self._seen)
                self._seen.add(name)
        return new[self.process[0]]

    def add(
        self,
        rollout: Rollout,
        names: Sequence[EpisodeKey],
        ends: set[int],
        weights: Sequence[float],
    ) -> None:
        """Add the results of a played and scored batch, without repeated padding episodes.

        `ends`: tokens that end an episode. `weights`: weights of the reward functions.
        """
        ended = rollout.ended(ends)
        for i, (name, episode) in enumerate(zip(names, rollout.episodes, strict=True)):
            if i in rollout.repeated:
                continue
            rewards = rollout.rewards[i].tolist()
            parts = [w * r for w, r in zip(weights, rewards, strict=True) if not math.isnan(r)]
            played = episode.env_type is not None and episode.stop_reason is not None
            self.episodes.append(
                PlayedEpisode(
                    name,
                    score=rollout.totals[i],
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
                )
            )

    def add_sum(self, name: str, total: float, weight: float) -> None:
        """Add a total and its weight to the mean `name`, which is not taken over episodes."""
        self._sums.append((name, total, weight))

    def figures(self, gather: GatherObjects) -> dict[str, float]:
        """Compute all metrics over all processes, which must call this together; names have no prefix."""
        every = sorted((e for part in gather([self.episodes]) for e in part), key=lambda e: e.name)
        sums = [entry for part in gather([self._sums]) for entry in part]
        if not every:
            return {}
        rows = {e.name[0] for e in every}
        result: dict[str, float] = {"episodes": len(every), "rows": len(rows)}
        for part in (_outcomes, _turns, _lengths, _endings):
            result |= part(every)
        result |= _rewards(every, self.reward_names)
        if self.uses_tools:
            calls = sum(e.tool_calls for e in every)
            failures = sum(e.tool_failures for e in every)
            result["tools/call_frequency"] = calls / len(every)
            result["tools/failure_frequency"] = failures / calls if calls else 0.0
        for name in sorted({name for name, _, weight in sums if weight}):
            own = [(total, weight) for key, total, weight in sums if key == name]
            result[name] = math.fsum(t for t, _ in own) / math.fsum(w for _, w in own)
        return result


def _by_row(pairs: Iterable[tuple[PlayedEpisode, float]]) -> tuple[list[float], list[float]]:
    """Return the sum of values and the number of episodes of each row."""
    rows: dict[int, list[float]] = {}
    for episode, value in pairs:
        rows.setdefault(episode.name[0], []).append(value)
    return [math.fsum(v) for v in rows.values()], [float(len(v)) for v in rows.values()]


def _outcomes(every: list[PlayedEpisode]) -> dict[str, float]:
    """Return mean score and success rate, with their confidence intervals."""
    result: dict[str, float] = {}
    reporting = {e.env_type for e in every if e.success is not None}
    outcomes = zip(every, cut_off_as_failed(every, reporting), strict=True)
    known = [(e, float(success)) for e, success in outcomes if success is not None]
    if known:
        totals, counts = _by_row(known)
        low, high = rate_interval(totals, counts)
        rate = math.fsum(totals) / math.fsum(counts)
        result["episode/success_rate"] = rate
        result["episode/success_known"] = len(known) / len(every)
        result["episode/success_rate_low"], result["episode/success_rate_high"] = low, high
    totals, counts = _by_row((e, e.score) for e in every)
    result["episode/score"] = math.fsum(totals) / math.fsum(counts) if counts else 0.0
    interval = mean_interval(totals, counts)
    if interval is not None:
        result["episode/score_low"], result["episode/score_high"] = interval
    return result


def _turns(every: list[PlayedEpisode]) -> dict[str, float]:
    turns = sum(e.turns for e in every)
    result = {
        "turns/mean": turns / len(every),
        "turns/max": max(e.turns for e in every),
        "turns/tokens_mean": sum(e.tokens for e in every) / turns if turns else 0.0,
    }
    valid = [flag for e in every for flag in e.valid_actions]
    if valid:
        result["turns/valid_action_rate"] = sum(valid) / len(valid)
    return result


def _lengths(every: list[PlayedEpisode]) -> dict[str, float]:
    """Return TRL's metrics of completion lengths, counted in sampled tokens per episode."""
    lengths = [e.tokens for e in every]
    ended = [e.tokens for e in every if e.ended] or [0]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(not e.ended for e in every) / len(every),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
    }


def _endings(every: list[PlayedEpisode]) -> dict[str, float]:
    if all(e.stop_reason is None for e in every):
        return {}
    reasons = [e.stop_reason for e in every]
    return {f"stop_reason/{r.value}": reasons.count(r.value) / len(every) for r in StopReason}


def _rewards(every: list[PlayedEpisode], names: list[str]) -> dict[str, float]:
    """Return mean and deviation of each reward function under TRL's names, without missing rewards."""
    columns = {f"rewards/{name}": [e.rewards[i] for e in every] for i, name in enumerate(names)}
    columns["reward"] = [e.reward for e in every]
    result: dict[str, float] = {}
    for name, values in columns.items():
        known = [v for v in values if not math.isnan(v)]
        mean, deviation = (
            ("reward", "reward_std") if name == "reward" else (f"{name}/mean", f"{name}/std")
        )
        if known:
            result[mean] = math.fsum(known) / len(known)
        if len(known) > 1:
            result[deviation] = spread(torch.tensor(known, dtype=torch.float64)).item()
    return result
