"""The batch backend whose rounds all processes make together, without any process."""

import pytest

from trl_stppo.generation.batched import CollectiveBackend
from trl_stppo.generation.protocol import TurnRequest

FILLER = 99


class Others:
    """What the other processes say, round by round, and what is asked of the sampler."""

    def __init__(self, *rounds):
        self.rounds = list(rounds)
        self.said = []
        self.calls = []

    def exchange(self, own):
        self.said.append(own)
        return [own, *self.rounds.pop(0)]

    def generate(self, rows, limit, seeds):
        self.calls.append((rows, limit, seeds))
        answers = [[*row[-1:], *range(limit - 1)] for row in rows]
        return answers, [[-float(token) for token in ids] for ids in answers]

    def backend(self, **options):
        return CollectiveBackend(self.generate, self.exchange, FILLER, **options)


def request(key, limit=3, ids=None):
    return TurnRequest(key, ids or [10, 20 + key], limit, (7, key))


def test_a_process_with_fewer_turns_fills_up_to_the_most_and_to_the_largest_limit():
    others = Others([(4, 6, 0), (1, 2, 0)])
    backend = others.backend()
    backend.add(request(0, 3))
    backend.add(request(5, 4))
    results = backend.step()
    assert others.said == [(2, 4, 0)]
    rows, limit, seeds = others.calls[0]
    assert rows == [[10, 20], [10, 25], [FILLER], [FILLER]]
    assert limit == 6
    assert seeds == [(7, 0), (7, 5), (0,), (0,)]
    assert [r.key for r in results] == [0, 5]
    # Each is cut to its own limit, its logprobs too.
    assert [r.ids for r in results] == [[20, 0, 1], [25, 0, 1, 2]]
    assert [r.logprobs for r in results] == [[-20.0, 0.0, -1.0], [-25.0, 0.0, -1.0, -2.0]]


def test_a_process_without_a_turn_still_takes_part():
    others = Others([(2, 5, 0)])
    backend = others.backend()
    assert backend.busy, "others may need it"
    assert backend.step() == []
    assert others.said == [(0, 0, 0)]
    assert others.calls == [([[FILLER], [FILLER]], 5, [(0,), (0,)])]


def test_a_round_in_which_nobody_has_a_turn_generates_nothing():
    others = Others([(0, 0, 0)], [(0, 0, 1)])
    backend = others.backend()
    assert backend.step() == backend.step() == []
    assert others.calls == []


def test_finishing_goes_on_until_all_have_finished():
    others = Others([(2, 5, 0)], [(0, 0, 0)], [(1, 3, 0)], [(0, 0, 1)])
    backend = others.backend()
    backend.finish()
    assert others.said == [(0, 0, 1)] * 4
    assert [(len(rows), limit) for rows, limit, _ in others.calls] == [(2, 5), (1, 3)]
    assert others.rounds == []


def test_a_process_alone_needs_no_filler_and_finishes_at_once():
    others = Others([], [])
    backend = others.backend()
    backend.add(request(0))
    assert [r.key for r in backend.step()] == [0]
    assert others.calls[0][0] == [[10, 20]]
    backend.finish()
    assert others.said == [(1, 3, 0), (0, 0, 1)]


@pytest.mark.parametrize("surplus", [-1, 1])
def test_a_wrong_number_of_completions_raises(surplus):
    others = Others([(3, 3, 0)])
    backend = CollectiveBackend(
        lambda rows, limit, seeds: ([[1]] * (len(rows) + surplus), None), others.exchange, FILLER
    )
    backend.add(request(0))
    with pytest.raises(RuntimeError, match=f"3 turns were to be sampled; {3 + surplus} came back"):
        backend.step()
