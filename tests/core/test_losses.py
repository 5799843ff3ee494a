import math

import pytest
import references
import torch

from trl_stppo import core
from trl_stppo.core.losses import MAX_LOG_RATIO

NAN = float("nan")
LOW, HIGH, DELTA = 0.2, 0.3, 1.6


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


# ---- kl_penalty ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("garbage", [NAN, 1e3, -1e3])
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


def test_kl_gradcheck_and_guards():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(2, 3, dtype=torch.float64)
    for estimator in core.KL_ESTIMATORS:
        assert torch.autograd.gradcheck(lambda v, e=estimator: core.kl_penalty(v, ref, e), x)
    with pytest.raises(ValueError, match="estimator must be one of 'k1', 'k3'; got 'k2'"):
        core.kl_penalty(x, ref, "k2")
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \[2, 2\]"):
        core.kl_penalty(x, ref[:, :2], "k1")
    with pytest.raises(ValueError, match="logprobs must be floating point"):
        core.kl_penalty(x.detach().long(), ref, "k1")
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        core.kl_penalty(x, ref, "k1", loss_mask=ref)
    with pytest.raises(ValueError, match=r"loss_mask has shape \[1, 3\]"):
        core.kl_penalty(x, ref, "k1", loss_mask=ones(1, 3))


# ---- clipped_surrogate ---------------------------------------------------------------------------

# ratio, advantage, clipped?, objective with low 0.2, high 0.3: every corner, worked by hand
CORNERS = [
    (1.0, 2.0, False, 2.0),
    (1.0, -2.0, False, -2.0),
    (1.5, 2.0, True, 2.6),  # min(3.0, 1.3 * 2)
    (1.5, -2.0, False, -3.0),  # min(-3.0, -2.6): the pessimist keeps the unclipped one
    (0.5, 2.0, False, 1.0),  # min(1.0, 1.6)
    (0.5, -2.0, True, -1.6),  # min(-1.0, 0.8 * -2)
    (1.5, 0.0, False, 0.0),
    (0.5, 0.0, False, 0.0),
]


def test_surrogate_by_hand(close):
    ratios, advantages, clipped, objectives = (list(x) for x in zip(*CORNERS, strict=True))
    log_ratio = tensor(ratios).log()
    out = core.clipped_surrogate(log_ratio, tensor(advantages), ones(1, 8), LOW, HIGH)
    products = [w * a for w, a in zip(ratios, advantages, strict=True)]
    assert out.is_clipped.tolist() == [clipped]
    close(out.objective, [objectives])
    close(out.kept, [[0.0 if c else p for p, c in zip(products, clipped, strict=True)]])
    close(out.clipped, [[p if c else 0.0 for p, c in zip(products, clipped, strict=True)]])


def test_surrogate_with_delta_by_hand(close):
    # delta 1.6: only A < 0 feels it. min(min(2, 1.6) * -2, 1.3 * -2) = -3.2; A > 0: still 1.3 * 2
    log_ratio, advantages = tensor([2.0, 1.5, 2.0]).log(), tensor([-2.0, -2.0, 2.0])
    out = core.clipped_surrogate(log_ratio, advantages, ones(1, 3), LOW, HIGH, delta=DELTA)
    assert out.is_clipped.tolist() == [[True, False, True]]
    close(out.objective, [[-3.2, -3.0, 2.6]])
    close(out.kept, [[0.0, -3.0, 0.0]])
    close(out.clipped, [[-4.0, 0.0, 4.0]])
    assert (out.stats.clipped_low.item(), out.stats.clipped_high.item()) == (0.0, 2.0)


