import math

import pytest
import torch

from tests.kit import references
from trl_stppo import core
from trl_stppo.core.policy import MAX_LOG_RATIO

NAN, INF = float("nan"), float("inf")
LOW, HIGH, DELTA = 0.2, 0.3, 1.6


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


# ratio, advantage, clipped?, objective with low 0.2, high 0.3: every corner, worked by hand
CORNERS = [
    (1.0, 2.0, False, 2.0),
    (1.0, -2.0, False, -2.0),
    # The result is min(3.0, 1.3 * 2).
    (1.5, 2.0, True, 2.6),
    # The result is min(-3.0, -2.6), the unclipped one.
    (1.5, -2.0, False, -3.0),
    # The result is min(1.0, 1.6).
    (0.5, 2.0, False, 1.0),
    # The result is min(-1.0, 0.8 * -2).
    (0.5, -2.0, True, -1.6),
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
    out = core.clipped_surrogate(log_ratio, batch.advantages, batch.loss_mask, LOW, HIGH, delta=delta)
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
            torch.autograd.grad(x.sum(), log_ratio, retain_graph=True)[0] for x in (out.kept, out.clipped)
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


# This is exp(20); no ratio is larger.
E20 = 485165195.4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("huge", [20.0, 20.1, 90.0, 1e30, INF])
def test_a_log_ratio_above_20_counts_as_20(huge, dtype):
    log_ratio = torch.tensor([[huge, 0.0, huge]], dtype=dtype, requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0, 1.0]], dtype=dtype)
    out = core.clipped_surrogate(log_ratio, advantages, ones(1, 3), LOW, HIGH)
    (out.kept + out.clipped).sum().backward()
    expected = torch.tensor([[-E20, 1.0, E20]], dtype=dtype)
    torch.testing.assert_close(out.kept + out.clipped, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(log_ratio.grad, expected, rtol=1e-6, atol=0.0)
    assert out.is_clipped.tolist() == [[False, False, True]]
    assert out.stats.ratio_max.item() == pytest.approx(E20)
    assert out.stats.approx_kl_sum.item() == pytest.approx(2 * (E20 - 1 - 20))


def test_a_token_that_the_old_policy_could_not_play_pushes_its_turn_finitely():
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    old_logprobs = torch.tensor([[-1.0, -INF, -3.0]])
    index = torch.tensor([[0, 0, 1]])
    log_ratio = core.log_importance_ratio(logprobs, old_logprobs, index, "turn")
    out = core.clipped_surrogate(log_ratio, -torch.ones(1, 3), ones(1, 3), LOW, HIGH)
    out.kept.sum().backward()
    assert out.kept[0].tolist() == pytest.approx([-E20, -E20, -1.0])
    assert logprobs.grad[0].tolist() == pytest.approx([-E20, -E20, -1.0])


def test_a_log_ratio_of_minus_infinity_is_a_ratio_of_zero():
    log_ratio = torch.tensor([[-INF, -INF]], requires_grad=True)
    out = core.clipped_surrogate(log_ratio, torch.tensor([[1.0, -1.0]]), ones(1, 2), LOW, HIGH)
    (out.kept + out.clipped).sum().backward()
    assert (out.kept + out.clipped).tolist() == [[0.0, 0.0]]
    assert log_ratio.grad.tolist() == [[0.0, 0.0]]
    assert out.is_clipped.tolist() == [[False, True]]


def test_a_log_ratio_that_is_no_number_is_not_hidden():
    out = core.clipped_surrogate(torch.full((1, 1), NAN), -torch.ones(1, 1), ones(1, 1), LOW, HIGH)
    assert out.kept.isnan().all()


@pytest.mark.parametrize("advantage", [-1.0, -10.0])
def test_a_gradient_too_large_for_float16_is_the_largest_there_is(advantage):
    # exp(12) = 162755 is beyond float16, whose largest number is 65504
    log_ratio = torch.tensor([[12.0, 1.0]], dtype=torch.float16, requires_grad=True)
    out = core.clipped_surrogate(log_ratio, torch.full((1, 2), advantage), ones(1, 2), LOW, HIGH)
    out.kept.sum().backward()
    assert out.kept.dtype == torch.float32
    assert out.kept[0, 0].item() == pytest.approx(162754.79 * advantage)
    assert log_ratio.grad[0].tolist() == pytest.approx([-65504.0, math.e * advantage], rel=1e-3)


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


def test_a_width_of_one_or_more_clips_nothing_from_below():
    log_ratio, mask = tensor([-30.0, -1.0, 0.5]), ones(1, 3)
    stats = core.clipped_surrogate(log_ratio, -torch.ones_like(log_ratio), mask, 10.0, 10.0).stats
    assert stats.clipped_low == stats.clipped_high == 0


@pytest.mark.parametrize(
    ("tokens", "ratios", "width"),
    [(44, 2, 0.2 / 22), (7, 7, 0.2), (3, 6, 0.2), (0, 0, 0.0), (600, 1, 1 / 3000)],
)
def test_the_default_clip_range_is_that_of_a_token_over_the_tokens_of_a_ratio(tokens, ratios, width):
    assert core.default_cliprange(tokens, ratios) == pytest.approx(width, abs=1e-15)
