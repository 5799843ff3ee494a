import math

import pytest
import torch

from trl_stppo import core


def square(coefficient, logprobs, entropies, mask=None):
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (coefficient, logprobs, entropies)]
    mask = torch.ones_like(tensors[0], dtype=torch.bool) if mask is None else torch.tensor(mask)
    return core.logit_space_squares(*tensors, mask).sum()


def exact(logits, chosen, coefficient):
    """|c (onehot - p)|^2 token by token, from the table of probabilities."""
    total = 0.0
    for row, y, c in zip(logits, chosen, coefficient, strict=True):
        p = [math.exp(z) / sum(math.exp(w) for w in row) for z in row]
        total += sum((c * ((v == y) - p[v])) ** 2 for v in range(len(row)))
    return total


def test_by_hand():
    # Uniform over four: 1 - 2/4 + 1/4 = 3/4, times 2^2; the second token is certain: nothing.
    out = square([[2.0, 5.0]], [[math.log(0.25), 0.0]], [[math.log(4), 0.0]])
    assert out.item() == pytest.approx(3.0, rel=1e-14)


def test_exact_where_the_distribution_is_uniform_on_its_support():
    logits = [[0.0] * 3 + [-1e3] * 2, [1.0] * 5]
    out = square([[0.5, -2.0]], [[-math.log(3), -math.log(5)]], [[math.log(3), math.log(5)]])
    assert out.item() == pytest.approx(exact(logits, [1, 4], [0.5, -2.0]), rel=1e-12)


def test_close_to_exact_from_below_elsewhere():
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 12, generator=draw, dtype=torch.float64)
    logp = logits.log_softmax(-1)
    chosen = torch.multinomial(logp.exp(), 1, generator=draw)
    entropy = -(logp.exp() * logp).sum(-1)
    coefficient = torch.randn(50, generator=draw, dtype=torch.float64)
    mask = torch.ones(1, 50, dtype=torch.bool)
    rows = coefficient[None], logp.gather(-1, chosen).T, entropy[None]
    out = core.logit_space_squares(*rows, mask).sum().item()
    truth = exact(logits.tolist(), chosen.squeeze(1).tolist(), coefficient.tolist())
    assert 0.7 * truth < out <= truth * (1 + 1e-12)


def test_what_does_not_count_is_inert():
    values = [[1.0, math.nan]], [[-1.0, math.nan]], [[0.5, math.inf]]
    assert square(*values, [[True, False]]) == square([[1.0]], [[-1.0]], [[0.5]])
    assert square(*values, [[False, False]]) == 0.0


def test_never_negative_and_detached():
    logprobs = torch.tensor([[-1e-9]], requires_grad=True)
    out = core.logit_space_squares(torch.ones(1, 1), logprobs, torch.full((1, 1), 9.0), logprobs < 0)
    assert out >= 0
    assert not out.requires_grad
    assert out.dtype == torch.float32
