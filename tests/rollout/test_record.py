"""The record of a rollout: spans, masks, and rewards that are finite numbers."""

from __future__ import annotations

import math

import pytest
import torch

from trl_stppo.errors import TurnSpanError
from trl_stppo.rollout.record import (
    StopReason,
    check_reward,
    check_spans,
    mask_from_spans,
    spans_from_mask,
)


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ([], []),
        ([0, 0], []),
        ([1], [(0, 1)]),
        ([1, 1, 0, 0, 1], [(0, 2), (4, 5)]),
        ([0, 1, 0, 1, 1, 0], [(1, 2), (3, 5)]),
    ],
)
def test_spans_are_the_maximal_runs_of_ones(mask, spans):
    assert spans_from_mask(mask) == spans
    assert mask_from_spans(spans, len(mask)) == mask


def test_adjacent_spans_cannot_be_told_apart_in_a_mask():
    assert mask_from_spans([(0, 2), (2, 3)], 4) == [1, 1, 1, 0]


@pytest.mark.parametrize("spans", [[], [(0, 1)], [(0, 5)], [(0, 2), (2, 5)], [(1, 2), (4, 5)]])
def test_ordered_disjoint_spans_inside_the_completion_are_fine(spans):
    check_spans(spans, 5, 0)


@pytest.mark.parametrize(
    ("spans", "turn"),
    [
        ([(2, 3), (0, 1)], 1),  # out of order
        ([(0, 3), (2, 4)], 1),  # overlap
        ([(0, 6)], 0),  # past the end
        ([(-1, 2)], 0),
        ([(1, 1)], 0),  # empty
        ([(0, 1), (3, 2)], 1),  # backwards
    ],
)
def test_bad_spans_raise_naming_episode_and_turn(spans, turn):
    start, end = spans[turn]
    with pytest.raises(TurnSpanError, match=rf"`turn_spans\[7\]\[{turn}\]` is \({start}, {end}\)"):
        check_spans(spans, 5, 7)


@pytest.mark.parametrize(
    ("value", "number"), [(1, 1.0), (True, 1.0), (0.5, 0.5), (torch.tensor(2.0), 2.0)]
)
def test_rewards_become_floats(value, number):
    result = check_reward(value, "name")
    assert type(result) is float
    assert result == number


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1.0", [1.0, 2.0], {}])
def test_a_reward_that_is_no_finite_number_raises_with_its_origin(value):
    with pytest.raises(
        ValueError, match=r"`turn_rewards\[3\]` is .*; a reward must be a finite number"
    ):
        check_reward(value, "turn_rewards[3]")


def test_stop_reasons_are_these():
    assert [str(r) for r in StopReason] == [
        "terminated",
        "truncated",
        "max_turns",
        "token_budget",
        "no_action",
        "malformed_limit",
        "env_error",
        "env_timeout",
        "episode_timeout",
        "sampler_error",
    ]
