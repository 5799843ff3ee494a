import math

import pytest
import torch

from tests.kit import references
from trl_stppo import core
from trl_stppo.core.policy import CLIP_BIAS_EPS

NAN, INF = float("nan"), float("inf")


def scale(grad_norm, clip_bias_norm, *args):
    norms = torch.tensor([grad_norm, clip_bias_norm], dtype=torch.float64)
    return core.normalization_scale(*norms, *args).item()


def cosine(*numbers):
    return core.cosine(*torch.tensor(numbers, dtype=torch.float64)).item()


NORMS = [0.0, 1e-13, 1e-6, 0.3, 1.0, 2.5, 1e3, 1e8]


@pytest.mark.parametrize(("mode", "expected"), [("triggered", 1 / 4), ("share", 2 / 6)])
def test_by_hand(mode, expected):
    # ||g|| = 2, ||C|| = 4
    assert scale(2.0, 4.0, mode) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("mode", "expected"), [("triggered", 4.0), ("share", 8 / 9)])
def test_a_small_bias_by_hand(mode, expected):
    # ||g|| = 2, ||C|| = 1/4: only the literal rule amplifies
    assert scale(2.0, 0.25, mode) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("mode", core.NORMALIZATION_MODES)
def test_against_reference(mode):
    for g in NORMS:
        for c in NORMS:
            expected = references.scale(g, c, mode)
            assert scale(g, c, mode) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", core.NORMALIZATION_MODES)
@pytest.mark.parametrize("clip_bias_norm", [0.0, CLIP_BIAS_EPS])
@pytest.mark.parametrize("grad_norm", [0.0, 1e-13, 1.0])
def test_nothing_clipped_means_scale_one(mode, grad_norm, clip_bias_norm):
    # clipped terms may cancel to a norm that is not quite 0; 0 / 0 counts as 1
    assert scale(grad_norm, clip_bias_norm, mode) == 1.0


def test_just_above_eps_counts():
    assert scale(1.0, 2e-12, "triggered") == pytest.approx(5e11)


def test_several_norms_at_once_give_what_each_gives():
    g, c = torch.tensor([0.0, 2.0, 2.0, 0.0]), torch.tensor([0.0, 0.0, 4.0, 4.0])
    assert core.normalization_scale(g, c, "share").tolist() == pytest.approx([1, 1, 1 / 3, 0])


def test_norms_whose_sum_overflows_keep_their_share():
    huge = torch.tensor(2e38)
    assert core.normalization_scale(huge, huge, "share").item() == pytest.approx(0.5)
    assert scale(1e308, 1e308, "share") == pytest.approx(0.5)
    for g, c in ((1e-30, 3e38), (3e38, 1e-11)):
        out = core.normalization_scale(torch.tensor(g), torch.tensor(c), "share")
        assert out.item() == pytest.approx(references.scale(g, c, "share"), abs=1e-30)


@pytest.mark.parametrize("mode", core.NORMALIZATION_MODES)
@pytest.mark.parametrize(("g", "c"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (INF, INF)])
def test_norms_that_are_not_finite_give_one(mode, g, c):
    assert scale(g, c, mode) == 1.0
    assert core.normalization_scale(torch.tensor(g), torch.tensor(c), mode).item() == 1.0


@pytest.mark.parametrize("mode", core.NORMALIZATION_MODES)
def test_tensors_in_tensor_out_detached(mode):
    g, c = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    out = core.normalization_scale(g, c, mode)
    assert isinstance(out, torch.Tensor)
    assert out.shape == ()
    assert out.dtype == torch.float32
    assert not out.requires_grad
    half = torch.tensor(2.0, dtype=torch.float16)
    assert core.normalization_scale(half, half, mode).dtype == torch.float32


def test_cosine_by_hand():
    # (3, 4) and (4, 3): 24 / 25; opposite; orthogonal
    assert cosine(24.0, 5.0, 5.0) == pytest.approx(24 / 25)
    assert cosine(-25.0, 5.0, 5.0) == -1.0
    assert cosine(0.0, 5.0, 5.0) == 0.0


def test_cosine_edges():
    assert cosine(0.0, 0.0, 5.0) == 0.0
    assert cosine(0.0, 5.0, 0.0) == 0.0
    assert core.cosine(torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0)).item() == 0.0
    assert cosine(26.0, 5.0, 5.0) == 1.0
    # the product of the norms would vanish in float32
    tiny = torch.tensor(1e-30)
    assert core.cosine(torch.tensor(0.0), tiny, tiny).item() == 0.0
    assert core.cosine(torch.tensor(1e-35), tiny, torch.tensor(1e-5)).item() == pytest.approx(1.0)
    assert math.isnan(cosine(NAN, 1.0, 1.0))