def test_surrogate_stats_by_hand(close):
    log_ratio = tensor([0.5, 1.0, 2.0, 7.0]).log()
    advantages = tensor([-1.0, 1.0, 1.0, 1.0])
    mask = torch.tensor([[True, True, True, False]])
    stats = core.clipped_surrogate(log_ratio, advantages, mask, LOW, HIGH).stats
    assert (stats.tokens, stats.clipped_low, stats.clipped_high) == (3, 1, 1)
    close(stats.ratio_sum, 3.5)
    close(stats.ratio_max, 2.0)
    # w - 1 - ln w: (0.5 - 1 + ln 2) + 0 + (2 - 1 - ln 2) = 0.5
    close(stats.approx_kl_sum, 0.5)
    assert all(x.shape == () and not x.requires_grad for x in stats)


def test_ratios_on_the_bounds_are_kept():
    log_ratio = torch.zeros(1, 2, dtype=torch.float64)
    out = core.clipped_surrogate(log_ratio, tensor([1.0, -1.0]), ones(1, 2), 0.0, 0.0)
    assert not out.is_clipped.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("delta", [None, DELTA])
@pytest.mark.parametrize("weighted", [None, "episode", "token"])
@pytest.mark.parametrize("seed", range(3))
def test_surrogate_against_reference(make_batch, close, seed, weighted, delta, dtype):
    batch = make_batch(seed, dtype=dtype)
    log_ratio = 2 * (batch.logprobs - batch.old_logprobs)
    weights = None
    if weighted:
        weights = batch.values.abs()[:, : 1 if weighted == "episode" else None]
    out = core.clipped_surrogate(
        log_ratio, batch.advantages, batch.loss_mask, LOW, HIGH, delta=delta, weights=weights
    )
    full = torch.ones_like(log_ratio) if weights is None else weights.expand(6, 23)
    bound, clipped_tokens, ratios = delta or math.inf, 0, []
    for b, t in batch.loss_mask.nonzero().tolist():
        w, a = math.exp(log_ratio[b, t].item()), batch.advantages[b, t].item()
        c = full[b, t].item()
        clipped = references.is_clipped(w, a, LOW, HIGH, bound)
        assert out.is_clipped[b, t].item() is clipped
        close(out.objective[b, t], c * references.objective(w, a, LOW, HIGH, bound))
        close(out.kept[b, t], 0.0 if clipped else c * w * a)
        close(out.clipped[b, t], c * w * a if clipped else 0.0)
        clipped_tokens += clipped
        ratios.append(w)
    assert clipped_tokens > 0
    assert out.stats.clipped_low + out.stats.clipped_high == clipped_tokens
    assert out.stats.tokens == len(ratios)
    close(out.stats.ratio_sum, sum(ratios))
    close(out.stats.ratio_max, max(ratios))
    close(out.stats.approx_kl_sum, sum(w - 1 - math.log(w) for w in ratios))
    off = ~batch.loss_mask
    assert not out.is_clipped[off].any()
    assert all((x[off] == 0).all() for x in (out.kept, out.clipped, out.objective))


@pytest.mark.parametrize("delta", [None, DELTA])
def test_gradient_of_kept_is_that_of_the_min_clip_objective(make_batch, close, delta):
    batch = make_batch(3)
    log_ratio = (2 * (batch.logprobs - batch.old_logprobs)).requires_grad_()
    out = core.clipped_surrogate(
        log_ratio, batch.advantages, batch.loss_mask, LOW, HIGH, delta=delta
    )
    (kept_grad,) = torch.autograd.grad(out.kept.sum(), log_ratio)
    # the textbook expression, through autograd
    w = log_ratio.exp()
    upper = w if delta is None else w.clamp(max=delta)
    usual = torch.minimum(upper * batch.advantages, w.clamp(1 - LOW, 1 + HIGH) * batch.advantages)
    (usual_grad,) = torch.autograd.grad(usual[batch.loss_mask].sum(), log_ratio)
    close(kept_grad, usual_grad)
    close(out.objective[batch.loss_mask], usual[batch.loss_mask].detach())
    assert not out.objective.requires_grad


