"""From the record's lists to padded tensors."""

from __future__ import annotations

import pytest
import torch

from trl_stppo.rollout.batch import build_turn_batch, ends_with_eos
from trl_stppo.rollout.record import RolloutRecord

MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0]]).bool()
ENDED = torch.tensor([True, False])


def build(mask=MASK, ended=ENDED, **record):
    return build_turn_batch(RolloutRecord(**record), mask, ended, torch.float64)


def test_spans_number_the_turns_even_where_they_touch():
    turns = build(turn_spans=[[(0, 2), (3, 5)], [(0, 1), (1, 4)]])
    assert turns.turn_index.tolist() == [[0, 0, -1, 1, 1, -1], [0, 1, 1, 1, -1, -1]]
    assert torch.equal(turns.action_mask, MASK)


def test_without_spans_the_runs_of_the_mask_are_the_turns():
    turns = build()
    assert turns.turn_index.tolist() == [[0, 0, -1, 1, 1, -1], [0, 0, 0, 0, -1, -1]]
    assert turns.turn_rewards is None


def test_an_episode_that_was_masked_out_has_no_turns():
    mask = MASK.clone()
    mask[0] = False
    turns = build(mask, turn_spans=[[(0, 2), (3, 5)], [(0, 4)]], turn_rewards=[[1.0, 2.0], [3.0]])
    assert turns.turn_index.tolist() == [[-1] * 6, [0, 0, 0, 0, -1, -1]]
    assert turns.turn_rewards.tolist() == [[0.0], [3.0]]


def test_rewards_are_padded_to_the_longest_episode():
    spans = [[(0, 2), (3, 5)], [(0, 4)]]
    turns = build(turn_spans=spans, turn_rewards=[[1.0, 2.0], [3.0]])
    assert turns.turn_rewards.tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert turns.turn_rewards.dtype == torch.float64


def test_rewards_past_the_last_turn_go_to_it():
    turns = build(turn_rewards=[[1.0, 2.0, 4.0], [3.0]])
    assert turns.turn_rewards.tolist() == [[1.0, 6.0], [3.0, 0.0]]


@pytest.mark.parametrize(
    ("record", "terminated"),
    [
        ({}, [True, False]),  # TRL's own loop: EOS stands in
        ({"terminated": [False, True]}, [False, True]),
        ({"truncated": [True, False]}, [False, True]),
        ({"terminated": [True, True], "truncated": [True, False]}, [True, True]),
    ],
)
def test_how_an_episode_ended_is_what_the_rollout_said(record, terminated):
    assert build(**record).terminated.tolist() == terminated


@pytest.mark.parametrize(
    ("ids", "mask", "expected"),
    [
        ([5, 6, 2], [1, 1, 1], True),
        ([5, 2, 6], [1, 1, 1], False),
        ([5, 2, 0], [1, 1, 0], True),  # padding behind
        ([5, 6, 2], [1, 1, 0], False),  # only tokens that count
        ([5, 3, 0], [1, 1, 0], True),  # any of the ids
        ([5, 6, 7], [0, 0, 0], False),
    ],
)
def test_an_end_of_turn_must_be_the_last_token_that_counts(ids, mask, expected):
    result = ends_with_eos(torch.tensor([ids]), torch.tensor([mask]), [2, 3])
    assert result.tolist() == [expected]
