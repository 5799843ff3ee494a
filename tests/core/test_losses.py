import math

import pytest
import torch

from tests.kit import references
from trl_stppo import core

NAN, INF = float("nan"), float("inf")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def test_kl_by_hand(close):
    # x = ref - now = ln 2 and -ln 2;  k3: 2 - 1 - ln 2 and 1/2 - 1 + ln 2
    log2 = math.log(2)
    now, ref = tensor([-log2, 0.0]), tensor([0.0, -log2])
    close(core.kl_penalty(now, ref, "k1"), [[-log2, log2]])
    close(core.kl_penalty(now, ref, "k3"), [[1 - log2, log2 - 0.5]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("estimator", core.KL_ESTIMATORS)
def test_kl_against_reference(make_batch, close, estimator, dtype):
    batch = make_batch(0, dtype=dtype)
    out = core.kl_penalty(batch.logprobs, batch.old_logprobs, estimator)
    for b in range(6):
        for t in range(23):
            now, ref = batch.logprobs[b, t].item(), batch.old_logprobs[b, t].item()
            close(out[b, t], references.kl_penalty(now, ref, estimator))


@pytest.mark.parametrize("estimator", core.KL_ESTIMATORS)
def test_both_estimators_average_to_the_true_kl(close, estimator):
    # exact expectation over a three-letter vocabulary
    p, q = tensor([0.5, 0.3, 0.2]), tensor([0.2, 0.2, 0.6])
    expected = (p * (p.log() - q.log())).sum()
    close((p * core.kl_penalty(p.log(), q.log(), estimator)).sum(), expected)


def test_k3_keeps_its_digits_near_zero():
    # x^2 / 2 = 5e-11 for x = 1e-5; exp(x) - 1 - x in float32 gives 0 or 1e-7
    ref = torch.tensor([[1e-5]])
    out = core.kl_penalty(torch.zeros(1, 1), ref, "k3").item()
    assert 0.0 <= out < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gap", [20.0, 20.1, 30.0, 90.0, 1e30, INF])
def test_k3_takes_a_gap_above_20_as_20(gap, dtype):
    # exp(20) - 1 - 20; the derivative by logprobs is 1 - exp(20)
    now = torch.tensor([[-gap, 0.0]], dtype=dtype, requires_grad=True)
    out = core.kl_penalty(now, torch.zeros(1, 2, dtype=dtype), "k3")
    out.sum().backward()
    assert out[0].tolist() == pytest.approx([485165174.4, 0.0])
    assert now.grad[0].tolist() == pytest.approx([-485165194.4, 0.0])


def test_k3_below_and_k1_are_as_they_are(close):
    # x = -90: exp(-90) - 1 + 90 = 89, growing no faster than the log-probability falls
    ref = tensor([-90.0, -30.0])
    close(core.kl_penalty(0 * ref, ref, "k3"), [[89.0, 29.0]])
    close(core.kl_penalty(ref, 0 * ref, "k1"), [[-90.0, -30.0]])
    assert core.kl_penalty(tensor([0.0]), tensor([NAN]), "k3").isnan().all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e3, -1e3])
@pytest.mark.parametrize("estimator", core.KL_ESTIMATORS)
def test_kl_off_mask_is_zero_with_zero_gradient(make_batch, estimator, garbage):
    batch = make_batch(1)
    now = batch.logprobs.masked_fill(~batch.loss_mask, garbage).requires_grad_()
    out = core.kl_penalty(now, batch.old_logprobs, estimator, loss_mask=batch.loss_mask)
    clean = core.kl_penalty(batch.logprobs, batch.old_logprobs, estimator)
    out.sum().backward()
    assert torch.equal(out[batch.loss_mask], clean[batch.loss_mask])
    assert (out[~batch.loss_mask] == 0).all()
    assert torch.isfinite(now.grad).all()
    assert (now.grad[~batch.loss_mask] == 0).all()


def test_kl_gradcheck():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(2, 3, dtype=torch.float64)
    for estimator in core.KL_ESTIMATORS:
        assert torch.autograd.gradcheck(lambda v, e=estimator: core.kl_penalty(v, ref, e), x)


def test_value_loss_by_hand(close):
    # old 0, c = 0.5
    values, returns = tensor([0.2, 2.0, 2.0, -2.0]), tensor([1.0, 1.9, 0.0, -0.4])
    # 0.2: inside, 0.5 * 0.8^2 = 0.32
    # 2.0 -> 0.5, R 1.9: max(0.1^2, 1.4^2) / 2 = 0.98, clipped
    # 2.0 -> 0.5, R 0.0: max(2^2, 0.5^2) / 2 = 2.0, not clipped
    # -2.0 -> -0.5, R -0.4: max(1.6^2, 0.1^2) / 2 = 1.28, not clipped
    loss, clipped = core.clipped_value_loss(values, 0 * values, returns, ones(1, 4), 0.5)
    close(loss, [[0.32, 0.98, 2.0, 1.28]])
    assert clipped.tolist() == [[False, True, False, False]]
    loss, clipped = core.clipped_value_loss(values, 0 * values, returns, ones(1, 4), None)
    close(loss, [[0.32, 0.005, 2.0, 1.28]])
    assert not clipped.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cliprange", [None, 0.2, 1.0])
