"""Limit on the rate of episodes whose environment fails."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...errors import EnvironmentFailureError
from ...rollout.episode import Episode
from ...rollout.record import FAILURES

# Rollout batches over which failed episodes are counted; the limit holds only from that many batches on.
FAILURE_BATCHES = 5
# Share of failed episodes of these batches beyond which the run ends.
MAX_FAILURE_RATE = 0.5


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
    """Counts failed episodes of the last rollout batches, and ends the run if they are too many.

    If a fault affects only some kinds of episodes, the run would go on with the other kinds alone.
    """

    def __init__(self) -> None:
        self._batches: deque[Failures] = deque(maxlen=FAILURE_BATCHES)

    def rollout(self, everyone: Iterable[Failures], columns: Iterable[str] = ()) -> None:
        """Add all processes' counts of a rollout batch; raise if the rate exceeds the limit."""
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
                f" The rows have the columns {', '.join(columns) or '(none)'}. Try the environment or "
                f"agent with them: `trl-stppo env check`, in Python `trl_stppo.envs.check_env`."
            )
        raise EnvironmentFailureError(
            f"{sum(failed)} of {sum(episodes)} episodes of {which} ({rate:.0%}) ended in a failure of the "
            f"prompt, environment, agent or sampler; allowed: {MAX_FAILURE_RATE:.0%}: {causes}.{advice}"
        )

    def clear(self) -> None:
        """Drop all counts of failed episodes."""
        self._batches.clear()

    def state_dict(self) -> list[list[int]]:
        """Return the counts, without messages, which may contain private text."""
        return [[batch.failed, batch.episodes] for batch in self._batches]

    def load_state_dict(self, state: list[list[int]]) -> None:
        """Restore the counts from a `state_dict`."""
        self.clear()
        self._batches.extend(Failures(failed, episodes) for failed, episodes in state)
