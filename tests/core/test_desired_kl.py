import math

import pytest
import torch

from trl_stppo.core.desired_kl import kl_per_turn, next_step_factor

NAN, INF = float("nan"), float("inf")


def test_by_hand():
    # Turn 0: ratios 2 and 1/2; turn 1 does not train; turn 2: ratio 1. Outside turns anything may stand.
    index = torch.tensor([[0, 0, -1, 1, 2]])
    mask = torch.tensor([[True, True, False, False, True]])
    old = torch.tensor([[-1.0, -1.0, NAN, 0.0, -3.0]], dtype=torch.float64)
    new = old + torch.tensor([[math.log(2), -math.log(2), INF, 9.0, 0.0]], dtype=torch.float64)
    total, turns = kl_per_turn(new, old, index, mask)
    assert turns == 2
    assert total.item() == pytest.approx((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)), rel=1e-12)


def test_against_a_loop_and_under_padding_and_splits():
    torch.manual_seed(0)
    old = torch.randn(6, 9, dtype=torch.float64)
    new = old + 0.5 * torch.randn(6, 9)
    index = torch.tensor([[0, 0, -1, 1, 1, 1, -1, 2, -1]] * 6)
    mask = (index >= 0) & (torch.rand(6, 9) < 0.5)
    expected, turns = 0.0, set()
    for row in range(6):
        for token in range(9):
            if mask[row, token]:
                x = float(new[row, token]) - float(old[row, token])
                expected += math.exp(x) - 1 - x
                turns.add((row, int(index[row, token])))
    total, count = kl_per_turn(new.requires_grad_(), old, index, mask)
    assert not total.requires_grad
    assert (total.item(), count.item()) == pytest.approx((expected, len(turns)), rel=1e-12)
    parts = [kl_per_turn(new[i], old[i], index[i], mask[i]) for i in (slice(0, 2), slice(2, 6))]
    assert sum(p[0] for p in parts).item() == pytest.approx(expected, rel=1e-12)
    assert sum(p[1] for p in parts) == count
    wide = [torch.nn.functional.pad(x, (0, 3), value=v) for x, v in ((new, NAN), (old, 1.0))]
    empty = torch.nn.functional.pad(index, (0, 3), value=-1), torch.nn.functional.pad(mask, (0, 3))
    assert kl_per_turn(*wide, *empty)[0].item() == total.item()


def test_one_token_keeps_the_sum_finite_and_nothing_is_no_turn():
    ids = torch.zeros(1, 1, dtype=torch.int64)
    total, _ = kl_per_turn(torch.full((1, 1), 500.0), torch.zeros(1, 1), ids, ids == 0)
    assert total.item() == pytest.approx(math.expm1(20.0) - 500.0)
    assert [x.item() for x in kl_per_turn(torch.ones(1, 1), ids.float(), ids, ids > 0)] == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(("kl", "options", "factor"), [
    (0.201, {}, 0.3 / 1.5),
    (0.2, {}, 0.3),
    (0.05, {}, 0.3),
    (0.049, {}, 0.45),
    (0.0, {"may_grow": False}, 0.3),
    (0.3, {"may_grow": False}, 0.2),
    (NAN, {}, 0.2),
    (INF, {}, 0.2),
    (-INF, {}, 0.2),
    (0.3, {"delay": 1}, 0.3 / math.sqrt(1.5)),
    (0.0, {"delay": 3}, 0.3 * 1.5**0.25),
])  # fmt: skip
def test_the_factor_by_hand(kl, options, factor):
    assert next_step_factor(0.3, kl, 0.1, **options) == pytest.approx(factor, rel=1e-12)


def test_the_factor_has_bounds():
    assert next_step_factor(0.9, 0.0, 0.1) == 1.0
    assert next_step_factor(0.0011, 1.0, 0.1) == 0.001
