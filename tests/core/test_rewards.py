import pytest
import torch

from tests.kit import references
from trl_stppo import core

NAN = float("nan")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_token_rewards_by_hand(close):
    index = torch.tensor([[0, 0, -1, 1, 2], [-1, 0, 0, -1, -1], [-1] * 5])
    out = core.token_rewards(
        index,
        scores=torch.tensor([10.0, 20.0, NAN]).double(),
        turn_rewards=tensor([1.0, 2.0, 3.0], [4.0, NAN, NAN], [NAN, NAN, NAN]),
        kl=tensor([0.1, 0.2, NAN, 0.3, 0.4], [NAN, 0.5, 0.6, NAN, NAN], [NAN] * 5),
        kl_coef=0.5,
    )
    # turn rewards on tokens 1, 3, 4 (3 and 4 are adjacent turns), the score on the last of them
    expected = [
        [-0.05, 1.0 - 0.1, 0.0, 2.0 - 0.15, 3.0 + 10.0 - 0.2],
        [0.0, -0.25, 4.0 + 20.0 - 0.3, 0.0, 0.0],
        [0.0] * 5,
    ]
    close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_turn_rewards", [False, True])
@pytest.mark.parametrize("with_kl", [False, True])
def test_token_rewards_against_reference(make_batch, close, with_turn_rewards, with_kl, dtype):
    batch = make_batch(11, dtype=dtype)
    kwargs = {"turn_rewards": batch.turn_rewards} if with_turn_rewards else {}
    kwargs |= {"kl": batch.logprobs, "kl_coef": 0.3} if with_kl else {}
    actual = core.token_rewards(batch.turn_index, scores=batch.scores, **kwargs)
    kwargs = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    index, scores = batch.turn_index.tolist(), batch.scores.tolist()
    close(actual, references.token_rewards(index, scores, **kwargs))


def test_every_turn_needs_its_column():
    index = torch.tensor([[0, -1, 1, 1], [0, 0, -1, -1]])
    scores = torch.zeros(2)
    with pytest.raises(ValueError, match="columns of turn_rewards is 1, but turn_index has 2 turns"):
        core.token_rewards(index, scores=scores, turn_rewards=torch.ones(2, 1))
    with pytest.raises(ValueError, match="columns of turn_rewards is 0, but turn_index has 2 turns"):
        core.token_rewards(index, scores=scores, turn_rewards=torch.ones(2, 0))
    out = core.token_rewards(index, scores=scores, turn_rewards=torch.ones(2, 2))
    assert out.tolist() == [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    nothing = torch.full((2, 4), -1)
    out = core.token_rewards(nothing, scores=scores, turn_rewards=torch.ones(2, 0))
    assert torch.equal(out, torch.zeros(2, 4))


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e30])
def test_gradients_are_zero_where_nothing_counts(make_batch, garbage):
    batch = make_batch(13)
    outside, turns = batch.turn_index < 0, core.num_turns(batch.turn_index)
    missing = torch.arange(5) >= turns[:, None]
    kl = batch.logprobs.masked_fill(outside, garbage).requires_grad_()
    paid = batch.turn_rewards.masked_fill(missing, garbage).requires_grad_()
    scores = batch.scores.masked_fill(turns == 0, garbage).requires_grad_()
    out = core.token_rewards(batch.turn_index, scores=scores, turn_rewards=paid, kl=kl, kl_coef=0.1)
    assert (out[outside] == 0).all()
    out.square().sum().backward()
    for x, off in ((kl, outside), (paid, missing), (scores, turns == 0)):
        assert torch.isfinite(x.grad).all()
        assert (x.grad[off] == 0).all()
        assert (x.grad[~off] != 0).any()
