"""From episodes to padded tensors."""

import torch

from trl_stppo.rollout.episode import Episode
from trl_stppo.trainer.batch import build_turn_batch

MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
TURNS = [[(0, 2), (3, 5)], [(0, 4)]]


def build(spans=TURNS, rewards=None, mask=MASK, terminated=(True, False)):
    episodes = [
        Episode(row, {}, "", turn_spans=turns, turns=[*range(len(turns))], terminated=end)
        for row, (turns, end) in enumerate(zip(spans, terminated, strict=True))
    ]
    return build_turn_batch(episodes, rewards, mask, torch.float64)


def test_an_episode_that_is_hidden_has_no_turns():
    mask = MASK.clone()
    mask[0] = 0
    turns = build(rewards=[[1.0, 2.0], [3.0]], mask=mask)
    assert turns.turn_index.tolist() == [[-1] * 6, [0, 0, 0, 0, -1, -1]]
    assert turns.turn_rewards.tolist() == [[0.0], [3.0]]


def test_a_padding_row_belongs_to_no_episode():
    """Sharded processes make equally many passes, so one with fewer contexts has padding rows."""
    turns = build(mask=torch.cat([MASK, torch.zeros(1, 6, dtype=MASK.dtype)]), rewards=[[1.0, 2.0], [3.0]])
    assert turns.episodes.tolist() == [0, 1, -1]
    assert turns.row_index[2].tolist() == [-1] * 6
    assert turns.turn_index.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    values = torch.arange(18.0).view(3, 6)
    assert turns.join(values).tolist() == [[0.0, 1.0, 3.0, 4.0], [6.0, 7.0, 8.0, 9.0]]
    back = turns.split(turns.join(values))
    assert torch.equal(back, values.where(turns.row_index >= 0, 0.0))
    assert turns.split(torch.tensor([5.0, 6.0])).tolist() == [5.0, 6.0, 5.0]
