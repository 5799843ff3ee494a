"""Advantages of RLOO, against the others of a group, and of ReBN, against all turns of a batch."""

import math

import pytest
import torch

from tests.kit import references
from tests.kit.reductions import on_processes
from trl_stppo import core

NAN, INF = float("nan"), float("inf")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def rebn(batch, gamma, **options):
    return core.return_batch_norm(batch.rewards, batch.turn_index, batch.loss_mask, gamma, **options)


def test_leave_one_out_by_hand(close):
    # 1 against (3 + 8) / 2, 3 against (1 + 8) / 2, 8 against (1 + 3) / 2; an episode alone has no others
    scores = tensor([1.0, 3.0, NAN, 8.0], [2.0, NAN, NAN, NAN])
    counts = ~scores.isnan()
    expected = [[-4.5, -1.5, 0, 6.0], [0, 0, 0, 0]]
    close(core.leave_one_out_advantages(scores, counts), expected)


@pytest.mark.parametrize("seed", range(4))
def test_leave_one_out_against_a_plain_loop(seed, close):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    counts = torch.rand(6, 5, generator=draw) < 0.5
    counts[0], counts[1] = False, True
    expected = references.leave_one_out(scores.tolist(), counts.tolist())
    close(core.leave_one_out_advantages(scores, counts), expected)


def test_leave_one_out_is_the_unscaled_groups_but_for_a_factor(close):
    scores, counts = tensor([1.0, 2.0, 4.0, 4.5]), torch.ones(1, 4, dtype=torch.bool)
    unscaled = core.group_advantages(scores, counts, "none")
    close(core.leave_one_out_advantages(scores, counts), unscaled * 4 / 3)
    shifted, order = scores + 300.0, [2, 0, 3, 1]
    close(core.leave_one_out_advantages(shifted, counts), unscaled * 4 / 3)
    close(core.leave_one_out_advantages(scores[:, order], counts), unscaled[:, order] * 4 / 3)