def test_value_loss_against_reference(make_batch, close, cliprange, dtype):
    batch = make_batch(8, dtype=dtype)
    args = (batch.values, batch.old_values, batch.returns)
    loss, clipped = core.clipped_value_loss(*args, batch.loss_mask, cliprange)
    for b, t in batch.loss_mask.nonzero().tolist():
        expected = references.value_loss(*(x[b, t].item() for x in args), cliprange)
        close(loss[b, t], expected[0])
        assert clipped[b, t].item() is expected[1]
    assert clipped.any() == (cliprange is not None)
    assert (loss[~batch.loss_mask] == 0).all()
    assert not clipped[~batch.loss_mask].any()


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e3])
@pytest.mark.parametrize("cliprange", [None, 0.2])
def test_value_loss_off_mask_is_inert(make_batch, cliprange, garbage):
    batch = make_batch(9)

    def run(fill):
        args = [batch.values, batch.old_values, batch.returns]
        if fill is not None:
            args = [x.masked_fill(~batch.loss_mask, fill) for x in args]
        values = args[0].clone().requires_grad_()
        loss, clipped = core.clipped_value_loss(values, *args[1:], batch.loss_mask, cliprange)
        loss.sum().backward()
        return loss.detach(), clipped, values.grad

    for clean, poisoned in zip(run(None), run(garbage), strict=True):
        assert torch.equal(clean, poisoned)
    assert (run(garbage)[2][~batch.loss_mask] == 0).all()


def test_value_loss_gradient(make_batch, close):
    batch = make_batch(10)
    values = batch.values.requires_grad_()
    old_values, returns = batch.old_values.requires_grad_(), batch.returns.requires_grad_()
    loss, clipped = core.clipped_value_loss(values, old_values, returns, batch.loss_mask, 0.2)
    loss.sum().backward()
    # v - R where the plain error is the larger one, 0 where the clipped one is: it is flat there
    expected = (values - returns).masked_fill(clipped | ~batch.loss_mask, 0.0)
    close(values.grad, expected.detach())
    assert old_values.grad is None
    assert returns.grad is None
    assert torch.autograd.gradcheck(
        lambda v: core.clipped_value_loss(v, old_values, returns, batch.loss_mask, 0.2)[0], values
    )


def test_value_loss_edges():
    for shape in ((0, 3), (2, 0)):
        empty = torch.zeros(shape)
        assert core.clipped_value_loss(empty, empty, empty, ones(shape), 0.2)[0].shape == shape


@pytest.mark.parametrize(("loss_type", "expected"), [
    # 3 episodes (one empty), 4 tokens in all, at most 8 per episode
    ("grpo", [[1 / 9, 1 / 9, 1 / 9], [0, 0, 0], [0, 1 / 3, 0]]),
    ("bnpo", [[1 / 4, 1 / 4, 1 / 4], [0, 0, 0], [0, 1 / 4, 0]]),
    ("dapo", [[1 / 4, 1 / 4, 1 / 4], [0, 0, 0], [0, 1 / 4, 0]]),
    ("dr_grpo", [[1 / 24, 1 / 24, 1 / 24], [0, 0, 0], [0, 1 / 24, 0]]),
])  # fmt: skip
def test_weights_by_hand(close, loss_type, expected):
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 1, 0]], dtype=torch.bool)
    weights = core.aggregation_weights(
        mask, loss_type, num_episodes=3, num_tokens=4, max_length=8, dtype=torch.float64
    )
    close(weights, expected)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss_type", core.LOSS_TYPES)
def test_weights_against_reference_and_over_splits(make_batch, close, loss_type, dtype, as_tensor):
    batch = make_batch(11, dtype=dtype)
    tokens = int(batch.loss_mask.sum())
    expected = references.aggregate(batch.values.tolist(), batch.loss_mask.tolist(), loss_type, 6, tokens, 23)
    counts = {"num_episodes": 6, "num_tokens": tokens}
    if as_tensor:
        counts = {name: torch.tensor(count) for name, count in counts.items()}
    for size in (6, 1, 2, 4):
        total = torch.zeros((), dtype=dtype)
        for x, mask in zip(batch.values.split(size), batch.loss_mask.split(size), strict=True):
            weights = core.aggregation_weights(mask, loss_type, **counts, max_length=23, dtype=dtype)
            assert weights.dtype == dtype
            assert (weights[~mask] == 0).all()
            total = total + (x * weights).sum()
        close(total, expected)


@pytest.mark.parametrize("loss_type", core.LOSS_TYPES)
@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_nothing_to_average_gives_zero(loss_type, zero):
    weights = core.aggregation_weights(
        ~ones(2, 3), loss_type, num_episodes=zero, num_tokens=zero, max_length=5
    )
    assert torch.equal(weights, torch.zeros(2, 3))
