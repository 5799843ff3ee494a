"""Intervals against values worked out by hand, tables, and plain loops."""

import math
import random
import statistics

import pytest

from trl_stppo.statistics import effective_trials, mean_interval, rate_interval, wilson_interval


@pytest.mark.parametrize(("successes", "trials"), [(1, 10), (7, 10), (123, 400)])
def test_bounds_are_where_the_score_statistic_reaches_its_quantile(successes, trials):
    rate = successes / trials
    for bound in wilson_interval(successes, trials):
        score = abs(rate - bound) / math.sqrt(bound * (1 - bound) / trials)
        assert score == pytest.approx(1.959964, abs=1e-5)


def test_certainty_stays_inside_the_unit_interval():
    assert wilson_interval(0, 10)[0] == pytest.approx(0.0, abs=1e-15)
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)


def test_an_interval_of_single_values_is_two_standard_errors_wide():
    values = [0.0, 1.0, 2.0, 0.0, 40.0]
    low, high = mean_interval(values, [1.0] * 5)
    half = 1.959964 * statistics.stdev(values) / math.sqrt(5)
    assert (low, high) == pytest.approx((8.6 - half, 8.6 + half))


def test_an_interval_of_equal_clusters_is_that_of_their_means():
    means = [1.0, 4.0, 2.5]
    interval = mean_interval([4 * m for m in means], [4.0] * 3)
    assert interval == pytest.approx(mean_interval(means, [1.0] * 3))


def test_uneven_clusters_against_a_plain_loop():
    totals, counts = [3.0, 0.0, 5.0, 9.0], [2.0, 0.0, 3.0, 1.0]
    mean = 17.0 / 6.0
    squares = (3 - 2 * mean) ** 2 + (5 - 3 * mean) ** 2 + (9 - mean) ** 2
    half = 1.959964 * math.sqrt(3 / 2 * squares) / 6.0
    assert mean_interval(totals, counts) == pytest.approx((mean - half, mean + half))
    assert mean_interval([1.0, 0.0], [2.0, 0.0]) is None


def test_single_trials_have_wilsons_interval():
    wins = [1.0, 0.0, 1.0, 1.0]
    assert rate_interval(wins, [1.0] * 4) == pytest.approx(wilson_interval(3, 4))


def test_clusters_count_by_how_far_they_agree():
    # Rows that always or never succeed: an episode more says nothing more.
    assert effective_trials([4.0, 0.0, 4.0], [4.0] * 3) == pytest.approx(3.0)
    # By hand: R = 1/2, sum((s - 2)^2) = 2, so 12^2 / 4 / 2 = 18, but there were only 12.
    assert effective_trials([1.0, 2.0, 3.0], [4.0] * 3) == 12.0
    # R = 1/2, sum((s - 2)^2) = 8: 144 / 4 / 8.
    assert effective_trials([0.0, 2.0, 4.0], [4.0] * 3) == pytest.approx(4.5)
    # Nothing but successes: the rows are what was drawn.
    assert rate_interval([4.0, 4.0], [4.0] * 2) == pytest.approx(wilson_interval(2, 2))


def test_intervals_over_clusters_cover_what_they_should():
    """Rows of different difficulty, four episodes each; treating episodes as rows covers too little."""
    draw = random.Random(0)
    clustered = naive = 0
    for _ in range(400):
        rows = [draw.betavariate(0.6, 0.9) for _ in range(40)]
        wins = [float(sum(draw.random() < p for _ in range(4))) for p in rows]
        low, high = rate_interval(wins, [4.0] * 40)
        clustered += low <= 0.4 <= high
        low, high = wilson_interval(sum(wins), 160)
        naive += low <= 0.4 <= high
    assert 0.92 <= clustered / 400 <= 0.98
    assert naive / 400 < 0.85
