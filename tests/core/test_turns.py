import pytest
import torch

from tests.kit import references
from trl_stppo import core
from trl_stppo.errors import TurnSpanError

NAN = float("nan")


def test_spans_by_hand():
    index = core.turn_index_from_spans([[(0, 2), (4, 5)], [(1, 6)]], 6)
    assert index.dtype == torch.int64
    assert index.tolist() == [[0, 0, -1, -1, 1, -1], [-1, 0, 0, 0, 0, 0]]


def test_adjacent_spans_stay_two_turns():
    index = core.turn_index_from_spans([[(0, 2), (2, 3), (3, 5)]], 5)
    assert index.tolist() == [[0, 0, 1, 2, 2]]
    assert core.num_turns(index).tolist() == [3]


def test_an_episode_may_have_no_turns_and_a_batch_no_episodes():
    assert core.turn_index_from_spans([[], [(0, 1)]], 2).tolist() == [[-1, -1], [0, -1]]
    assert core.turn_index_from_spans([], 4).shape == (0, 4)
    assert core.turn_index_from_spans([[]], 0).shape == (1, 0)


def test_spans_go_to_the_device_asked_for():
    assert core.turn_index_from_spans([[(0, 1)]], 2, device="meta").device.type == "meta"


@pytest.mark.parametrize("seed", range(5))
def test_spans_against_reference(make_batch, seed):
    batch = make_batch(seed)
    index = core.turn_index_from_spans(batch.spans, 23)
    assert index.tolist() == references.turn_index(batch.spans, 23)


@pytest.mark.parametrize(("turns", "message"), [
    ([(0, 2), (3, 3)], r"episode 1, turn 1, span \(3, 3\): must have 2 <= start < end <= 8"),
    ([(4, 2)], r"episode 1, turn 0, span \(4, 2\): must have 0 <= start < end"),
    ([(-1, 2)], r"span \(-1, 2\): must have 0 <= start"),
    ([(0, 2), (5, 9)], r"turn 1, span \(5, 9\): .* end <= 8"),
    ([(4, 6), (0, 2)], r"turn 1, span \(0, 2\): must have 6 <= start"),
    ([(0, 4), (3, 6)], r"turn 1, span \(3, 6\): must have 4 <= start"),
    ([(0, 4), (0, 4)], r"turn 1, span \(0, 4\)"),
    ([(0.0, 4)], r"span \(0.0, 4\): must be a pair of integers"),
    ([("0", 4)], r"must be a pair of integers"),
    ([(0, 1, 2)], r"span \(0, 1, 2\): must be a pair of integers"),
    ([3], r"span 3: must be a pair of integers"),
    ([(False, True)], r"pair of integers, not bools"),
])  # fmt: skip
def test_bad_spans_are_refused(turns, message):
    with pytest.raises(TurnSpanError, match=message):
        core.turn_index_from_spans([[(0, 8)], turns], 8)


def test_starts_and_ends_by_hand():
    #                     turn 0  obs  turn 1, 2 adjacent, 2 at the last position
    index = torch.tensor([[0, 0, -1, 1, 2, 2], [-1] * 6, [0] * 6])
    assert core.turn_starts(index).int().tolist() == [
        [1, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
    ]
    assert core.turn_ends(index).int().tolist() == [
        [0, 1, 0, 1, 0, 1],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("seed", range(5))
def test_starts_ends_and_counts_against_the_spans(make_batch, seed):
    batch = make_batch(seed)
    starts, ends = core.turn_starts(batch.turn_index), core.turn_ends(batch.turn_index)
    for b, turns in enumerate(batch.spans):
        assert starts[b].nonzero().flatten().tolist() == [start for start, _ in turns]
        assert ends[b].nonzero().flatten().tolist() == [end - 1 for _, end in turns]
    assert core.num_turns(batch.turn_index).tolist() == [len(turns) for turns in batch.spans]


def test_empty_shapes():
    index = torch.zeros(2, 0, dtype=torch.int64)
    assert core.num_turns(index).tolist() == [0, 0]
    assert core.turn_starts(index).shape == core.turn_ends(index).shape == (2, 0)
    assert core.reduce_turns(torch.zeros(2, 0), index, num_turns=3, op="sum").shape == (2, 3)


def test_reduce_and_broadcast_by_hand():
    x = torch.tensor([[1.0, 2.0, NAN, 5.0, 7.0], [NAN] * 5])
    index = torch.tensor([[0, 0, -1, 1, 2], [-1] * 5])
    # turn 0: 1 + 2; turn 1: 5; turn 2: 7, adjacent to turn 1; a fourth does not exist
    sums = core.reduce_turns(x, index, num_turns=4, op="sum")
    means = core.reduce_turns(x, index, num_turns=4, op="mean")
    assert sums.tolist() == [[3.0, 5.0, 7.0, 0.0], [0.0] * 4]
    assert means.tolist() == [[1.5, 5.0, 7.0, 0.0], [0.0] * 4]
    assert core.broadcast_turns(means, index).tolist() == [[1.5, 1.5, 0.0, 5.0, 7.0], [0.0] * 5]


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reduce_against_reference(make_batch, close, op, dtype):
    batch = make_batch(7, dtype=dtype)
    out = core.reduce_turns(batch.values, batch.turn_index, num_turns=5, op=op)
    for b, row in enumerate(batch.turn_index.tolist()):
        for k in range(5):
            x = [batch.values[b, t].item() for t in references.tokens_of(row, k)]
            expected = sum(x) / (len(x) if op == "mean" else 1) if x else 0.0
            close(out[b, k], expected)


def test_no_turns_at_all():
    index = torch.full((2, 3), -1)
    out = core.reduce_turns(torch.full((2, 3), NAN), index, num_turns=0, op="mean")
    assert out.shape == (2, 0)
    assert core.broadcast_turns(out, index).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e3])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_garbage_off_turn_reaches_neither_value_nor_gradient(make_batch, op, garbage):
    batch = make_batch(3)
    clean = core.reduce_turns(batch.values, batch.turn_index, num_turns=5, op=op)
    x = batch.values.masked_fill(~batch.action_mask, garbage).requires_grad_()
    out = core.reduce_turns(x, batch.turn_index, num_turns=5, op=op)
    assert torch.equal(out, clean)
    core.broadcast_turns(out, batch.turn_index).square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~batch.action_mask] == 0).all()


def test_broadcast_ignores_turns_an_episode_does_not_have():
    x = torch.tensor([[4.0, NAN]], requires_grad=True)
    out = core.broadcast_turns(x, torch.tensor([[-1, 0, 0]]))
    out.sum().backward()
    assert out.tolist() == [[0.0, 4.0, 4.0]]
    assert x.grad.tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_gradcheck(op):
    index = torch.tensor([[0, 0, -1, 1, 2], [-1, -1, 0, 0, 0]])
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: core.reduce_turns(v, index, num_turns=3, op=op), x)
    assert torch.autograd.gradcheck(lambda v: core.broadcast_turns(v, index), y)


def test_half_precision_sums_in_float32():
    x, index = torch.ones(1, 4096, dtype=torch.bfloat16), torch.zeros(1, 4096, dtype=torch.int64)
    out = core.reduce_turns(x, index, num_turns=1, op="sum")
    assert out.dtype == torch.float32
    assert out.item() == 4096.0
