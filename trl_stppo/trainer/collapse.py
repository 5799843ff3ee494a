"""Limits that a collapsing run, or one whose environments fail, misses, and for how long it may."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..errors import EnvironmentFailureError
from ..rollout.episode import Episode
from ..rollout.record import FAILURES
from .ppo_config import PPOConfig

logger = logging.getLogger(__name__)

# Field -> the metric of the rollout batch that it is a lower limit of.
ROLLOUT_LIMITS = {
    "min_valid_action_rate": "turns/valid_action_rate",
    "min_reward_std": "reward_std",
}
CLIP_BIAS_LIMIT = "max_clip_bias_ratio"
# Rollout batches over which failed episodes are counted; before there are as many, nobody judges.
FAILURE_BATCHES = 5


class CollapseWatch:
    """Counts how often in a row a run has missed each of its limits.

    Args:
        args: the limits; None switches one off.

    Attributes:
        strikes: by field, plain numbers for a checkpoint.
    """

    def __init__(self, args: PPOConfig) -> None:
        self._args = args
        self._said: set[str] = set()
        self.strikes: dict[str, int] = {}

    def rollout(self, figures: Mapping[str, Sequence[float]], step: int) -> str | None:
        """Look at a new rollout batch.

        Args:
            figures: metrics as lists, the newest value last.
            step: the optimizer step that comes after it, for the message.

        Returns:
            Why the run is to stop; None while it may go on.
        """
        verdict = None
        for field, metric in ROLLOUT_LIMITS.items():
            limit, values = getattr(self._args, field), figures.get(metric)
            if limit is None:
                continue
            if not values:
                if field not in self._said:
                    logger.warning("`%s` watches nothing: this run has no %r.", field, metric)
                self._said.add(field)
            elif not math.isnan(values[-1]):
                value, where = values[-1], f"{metric} at step {step}"
                found = self._count(field, value, limit, value < limit, where, "rollout batches")
                verdict = verdict or found
        return verdict

    def mini_batch(self, figures: Mapping[str, float], step: int) -> str | None:
        """Look at an optimizer step; arguments and result as in `rollout`."""
        limit = getattr(self._args, CLIP_BIAS_LIMIT, None)
        if limit is None or "clip_bias/norm" not in figures:
            return None
        bias, kept = figures["clip_bias/norm"], figures["clip_bias/grad_norm"]
        ratio = bias / kept if kept > 0 else math.inf if bias > 0 else 0.0
        where = f"clip_bias/norm over clip_bias/grad_norm at step {step}"
        return self._count(CLIP_BIAS_LIMIT, ratio, limit, ratio > limit, where, "optimizer steps")

    def _count(
        self, field: str, value: float, limit: float, missed: bool, where: str, unit: str
    ) -> str | None:
        self.strikes[field] = self.strikes.get(field, 0) + 1 if missed else 0
        patience = self._args.collapse_patience
        if self.strikes[field] < patience:
            return None
        return (
            f"`{field}={limit}` was missed {patience} {unit} in a row (`collapse_patience`); the last "
            f"value is {value:.4g}, {where}"
        )


class Failures(NamedTuple):
    """Episodes of a rollout batch whose environment failed.

    Attributes:
        failed, episodes: how many, and of how many.
        errors: the most frequent messages, with their numbers.
    """

    failed: int
    episodes: int
    errors: tuple[tuple[str, int], ...] = ()


def failures_of(episodes: Sequence[Episode]) -> Failures:
    """What this process has seen."""
    errors = [str(e.error) for e in episodes if e.stop_reason in FAILURES]
    return Failures(len(errors), len(episodes), tuple(Counter(errors).most_common(3)))


class FailureWatch:
    """Adds up how many episodes of the last rollout batches have failed.

    Where only some kinds of episodes need what is broken, the others alone go on teaching.

    Args:
        limit: `max_env_error_rate`.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._batches: deque[Failures] = deque(maxlen=FAILURE_BATCHES)

    def rollout(self, everyone: Iterable[Failures]) -> None:
        """Take in what the processes have seen of a rollout batch.

        Raises:
            EnvironmentFailureError: of the last ones too many episodes have failed.
        """
        failed, episodes, errors = zip(*everyone, strict=True)
        self._batches.append(Failures(sum(failed), sum(episodes), tuple(sum(errors, ()))))
        failed, episodes, errors = zip(*self._batches, strict=True)
        rate = sum(failed) / sum(episodes)
        if len(self._batches) < FAILURE_BATCHES or rate <= self._limit:
            return
        common: Counter[str] = Counter()
        for text, count in sum(errors, ()):
            common[text] += count
        said = "; ".join(f"{text.rstrip('.')} ({n}x)" for text, n in common.most_common(3))
        raise EnvironmentFailureError(
            f"{sum(failed)} of {sum(episodes)} episodes of the last {FAILURE_BATCHES} rollout batches "
            f"({rate:.0%}) ended in a failure of their environment, more than "
            f"`max_env_error_rate={self._limit}` allows: {said}."
        )

    def state_dict(self) -> list[list[int]]:
        """Numbers alone: messages may hold what no checkpoint is to hold."""
        return [[batch.failed, batch.episodes] for batch in self._batches]

    def load_state_dict(self, state: list[list[int]]) -> None:
        """Go on from `state_dict`."""
        self._batches.clear()
        self._batches.extend(Failures(failed, episodes) for failed, episodes in state)
