"""Episodes of several contexts as single rows."""

import random

import pytest
import torch

from trl_stppo.core import JoinedView, token_gae, turn_gae

# Episode 0: turns 0 and 3 in a parent context, 1 and 2 in a sub-agent's. Episode 1 has one turn.
SPANS = [[(0, 2), (4, 5)], [(1, 2), (3, 6)], [(2, 3)]]
TURNS, OWNERS = [[0, 3], [1, 2], [0]], [0, 0, 1]


def view(spans=SPANS, turns=TURNS, owners=OWNERS, episodes=2, length=6):
    return JoinedView(spans, turns, owners, num_episodes=episodes, length=length)


def test_tokens_come_in_the_order_of_their_turns():
    joined = view()
    assert joined.turn_index.tolist() == [[0, 0, 1, 2, 2, 2, 3], [0] + [-1] * 6]
    assert joined.last.tolist() == [0, 2]
    x = torch.arange(18.0).view(3, 6)
    assert joined.join(x).tolist() == [[0, 1, 7, 9, 10, 11, 4], [14] + [0] * 6]
    assert joined.join(x > 3).dtype == torch.bool


def test_a_split_puts_numbers_back_and_leaves_0_elsewhere():
    joined = view()
    x = torch.arange(1.0, 19.0).view(3, 6)
    back = joined.split(joined.join(x))
    inside = torch.zeros(3, 6, dtype=torch.bool)
    for row, spans in enumerate(SPANS):
        for start, end in spans:
            inside[row, start:end] = True
    assert torch.equal(back, x.masked_fill(~inside, 0.0))
    assert torch.equal(joined.split(torch.ones(2, 7)).bool(), inside)


def test_an_episode_without_turns_and_a_batch_without_any():
    joined = view([[(0, 1)], []], [[0], []], [0, 1], length=2)
    assert joined.turn_index.tolist() == [[0], [-1]]
    assert joined.split(torch.full((2, 1), 7.0)).tolist() == [[7.0, 0.0], [0.0, 0.0]]
    empty = view([[], []], [[], []], [0, 1], length=3)
    assert empty.turn_index.tolist() == [[-1], [-1]]
    assert empty.split(torch.ones(2, 1)).tolist() == [[0.0] * 3] * 2


def test_an_episode_ends_in_a_context_without_turns_after_its_last_turn():
    spans, turns = [[(0, 1)], [], [], [(0, 1)], []], [[0], [], [], [0], []]
    assert view(spans, turns, [0, 0, 1, 1, 2], episodes=3, length=2).last.tolist() == [1, 3, 4]


@pytest.mark.parametrize("estimator", [token_gae, turn_gae])
@pytest.mark.parametrize("seed", range(20))
def test_the_advantages_do_not_depend_on_how_an_episode_is_cut(seed, estimator):
    """Whatever context a turn is in, with whatever lies between."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, 4) for _ in range(chance.randint(1, 6))]
    total, places = sum(lengths), len(lengths)
    owner = [chance.randrange(places) for _ in lengths]
    gaps = [chance.randint(0, 2) for _ in lengths]
    rows = sorted(set(owner))
    spans, turns = [[] for _ in rows], [[] for _ in rows]
    place = [0] * len(rows)
    for turn, (length, gap) in enumerate(zip(lengths, gaps, strict=True)):
        row = rows.index(owner[turn])
        start = place[row] + gap
        spans[row].append((start, start + length))
        turns[row].append(turn)
        place[row] = start + length
    draw = torch.Generator().manual_seed(total)
    rewards, values = torch.randn(2, 1, total, generator=draw, dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(places), torch.tensor(lengths))[None]
    joined = view(spans, turns, [0] * len(rows), 1, max(place))
    assert torch.equal(joined.turn_index, index)
    mask = index if estimator is turn_gae else index >= 0
    expected = estimator(rewards, values, mask, 0.9, 0.8)
    cut = [joined.join(joined.split(x)) for x in (rewards, values)]
    for one, other in zip(estimator(*cut, mask, 0.9, 0.8), expected, strict=True):
        assert torch.equal(one, other)
