import math

import pytest
import torch

from tests.kit import references
from tests.kit.reductions import on_processes
from trl_stppo import core
from trl_stppo.core import advantages as module

NAN, INF = float("nan"), float("inf")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def test_by_hand(close):
    # counted: 1, 3, 5: mean 3, unbiased variance (4 + 0 + 4) / 2 = 4
    x = tensor([1.0, NAN, 3.0], [5.0, 1e3, NAN])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    scale = (4 + 1e-8) ** -0.5
    close(core.whiten(x, mask), [[-2 * scale, 0, 0], [2 * scale, 0, 0]])
    close(core.whiten(x, mask, center=False), [[3 - 2 * scale, 0, 3], [3 + 2 * scale, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("center", [True, False])
def test_against_reference(make_batch, close, center, dtype):
    batch = make_batch(12, dtype=dtype)
    actual = core.whiten(batch.advantages, batch.action_mask, center=center)
    x, mask = batch.advantages.tolist(), batch.action_mask.tolist()
    close(actual, references.whiten(x, mask, center))


@pytest.fixture(params=["float64 on the device", "float32 alone"])
def device(request, monkeypatch):
    """Devices that can do float64, and those (Apple's GPUs) that cannot."""
    if request.param == "float32 alone":
        monkeypatch.setattr(module, "widest", lambda x: x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 500, 4097])
def test_equal_values_are_zero(device, count, dtype):
    for value in (1000.1, -300.7, 0.1, 1e-30, 1e17):
        x = torch.full((1, count), value, dtype=dtype)
        assert (core.whiten(x, ones(1, count)) == 0).all()
        kept = core.whiten(x, ones(1, count), center=False)
        assert torch.equal(kept, x.to(kept.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_values_on_several_processes_are_zero(device, dtype):
    shards = [(torch.full((n, 7), 1000.1, dtype=dtype), ones(n, 7)) for n in (1, 30, 5)]
    assert all((out == 0).all() for out in on_processes(core.whiten, shards))


def test_a_large_mean_is_survived(device):
    # sum(x^2) - n mean^2 in float32 would return noise here
    x = 1e4 + torch.tensor([[-1.0, 0.0, 1.0]])
    torch.testing.assert_close(core.whiten(x, ones(1, 3)), torch.tensor([[-1.0, 0.0, 1.0]]))


def test_a_spread_of_one_rounding_step_keeps_its_signs(device, close):
    # 1000.1 and the next float32 above it, 100 : 400. The step is 2^-14, the mean 4/5 of it up.
    low = torch.tensor(1000.1)
    x = torch.full((1, 500), low.item())
    x[0, 100:] = torch.nextafter(low, torch.tensor(INF))
    deviation = 2**-14 * math.sqrt(500 / 499 * 0.8 * 0.2)
    expected = torch.full((1, 500), 0.2 * 2**-14)
    expected[0, :100] = -0.8 * 2**-14
    close(core.whiten(x, ones(1, 500)), expected / math.hypot(deviation, 1e-4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1e20, 1e25, 1e37])
def test_huge_values_come_out_as_small_ones_do(dtype, size):
    x = size * torch.tensor([[1.0, -1.0, 0.0]], dtype=dtype)
    assert core.whiten(x, ones(1, 3))[0].tolist() == pytest.approx([1.0, -1.0, 0.0], abs=1e-6)
    kept = core.whiten(x + 3 * x[0, 0], ones(1, 3), center=False)
    torch.testing.assert_close(kept, torch.full_like(x, 3 * size))


def test_what_is_too_large_for_the_device_is_not_taken_for_equal(monkeypatch):
    monkeypatch.setattr(module, "widest", lambda x: x)
    # The squares overflow.
    x = torch.tensor([[1e20, -1e20, 0.0]])
    assert core.whiten(x, ones(1, 3)).isnan().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_is_not_hidden(device, bad):
    assert core.whiten(torch.tensor([[1.0, bad, 0.0]]), ones(1, 3)).isnan().all()


@pytest.mark.parametrize("center", [True, False])
def test_over_processes_equals_at_once(make_batch, close, center):
    batch = make_batch(19, batch_size=7)
    together = core.whiten(batch.advantages, batch.action_mask, center=center)
    shards = list(zip(batch.advantages.split(2), batch.action_mask.split(2), strict=True))
    shards.append((torch.full((1, 23), NAN).double(), ~ones(1, 23)))
    outs = on_processes(core.whiten, shards, center=center)
    close(torch.cat(outs[:-1]), together)
    assert (outs[-1] == 0).all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_does_not_count_is_inert(device, make_batch, center, dtype, garbage):
    batch = make_batch(17, dtype=dtype)
    mask = batch.action_mask

    def run(x):
        x = x.clone().requires_grad_()
        out = core.whiten(x, mask, center=center)
        (out * batch.values).sum().backward()
        return out.detach(), x.grad

    clean, poisoned = (run(x) for x in (batch.advantages, batch.advantages.masked_fill(~mask, garbage)))
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)
        assert (a[~mask] == 0).all()
        assert (a[mask] != 0).any()


@pytest.mark.parametrize("center", [True, False])
def test_gradcheck(make_batch, center):
    batch = make_batch(21, batch_size=3, length=6)
    x = batch.advantages.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: core.whiten(v, batch.action_mask, center=center), x)


def test_edges():
    x = tensor([5.0, NAN])
    assert core.whiten(x, torch.tensor([[False, False]])).tolist() == [[0.0, 0.0]]
    assert core.whiten(x, torch.tensor([[True, False]])).tolist() == [[0.0, 0.0]]
    assert core.whiten(x, torch.tensor([[True, False]]), center=False).tolist() == [[5.0, 0.0]]
    same = core.whiten(tensor([2.0, 2.0]), torch.tensor([[True, True]]))
    assert same.tolist() == [[0.0, 0.0]]
    for shape in ((0, 2), (2, 0)):
        assert core.whiten(torch.zeros(shape), ones(shape)).shape == shape