def test_leave_one_out_at_the_edges():
    counts = torch.tensor([[True, True, False], [False, False, False]])
    for poison in (NAN, INF, 1e30):
        scores = tensor([1.0, 2.0, poison], [poison] * 3).requires_grad_()
        out = core.leave_one_out_advantages(scores, counts)
        assert out.tolist() == [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
        (out * torch.arange(6.0).view(2, 3)).sum().backward()
        assert (scores.grad[~counts] == 0).all()
        assert scores.grad[counts].isfinite().all()
    equal = torch.full((2, 7), 300.7)
    assert (core.leave_one_out_advantages(equal, torch.ones(2, 7).bool()) == 0).all()
    assert core.leave_one_out_advantages(torch.ones(2, 1), torch.ones(2, 1).bool()).sum() == 0
    assert core.leave_one_out_advantages(equal.half(), torch.ones(2, 7).bool()).dtype is (torch.float32)


INDEX = torch.tensor([[0, 0, -1, 1], [-1, 0, -1, -1], [0, -1, 1, 1]])


def test_return_batch_norm_by_hand(close):
    # Returns at gamma 0.5: turn 1 of episode 0 has 4, turn 0 has 1 + 2 = 3; episode 1 has -1; episode 2
    # has failed. Mean 2, deviation sqrt((4 + 1 + 9) / 3), of the population.
    rewards = tensor([0.25, 0.75, NAN, 4.0], [NAN, -1.0, NAN, NAN], [7.0, NAN, 7.0, 7.0])
    counts = torch.tensor([[True] * 4, [True] * 4, [False] * 4])
    unit = math.sqrt(14 / 3) + 1e-9
    expected = [[1 / unit, 1 / unit, 0, 2 / unit], [0, -3 / unit, 0, 0], [0, 0, 0, 0]]
    close(core.return_batch_norm(rewards, INDEX, counts, 0.5), expected)


@pytest.mark.parametrize("gamma", [0.0, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_return_batch_norm_against_a_plain_loop(seed, gamma, make_batch, close):
    batch = make_batch(seed)
    batch.loss_mask[0] = False
    lists = (x.tolist() for x in (batch.rewards, batch.turn_index, batch.loss_mask))
    close(rebn(batch, gamma), references.return_batch_norm(*lists, gamma))


def test_it_is_whitening_where_every_turn_is_a_token(close):
    """But for the unbiased variance there, and where the small number is added."""
    x = torch.randn(3, 4, generator=torch.manual_seed(0), dtype=torch.float64)
    index, mask = torch.arange(4).expand(3, 4), torch.ones(3, 4, dtype=torch.bool)
    expected = core.whiten(x, mask) * math.sqrt(12 / 11)
    close(core.return_batch_norm(x, index, mask, 0.0), expected, rtol=1e-7)


def test_padding_the_order_of_episodes_and_a_constant_change_nothing(make_batch, close):
    batch = make_batch(3)
    expected = rebn(batch, 0.9)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    fields = (batch.rewards, batch.turn_index, batch.loss_mask)
    close(core.return_batch_norm(*(x[order] for x in fields), 0.9), expected[order])
    padded = [
        torch.nn.functional.pad(x, (2, 3), value=v) for x, v in zip(fields, (NAN, -1, False), strict=True)
    ]
    close(core.return_batch_norm(*padded, 0.9)[:, 2:-3], expected)
    # Only the relative size of returns counts, and with gamma 0 not what all of them have in common.
    close(core.return_batch_norm(50 * fields[0], *fields[1:], 0.9), expected, rtol=1e-7)
    ends = core.turn_ends(batch.turn_index)
    shifted = core.return_batch_norm(fields[0] + 7.0 * ends, *fields[1:], 0.0)
    close(shifted, rebn(batch, 0.0), rtol=1e-9)


@pytest.mark.parametrize("sizes", [(3, 3), (1, 2, 3), (6, 0)])
def test_any_split_over_processes_is_the_same(sizes, make_batch, close):
    batch = make_batch(1)
    columns = (x.split(sizes) for x in (batch.rewards, batch.turn_index, batch.loss_mask))
    shards = list(zip(*columns, strict=True))
    results = on_processes(core.return_batch_norm, shards, gamma=0.9)
    close(torch.cat(results), rebn(batch, 0.9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_returns_and_a_single_turn_have_no_advantage(dtype):
    for value in (0.0, 300.7, -0.1, 1e17):
        for turns in (1, 2, 3, 7, 129):
            index = torch.full((turns, 3), -1)
            index[:, 1] = 0
            rewards = torch.full((turns, 3), value, dtype=dtype)
            out = core.return_batch_norm(rewards, index, torch.ones(turns, 3).bool(), 1.0)
            assert (out == 0).all()


def test_where_nothing_counts_all_is_zero_and_half_precision_is_raised():
    nothing = torch.full((2, 4), -1)
    for index in (nothing, nothing[:0], nothing[:, :0]):
        rewards = torch.full(index.shape, NAN, dtype=torch.bfloat16)
        out = core.return_batch_norm(rewards, index, torch.ones(index.shape).bool(), 0.9)
        assert (out == 0).all()
        assert (out.shape, out.dtype) == (index.shape, torch.float32)


@pytest.mark.parametrize("poison", [NAN, INF, 1e30])
def test_what_does_not_count_is_inert_and_has_no_gradient(poison, make_batch):
    batch = make_batch(2)
    failed = torch.zeros_like(batch.loss_mask)
    failed[1] = True
    batch.loss_mask &= ~failed
    expected = rebn(batch, 0.9)
    inert = (batch.turn_index < 0) | failed
    batch.rewards = batch.rewards.masked_fill(inert, poison).requires_grad_()
    out = rebn(batch, 0.9)
    assert torch.equal(out, expected)
    assert (out[~batch.loss_mask] == 0).all()
    assert (out[batch.loss_mask] != 0).all()
    (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    assert (batch.rewards.grad[inert] == 0).all()
    assert batch.rewards.grad.isfinite().all()
