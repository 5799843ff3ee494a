import pytest
import torch

from tests.kit import references
from trl_stppo import core

NAN = float("nan")


@pytest.mark.parametrize(("level", "expected"), [
    # d = 0.1, 0.3 | obs | -0.6, at the tokens themselves
    ("token", [0.1, 0.3, 0.0, -0.6]),
    # turn 0: (0.1 + 0.3) / 2 = 0.2; turn 1: -0.6
    ("turn", [0.2, 0.2, 0.0, -0.6]),
    # (0.1 + 0.3 - 0.6) / 3 = -0.2 / 3
    ("sequence", [-0.2 / 3, -0.2 / 3, 0.0, -0.2 / 3]),
])  # fmt: skip
def test_by_hand(close, level, expected):
    logprobs = torch.tensor([[-0.9, -0.7, NAN, -1.6]], dtype=torch.float64)
    old_logprobs = torch.tensor([[-1.0, -1.0, 1e3, -1.0]], dtype=torch.float64)
    index = torch.tensor([[0, 0, -1, 1]])
    close(core.log_importance_ratio(logprobs, old_logprobs, index, level), [expected])


def test_loss_mask_restricts_the_means_by_hand(close):
    logprobs = torch.tensor([[0.1, 0.3, 0.9, -0.6]], dtype=torch.float64)
    index = torch.tensor([[0, 0, 0, 1]])
    loss_mask = torch.tensor([[True, False, True, True]])
    zeros = torch.zeros_like(logprobs)
    # turn 0 counts 0.1 and 0.9 only: mean 0.5; sequence: (0.1 + 0.9 - 0.6) / 3 = 0.4 / 3
    turn = core.log_importance_ratio(logprobs, zeros, index, "turn", loss_mask=loss_mask)
    close(turn, [[0.5, 0.0, 0.5, -0.6]])
    sequence = core.log_importance_ratio(logprobs, zeros, index, "sequence", loss_mask=loss_mask)
    close(sequence, [[0.4 / 3, 0.0, 0.4 / 3, 0.4 / 3]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_loss_mask", [False, True])
@pytest.mark.parametrize("level", core.RATIO_LEVELS)
@pytest.mark.parametrize("seed", range(4))
def test_against_reference(make_batch, close, seed, level, with_loss_mask, dtype):
    batch = make_batch(seed, dtype=dtype)
    loss_mask = batch.loss_mask if with_loss_mask else None
    actual = core.log_importance_ratio(
        batch.logprobs, batch.old_logprobs, batch.turn_index, level, loss_mask=loss_mask
    )
    expected = references.log_ratio(
        batch.logprobs.tolist(), batch.old_logprobs.tolist(), batch.turn_index.tolist(), level,
        loss_mask.tolist() if with_loss_mask else None,
    )  # fmt: skip
    close(actual, expected)


def test_one_token_turns_reduce_to_token_level(make_batch, close):
    batch = make_batch(0)
    index = torch.arange(23).expand(6, 23)
    args = (batch.logprobs, batch.old_logprobs, index)
    close(core.log_importance_ratio(*args, "turn"), core.log_importance_ratio(*args, "token"))


def test_one_turn_per_episode_reduces_to_sequence_level(make_batch, close):
    batch = make_batch(0)
    index = core.turn_index_from_spans([[(0, 5)], [(2, 23)], [], [(22, 23)], [(0, 23)], []], 23)
    args = (batch.logprobs, batch.old_logprobs, index)
    turn = core.log_importance_ratio(*args, "turn")
    close(turn, core.log_importance_ratio(*args, "sequence"))
    assert not torch.allclose(turn, core.log_importance_ratio(*args, "token"))


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_the_same_policy_has_log_ratio_zero(make_batch, level):
    batch = make_batch(1)
    out = core.log_importance_ratio(batch.logprobs, batch.logprobs, batch.turn_index, level)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("garbage", [NAN, float("-inf"), 1e3])
@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_tokens_that_do_not_count_are_inert(make_batch, level, garbage):
    batch = make_batch(2)

    def run(logprobs, old_logprobs):
        logprobs = logprobs.clone().requires_grad_()
        out = core.log_importance_ratio(
            logprobs, old_logprobs, batch.turn_index, level, loss_mask=batch.loss_mask
        )
        (out.exp() * batch.advantages).sum().backward()
        return out.detach(), logprobs.grad

    clean, clean_grad = run(batch.logprobs, batch.old_logprobs)
    poisoned, poisoned_grad = run(
        batch.logprobs.masked_fill(~batch.loss_mask, garbage),
        batch.old_logprobs.masked_fill(~batch.loss_mask, garbage),
    )
    assert torch.equal(clean, poisoned)
    assert torch.equal(clean_grad, poisoned_grad)
    assert (poisoned_grad[~batch.loss_mask] == 0).all()
    assert (poisoned_grad[batch.loss_mask] != 0).any()
    assert (clean[~batch.loss_mask] == 0).all()


def test_the_gradient_flows_through_the_mean(close):
    logprobs = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 0, 0, 1]])
    out = core.log_importance_ratio(logprobs, torch.zeros(1, 4).double(), index, "turn")
    out[0, 0].backward()
    # one token's log ratio depends on all three tokens of its turn, a third each, on no other turn
    close(logprobs.grad, [[1 / 3, 1 / 3, 1 / 3, 0.0]])


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_padding_and_episode_order_change_nothing(make_batch, close, level):
    batch = make_batch(4)
    args = (batch.logprobs, batch.old_logprobs, batch.turn_index)
    plain = core.log_importance_ratio(*args, level)
    pad = torch.nn.functional.pad
    padded = core.log_importance_ratio(
        pad(args[0], (2, 7), value=NAN), pad(args[1], (2, 7), value=9.0),
        pad(args[2], (2, 7), value=-1), level,
    )  # fmt: skip
    close(padded, pad(plain, (2, 7)))
    close(core.log_importance_ratio(*(x.flip(0) for x in args), level), plain.flip(0))


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_gradcheck(make_batch, level):
    batch = make_batch(5, batch_size=3, length=7)
    logprobs = batch.logprobs.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: core.log_importance_ratio(x, batch.old_logprobs, batch.turn_index, level),
        logprobs,
    )


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_edges(level):
    nothing = torch.tensor([[-1, -1]])
    x = torch.full((1, 2), NAN)
    assert core.log_importance_ratio(x, x, nothing, level).tolist() == [[0.0, 0.0]]
    one = torch.tensor([[0]])
    x = torch.tensor([[0.5]])
    assert core.log_importance_ratio(x, torch.zeros(1, 1), one, level).tolist() == [[0.5]]
    empty = torch.zeros(0, 3)
    assert core.log_importance_ratio(empty, empty, empty.long(), level).shape == (0, 3)


@pytest.mark.parametrize("level", core.RATIO_LEVELS)
def test_half_precision_is_subtracted_in_float32(level):
    x = torch.full((1, 600), -1.0, dtype=torch.bfloat16)
    index = torch.zeros(1, 600, dtype=torch.int64)
    out = core.log_importance_ratio(x, x + 0.5, index, level)
    assert out.dtype == torch.float32
    assert (out == -0.5).all()
