"""What a run has logged and how long it has taken: plain numbers, for whoever shows them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

SUCCESS, SCORE = "episode/success_rate", "episode/score"
# Shown where a figure is missing or not a number.
NOTHING = "–"  # noqa: RUF001
ROLLING = 10  # rollout batches of the rolling success
BARS = "▁▂▃▄▅▆▇█"


def number(value: Any) -> float | None:
    """A figure as logged; None for what is missing, not a number, or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        figure = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return figure if math.isfinite(figure) else None


def shown(value: float | None, form: str = ".3f") -> str:
    """A figure in a format, `NOTHING` where there is none."""
    return NOTHING if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """Seconds as "42 s", "3:05" or "2:10:00"."""
    if seconds is None:
        return NOTHING
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of some values, one character for each or for the mean of a few."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    parts = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
    low, high = min(parts), max(parts)
    if high - low < 1e-12:
        return BARS[3] * len(parts)
    return "".join(BARS[round((part - low) / (high - low) * (len(BARS) - 1))] for part in parts)


class Figures:
    """The newest value of every metric, and the course of the one that is watched.

    Attributes:
        course: success of the rollout batches, or their score where nobody judges, oldest first.
        held_out: newest figure of evaluation and its step, None before there is one.
    """

    def __init__(self) -> None:
        self.course: deque[float] = deque(maxlen=500)
        self.watched = SUCCESS
        self.held_out: tuple[float, int] | None = None
        self._newest: dict[str, float | None] = {}
        self._since: dict[str, list[float]] = {}

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take in one entry of `log_history`; None and NaN take the place of a number, too."""
        for name, value in entry.items():
            self._newest[name] = number(value)
            if self._newest[name] is not None:
                self._since.setdefault(name, []).append(float(value))
        for name in (SUCCESS, SCORE):
            if (value := number(entry.get(f"eval_{name}"))) is not None:
                self.held_out = value, int(entry.get("step", 0))
                break
        self._add_to_course(entry)

    def _add_to_course(self, entry: Mapping[str, Any]) -> None:
        success, score = number(entry.get(SUCCESS)), number(entry.get(SCORE))
        if success is not None and self.watched == SCORE:
            self.course.clear()  # the first rollout batch that is judged
        if success is not None:
            self.watched = SUCCESS
            self.course.append(success)
        elif score is not None and (self.watched == SCORE or not self.course):
            self.watched = SCORE
            self.course.append(score)

    def get(self, name: str) -> float | None:
        """The newest value; None where it is missing or not a number."""
        return self._newest.get(name)

    def rolling(self) -> float | None:
        """Mean of the last `ROLLING` values of the course."""
        last = list(self.course)[-ROLLING:]
        return sum(last) / len(last) if last else None

    def averaged(self) -> Callable[[str], float | None]:
        """Means of everything that was logged since the last call, by name."""
        since, self._since = self._since, {}
        means = {name: sum(values) / len(values) for name, values in since.items()}
        return means.get


class Shares(NamedTuple):
    """Seconds of one round, a rollout batch and its updates."""

    generation: float
    environments: float
    scoring: float
    update: float


class Progress:
    """Where a run is, in optimizer steps and seconds. A round is one rollout batch with its updates.

    Args:
        steps_per_round: optimizer steps of a round.
        episodes: of a round; 0 where that is not known.
        clock: seconds from any fixed moment.

    Attributes:
        step: optimizer steps taken, those before a resume among them.
        max_steps: of the whole run.
        phase: what goes on now.
        rounds: that this process has seen the end of.
    """

    def __init__(
        self, steps_per_round: int = 1, episodes: int = 0, clock: Callable[[], float] | None = None
    ) -> None:
        self.steps_per_round, self.episodes = max(1, steps_per_round), episodes
        self._clock = clock or time.monotonic
        self.step = self.max_steps = self.rounds = 0
        self.phase, self._phase_began = "", self._clock()
        self.start(0, 0)

    def start(self, step: int, max_steps: int) -> None:
        """Begin; a resumed run has steps behind it that took none of this process's time."""
        self._first = self.step = step
        self.max_steps, self.rounds = max_steps, 0
        self._began = self._clock()
        self._mark: tuple[int, float] | None = None  # step and time of the last round's end
        self._step_began: float | None = None
        # Seconds inside the steps of this round; None for one whose beginning was not seen.
        self._spent: float | None = 0.0 if step % self.steps_per_round == 0 else None
        self._round: float | None = None
        self.enter("starting")

    def enter(self, phase: str) -> None:
        """Something else goes on from now."""
        if phase != self.phase:
            self.phase, self._phase_began = phase, self._clock()

    def begin_step(self) -> None:
        """An optimizer step begins; the first of a round plays its episodes first."""
        self._step_began = self._clock()
        self.enter("playing" if self.step % self.steps_per_round == 0 else "updating")

    def end_step(self, step: int) -> None:
        """An optimizer step is over."""
        if self._spent is not None and self._step_began is not None:
            self._spent += self._clock() - self._step_began
        self.step, self._step_began = step, None
        if step % self.steps_per_round == 0:
            self.rounds += 1
            self._mark = step, self._clock()
            self._round, self._spent = self._spent, 0.0

    @property
    def phase_seconds(self) -> float:
        """How long it has been going on."""
        return self._clock() - self._phase_began

    @property
    def gone(self) -> float:
        """Seconds since the start or the resume."""
        return self._clock() - self._began

    def left(self) -> float | None:
        """Seconds until the end if rounds go on taking as long; None before the first is over."""
        if self._mark is None or self._mark[0] <= self._first:
            return None
        step, when = self._mark
        per_step = (when - self._began) / (step - self._first)
        return max(0.0, per_step * (self.max_steps - step) - (self._clock() - when))

    def shares(self, get: Callable[[str], float | None]) -> Shares | None:
        """How the last round's time was spent; None where it is not known.

        Args:
            get: newest metrics. The rollout's seconds are sampled tokens over their rate, and what is
                left of them beside sampling and waiting went into scoring.
        """
        rate, turns, tokens = map(
            get, ("perf/rollout_tokens_per_second", "turns/mean", "turns/tokens_mean")
        )
        generation, waiting = get("perf/generation_seconds"), get("perf/wait_seconds")
        if self._round is None or not self.episodes or None in (turns, tokens, generation, waiting):
            return None
        if not rate:
            return None
        rollout = self.episodes * turns * tokens / rate  # type: ignore[operator]
        scoring = max(0.0, rollout - generation - waiting)  # type: ignore[operator]
        return Shares(generation, waiting, scoring, max(0.0, self._round - rollout))  # type: ignore[arg-type]
