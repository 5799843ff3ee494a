"""The KL of an update, what it may be, and the factor on steps: by hand, and against a plain loop."""

import math

import pytest
import torch

from trl_stppo.core.trust_region import Region, kl_per_turn

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
    region, seen = Region(), []
    for spread in (0.1, 0.5, 0.3, 0.2, 0.0):
        region = region.after_rollout(spread)
        seen.append(region.largest)
    forget = 0.5 ** (1 / 50)
    assert seen[:2] == [0.0, 0.0], "no mean of three yet"
    assert seen[2] == pytest.approx(0.3)
    assert seen[3] == pytest.approx(1.0 / 3)
    assert seen[4] == pytest.approx(forget / 3)
    for _ in range(49):
        region = region.after_rollout(0.0)
    assert region.largest == pytest.approx(0.5 / 3)


@pytest.mark.parametrize(("spread", "largest", "gain"), [
    (0.3, 0.0, 1.0),
    (0.3, 0.3, 1.0),
    (0.6, 0.3, 1.0),
    (0.15, 0.3, 0.25),
    (0.029, 0.3, 0.01),
    (0.0, 0.3, 0.01),
])  # fmt: skip
def test_the_gain_by_hand(spread, largest, gain):
    assert Region(largest=largest).gain(spread) == pytest.approx(gain)


@pytest.mark.parametrize(("ratio", "factor"), [
    (4.0, 0.4 * 0.5), (16.0, 0.4 * 0.25), (90.0, 0.4 * 0.25), (NAN, 0.4 * 0.25), (INF, 0.4 * 0.25),
])  # fmt: skip
def test_a_step_that_is_too_large_shortens_the_factor(ratio, factor):
    assert Region(0.4).after_refusal(ratio) == Region(pytest.approx(factor), starts=False)
    assert Region(0.0011).after_refusal(ratio).factor == 0.001


@pytest.mark.parametrize(("ratio", "may_grow", "factor"), [
    (2.01, True, 0.3 / 1.5),
    (3.0, False, 0.3 * math.sqrt(1 / 3)),
    (4.0, True, 0.15),
    (90.0, True, 0.075),
    (2.0, True, 0.3),
    (0.5, True, 0.3),
    (0.49, True, 0.3 * math.sqrt(1 / 0.49)),
    (0.01, True, 0.45),
    (0.01, False, 0.3),
    (0.0, True, 0.3),
    (-1.0, True, 0.3),
])  # fmt: skip
def test_the_factor_after_an_update_by_hand(ratio, may_grow, factor):
    region = Region(0.3, starts=False).after_update(ratio, 32, may_grow=may_grow)
    assert region == Region(pytest.approx(factor, rel=1e-12), starts=False)


@pytest.mark.parametrize(("ratio", "growth", "starts"), [
    (1 / 64, 4.0, True), (1 / 9, 1.5, False), (1e-8, 10.0, True), (1.0, 1.0, False),
    (0.0, 1.0, True), (-1.0, 1.0, True),
])  # fmt: skip
def test_the_first_updates_by_hand(ratio, growth, starts):
    region = Region(0.05).after_update(ratio, 32, may_grow=True)
    assert region == Region(pytest.approx(0.05 * growth), starts=starts)


def test_the_factor_has_bounds():
    assert Region(0.9).after_update(1e-8, 32, may_grow=True).factor == 1.0
    assert Region(0.0011).after_update(10.0, 32, may_grow=True).factor == 0.001


def test_updates_of_few_turns_decide_together():
    region = Region(starts=False).after_update(8.0, 8, may_grow=True)
    assert region == Region(starts=False, measured=64.0, turns=8)
    assert region.after_update(0.0, 24, may_grow=True).factor == 0.1, "r is 2 in the mean"
    assert region.after_refusal(4.0) == Region(0.05, starts=False), "a refusal decides alone"