def test_ratio_one_is_plain_policy_gradient(make_batch, close):
    batch = make_batch(4)
    logprobs = batch.logprobs.requires_grad_()
    log_ratio = core.log_importance_ratio(
        logprobs, logprobs.detach(), batch.turn_index, "token", loss_mask=batch.loss_mask
    )
    out = core.clipped_surrogate(log_ratio, batch.advantages, batch.loss_mask, LOW, HIGH)
    out.kept.sum().backward()
    close(logprobs.grad, batch.advantages.masked_fill(~batch.loss_mask, 0.0))
    close(out.objective.sum(), batch.advantages[batch.loss_mask].sum())
    assert not out.is_clipped.any()


def test_advantages_and_weights_are_constants():
    advantages = tensor([1.0, -1.0]).requires_grad_()
    weights = tensor([0.5]).requires_grad_()
    log_ratio = tensor([0.1, 0.1]).requires_grad_()
    out = core.clipped_surrogate(log_ratio, advantages, ones(1, 2), LOW, HIGH, weights=weights)
    out.kept.sum().backward()
    assert advantages.grad is None
    assert weights.grad is None


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e3])
def test_surrogate_off_mask_is_inert(make_batch, garbage):
    batch = make_batch(5)

    def run(fill):
        off = ~batch.loss_mask
        args = [batch.logprobs - batch.old_logprobs, batch.advantages, batch.values.abs()]
        if fill is not None:
            args = [x.masked_fill(off, fill) for x in args]
        log_ratio, advantages, weights = args
        log_ratio = log_ratio.requires_grad_()
        out = core.clipped_surrogate(
            log_ratio, advantages, batch.loss_mask, LOW, HIGH, delta=DELTA, weights=weights
        )
        grads = [
            torch.autograd.grad(x.sum(), log_ratio, retain_graph=True)[0]
            for x in (out.kept, out.clipped)
        ]
        return [*out[:4], *out.stats, *grads]

    for clean, poisoned in zip(run(None), run(garbage), strict=True):
        assert torch.equal(clean, poisoned)
    for grad in run(garbage)[-2:]:
        assert (grad[~batch.loss_mask] == 0).all()
        assert (grad[batch.loss_mask] != 0).any()


def test_surrogate_padding_and_episode_order(make_batch, close):
    batch, pad = make_batch(6), torch.nn.functional.pad
    log_ratio = batch.logprobs - batch.old_logprobs
    args = (log_ratio, batch.advantages, batch.loss_mask)
    plain = core.clipped_surrogate(*args, LOW, HIGH)
    padded = core.clipped_surrogate(
        pad(log_ratio, (1, 4), value=NAN), pad(batch.advantages, (1, 4), value=NAN),
        pad(batch.loss_mask, (1, 4), value=False), LOW, HIGH,
    )  # fmt: skip
    close(padded.kept, pad(plain.kept, (1, 4)))
    close(padded.clipped, pad(plain.clipped, (1, 4)))
    close(torch.stack(padded.stats), torch.stack(plain.stats))
    flipped = core.clipped_surrogate(*(x.flip(0) for x in args), LOW, HIGH)
    close(flipped.kept, plain.kept.flip(0))


def test_stats_of_parts_add_up(make_batch, close):
    batch = make_batch(7)
    args = (batch.logprobs - batch.old_logprobs, batch.advantages, batch.loss_mask)
    whole = core.clipped_surrogate(*args, LOW, HIGH).stats
    chunks = zip(*(x.split(2) for x in args), strict=True)
    parts = [core.clipped_surrogate(*chunk, LOW, HIGH).stats for chunk in chunks]
    for name in whole._fields:
        combine = max if name == "ratio_max" else sum
        close(torch.as_tensor(combine(getattr(p, name) for p in parts)), getattr(whole, name))


