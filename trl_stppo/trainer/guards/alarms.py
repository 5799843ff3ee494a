"""Watches for a collapse, for a sampler with wrong weights, and for environments that fail too often."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import EnvironmentFailureError
from ...rollout.episode import Episode
from ...rollout.record import FAILURES

SUCCESS, SCORE = "episode/success_rate", "episode/score"
# Rollout batches over which failed episodes are counted; the limit applies only after so many batches.
FAILURE_BATCHES = 5
MAX_FAILURE_RATE = 0.5
# A fall is a loss of at least this share of the best level.
SHARE = 0.15
BEST_OF = 3
# Number of rollouts in a fall -> standard errors that the fall must exceed. Chosen on recorded runs: the
# alarm is raised for 28 of 28 runs that lost a solved task, and for 19 of 860 that lost nothing.
CHANCE = {1: 4.0, 2: 3.0}
KL_FROM, KL_TIMES, KL_AFTER = 0.1, 20.0, 10
# Largest gaps, in nats per token, between the sampler's and training's log-probabilities for equal weights.
# The limit for our own sampler in float32 is a hundred times its rounding error.
EXACT = 1e-3
# The limit for another engine, or for 16 bits.
ROUGH = 0.05
# An inexact sampler's gap has risen if it exceeds the last rollout batch's gap by this factor.
RISE = 1.25
PATIENCE = 3


class Failures(NamedTuple):
    """Counts of a rollout batch's failed episodes, with their most common errors."""

    failed: int
    episodes: int
    errors: tuple[tuple[str, int], ...] = ()


def failures_of(episodes: Sequence[Episode]) -> Failures:
    """Count this process's failed episodes."""
    errors = [str(e.error) for e in episodes if e.stop_reason in FAILURES]
    return Failures(len(errors), len(episodes), tuple(Counter(errors).most_common(3)))


class FailureWatch:
    """Counts failed episodes of the last rollout batches, and ends the run if too many failed.

    Otherwise a fault of some kinds of episodes would leave the run with only the other kinds.
    """

    def __init__(self) -> None:
        self._batches: deque[Failures] = deque(maxlen=FAILURE_BATCHES)

    def rollout(self, everyone: Iterable[Failures], columns: Iterable[str] = ()) -> None:
        """Add all processes' counts of a rollout batch; raise if too many episodes failed."""
        failed, episodes, errors = zip(*everyone, strict=True)
        self._batches.append(Failures(sum(failed), sum(episodes), tuple(sum(errors, ()))))
        failed, episodes, errors = zip(*self._batches, strict=True)
        rate = sum(failed) / sum(episodes)
        nothing_played = len(self._batches) == 1 and rate == 1.0
        enough = len(self._batches) == FAILURE_BATCHES or nothing_played
        if not enough or rate <= MAX_FAILURE_RATE:
            return
        common: Counter[str] = Counter()
        for text, count in sum(errors, ()):
            common[text] += count
        causes = "; ".join(f"{text.rstrip('.')} ({n}x)" for text, n in common.most_common(3))
        which, advice = f"the last {FAILURE_BATCHES} rollout batches", ""
        if nothing_played:
            which = "the first rollout batch"
            advice = (
                f" The rows have the columns {', '.join(columns) or '(none)'}. Try an environment "
                f"with them: `trl-stppo env check`, in Python `trl_stppo.envs.check_env`. Try an agent with "
                f"`scripted` (docs/agents.md)."
            )
        raise EnvironmentFailureError(
            f"{sum(failed)} of {sum(episodes)} episodes of {which} ({rate:.0%}) ended in a failure of the "
            f"prompt, environment or agent; allowed: {MAX_FAILURE_RATE:.0%}: {causes}.{advice}"
        )

    def clear(self) -> None:
        """Drop all counts of failed episodes."""
        self._batches.clear()

    def state_dict(self) -> list[list[int]]:
        """Return the counts. Messages are left out, because they may contain private text."""
        return [[batch.failed, batch.episodes] for batch in self._batches]

    def load_state_dict(self, state: list[list[int]]) -> None:
        """Restore the counts from a `state_dict`."""
        self.clear()
        self._batches.extend(Failures(failed, episodes) for failed, episodes in state)


