"""The row of an episode only grows at its end."""

import pytest

from trl_stppo.rollout.episode import Episode


def an_episode():
    episode = Episode(3, {}, "p")
    episode.append_turn([1, 2], [-1.0, -2.0])
    episode.append_observation([3, 4])
    return episode


def test_an_episode_is_lists_of_one_length():
    episode = an_episode()
    episode.append_turn([5], None)
    assert episode.ids == [1, 2, 3, 4, 5]
    assert episode.action_mask == [True, True, False, False, True]
    assert episode.logprobs == [-1.0, -2.0, 0.0, 0.0, 0.0]
    assert episode.turn_spans == [(0, 2), (4, 5)]
    assert (episode.turn_rewards, episode.has_logprobs) == ([0.0, 0.0], False)


@pytest.mark.parametrize("name", ["ids", "action_mask", "logprobs"])
def test_writing_into_a_list_is_noticed(name):
    episode = an_episode()
    getattr(episode, name).append(1)
    with pytest.raises(RuntimeError, match="row=3"):
        episode.append_observation([5])
