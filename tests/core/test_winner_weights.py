import math

import torch

from trl_stppo import core


def tensor(rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def test_winners_by_hand():
    advantages = tensor([[1.0, -0.5, 9.0], [0.5, -1.0, 9.0], [2.0, -2.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False]] * 3 + [[False] * 3])
    # +0.5, -0.5, exactly nothing, and no token that counts
    assert core.winner_weights(advantages, mask).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_winners_see_nothing_off_the_mask_and_have_no_unit():
    draw = torch.Generator().manual_seed(0)
    advantages = torch.randn(20, 7, generator=draw, dtype=torch.float64)
    mask = torch.rand(20, 7, generator=draw) < 0.6
    expected = []
    for row, counts in zip(advantages.tolist(), mask.tolist(), strict=True):
        total = math.fsum(a for a, there in zip(row, counts, strict=True) if there)
        expected.append(float(total > 0))
    assert 0 < sum(expected) < 20
    spoilt = advantages.masked_fill(~mask, math.nan)
    for given in (advantages, spoilt, 1e-6 * advantages, advantages.clone().requires_grad_()):
        weights = core.winner_weights(given, mask)
        assert weights.tolist() == expected
        assert not weights.requires_grad
    order = torch.randperm(20, generator=draw)
    assert core.winner_weights(advantages[order], mask[order]).tolist() == [expected[i] for i in order]


def test_winners_of_half_precision_come_out_wide():
    # 100 + 0.25 - 100 is 0.25, which bfloat16 loses
    advantages = tensor([[100.0, 0.25, -100.0]], torch.bfloat16)
    weights = core.winner_weights(advantages, torch.ones(1, 3, dtype=torch.bool))
    assert weights.dtype == torch.float32
    assert weights.tolist() == [1.0]
