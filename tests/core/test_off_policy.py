import math

import pytest
import torch

from trl_stppo import core


def tensor(rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


# ------------------------------------------------------------------------------ winners


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
    assert core.winner_weights(advantages[order], mask[order]).tolist() == [
        expected[i] for i in order
    ]


def test_winners_of_half_precision_come_out_wide():
    # 100 + 0.25 - 100 is 0.25, which bfloat16 loses
    advantages = tensor([[100.0, 0.25, -100.0]], torch.bfloat16)
    weights = core.winner_weights(advantages, torch.ones(1, 3, dtype=torch.bool))
    assert weights.dtype == torch.float32
    assert weights.tolist() == [1.0]


# ----------------------------------------------------------------------------- episodes


def rows(batch=6, tokens=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    kept, clipped = torch.randn(2, batch, tokens, generator=draw, dtype=torch.float64)
    gone = torch.rand(batch, tokens, generator=draw) < 0.5
    logprobs = -3 * torch.rand(batch, tokens, generator=draw, dtype=torch.float64)
    entropies = 2 * torch.rand(batch, tokens, generator=draw, dtype=torch.float64)
    mask = torch.rand(batch, tokens, generator=draw) < 0.8
    return kept.masked_fill(gone, 0), clipped.masked_fill(~gone, 0), logprobs, entropies, mask


def by_loop(kept, clipped, logprobs, entropies, mask, power):
    weights = []
    for b in range(len(mask)):
        squares = [0.0, 0.0]
        for i, part in enumerate((kept, clipped)):
            for t in range(mask.shape[1]):
                if mask[b, t]:
                    p, entropy = math.exp(logprobs[b, t].item()), entropies[b, t].item()
                    q = max(1 - 2 * p + math.exp(-entropy), (1 - p) ** 2)
                    squares[i] += part[b, t].item() ** 2 * q
        g, c = math.sqrt(squares[0]), math.sqrt(squares[1])
        weights.append(1.0 if c <= 1e-12 else (g / (g + c)) ** power)
    return weights


@pytest.mark.parametrize("power", [1.0, 4.0, 0.5])
def test_episode_weights_against_a_loop(power):
    given = rows()
    weights = core.episode_weights(*given, power)
    assert weights.tolist() == pytest.approx(by_loop(*given, power), rel=1e-12)
    assert 0 <= weights.min() < weights.max() <= 1


def test_episode_weights_by_hand():
    # Two equally likely tokens: q is 1/2 throughout. Norms 3 : 1, nothing clipped, all clipped, nothing.
    kept, clipped = tensor([[3.0], [1.0], [0.0], [0.0]]), tensor([[1.0], [0.0], [2.0], [0.0]])
    half, entropy = torch.full((4, 1), 0.5).log(), torch.full((4, 1), math.log(2))
    mask = torch.ones(4, 1, dtype=torch.bool)
    weights = core.episode_weights(kept, clipped, half, entropy, mask, 2.0)
    assert weights.tolist() == pytest.approx([9 / 16, 1.0, 0.0, 1.0])


def test_what_an_episodes_tokens_share_cancels_in_its_weight():
    kept, clipped, *others = rows()
    factor = torch.linspace(1e-3, 50.0, len(kept), dtype=torch.float64).unsqueeze(1)
    expected = core.episode_weights(kept, clipped, *others, 4.0)
    found = core.episode_weights(factor * kept, factor * clipped, *others, 4.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_padding_order_and_what_is_off_the_mask_change_no_episode_weight():
    *given, mask = rows()
    expected = core.episode_weights(*given, mask, 4.0)
    spoilt = [part.masked_fill(~mask, math.nan) for part in given]
    assert torch.equal(core.episode_weights(*spoilt, mask, 4.0), expected)
    padded = [torch.nn.functional.pad(part, (0, 3), value=7.0) for part in given]
    wider = torch.nn.functional.pad(mask, (0, 3))
    torch.testing.assert_close(core.episode_weights(*padded, wider, 4.0), expected)
    order = torch.tensor([3, 1, 0, 5, 2, 4])
    turned = core.episode_weights(*(part[order] for part in given), mask[order], 4.0)
    assert torch.equal(turned, expected[order])
    nothing = torch.zeros_like(mask)
    assert core.episode_weights(*given, nothing, 4.0).tolist() == [1.0] * len(mask)


def test_wrong_shapes_and_dtypes_are_named():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantages has shape \[2, 2\]"):
        core.winner_weights(x[:, :2], mask)
    with pytest.raises(ValueError, match="advantages must be floating point"):
        core.winner_weights(x.long(), mask)
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        core.winner_weights(x, x)
    with pytest.raises(ValueError, match="power must be a finite number > 0"):
        core.episode_weights(x, x, x, x, mask, 0.0)
    with pytest.raises(ValueError, match=r"entropies has shape \[2, 2\]"):
        core.episode_weights(x, x, x, x[:, :2], mask, 4.0)
