"""Several turns are sampled where one is asked for, and the best is the answer."""

from trl_stppo.generation.candidates import CandidatesBackend
from trl_stppo.generation.protocol import TurnRequest, TurnResult


class Later:
    """Answers the oldest request of each step's allowance; a turn's token is the last part of its seed."""

    def __init__(self, capacity: int | None = None, per_step: int = 100) -> None:
        self.capacity, self.per_step = capacity, per_step
        self.queue: dict[int, TurnRequest] = {}
        self.asked: list[TurnRequest] = []
        self.released: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    def add(self, request: TurnRequest) -> None:
        self.asked.append(request)
        self.queue[request.key] = request

    def step(self) -> list[TurnResult]:
        now = [self.queue.pop(key) for key in list(self.queue)[: self.per_step]]
        return [TurnResult(r.key, [r.seed[-1]], [-0.5]) for r in now]

    def release(self, key: int) -> None:
        self.queue.pop(key, None)
        self.released.append(key)


def highest(asked):
    """The candidate with the largest token that is below the row's first."""
    for request, results in asked:
        assert [result.ids for result in results] == [[n] for n in range(len(results))]
        assert all(result.key // len(results) == request.key for result in results)
    return [min(request.ids[0], len(results) - 1) for request, results in asked]


def test_the_best_is_played_and_the_others_are_forgotten() -> None:
    inner = Later()
    backend = CandidatesBackend(inner, 3, highest)
    backend.add(TurnRequest(4, [1], 9, (7, 4)))
    assert backend.busy
    assert [(r.key, r.seed) for r in inner.asked] == [(12 + i, (7, 4, i)) for i in range(3)]
    assert {(tuple(r.ids), r.max_new_tokens) for r in inner.asked} == {((1,), 9)}
    assert backend.step() == [TurnResult(4, [1], [-0.5])]
    assert inner.released == [12, 14], "their rows do not go on"
    backend.add(TurnRequest(4, [2], 9, (7, 5)))
    assert backend.step() == [TurnResult(4, [2], [-0.5])]
    backend.release(4)
    assert inner.released[-3:] == [12, 13, 14]


def test_nothing_is_chosen_before_all_candidates_are_there() -> None:
    chosen = []

    def choose(asked):
        chosen.append([request.key for request, _ in asked])
        return highest(asked)

    backend = CandidatesBackend(Later(per_step=3), 2, choose)
    for key in (0, 1, 2):
        backend.add(TurnRequest(key, [0], 1, (key,)))
    assert [result.key for result in backend.step()] == [0]
    assert [result.key for result in backend.step()] == [1, 2]
    assert chosen == [[0], [1, 2]]
    assert backend.step() == []


def test_an_episode_that_is_released_in_the_middle_is_never_chosen_for() -> None:
    inner = Later(per_step=1)
    backend = CandidatesBackend(inner, 2, highest)
    backend.add(TurnRequest(0, [0], 1, (0,)))
    assert backend.step() == []
    backend.release(0)
    assert not backend.busy
    backend.add(TurnRequest(0, [1], 1, (0,)))
    assert backend.step() == []
    assert backend.step() == [TurnResult(0, [1], [-0.5])]


def test_room_is_shared_among_candidates() -> None:
    assert CandidatesBackend(Later(), 3, highest).capacity is None
    assert CandidatesBackend(Later(capacity=8), 3, highest).capacity == 2
    assert CandidatesBackend(Later(capacity=2), 3, highest).capacity == 1
