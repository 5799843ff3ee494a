"""Metrics of an evaluation, computed from the results of its episodes in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...rollout.record import cut_off_as_failed
from ...statistics import mean_interval, rate_interval
from ..loop.log import PlayedEpisode, episode_figures, reward_figures
from ..loop.rollout import EpisodeKey

# [objects of this process] -> [objects of all processes], in process order
GatherObjects = Callable[[list[Any]], list[Any]]


@dataclass
class EvaluationRun:
    """Results that this process has collected in one evaluation of `total` episodes."""

    reward_names: list[str]
    uses_tools: bool = False
    process: int = 0
    total: int = 0
    episodes: list[PlayedEpisode] = field(default_factory=list)
    _seen: set[EpisodeKey] = field(default_factory=set)
    # Name, total and weight of means that are not taken over episodes.
    sums: list[tuple[str, float, float]] = field(default_factory=list)

    def mark_new(self, names: Sequence[EpisodeKey], gather: GatherObjects) -> list[bool]:
        """Mark the named episodes as seen on all processes; return for each name whether it is new."""
        new: list[list[bool]] = []
        for batch in gather([list(names)]):
            new.append([])
            for name in batch:
                new[-1].append(name not in self._seen)
                self._seen.add(name)
        return new[self.process]

    def figures(self, gather: GatherObjects) -> dict[str, float]:
        """Compute all metrics over all processes, which must call this together; names have no prefix."""
        every = sorted((e for part in gather([self.episodes]) for e in part), key=lambda e: e.name)
        sums = [entry for part in gather([self.sums]) for entry in part]
        if not every:
            return {}
        reporting = {e.env_type for e in every if e.success is not None}
        outcomes = zip(every, cut_off_as_failed(every, reporting), strict=True)
        every = [replace(episode, success=success) for episode, success in outcomes]
        rows = {e.name[0] for e in every}
        result: dict[str, float] = {"episodes": len(every), "rows": len(rows)}
        result |= episode_figures(every, uses_tools=self.uses_tools)
        rewards = reward_figures(every, self.reward_names)
        result |= _outcomes(every) | {n: v for n, v in rewards.items() if not math.isnan(v)}
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
    """Return the mean score, and the confidence intervals of mean score and success rate."""
    result: dict[str, float] = {}
    known = [(e, float(e.success)) for e in every if e.success is not None]
    if known:
        low, high = rate_interval(*_by_row(known))
        result["episode/success_known"] = len(known) / len(every)
        result["episode/success_rate_low"], result["episode/success_rate_high"] = low, high
    totals, counts = _by_row((e, e.score) for e in every)
    result["episode/score"] = math.fsum(totals) / math.fsum(counts)
    interval = mean_interval(totals, counts)
    if interval is not None:
        result["episode/score_low"], result["episode/score_high"] = interval
    return result
