"""Rollouts that are left alone, and runs that stop at a limit: each seen through training."""

import pytest

from tests.kit.guard_kit import run, same
from tests.kit.scripted import logged

FAR = {"staleness": 0.0, "learning_rate": 3e-2, "num_mini_batches": 1, "num_ppo_epochs": 4}


@pytest.fixture(scope="module")
def free_run(tmp_path_factory):
    return run(tmp_path_factory.mktemp("free"), max_steps=8, **FAR)


@pytest.mark.long
def test_beyond_target_kl_the_rest_of_the_rollout_batch_moves_nothing(free_run, tmp_path):
    free, free_moments = free_run
    kl = logged(free, "policy/approx_kl")
    assert 0 <= kl[0] < kl[1] < kl[2], "the case should be interesting"
    target = (kl[1] + kl[2]) / 2
    trainer, moments = run(tmp_path, max_steps=8, target_kl=target, **FAR)
    after = moments.by_step
    assert same(after[2], free_moments.by_step[2]), "up to there nothing differs"
    assert same(after[2], after[3])
    assert same(after[3], after[4])
    assert not same(after[4], after[5]), "the next rollout batch is a new one"
    stopped = logged(trainer, "guard/kl_stopped_steps")
    assert stopped[:5] == [0, 0, 1, 2, 2]
    assert logged(trainer, "guard/skipped_steps")[-1] == 0
    assert trainer.state.global_step == 8
    assert "policy/approx_kl" not in trainer.state.log_history[3], "nothing is computed for it"


def test_below_target_kl_nothing_changes(free_run, tmp_path):
    free, free_moments = free_run
    target = max(logged(free, "policy/approx_kl")) * 1.01
    _, moments = run(tmp_path, max_steps=8, target_kl=target, **FAR)
    assert same(moments.by_step[8], free_moments.by_step[8])


def test_the_share_that_is_kept_is_of_both_norms(tmp_path):
    trainer, _ = run(tmp_path)
    names = ("clip_bias/share", "clip_bias/norm", "clip_bias/grad_norm")
    figures = list(zip(*(logged(trainer, name) for name in names), strict=True))
    assert any(0 < share < 1 for share, *_ in figures), "the case should be interesting"
    for share, clipped, kept in figures:
        assert share == pytest.approx(kept / (kept + clipped) if clipped else 1.0)
