"""Rollouts that are left alone, and runs that stop at a limit: each seen through training."""

import pytest

from tests.kit.guard_kit import run
from tests.kit.scripted import logged


def test_the_share_that_is_kept_is_of_both_norms(tmp_path):
    trainer, _ = run(tmp_path)
    names = ("clip_bias/share", "clip_bias/norm", "clip_bias/grad_norm")
    figures = list(zip(*(logged(trainer, name) for name in names), strict=True))
    assert any(0 < share < 1 for share, *_ in figures), "the case should be interesting"
    for share, clipped, kept in figures:
        assert share == pytest.approx(kept / (kept + clipped) if clipped else 1.0)
