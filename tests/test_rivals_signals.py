"""What runs ahead of a collapse, on runs made by hand."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def module(script):
    return script("_rivals_signals")


def a_run(seed, success, kl):
    from_grid = dict.fromkeys(["stage", "task", "method", "pressure", "learning_rate"], "x")
    from_grid |= dict.fromkeys(["mode", "power", "target", "estimator", "optimizer"], "x")
    from_grid |= {"seed": str(seed), "cliprange": "0.2", "phase": "train"}
    return [
        from_grid | {"episode/success_rate": str(s), "policy/approx_kl": str(k)}
        for s, k in zip(success, kl, strict=True)
    ]


def test_the_first_update_of_a_collapse(module):
    assert module.collapse_at([0.6, 0.6, 0.6, 0.0, 0.0, 0.0]) == 4
    assert module.collapse_at([0.6] * 6) is None
    assert module.collapse_at([0.2, 0.2, 0.2, 0.0, 0.0]) is None  # nothing was there to lose
    assert module.collapse_at([]) is None


def test_areas_by_hand(module):
    assert module.area([3.0], [1.0, 2.0]) == 1.0
    assert module.area([1.0], [1.0, 2.0]) == 0.25
    assert module.area([], [1.0]) is None


def test_a_signal_that_rises_before_every_collapse(module):
    lost = [0.6] * 7 + [0.0] * 3  # below half in the mean of three from the ninth update on
    rising = [0.0] * 5 + [1.0] * 5
    rows = [*a_run(0, lost, rising), *a_run(1, [0.6] * 10, [0.0] * 10)]
    found = module.signals(rows)
    assert (found["runs"], found["collapses"]) == (2, 1)
    assert found["areas"]["KL"] == 1.0
    # One of the three updates has lost its success already; the others look like any other.
    assert found["areas"]["drop of success"] == pytest.approx(0.5 + 0.5 / 3)
