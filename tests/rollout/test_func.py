"""What a user's rollout_func may return besides TRL's keys."""

from __future__ import annotations

import math

import pytest

from trl_stppo.errors import TurnSpanError
from trl_stppo.rollout.func import read_rollout
from trl_stppo.rollout.record import RolloutRecord


def output(**extra):
    """Two episodes, of five and of three tokens."""
    return {
        "prompt_ids": [[1], [2]],
        "completion_ids": [[3, 4, 5, 6, 7], [8, 9, 3]],
        "logprobs": None,
        **extra,
    }


SPANS = [[(0, 2), (3, 5)], [(0, 3)]]


def read(**extra):
    record = RolloutRecord()
    return read_rollout(output(**extra), record), record


def test_trls_keys_and_unknown_ones_pass_through():
    result, record = read(answer=["x", "y"], turn_rewards=[[1.0], [0.0]])
    assert result == output(answer=["x", "y"])
    assert record.turn_spans == [[(0, 5)], [(0, 3)]]
    assert record.turn_rewards == [[1.0], [0.0]]


def test_without_spans_and_mask_an_episode_is_one_turn():
    assert read()[1].turn_spans == [[(0, 5)], [(0, 3)]]


def test_without_spans_the_runs_of_the_mask_are_the_turns():
    masks = [[1, 1, 0, 1, 1], [0, 1, 1]]
    result, record = read(env_mask=masks)
    assert record.turn_spans == [[(0, 2), (3, 5)], [(1, 3)]]
    assert result["env_mask"] == masks


def test_spans_give_the_mask():
    result, record = read(turn_spans=SPANS)
    assert result["env_mask"] == [[1, 1, 0, 1, 1], [1, 1, 1]]
    assert record.turn_spans == SPANS


def test_adjacent_spans_stay_two_turns():
    spans = [[(0, 2), (2, 5)], [(0, 1), (1, 2), (2, 3)]]
    result, record = read(turn_spans=spans, env_mask=[[1] * 5, [1] * 3])
    assert record.turn_spans == spans
    assert result["env_mask"] == [[1] * 5, [1] * 3]


def test_flags_are_read_as_booleans():
    record = read(terminated=[1, 0], truncated=[0, 1])[1]
    assert (record.terminated, record.truncated) == ([True, False], [False, True])


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"turn_spans": [[(3, 5), (0, 2)], [(0, 3)]]}, TurnSpanError, r"`turn_spans\[0\]\[1\]`"),
        ({"turn_spans": [[(0, 3), (2, 5)], [(0, 3)]]}, TurnSpanError, r"`turn_spans\[0\]\[1\]`"),
        (
            {"turn_spans": [[(0, 5)], [(0, 4)]]},
            TurnSpanError,
            r"`turn_spans\[1\]\[0\]` is \(0, 4\)",
        ),
        (
            {"turn_spans": [[(0, 5)], [(2, 2)]]},
            TurnSpanError,
            r"`turn_spans\[1\]\[0\]` is \(2, 2\)",
        ),
        (
            {"turn_spans": SPANS, "env_mask": [[1, 1, 1, 1, 1], [1, 1, 1]]},
            TurnSpanError,
            r"`turn_spans\[0\]` covers other tokens than `env_mask\[0\]`",
        ),
        (
            {"turn_spans": SPANS, "env_mask": [[1, 1, 0, 1, 1], [1, 1, 0]]},
            TurnSpanError,
            r"`turn_spans\[1\]` covers other tokens",
        ),
        ({"turn_spans": SPANS[:1]}, ValueError, "`turn_spans` has 1 entries for 2 episodes"),
        ({"env_mask": [[1]]}, ValueError, "`env_mask` has 1 entries for 2 episodes"),
        (
            {"env_mask": [[1, 1, 0, 1, 1], [1, 1]]},
            ValueError,
            r"`env_mask\[1\]` has 2 entries for the 3 tokens",
        ),
        ({"turn_rewards": [[1.0]] * 3}, ValueError, "`turn_rewards` has 3 entries for 2 episodes"),
        ({"terminated": [True]}, ValueError, "`terminated` has 1 entries"),
        ({"truncated": [True] * 3}, ValueError, "`truncated` has 3 entries"),
        (
            {"turn_spans": SPANS, "turn_rewards": [[1.0], [1.0]]},
            ValueError,
            r"`turn_rewards\[0\]` has 1 entries, but episode 0 has 2 turns",
        ),
        (
            {"turn_spans": SPANS, "turn_rewards": [[1.0, math.nan], [1.0]]},
            ValueError,
            r"`turn_rewards\[0\]\[1\]` is nan",
        ),
        (
            {"completion_ids": [[3], []]},
            ValueError,
            r"`completion_ids\[1\]` is empty: an episode needs at least one token",
        ),
    ],
)
def test_a_result_that_contradicts_itself_raises_by_key(extra, error, message):
    with pytest.raises(error, match=message):
        read(**extra)


def test_a_turn_span_error_is_a_value_error():
    assert issubclass(TurnSpanError, ValueError)


def test_a_missing_key_of_trls_is_left_to_trl():
    assert read_rollout({"prompt_ids": [[1]]}, RolloutRecord()) == {"prompt_ids": [[1]]}


def test_the_callers_dict_is_not_changed():
    given = output(turn_spans=SPANS)
    read_rollout(given, RolloutRecord())
    assert given == output(turn_spans=SPANS)


def test_a_mask_without_any_policy_token_is_an_episode_without_turns():
    assert read(env_mask=[[0] * 5, [1] * 3])[1].turn_spans == [[], [(0, 3)]]