def test_surrogate_gradcheck():
    # away from the kinks at ln 0.8, ln 1.3 and ln 1.6
    log_ratio = tensor([-0.5, 0.1, 0.4, 0.6], [0.35, 0.0, -0.1, 0.9]).requires_grad_()
    advantages = tensor([-1.0, 2.0, 0.5, -0.3], [1.0, -1.0, 0.0, -2.0])
    mask = torch.tensor([[True, True, False, True], [True, True, True, True]])

    def run(x):
        out = core.clipped_surrogate(x, advantages, mask, LOW, HIGH, delta=DELTA)
        return out.kept, out.clipped

    assert torch.autograd.gradcheck(run, log_ratio)


def test_huge_log_ratios_neither_overflow_nor_fall_silent():
    log_ratio = torch.tensor([[90.0, 1e4, -1e4, MAX_LOG_RATIO]], requires_grad=True)
    advantages = torch.tensor([[-1.0, -1.0, 1.0, -1.0]])
    out = core.clipped_surrogate(log_ratio, advantages, ones(1, 4), LOW, HIGH)
    out.kept.sum().backward()
    most = math.exp(MAX_LOG_RATIO)
    expected = torch.tensor([[-most, -most, 0.0, -most]])
    torch.testing.assert_close(out.kept.detach(), expected)
    torch.testing.assert_close(log_ratio.grad, expected)
    assert torch.isfinite(torch.stack(out.stats)).all()


def test_below_the_limit_exp_is_exact():
    log_ratio = tensor([-30.0, 3.0, MAX_LOG_RATIO - 1e-9])
    out = core.clipped_surrogate(log_ratio, -tensor([1.0] * 3), ones(1, 3), 0.99, HIGH)
    assert torch.equal(out.kept + out.clipped, -log_ratio.exp())


def test_surrogate_edges():
    for shape in ((0, 3), (2, 0)):
        out = core.clipped_surrogate(torch.zeros(shape), torch.zeros(shape), ones(shape), 0.1, 0.1)
        assert out.kept.shape == shape
        assert torch.stack(out.stats).tolist() == [0.0] * 6
    x = torch.full((1, 1), NAN)
    out = core.clipped_surrogate(x, x, ~ones(1, 1), 0.1, 0.1)
    assert torch.stack(out.stats).tolist() == [0.0] * 6
    half = torch.zeros(1, 2, dtype=torch.bfloat16)
    assert core.clipped_surrogate(half, half, ones(1, 2), 0.1, 0.1).kept.dtype == torch.float32


def test_surrogate_guards():
    x, mask = torch.zeros(2, 3), ones(2, 3)
    with pytest.raises(ValueError, match=r"cliprange_low must lie in \[0, 1\), got 1.0"):
        core.clipped_surrogate(x, x, mask, 1.0, 0.2)
    with pytest.raises(ValueError, match=r"cliprange_low must lie in \[0, 1\), got -0.1"):
        core.clipped_surrogate(x, x, mask, -0.1, 0.2)
    with pytest.raises(ValueError, match=r"cliprange_high must be at least 0, got -0\.2"):
        core.clipped_surrogate(x, x, mask, 0.2, -0.2)
    with pytest.raises(ValueError, match=r"delta must exceed 1 \+ cliprange_high = 1.5, got 1.5"):
        core.clipped_surrogate(x, x, mask, 0.2, 0.5, delta=1.5)
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        core.clipped_surrogate(x, x, x, 0.2, 0.2)
    with pytest.raises(ValueError, match=r"advantages has shape \[2, 1\]"):
        core.clipped_surrogate(x, x[:, :1], mask, 0.2, 0.2)
    with pytest.raises(ValueError, match="log_ratio must be floating point"):
        core.clipped_surrogate(x.long(), x, mask, 0.2, 0.2)
    with pytest.raises(ValueError, match=r"weights must be \[B, T\] or \[B, 1\] .* \[2\]"):
        core.clipped_surrogate(x, x, mask, 0.2, 0.2, weights=torch.ones(2))
    with pytest.raises(ValueError, match="weights must be floating point"):
        core.clipped_surrogate(x, x, mask, 0.2, 0.2, weights=mask)