@dataclasses.dataclass
class FallWatch:
    """Detects a sudden fall of success or score, or a jump of the KL, from rollout to rollout.

    Attributes:
        episodes: number of episodes of a rollout, over all processes.
        good_step: optimizer steps of the newest policy before a fall.
        _best: highest mean level over rollouts, and the variance of an episode.
    """

    episodes: int
    falls: int = 0
    good_step: int = 0
    _fallen: bool = False
    _best: list[float] = dataclasses.field(default_factory=list)
    _recent: list[list[float]] = dataclasses.field(default_factory=list)
    _kls: list[float] = dataclasses.field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {name: value for name, value in vars(self).items() if name != "episodes"}

    def look(self, figures: Mapping[str, float], kl: float | None, step: int) -> str | None:
        """Check a rollout's metrics; return a description of a fall that has just begun, else None.

        `kl`: the mean `policy/approx_kl` of the update before it, nats, None if there was none.
        """
        signs = [sign for sign in (self._success(figures), self._jump(kl)) if sign]
        known, self._fallen = self._fallen, bool(signs)
        if not signs:
            self.good_step = step
        if known or not signs:
            return None
        self.falls += 1
        return ", ".join(signs)

    def _success(self, figures: Mapping[str, float]) -> str | None:
        name = SUCCESS if math.isfinite(figures.get(SUCCESS, math.nan)) else SCORE
        level = figures.get(name, math.nan)
        if not math.isfinite(level):
            return None
        spread = figures.get("reward_std", 0.0) ** 2
        self._recent.append([level, level * (1 - level) if name == SUCCESS else spread])
        del self._recent[:-BEST_OF]
        sign = None
        low = self._best and level <= self._best[0] - SHARE * abs(self._best[0])
        if low and any(self._is_fall(count, bound) for count, bound in CHANCE.items()):
            sign = f"{name} is {level:.3g}; the best mean of {BEST_OF} rollouts was {self._best[0]:.3g}"
        if len(self._recent) == BEST_OF:
            self._best = max(self._best, self._mean(BEST_OF))
        return sign

    def _mean(self, count: int) -> list[float]:
        return [statistics.fmean(column) for column in zip(*self._recent[-count:], strict=True)]

    def _is_fall(self, count: int, bound: float) -> bool:
        (best, spread), (level, own) = self._best, self._mean(count)
        error = math.sqrt((spread / BEST_OF + own / count) / self.episodes)
        return best - level >= SHARE * abs(best) and best - level > bound * error

    def _jump(self, kl: float | None) -> str | None:
        if kl is None or not math.isfinite(kl):
            return None
        usual = statistics.median(self._kls) if len(self._kls) >= KL_AFTER else math.inf
        self._kls.append(kl)
        if kl > KL_FROM and kl > KL_TIMES * usual:
            return f"policy/approx_kl is {kl:.3g} nats with a median of {usual:.3g}"
        return None


@dataclasses.dataclass
class SamplerWatch:
    """Detects a sampler with wrong weights by its gap to training's log-probabilities."""

    # Rollout batches whose gap exceeds the limit: `blocks` in all, `count` in a row up to the last batch.
    # A gap of an inexact sampler that has not risen sets `count` back to 1.
    blocks: int = 0
    count: int = 0
    last: float = 0.0

    def look(self, gap: float, *, exact: bool) -> str | None:
        """Return a message if the sampler's gap, in nats, exceeds its limit, which is lower if `exact`."""
        limit, rises = EXACT if exact else ROUGH, exact or gap > RISE * self.last
        self.last = gap
        if not gap > limit:
            self.count = 0
            return None
        self.blocks += 1
        self.count = self.count + 1 if rises else 1
        return (
            f"the sampler does not have the policy's weights: its log-probabilities are {gap:.2g} nats per "
            f"token off those of training (allowed: {limit:g})"
        )
