"""The KL of an update, what it may be, and the factor on steps: by hand, and against a plain loop."""

import math

import pytest
import torch

from trl_stppo.core.trust_region import (
    first_growth,
    kl_per_turn,
    largest_spread,
    next_step_factor,
    shortened_factor,
    spread_gain,
)

NAN, INF = float("nan"), float("inf")


def test_the_kl_by_hand():
    # Turn 0: ratios 2 and 1/2; turn 1 does not train; turn 2: ratio 1. Outside turns anything may stand.
    index = torch.tensor([[0, 0, -1, 1, 2]])
    mask = torch.tensor([[True, True, False, False, True]])
    start = torch.tensor([[-1.0, -1.0, NAN, 0.0, -3.0]], dtype=torch.float64)
    new = start + torch.tensor([[math.log(2), -math.log(2), INF, 9.0, 0.0]], dtype=torch.float64)
    total, turns = kl_per_turn(new, start, index, mask)
    assert turns == 2
    assert total.item() == pytest.approx((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)), rel=1e-12)


def test_the_kl_against_a_loop_and_under_padding_and_splits():
    torch.manual_seed(0)
    start = torch.randn(6, 9, dtype=torch.float64)
    new = start + 0.5 * torch.randn(6, 9)
    index = torch.tensor([[0, 0, -1, 1, 1, 1, -1, 2, -1]] * 6)
    mask = (index >= 0) & (torch.rand(6, 9) < 0.5)
    expected, turns = 0.0, set()
    for row in range(6):
        for token in range(9):
            if mask[row, token]:
                x = float(new[row, token]) - float(start[row, token])
                expected += math.exp(x) - 1 - x
                turns.add((row, int(index[row, token])))
    total, count = kl_per_turn(new.requires_grad_(), start, index, mask)
    assert not total.requires_grad
    assert (total.item(), count.item()) == pytest.approx((expected, len(turns)), rel=1e-12)
    parts = [kl_per_turn(new[i], start[i], index[i], mask[i]) for i in (slice(0, 2), slice(2, 6))]
    assert sum(p[0] for p in parts).item() == pytest.approx(expected, rel=1e-12)
    assert sum(p[1] for p in parts) == count
    wide = [torch.nn.functional.pad(x, (0, 3), value=v) for x, v in ((new, NAN), (start, 1.0))]
    empty = torch.nn.functional.pad(index, (0, 3), value=-1), torch.nn.functional.pad(mask, (0, 3))
    assert kl_per_turn(*wide, *empty)[0].item() == total.item()


def test_one_token_keeps_the_kl_finite_and_nothing_is_no_turn():
    ids = torch.zeros(1, 1, dtype=torch.int64)
    total, _ = kl_per_turn(torch.full((1, 1), 500.0), torch.zeros(1, 1), ids, ids == 0)
    assert total.item() == pytest.approx(math.expm1(20.0) - 500.0)
    nothing = kl_per_turn(torch.ones(1, 1), ids.float(), ids, ids > 0)
    assert [x.item() for x in nothing] == [0.0, 0.0]


def test_the_largest_spread_is_a_mean_of_three_and_is_forgotten():
    spreads, largest, seen = [0.1, 0.5, 0.3, 0.2, 0.0], 0.0, []
    for count in range(1, len(spreads) + 1):
        largest = largest_spread(largest, spreads[:count])
        seen.append(largest)
    forget = 0.5 ** (1 / 50)
    assert seen[:2] == [0.0, 0.0], "no mean of three yet"
    assert seen[2] == pytest.approx(0.3)
    assert seen[3] == pytest.approx(1.0 / 3)
    assert seen[4] == pytest.approx(forget / 3)
    for _ in range(49):
        largest = largest_spread(largest, [0.0, 0.0, 0.0])
    assert largest == pytest.approx(0.5 / 3)


@pytest.mark.parametrize(("spread", "largest", "gain"), [
    (0.3, 0.0, 1.0),
    (0.3, 0.3, 1.0),
    (0.6, 0.3, 1.0),
    (0.15, 0.3, 0.25),
    (0.029, 0.3, 0.01),
    (0.0, 0.3, 0.01),
])  # fmt: skip
def test_the_gain_by_hand(spread, largest, gain):
    assert spread_gain(spread, largest) == pytest.approx(gain)


@pytest.mark.parametrize(("kl", "factor"), [
    (-0.1, 0.4 * 0.7),
    (0.0, 0.4 * 0.7),
    (0.2, 0.4 * 0.7),
    (0.4, 0.4 * 0.5),
    (1.6, 0.4 * 0.25),
    (9.0, 0.4 * 0.25),
    (NAN, 0.4 * 0.25),
    (INF, 0.4 * 0.25),
])  # fmt: skip
def test_a_step_that_is_too_large_shortens_the_factor(kl, factor):
    assert shortened_factor(0.4, kl, 0.1) == pytest.approx(factor, rel=1e-12)
    assert shortened_factor(0.0011, kl, 0.1) == 0.001


@pytest.mark.parametrize(("kl", "may_grow", "factor"), [
    (0.201, True, 0.3 / 1.5),
    (0.3, False, 0.3 * math.sqrt(1 / 3)),
    (0.4, True, 0.15),
    (9.0, True, 0.075),
    (0.2, True, 0.3),
    (0.05, True, 0.3),
    (0.049, True, 0.3 * math.sqrt(0.1 / 0.049)),
    (0.001, True, 0.45),
    (0.001, False, 0.3),
    (0.0, True, 0.3),
    (-0.1, True, 0.3),
])  # fmt: skip
def test_the_factor_after_an_update_by_hand(kl, may_grow, factor):
    assert next_step_factor(0.3, kl, 0.1, may_grow=may_grow) == pytest.approx(factor, rel=1e-12)


def test_the_factor_has_bounds():
    assert next_step_factor(0.9, 1e-9, 0.1) == 1.0
    assert next_step_factor(0.0011, 1.0, 0.1) == 0.001
    assert next_step_factor(0.1, 1e-9, 0.1, growth=4.0) == pytest.approx(0.4)


@pytest.mark.parametrize(("kl", "growth"), [
    (0.1 / 64, 4.0), (0.1 / 9, 1.5), (0.1, 0.5), (1e-9, 10.0), (0.0, 1.5), (-0.1, 1.5),
])  # fmt: skip
def test_the_first_growth_by_hand(kl, growth):
    assert first_growth(kl, 0.1) == pytest.approx(growth, rel=1e-12)
