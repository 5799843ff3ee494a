"""Wilson's interval against values worked out by hand and a brute-force search."""

import math

import pytest

from trl_stppo.statistics import wilson_interval


def test_half_of_a_hundred():
    # centre (0.5 + 3.8415/200) / (1 + 3.8415/100) = 0.5; half width from the same formula: 0.0962
    low, high = wilson_interval(50, 100)
    assert low == pytest.approx(0.4038, abs=1e-4)
    assert high == pytest.approx(0.5962, abs=1e-4)


@pytest.mark.parametrize(("successes", "trials"), [(1, 10), (7, 10), (123, 400)])
def test_bounds_are_where_the_score_statistic_reaches_its_quantile(successes, trials):
    rate = successes / trials
    for bound in wilson_interval(successes, trials):
        score = abs(rate - bound) / math.sqrt(bound * (1 - bound) / trials)
        assert score == pytest.approx(1.959964, abs=1e-5)


def test_certainty_stays_inside_the_unit_interval():
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)


@pytest.mark.parametrize(("successes", "trials"), [(-1, 10), (11, 10), (0, 0)])
def test_impossible_counts_are_refused(successes, trials):
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, trials)
