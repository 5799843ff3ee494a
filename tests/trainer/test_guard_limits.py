"""Rollouts that are left alone, and runs that stop at a limit: each seen through training."""

from __future__ import annotations

import logging

import pytest

from tests.builders import LIMITS, TEXT
from tests.builders import train as train_environment
from tests.guard_kit import build, run, same
from tests.scripted import logged, play_script
from trl_stppo import PPOConfig, STPPOConfig

# ---------------------------------------------------------------------------- target_kl

FAR = {"staleness": 0.0, "learning_rate": 3e-2, "num_mini_batches": 1, "num_ppo_epochs": 4}


@pytest.fixture(scope="module")
def free_run(tmp_path_factory):
    return run(tmp_path_factory.mktemp("free"), max_steps=8, **FAR)


def test_beyond_target_kl_the_rest_of_the_rollout_batch_moves_nothing(free_run, tmp_path):
    free, free_moments = free_run
    kl = logged(free, "policy/approx_kl")
    assert 0 <= kl[0] < kl[1] < kl[2], "the case should be interesting"
    target = (kl[1] + kl[2]) / 2  # exceeded by the third mini-batch of the first rollout
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


def test_a_run_resumed_in_a_stopped_rollout_batch_leaves_it_alone_too(free_run, tmp_path):
    kl = logged(free_run[0], "policy/approx_kl")
    options = {**FAR, "target_kl": (kl[0] + kl[1]) / 2, "max_steps": 8}
    save = {"save_strategy": "steps", "save_steps": 3}
    whole, expected = run(tmp_path, **options, **save)
    trainer, moments = build(tmp_path, **options, **save)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(expected.by_step[3], moments.by_step[4])
    assert same(expected.by_step[8], moments.by_step[8])
    name = "guard/kl_stopped_steps"
    assert logged(trainer, name)[-1] == logged(whole, name)[-1] >= 3


# ----------------------------------------------------------------------------- collapse


def constant(*which: int):
    """A rollout_func whose episodes all earn the same in the rollout batches named, from 1 on."""
    count = 0

    def rollout(prompts, trainer):
        nonlocal count
        count += 1
        result = play_script(prompts)
        if count in which:
            result["turn_rewards"] = [[1.0, *[0.0] * (len(r) - 1)] for r in result["turn_rewards"]]
        return result

    return rollout


ONE_STEP = {"num_ppo_epochs": 1, "max_steps": 8, "collapse_patience": 2}


def test_rewards_without_spread_stop_the_run_with_a_checkpoint(tmp_path, caplog):
    trainer, _ = run(tmp_path, rollout_func=constant(3, 4), min_reward_std=0.1, **ONE_STEP)
    assert trainer.state.global_step == 4, "two rollouts in a row"
    assert (tmp_path / "checkpoint-4").is_dir()
    for part in ("`min_reward_std=0.1`", "reward_std at step 4", "value is 0", "2 rollout batches"):
        assert part in trainer.stop_reason
    last = caplog.records[-1].getMessage()
    assert last.startswith("Training stopped after step 4 of 8: `min_reward_std=0.1`")
    assert str(tmp_path / "checkpoint-4") in last


def test_a_rollout_with_spread_between_them_starts_the_patience_anew(tmp_path):
    trainer, _ = run(tmp_path, rollout_func=constant(2, 4, 6), min_reward_std=0.1, **ONE_STEP)
    assert trainer.state.global_step == 8
    assert trainer.stop_reason is None


def test_several_steps_of_one_rollout_count_once(tmp_path):
    # Metrics that are not logged yet still hold the rollout's figure at its later steps.
    options = {**ONE_STEP, "num_ppo_epochs": 4, "logging_steps": 10}
    trainer, _ = run(tmp_path, rollout_func=constant(1, 2), min_reward_std=0.1, **options)
    assert trainer.state.global_step == 5, "the first step of the second rollout"


def test_patience_goes_on_over_a_resume(tmp_path):
    save = {"save_strategy": "steps", "save_steps": 1, "min_reward_std": 0.1}
    run(tmp_path, rollout_func=constant(1), **{**ONE_STEP, "max_steps": 1}, **save)
    trainer, _ = build(tmp_path, rollout_func=constant(1), **ONE_STEP, **save)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(("limit", "steps"), [(0.5, 3), (100.0, 6)])
def test_a_clipping_bias_that_outweighs_the_rest_stops_the_run(limit, steps, tmp_path):
    trainer, _ = run(tmp_path, max_clip_bias_ratio=limit, collapse_patience=3)
    assert trainer.state.global_step == steps
    assert (trainer.stop_reason is None) == (steps == 6)
    assert (tmp_path / f"checkpoint-{steps}").is_dir() == (steps == 3)


def test_actions_that_nobody_can_read_stop_the_run(tmp_path):
    steps = {"max_steps": 5, "num_mini_batches": 1}
    limit = {"min_valid_action_rate": 1.0, "collapse_patience": 2}
    trainer = train_environment(tmp_path, arguments=TEXT, **steps, **limit, **LIMITS)
    assert trainer.state.global_step == 2
    assert trainer.stop_reason.startswith("`min_valid_action_rate=1.0` was missed 2 rollout")


def test_a_limit_without_its_metric_says_so_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(tmp_path, min_valid_action_rate=0.5, **ONE_STEP)
    assert caplog.text.count("`min_valid_action_rate` watches nothing") == 1


def test_a_second_training_does_not_remember_the_first_ones_end(tmp_path):
    trainer, _ = run(tmp_path, rollout_func=constant(1, 2), min_reward_std=0.1, **ONE_STEP)
    assert trainer.stop_reason is not None
    trainer.train()
    assert trainer.state.global_step == 8
    assert trainer.stop_reason is None


# ---------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_kl": 0.0}, "target_kl > 0 or None"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips >= 1"),
        ({"collapse_patience": 0}, "collapse_patience >= 1"),
        ({"min_valid_action_rate": 1.5}, "0 < min_valid_action_rate <= 1"),
        ({"min_reward_std": -1.0}, "min_reward_std > 0"),
        ({"enable_jit_checkpoint": True, "save_on_signal": False}, "contradicts"),
    ],
)
def test_settings_out_of_range_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        PPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_a_limit_of_the_clipping_bias_has_it_measured(tmp_path):
    def settings(**options):
        return STPPOConfig(output_dir=str(tmp_path), use_cpu=True, variant="ppo", **options)

    assert settings(max_clip_bias_ratio=2.0).log_clip_bias
    assert not settings().log_clip_bias
    with pytest.raises(ValueError, match="contradicts `log_clip_bias=False`"):
        settings(max_clip_bias_ratio=2.0, log_clip_bias=False)
    with pytest.raises(ValueError, match="max_clip_bias_ratio > 0"):
        settings(max_clip_bias_ratio=0.0)
