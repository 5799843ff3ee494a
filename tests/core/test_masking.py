import pytest
import torch

from trl_stppo import core
from trl_stppo.core import masking

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("garbage", [NAN, INF, 1e3])
def test_zero_off_mask_stops_garbage_in_value_and_gradient(garbage):
    x = torch.tensor([[2.0, garbage]], requires_grad=True)
    out = core.zero_off_mask(x, torch.tensor([[True, False]]))
    # exp and square so that the local derivative at the garbage would be inf or NaN
    (out.exp() + out.square()).sum().backward()
    assert out.tolist() == [[2.0, 0.0]]
    assert x.grad[0, 1].item() == 0.0
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_keeps_its_dtype(dtype):
    assert masking.upcast(torch.zeros(1, dtype=dtype)).dtype == dtype


def test_nothing_in_core_reads_a_tensor_back_from_its_device():
    # A meta tensor has no values, so anything that would wait for a GPU (item, bool(), nonzero,
    # a shape that depends on values) raises here.
    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, per_episode, scalar = empty(2, 5), empty(2), empty()
    mask, index = empty(2, 5, dtype=torch.bool), empty(2, 5, dtype=torch.int64)

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