# ---- clipped_value_loss --------------------------------------------------------------------------


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


def test_value_loss_edges_and_guards():
    x, mask = torch.zeros(2, 3), ones(2, 3)
    for shape in ((0, 3), (2, 0)):
        empty = torch.zeros(shape)
        assert core.clipped_value_loss(empty, empty, empty, ones(shape), 0.2)[0].shape == shape
    for bad in (0.0, -0.2, NAN):
        with pytest.raises(ValueError, match="cliprange_value must be > 0, or None"):
            core.clipped_value_loss(x, x, x, mask, bad)
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        core.clipped_value_loss(x, x, x, x, 0.2)
    with pytest.raises(ValueError, match=r"returns has shape \[2, 2\]"):
        core.clipped_value_loss(x, x, x[:, :2], mask, 0.2)
    with pytest.raises(ValueError, match="old_values must be floating point"):
        core.clipped_value_loss(x, x.long(), x, mask, 0.2)


# ---- aggregation_weights -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # 3 episodes (one empty), 4 tokens in all, at most 8 per episode
        ("grpo", [[1 / 9, 1 / 9, 1 / 9], [0, 0, 0], [0, 1 / 3, 0]]),
        ("bnpo", [[1 / 4, 1 / 4, 1 / 4], [0, 0, 0], [0, 1 / 4, 0]]),
        ("dapo", [[1 / 4, 1 / 4, 1 / 4], [0, 0, 0], [0, 1 / 4, 0]]),
        ("dr_grpo", [[1 / 24, 1 / 24, 1 / 24], [0, 0, 0], [0, 1 / 24, 0]]),
    ],
)
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
    expected = references.aggregate(
        batch.values.tolist(), batch.loss_mask.tolist(), loss_type, 6, tokens, 23
    )
    counts = {"num_episodes": 6, "num_tokens": tokens}
    if as_tensor:
        counts = {name: torch.tensor(count) for name, count in counts.items()}
    for size in (6, 1, 2, 4):
        total = torch.zeros((), dtype=dtype)
        for x, mask in zip(batch.values.split(size), batch.loss_mask.split(size), strict=True):
            weights = core.aggregation_weights(
                mask, loss_type, **counts, max_length=23, dtype=dtype
            )
            assert weights.dtype == dtype
            assert (weights[~mask] == 0).all()
            total = total + (x * weights).sum()
        close(total, expected)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_weights_of_full_episodes_sum_to_one(make_batch, close, loss_type):
    mask = make_batch(12).loss_mask
    mask = mask[mask.any(dim=1)]
    tokens = mask.sum()
    weights = core.aggregation_weights(
        mask, loss_type, num_episodes=len(mask), num_tokens=tokens, dtype=torch.float64
    )
    close(weights.sum(), 1.0)


@pytest.mark.parametrize("loss_type", core.LOSS_TYPES)
@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_nothing_to_average_gives_zero(loss_type, zero):
    weights = core.aggregation_weights(
        ~ones(2, 3), loss_type, num_episodes=zero, num_tokens=zero, max_length=5
    )
    assert torch.equal(weights, torch.zeros(2, 3))


def test_weights_guards():
    counts = {"num_episodes": 2, "num_tokens": 6}
    message = "loss_type must be one of 'grpo', 'bnpo', 'dapo', 'dr_grpo'; got 'mean'"
    with pytest.raises(ValueError, match=message):
        core.aggregation_weights(ones(2, 3), "mean", **counts)
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        core.aggregation_weights(torch.zeros(2, 3), "grpo", **counts)
    for bad in (None, 0):
        with pytest.raises(ValueError, match="'dr_grpo' needs max_length > 0 tokens, got"):
            core.aggregation_weights(ones(2, 3), "dr_grpo", **counts, max_length=bad)
