"""Rollouts that are left alone, and runs that stop at a limit: each seen through training."""

import math

import pytest

from tests.kit.guard_kit import build, run, same
from tests.kit.scripted import logged, play_script
from trl_stppo import PPOConfig, STPPOConfig
from trl_stppo.trainer.config.conditions import Condition, conditions
from trl_stppo.trainer.guards.watches import StopWhen

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


FLAT = "reward_std < 0.1 for 2"
ONE_STEP = {"num_ppo_epochs": 1, "max_steps": 8, "stop_when": FLAT}


def test_rewards_without_spread_stop_the_run_with_a_checkpoint(tmp_path, caplog):
    trainer, _ = run(tmp_path, rollout_func=constant(3, 4), **ONE_STEP)
    assert trainer.state.global_step == 4, "two rollouts in a row"
    assert (tmp_path / "checkpoint-4").is_dir()
    for part in (f"'{FLAT}'", "at step 4", "value is 0"):
        assert part in trainer.stop_reason
    last = caplog.records[-1].getMessage()
    assert last.startswith(f"Training stopped after step 4 of 8: `stop_when='{FLAT}'`")
    assert str(tmp_path / "checkpoint-4") in last


def test_a_rollout_with_spread_between_them_starts_the_patience_anew(tmp_path):
    trainer, _ = run(tmp_path, rollout_func=constant(2, 4, 6), **ONE_STEP)
    assert trainer.state.global_step == 8
    assert trainer.stop_reason is None


def test_patience_goes_on_over_a_resume(tmp_path):
    save = {"save_strategy": "steps", "save_steps": 1}
    first, _ = run(tmp_path, rollout_func=constant(1), **{**ONE_STEP, "max_steps": 1}, **save)
    assert first._guards.state_dict()["strikes"] == {FLAT: 1}
    trainer, _ = build(tmp_path, rollout_func=constant(1), **ONE_STEP, **save)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2


def test_after_such_a_stop_a_resumed_run_counts_anew(tmp_path):
    trainer, _ = run(tmp_path, rollout_func=constant(1, 2), **ONE_STEP)
    assert trainer.state.global_step == 2
    trainer, _ = build(tmp_path, rollout_func=constant(1), **ONE_STEP)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8, "one batch is not two in a row"


def test_a_metric_that_is_not_a_number_once_neither_counts_nor_starts_the_count_anew():
    limit = StopWhen("reward_std < 0.1 for 2")
    verdicts = [limit.look({"reward_std": x}, 0) for x in (0.0, math.nan, math.nan, 0.0)]
    assert [verdict is not None for verdict in verdicts] == [False, False, False, True]


def test_a_metric_that_the_log_is_without_is_warned_of_once(tmp_path, caplog):
    run(tmp_path, **{**ONE_STEP, "stop_when": "reward_sdt > 0"})
    assert sum("reward_sdt" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(("limit", "steps"), [(0.5, 3), (0.01, 6)])
def test_a_clipping_bias_that_outweighs_the_rest_stops_the_run(limit, steps, tmp_path):
    trainer, _ = run(tmp_path, stop_when=f"clip_bias/share < {limit} for 3")
    assert trainer.state.global_step == steps
    assert (trainer.stop_reason is None) == (steps == 6)
    assert (tmp_path / f"checkpoint-{steps}").is_dir() == (steps == 3)


def test_the_share_that_is_kept_is_of_both_norms(tmp_path):
    trainer, _ = run(tmp_path)
    names = ("clip_bias/share", "clip_bias/norm", "clip_bias/grad_norm")
    figures = list(zip(*(logged(trainer, name) for name in names), strict=True))
    assert any(0 < share < 1 for share, *_ in figures), "the case should be interesting"
    for share, clipped, kept in figures:
        assert share == pytest.approx(kept / (kept + clipped) if clipped else 1.0)


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "learning_rate"])
def test_what_transformers_logs_is_counted_in_log_entries(metric, tmp_path):
    trainer, _ = run(tmp_path, stop_when=f"{metric} > -1e9 for 2", logging_steps=2, max_steps=6)
    assert trainer.state.global_step == 4, "the second entry"
    assert (tmp_path / "checkpoint-4").is_dir()


def test_a_second_training_does_not_remember_the_first_ones_end(tmp_path):
    trainer, _ = run(tmp_path, rollout_func=constant(1, 2), **ONE_STEP)
    assert trainer.stop_reason is not None
    trainer.train()
    assert trainer.state.global_step == 8
    assert trainer.stop_reason is None


def settings(folder, cls=PPOConfig, **options):
    return cls(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", **options)


@pytest.mark.parametrize(("value", "expected"), [
    (None, None),
    ([], None),
    ("reward_std<1e-2 for 3", ["reward_std < 0.01 for 3"]),
    (" reward_std  >  2 ", ["reward_std > 2 for 5"]),
    (["a < -1.5E3", "b > 3 for 1"], ["a < -1500 for 5", "b > 3 for 1"]),
    (["a < 1", "a < 1.0 for 5"], ["a < 1 for 5"]),
])  # fmt: skip
def test_conditions_are_kept_as_texts(value, expected, tmp_path):
    args = settings(tmp_path, stop_when=value)
    assert args.stop_when == expected
    assert settings(tmp_path, stop_when=args.stop_when).stop_when == expected


def test_a_condition_by_hand():
    (condition,) = conditions("clip_bias/share < 0.25 for 7")
    assert condition == Condition("clip_bias/share", True, 0.25, 7)


@pytest.mark.parametrize("value", [
    *("reward_std", "reward_std = 1", "reward_std < low", "reward_std < 1 for ever", [3], 3),
    *("a < nan", "a > inf for 2", "a < 1 for 0", "a < 1 for 1.5", {"metric": "a", "below": 1}),
    "eval_episode/score < 1",
])  # fmt: skip
def test_conditions_that_cannot_be_are_refused(value, tmp_path):
    with pytest.raises(ValueError, match="stop_when"):
        settings(tmp_path, stop_when=value)


def test_a_condition_on_the_clipping_bias_has_it_measured(tmp_path):
    def measured(**options):
        return settings(tmp_path, STPPOConfig, variant="ppo", **options).measures_clip_bias

    assert measured(stop_when="clip_bias/share < 0.3")
    assert not measured(stop_when="reward_std < 0.3")
    assert not measured()
