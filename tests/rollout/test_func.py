"""What a user's rollout_func may return besides TRL's keys."""

import math
import re

import pytest

from trl_stppo.errors import TurnSpanError
from trl_stppo.rollout.func import read_rollout

END = 9


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
    """The episodes, and what is left for reward functions."""
    rows = [{"n": 1}, {"n": 2}]
    return read_rollout(output(**extra), rows, ["p", "q"], [END], message)


def message(ids, before):
    return {"role": "assistant", "content": f"{before}{ids}"}


def spans(**extra):
    return [episode.turn_spans for episode in read(**extra)[0]]


def masks(**extra):
    return [[int(flag) for flag in episode.action_mask] for episode in read(**extra)[0]]


def test_tokens_and_rows_are_kept_and_unknown_keys_are_columns():
    episodes, columns = read(answer=["x", "y"], turn_rewards=[[1.0], [0.0]])
    assert columns == {"answer": ["x", "y"]}
    assert [e.ids for e in episodes] == output()["completion_ids"]
    assert [e.prompt_ids for e in episodes] == output()["prompt_ids"]
    assert [(e.row, e.columns, e.prompt) for e in episodes] == [
        (0, {"n": 1}, "p"),
        (1, {"n": 2}, "q"),
    ]
    assert [e.turn_spans for e in episodes] == [[(0, 5)], [(0, 3)]]
    assert [(e.turn_rewards, e.has_turn_rewards) for e in episodes] == [
        ([1.0], True),
        ([0.0], True),
    ]
    assert episodes[1].messages == [message([8, 9, 3], [2])]
    assert not any(e.stop_reason or e.env_type or e.failed for e in episodes)


def test_without_spans_the_runs_of_the_mask_are_the_turns():
    mask = [[1, 1, 0, 1, 1], [0, 1, 1]]
    assert spans(env_mask=mask) == [[(0, 2), (3, 5)], [(1, 3)]]
    assert masks(env_mask=mask) == mask


def test_logprobs_count_where_the_policy_has_spoken():
    logprobs = [[-1.0, -2.0, 7.0, -3.0, None], [-4.0, -5.0, -6.0]]
    episodes, _ = read(turn_spans=SPANS, logprobs=logprobs)
    assert episodes[0].logprobs == [-1.0, -2.0, 0.0, -3.0, None]
    assert episodes[1].logprobs == [-4.0, -5.0, -6.0]
    assert all(e.has_logprobs for e in episodes)
    assert not any(e.has_logprobs for e in read()[0])


@pytest.mark.parametrize(("extra", "terminated"), [
    ({}, [False, False]),
    ({"completion_ids": [[3, 4, 5, 6, END], [8, END, 3]]}, [True, False]),
    ({"terminated": [0, 1]}, [False, True]),
    ({"truncated": [1, 0]}, [False, True]),
    ({"terminated": [True, True], "truncated": [True, False]}, [True, True]),
])  # fmt: skip
def test_how_an_episode_ended_is_what_the_rollout_said(extra, terminated):
    assert [episode.terminated for episode in read(**extra)[0]] == terminated


@pytest.mark.parametrize(("extra", "named"), [
    ({"turn_spans": [[(3, 5), (0, 2)], [(0, 3)]]}, "turn_spans[0][1]"),
    ({"turn_spans": [[(0, 3), (2, 5)], [(0, 3)]]}, "turn_spans[0][1]"),
    ({"turn_spans": [[(-1, 5)], [(0, 3)]]}, "turn_spans[0][0]"),
    ({"turn_spans": [[(0, 5)], [(0, 4)]]}, "turn_spans[1][0]"),
    ({"turn_spans": [[(0, 5)], [(2, 2)]]}, "turn_spans[1][0]"),
    ({"turn_spans": SPANS, "env_mask": [[1, 1, 1, 1, 1], [1, 1, 1]]}, "turn_spans[0]"),
    ({"turn_spans": SPANS, "env_mask": [[1, 1, 0, 1, 1], [1, 1, 0]]}, "turn_spans[1]"),
    ({"turn_spans": SPANS[:1]}, "turn_spans"),
    ({"env_mask": [[1]]}, "env_mask"),
    ({"env_mask": [[1, 1, 0, 1, 1], [1, 1]]}, "env_mask"),
    ({"turn_rewards": [[1.0]] * 3}, "turn_rewards"),
    ({"terminated": [True]}, "terminated"),
    ({"truncated": [True] * 3}, "truncated"),
    ({"turn_spans": SPANS, "turn_rewards": [[1.0], [1.0]]}, "turn_rewards[0]"),
    ({"turn_spans": SPANS, "turn_rewards": [[1.0, math.nan], [1.0]]}, "turn_rewards[0][1]"),
    ({"completion_ids": [[3], []]}, "completion_ids[1]"),
    ({"completion_ids": [[3]]}, "completion_ids"),
    ({"episode_of": [0, 0]}, "episode_of"),
    ({"episode_of": [0, 2]}, "episode_of"),
    ({"episode_of": [0]}, "episode_of"),
    ({"prompt_ids": [[3]]}, "prompt_ids"),
    ({"logprobs": [[0.0] * 4, [0.0] * 3]}, "logprobs"),
])  # fmt: skip
def test_a_result_that_contradicts_itself_raises_by_key(extra, named):
    with pytest.raises(ValueError, match=re.escape(f"`{named}`")) as caught:
        read(**extra)
    assert isinstance(caught.value, TurnSpanError) == named.startswith("turn_spans[")


def test_a_missing_key_is_named_as_trl_names_it():
    with pytest.raises(ValueError, match=r"rollout_func must return keys \['completion_ids', 'logprobs'\]"):
        read_rollout({"prompt_ids": [[1]]}, [{}], ["p"], [END], message)


def test_a_mask_without_any_policy_token_is_an_episode_without_turns():
    episodes, _ = read(env_mask=[[0] * 5, [1] * 3])
    assert [e.turn_spans for e in episodes] == [[], [(0, 3)]]
    assert episodes[0].failed
