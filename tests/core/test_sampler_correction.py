"""Weights for the gap to the sampler: by hand, against plain loops, and their edge cases."""

import math

import pytest
import torch

from trl_stppo import core

NAN = float("nan")


def reference(old, sampling, index, level, truncate, low, high):
    """The same weights with plain loops, in Python's floats."""
    out = []
    for b, row in enumerate(index):
        gaps = {
            t: 0.0 if math.isnan(sampling[b][t]) else old[b][t] - sampling[b][t]
            for t, k in enumerate(row)
            if k >= 0
        }
        weights = [1.0] * len(row)
        for t in gaps:
            group = {
                "token": [t],
                "turn": [s for s in gaps if row[s] == row[t]],
                "sequence": list(gaps),
            }[level]
            ratio = math.exp(sum(gaps[s] for s in group) / len(group))
            below = low is not None and ratio < low
            above = high is not None and ratio > high
            if below or above:
                weights[t] = (low if below else high) if truncate else 0.0
            else:
                weights[t] = ratio
        out.append(weights)
    return out


# d = 0.5, 0.1 | observation | -0.9, unknown | 2.0; turns of two, two and one token
SAMPLING = torch.tensor([[-1.5, -1.1, 7.0, -0.1, NAN, -3.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.0, -1.0, NAN, -1.0, -1.0, -1.0]], dtype=torch.float64)
INDEX = torch.tensor([[0, 0, -1, 1, 1, 2]])


@pytest.mark.parametrize(("level", "truncate", "low", "high", "expected"), [
    # means of the turns: 0.3, -0.45, 2.0
    ("turn", True, None, 2.0, [math.exp(0.3)] * 2 + [1.0] + [math.exp(-0.45)] * 2 + [2.0]),
    ("turn", False, None, 2.0, [math.exp(0.3)] * 2 + [1.0] + [math.exp(-0.45)] * 2 + [0.0]),
    ("turn", True, 0.9, None, [math.exp(0.3)] * 2 + [1.0] + [0.9] * 2 + [math.exp(2.0)]),
    ("turn", False, 0.9, 2.0, [math.exp(0.3)] * 2 + [1.0, 0.0, 0.0, 0.0]),
    ("token", True, 0.5, 2.0, [math.exp(0.5), math.exp(0.1), 1.0, 0.5, 1.0, 2.0]),
    # all five tokens: (0.5 + 0.1 - 0.9 + 0 + 2.0) / 5 = 0.34
    ("sequence", True, None, 2.0, [math.exp(0.34)] * 2 + [1.0] + [math.exp(0.34)] * 3),
    ("sequence", False, None, 1.2, [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
])  # fmt: skip
def test_by_hand(close, level, truncate, low, high, expected):
    weights = core.sampler_correction(
        OLD, SAMPLING, INDEX, level, truncate=truncate, clip_min=low, clip_max=high
    )
    close(weights, [expected])


@pytest.mark.parametrize("bounds", [(None, None), (None, 1.1), (0.9, None), (0.8, 1.2)])
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_against_plain_loops(make_batch, close, level, truncate, bounds):
    for seed in range(3):
        batch = make_batch(seed)
        sampling = batch.logprobs.clone()
        unknown = torch.rand(sampling.shape, generator=torch.manual_seed(seed)) < 0.1
        sampling[unknown] = NAN
        args = (batch.old_logprobs, sampling, batch.turn_index)
        actual = core.sampler_correction(
            *args, level, truncate=truncate, clip_min=bounds[0], clip_max=bounds[1]
        )
        close(actual, reference(*(arg.tolist() for arg in args), level, truncate, *bounds))


def test_with_one_token_turns_the_turn_level_is_the_token_level(make_batch, close):
    batch = make_batch(0)
    index = torch.arange(23).expand(6, 23)
    args = (batch.old_logprobs, batch.logprobs, index)
    turn, token = (
        core.sampler_correction(*args, level, truncate=True, clip_max=1.3) for level in ("turn", "token")
    )
    close(turn, token)


@pytest.mark.parametrize("garbage", [NAN, 1e3, -1e3, float("inf"), float("-inf")])
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_observations_and_padding_are_inert_and_weigh_one(make_batch, level, truncate, garbage):
    batch = make_batch(1)
    outside = batch.turn_index < 0
    assert outside.any()

    def weights(old, sampling):
        return core.sampler_correction(
            old, sampling, batch.turn_index, level, truncate=truncate, clip_min=0.8, clip_max=1.2
        )

    clean = weights(batch.old_logprobs, batch.logprobs)
    poisoned = weights(
        batch.old_logprobs.masked_fill(outside, garbage),
        batch.logprobs.masked_fill(outside, garbage),
    )
    assert torch.equal(clean, poisoned)
    assert (clean[outside] == 1.0).all()
    assert (clean[~outside] != 1.0).any()


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
@pytest.mark.parametrize("bounds", [(None, 1.0), (1.0, None), (1.0, 1.0)])
@pytest.mark.parametrize("truncate", [True, False])
def test_a_ratio_on_a_bound_is_inside(level, bounds, truncate):
    same, index = torch.full((1, 3), -0.7), torch.tensor([[0, 0, 1]])
    out = core.sampler_correction(
        same, same, index, level, truncate=truncate, clip_min=bounds[0], clip_max=bounds[1]
    )
    assert out.tolist() == [[1.0, 1.0, 1.0]]


def test_half_precision_is_computed_in_float32():
    old = torch.tensor([[-1.0, -1.5]], dtype=torch.bfloat16)
    out = core.sampler_correction(old, old - 0.25, torch.tensor([[0, 0]]), "turn", truncate=True)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.full((1, 2), math.exp(0.25)))


@pytest.mark.parametrize(("truncate", "low", "high", "expected"), [
    # 0.5 + 0.1 - 0.9 + 0 + 2.0 = 1.7
    (True, None, None, math.exp(1.7)),
    (True, None, 3.0, 3.0),
    (False, None, 3.0, 0.0),
    (True, 6.0, None, 6.0),
    (False, 6.0, None, 0.0),
    (False, 5.0, 6.0, math.exp(1.7)),
])  # fmt: skip
def test_the_product_over_an_episode_by_hand(close, truncate, low, high, expected):
    """One weight per episode, as TRL has it at its level "sequence"."""
    arguments = (OLD, SAMPLING, INDEX, "product")
    close(
        core.sampler_correction(*arguments, truncate=truncate, clip_min=low, clip_max=high),
        [[expected]],
    )


def test_the_product_is_that_of_the_token_weights(make_batch, close):
    batch = make_batch(3)
    args = batch.old_logprobs, batch.logprobs, batch.turn_index
    tokens = core.sampler_correction(*args, "token", truncate=True).tolist()
    # The ratio outside turns is 1.
    expected = [[math.prod(row)] for row in tokens]
    close(core.sampler_correction(*args, "product", truncate=True), expected)
