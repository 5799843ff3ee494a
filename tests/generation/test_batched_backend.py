"""The backend over a function that samples whole batches."""

import pytest

from trl_stppo.generation.batched import BatchedBackend
from trl_stppo.generation.protocol import TurnRequest, TurnResult


class Echo:
    """Returns each row's last token, limit times."""

    def __init__(self, logprobs: bool = True) -> None:
        self.calls, self.logprobs = [], logprobs

    def __call__(self, rows, limit, seeds):
        self.calls.append((rows, limit, seeds))
        out = [row[-1:] * limit for row in rows]
        return out, [[-0.5] * limit for _ in rows] if self.logprobs else None


def test_all_that_is_queued_is_one_batch_cut_to_each_limit() -> None:
    generate = Echo()
    backend = BatchedBackend(generate)
    assert not backend.busy
    assert backend.step() == []
    backend.add(TurnRequest(4, [1, 2], 3, (0, 4)))
    backend.add(TurnRequest(2, [5], 1, (0, 2)))
    assert backend.busy
    turns = backend.step()
    assert turns == [TurnResult(2, [5], [-0.5]), TurnResult(4, [2] * 3, [-0.5] * 3)]
    assert generate.calls == [([[5], [1, 2]], 3, [(0, 2), (0, 4)])], "in the order of the episodes"
    assert not backend.busy


def test_released_requests_are_not_sent() -> None:
    generate = Echo()
    backend = BatchedBackend(generate, capacity=2)
    backend.add(TurnRequest(0, [7], 2, (0,)))
    backend.add(TurnRequest(1, [8], 2, (1,)))
    backend.release(0)
    backend.release(99)
    backend.add(TurnRequest(2, [9], 2, (2,)))
    assert [turn.key for turn in backend.step()] == [1, 2]
    backend.release(1)
    backend.release(2)
    backend.add(TurnRequest(1, [8], 1, (1,)))
    backend.release(1)
    assert not backend.busy


@pytest.mark.parametrize(("returned", "match"), [
    (([[]], None), "empty"),
    (([], None), "came back"),
    (([[1]], []), "came back"),
    (([[1, 2]], [[-0.1]]), "logprobs"),
])  # fmt: skip
def test_a_batch_of_another_shape_is_refused(returned, match: str) -> None:
    backend = BatchedBackend(lambda rows, limit, seeds: returned)
    backend.add(TurnRequest(0, [7], 2, (0,)))
    with pytest.raises(RuntimeError, match=match):
        backend.step()
