"""Advantages relative to the other episodes of a prompt."""

import math

import pytest
import torch

from trl_stppo import core
from trl_stppo.core import advantages as module

NAN = float("nan")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def loop(scores, counts, scale):
    every = [s for row, mask in zip(scores, counts, strict=True) for s, c in zip(row, mask, strict=True) if c]
    out = []
    for row, mask in zip(scores, counts, strict=True):
        kept = [s for s, c in zip(row, mask, strict=True) if c]
        mean = sum(kept) / len(kept) if kept else 0.0
        spread = {"group": kept, "batch": every, "none": []}[scale]
        centre = sum(spread) / len(spread) if spread else 0.0
        squares = sum((s - centre) ** 2 for s in spread)
        deviation = math.sqrt(squares / (len(spread) - 1)) if len(spread) > 1 else 0.0
        unit = 1.0 if scale == "none" else deviation + 1e-4
        out.append([(s - mean) / unit if c else 0.0 for s, c in zip(row, mask, strict=True)])
    return out


def test_by_hand(close):
    scores = tensor([1.0, 3.0, NAN], [5.0, 5.0, 5.0])
    counts = torch.tensor([[True, True, False], [True, True, True]])
    # group 1: mean 2, std sqrt(2); group 2: all equal
    unit = math.sqrt(2) + 1e-4
    close(core.group_advantages(scores, counts), [[-1 / unit, 1 / unit, 0], [0, 0, 0]])
    close(core.group_advantages(scores, counts, "none"), [[-1, 1, 0], [0, 0, 0]])
    # batch: 1, 3, 5, 5, 5: mean 3.8, squares 7.84 + 0.64 + 3 * 1.44 = 12.8, std sqrt(3.2)
    unit = math.sqrt(3.2) + 1e-4
    close(core.group_advantages(scores, counts, "batch"), [[-1 / unit, 1 / unit, 0], [0, 0, 0]])


@pytest.mark.parametrize("scale", core.GROUP_SCALES)
@pytest.mark.parametrize("seed", range(4))
def test_against_a_plain_loop(scale, seed, close):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    counts = torch.rand(5, 4, generator=draw) < 0.6
    counts[0] = False
    close(core.group_advantages(scores, counts, scale), loop(scores.tolist(), counts.tolist(), scale))


@pytest.mark.parametrize("scale", core.GROUP_SCALES)
def test_what_does_not_count_is_inert(scale):
    scores = tensor([1.0, 2.0, 0.0], [0.0, 4.0, 1.0])
    counts = torch.tensor([[True, True, False], [False, True, True]])
    expected = core.group_advantages(scores, counts, scale)
    for poison in (NAN, 1e30, -math.inf):
        assert torch.equal(
            core.group_advantages(scores.masked_fill(~counts, poison), counts, scale), expected
        )


def test_invariances(close):
    scores = tensor([1.0, 2.0, 4.0], [0.0, 4.0, 1.0])
    counts = torch.ones(2, 3, dtype=torch.bool)
    result = core.group_advantages(scores, counts)
    close(core.group_advantages(scores + 7.0, counts), result)
    assert torch.allclose(core.group_advantages(scores * 50.0, counts), result, atol=1e-3)
    close(core.group_advantages(scores.flip(0, 1), counts), result.flip(0, 1))
    # A group does not know of the others, unless they share the deviation.
    close(core.group_advantages(scores[:1], counts[:1]), result[:1])


def test_half_precision_and_edges():
    counts = torch.ones(1, 2, dtype=torch.bool)
    assert core.group_advantages(torch.ones(1, 2).bfloat16(), counts).dtype == torch.float32
    alone = core.group_advantages(torch.ones(3, 1), torch.ones(3, 1, dtype=torch.bool))
    assert alone.tolist() == [[0.0]] * 3
    assert core.group_advantages(torch.zeros(0, 2), torch.zeros(0, 2).bool()).shape == (0, 2)


@pytest.fixture(params=["float64 on the device", "float32 alone"])
def device(request, monkeypatch):
    """Devices that can do float64, and those (Apple's GPUs) that cannot."""
    if request.param == "float32 alone":
        monkeypatch.setattr(module, "widest", lambda x: x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", core.GROUP_SCALES)
def test_equal_scores_have_no_advantage(device, scale, dtype):
    for value in (300.7, -1000.1, 0.1, 1e17):
        for number in (2, 3, 6, 7, 129):
            scores = torch.full((2, number), value, dtype=dtype)
            counts = torch.ones(2, number, dtype=torch.bool)
            counts[1, 0] = False
            assert (core.group_advantages(scores, counts, scale) == 0).all()


def test_a_spread_of_one_rounding_step_keeps_its_signs(device, close):
    # 300.7 four times and the next float32 above it, 2^-15 away, twice: the mean lies a third up
    low = torch.tensor(300.7)
    high = torch.nextafter(low, torch.tensor(math.inf))
    scores = torch.stack([low, low, high, low, high, low])[None]
    step = 2**-15
    unit = step * math.sqrt(6 / 5 * 2 / 9) + 1e-4
    signs = torch.tensor([[-1.0, -1.0, 2.0, -1.0, 2.0, -1.0]]) / 3
    counts = torch.ones(1, 6, dtype=torch.bool)
    close(core.group_advantages(scores, counts), signs * step / unit)
    close(core.group_advantages(scores, counts, "none"), signs * step, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("size", [1e20, 1e37])
def test_huge_scores_come_out_as_small_ones_do(size, scale, dtype):
    scores = size * torch.tensor([[1.0, -1.0, 0.0]], dtype=dtype)
    out = core.group_advantages(scores, torch.ones(1, 3, dtype=torch.bool), scale)
    assert out[0].tolist() == pytest.approx([1.0, -1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_what_is_too_large_for_the_device_is_not_taken_for_equal(monkeypatch, scale):
    monkeypatch.setattr(module, "widest", lambda x: x)
    # The squares overflow.
    scores = torch.tensor([[1e20, -1e20, 0.0]])
    out = core.group_advantages(scores, torch.ones(1, 3, dtype=torch.bool), scale)
    assert out.isnan().all()


@pytest.mark.parametrize("scale", core.GROUP_SCALES)
def test_gradients_are_zero_where_nothing_counts(scale):
    counts = torch.tensor([[True, True, False], [False, True, True]])
    for poison in (NAN, math.inf, 1e30):
        scores = tensor([1.0, 2.0, 0.0], [0.0, 4.0, 1.0]).masked_fill(~counts, poison)
        scores.requires_grad_()
        out = core.group_advantages(scores, counts, scale)
        (out * tensor([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])).sum().backward()
        assert (scores.grad[~counts] == 0).all()
        assert torch.isfinite(scores.grad).all()
