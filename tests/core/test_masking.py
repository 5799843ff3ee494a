import pytest
import torch

from trl_stppo import core
from trl_stppo.core import masking

NAN, INF = float("nan"), float("inf")


def test_masked_sum_and_mean_by_hand():
    x = torch.tensor([[1.0, 2.0, NAN], [INF, 6.0, -3.0]])
    mask = torch.tensor([[True, True, False], [False, True, False]])
    # 1 + 2 + 6 = 9 over 3 tokens; rows: 3 over 2, 6 over 1; columns: 1, 8, nothing
    assert core.masked_sum(x, mask).item() == 9.0
    assert core.masked_mean(x, mask).item() == 3.0
    assert core.masked_sum(x, mask, dim=1).tolist() == [3.0, 6.0]
    assert core.masked_mean(x, mask, dim=1).tolist() == [1.5, 6.0]
    assert core.masked_mean(x, mask, dim=0).tolist() == [1.0, 4.0, 0.0]


def test_an_empty_mask_gives_zero_and_zero_gradient():
    x = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    out = core.masked_mean(x, mask) + core.masked_mean(x, mask, dim=1).sum()
    out.backward()
    assert out.item() == 0.0
    assert torch.equal(x.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("garbage", [NAN, INF, 1e3])
def test_zero_off_mask_stops_garbage_in_value_and_gradient(garbage):
    x = torch.tensor([[2.0, garbage]], requires_grad=True)
    out = core.zero_off_mask(x, torch.tensor([[True, False]]))
    # exp and square so that the local derivative at the garbage would be inf or NaN
    (out.exp() + out.square()).sum().backward()
    assert out.tolist() == [[2.0, 0.0]]
    assert x.grad[0, 1].item() == 0.0
    assert torch.isfinite(x.grad).all()


def test_masked_mean_gradcheck():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    assert torch.autograd.gradcheck(lambda v: core.masked_mean(v, mask, dim=1), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    # 4096 ones: bfloat16 alone would stop counting at 256, float16 at 2048
    out = core.masked_sum(torch.ones(1, 4096, dtype=dtype), torch.ones(1, 4096, dtype=torch.bool))
    assert out.dtype == torch.float32
    assert out.item() == 4096.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_keeps_its_dtype(dtype):
    assert masking.upcast(torch.zeros(1, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("function", [core.masked_sum, core.masked_mean])
def test_guards(function):
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask must be bool .* got torch.int64"):
        function(x, mask.long())
    with pytest.raises(ValueError, match=r"mask must be \[B, T\], got shape \[3\]"):
        function(x, mask[0])
    with pytest.raises(ValueError, match=r"x has shape \[2, 2\], but \[2, 3\] is needed"):
        function(x[:, :2], mask)
    with pytest.raises(ValueError, match=r"x must be floating point, got torch.int64"):
        function(x.long(), mask)


def test_nothing_in_core_reads_a_tensor_back_from_its_device():
    # A meta tensor has no values, so anything that would wait for a GPU (item, bool(), nonzero,
    # a shape that depends on values) raises here.
    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, per_episode, scalar = empty(2, 5), empty(2), empty()
    mask, index = empty(2, 5, dtype=torch.bool), empty(2, 5, dtype=torch.int64)

    core.masked_mean(x, mask)
    core.turn_starts(index), core.turn_ends(index), core.num_turns(index)
    core.token_rewards(index, scores=per_episode, turn_rewards=empty(2, 3), kl=x, kl_coef=0.1)
    core.token_gae(x, x, mask, 0.9, 0.9, bootstrap_values=per_episode)
    core.turn_gae(x, x, index, 0.9, 0.9, bootstrap_values=per_episode)
    core.whiten(x, mask)
    for level in core.RATIO_LEVELS:
        core.log_importance_ratio(x, x, index, level, loss_mask=mask)
    core.kl_penalty(x, x, "k3", loss_mask=mask)
    core.clipped_surrogate(x, x, mask, 0.2, 0.2, delta=2.0, weights=empty(2, 1))
    core.clipped_value_loss(x, x, x, mask, 0.2)
    core.aggregation_weights(mask, "grpo", num_episodes=scalar, num_tokens=scalar)
    core.cosine(scalar, scalar, scalar)
    for mode in core.NORMALIZATION_MODES:
        assert core.normalization_scale(scalar, scalar, mode).device.type == "meta"


def test_only_what_float16_cannot_hold_is_bounded_on_the_way_back():
    x = torch.zeros(6, dtype=torch.float16, requires_grad=True)
    wide = masking.upcast(x)
    assert wide.dtype == torch.float32
    wide.backward(torch.tensor([1.5, 1e6, -1e6, float("inf"), float("-inf"), float("nan")]))
    assert x.grad.dtype == torch.float16
    assert x.grad[:5].tolist() == [1.5, 65504.0, -65504.0, float("inf"), float("-inf")]
    assert x.grad[5].isnan()
