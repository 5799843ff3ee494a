"""Turn rewards of tool environments: what was appended between two generation calls."""

from __future__ import annotations

import math

import pytest
from trl_stppo.rollout.tool_rewards import ToolRewards


class Env:
    def __init__(self, rewards=None):
        if rewards is not None:
            self.turn_rewards = rewards


def test_entries_belong_to_the_turn_in_which_they_were_appended():
    one, two = Env([]), Env([])
    watch = ToolRewards([one, two])
    one.turn_rewards += [1.0, 0.5]  # two tools in one turn
    watch.end_turn()
    two.turn_rewards.append(-1.0)  # the other one paid nothing in its first turn
    watch.end_turn()
    one.turn_rewards.append(2.0)
    watch.end_turn()
    assert watch.per_turn([3, 3]) == [[1.5, 0.0, 2.0], [0.0, -1.0, 0.0]]


def test_what_comes_after_the_last_turn_belongs_to_it():
    env = Env([])
    watch = ToolRewards([env])
    for reward in (1.0, 2.0, 4.0):
        env.turn_rewards.append(reward)
        watch.end_turn()
    assert watch.per_turn([2]) == [[1.0, 6.0]]
    assert watch.per_turn([5]) == [[1.0, 2.0, 4.0, 0.0, 0.0]]


def test_an_episode_without_turns_gets_none():
    env = Env([])
    watch = ToolRewards([env])
    env.turn_rewards.append(1.0)
    watch.end_turn()
    assert watch.per_turn([0]) == [[]]


def test_a_list_cleared_by_making_a_new_one_before_the_rollout_is_seen():
    env = Env([9.0])
    env.turn_rewards = []
    watch = ToolRewards([env])
    env.turn_rewards.append(1.0)
    watch.end_turn()
    assert watch.per_turn([1]) == [[1.0]]


def test_environments_without_the_attribute_pay_nothing():
    watch = ToolRewards([Env(), Env([])])
    assert watch.is_used
    watch.end_turn()
    assert watch.per_turn([2, 1]) == [[0.0, 0.0], [0.0]]
    assert not ToolRewards([Env(), Env()]).is_used


@pytest.mark.parametrize("rewards", [(1.0,), 1.0, {0: 1.0}])
def test_something_else_than_a_list_is_refused_by_name(rewards):
    with pytest.raises(ValueError, match=r"`Env.turn_rewards` is a (tuple|float|dict); it must be"):
        ToolRewards([Env(rewards)]).end_turn()


def test_a_list_that_shrinks_during_an_episode_is_refused():
    env = Env([1.0, 2.0])
    watch = ToolRewards([env])
    watch.end_turn()
    env.turn_rewards.clear()
    with pytest.raises(ValueError, match=r"`Env.turn_rewards` shrank from 2 to 0"):
        watch.end_turn()


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
def test_a_reward_that_is_no_number_is_refused_by_name(value):
    env = Env([])
    watch = ToolRewards([env])
    env.turn_rewards.append(value)
    with pytest.raises(ValueError, match=r"`Env.turn_rewards\[-1\]` is"):
        watch.end_turn()
