"""Figures of the live view: newest values, the course, time left, and how the time was spent."""

from __future__ import annotations

import math

import pytest

from trl_stppo.watch.figures import (
    NOTHING,
    Figures,
    Progress,
    Shares,
    duration,
    number,
    shown,
    sparkline,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "0.5", True])
def test_what_is_no_figure_is_shown_as_a_dash(value):
    assert shown(number(value)) == NOTHING


def test_figures_are_shown_in_their_format():
    assert (shown(0.25), shown(1234.5, ",.0f"), shown(0.0)) == ("0.250", "1,234", "0.000")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, NOTHING), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3725, "1:02:05"), (-3, "0 s")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 5, ""),
        ([1.0], 0, ""),
        ([0.3, 0.3, 0.3], 5, "▄▄▄"),
        ([0.0, 1.0], 5, "▁█"),
        # Means of two each: 0, 1, 2, 7 of a range of 7.
        ([0, 0, 1, 1, 2, 2, 7, 7], 4, "▁▂▃█"),
    ],
)
def test_sparklines(values, width, line):
    assert sparkline(values, width) == line


def test_none_and_nan_take_the_place_of_a_figure_and_absence_does_not():
    figures = Figures()
    figures.add({"a": 1.0, "b": 2.0, "c": 3.0})
    figures.add({"a": None, "b": math.nan})
    assert (figures.get("a"), figures.get("b"), figures.get("c"), figures.get("d")) == (
        *(None, None),
        *(3.0, None),
    )


def test_the_rolling_success_is_the_mean_of_the_last_ten_rollouts():
    figures = Figures()
    for i in range(12):
        figures.add({"episode/success_rate": float(i), "episode/score": 99.0})
        figures.add({"policy/approx_kl": 0.1})  # a step without a new rollout
    assert list(figures.course) == [float(i) for i in range(12)]
    assert figures.rolling() == sum(range(2, 12)) / 10


def test_the_score_is_watched_until_somebody_judges_success():
    figures = Figures()
    figures.add({"episode/score": 5.0})
    assert (figures.watched, figures.rolling()) == ("episode/score", 5.0)
    figures.add({"episode/score": 6.0, "episode/success_rate": 0.5})
    assert (figures.watched, list(figures.course)) == ("episode/success_rate", [0.5])


def test_evaluation_is_kept_apart():
    figures = Figures()
    figures.add({"episode/success_rate": 0.25, "step": 8})
    figures.add({"eval_episode/success_rate": 0.75, "step": 8})
    assert (figures.held_out, figures.rolling()) == ((0.75, 8), 0.25)


def test_a_line_averages_what_came_since_the_last_one():
    figures = Figures()
    figures.add({"policy/approx_kl": 1.0})
    figures.add({"policy/approx_kl": 3.0, "episode/score": math.nan})
    get = figures.averaged()
    assert (get("policy/approx_kl"), get("episode/score")) == (2.0, None)
    assert figures.averaged()("policy/approx_kl") is None


def rounds(clock: Clock, progress: Progress, first: int, last: int, seconds: float) -> None:
    """Steps first+1 .. last, of so many seconds each."""
    for step in range(first + 1, last + 1):
        progress.begin_step()
        clock.now += seconds
        progress.end_step(step)


def test_the_time_left_is_known_after_the_first_round_and_runs_down():
    clock = Clock()
    progress = Progress(4, clock=clock)
    progress.start(0, 40)
    rounds(clock, progress, 0, 3, 5.0)
    assert progress.left() is None, "the first step has played for all four"
    rounds(clock, progress, 3, 4, 5.0)
    assert progress.left() == 36 * 5.0
    clock.now += 7.0
    assert progress.left() == 36 * 5.0 - 7.0
    clock.now += 1000.0
    assert progress.left() == 0.0


def test_steps_before_a_resume_took_none_of_this_time():
    clock = Clock()
    progress = Progress(4, episodes=2, clock=clock)
    progress.start(30, 40)
    rounds(clock, progress, 30, 32, 5.0)
    assert progress.left() == 8 * 5.0
    assert progress.gone == 10.0
    assert progress.shares(SPENT.get) is None, "the beginning of that round was not seen"
    rounds(clock, progress, 32, 36, 5.0)
    assert progress.shares(SPENT.get) is not None


# 2 episodes of 3 turns of 5 tokens, at 3 tokens a second: a rollout of 10 seconds.
SPENT = {
    "turns/mean": 3.0,
    "turns/tokens_mean": 5.0,
    "perf/rollout_tokens_per_second": 3.0,
    "perf/generation_seconds": 6.0,
    "perf/wait_seconds": 1.5,
}


def test_the_time_of_a_round_is_split_by_what_was_measured():
    clock = Clock()
    progress = Progress(4, episodes=2, clock=clock)
    progress.start(0, 40)
    rounds(clock, progress, 0, 4, 3.5)  # 14 seconds
    assert progress.shares(SPENT.get) == pytest.approx(Shares(6.0, 1.5, 2.5, 4.0))
    assert progress.shares({**SPENT, "turns/mean": None}.get) is None
    assert progress.shares({**SPENT, "perf/rollout_tokens_per_second": 0.0}.get) is None


def test_an_evaluation_between_steps_is_no_part_of_a_round():
    clock = Clock()
    progress = Progress(1, episodes=2, clock=clock)
    progress.start(0, 4)
    rounds(clock, progress, 0, 1, 12.0)
    progress.enter("evaluating")
    clock.now += 50.0
    assert (progress.phase, progress.phase_seconds) == ("evaluating", 50.0)
    rounds(clock, progress, 1, 2, 12.0)
    shares = progress.shares(SPENT.get)
    assert shares is not None
    assert shares.update == pytest.approx(2.0)
