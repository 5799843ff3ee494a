"""Steps that are skipped, rollouts that are left alone, runs that stop: each seen through training."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from transformers import TrainerCallback

from tests.builders import LIMITS, TEXT
from tests.builders import train as train_environment
from tests.scripted import LEARNS, Float64Trainer, logged, play_script, scripted_trainer
from trl_stppo import PPOConfig, STPPOConfig
from trl_stppo.errors import NonFiniteError

RUN = {
    **LEARNS,
    "trainer_class": Float64Trainer,
    "num_ppo_epochs": 3,
    "max_steps": 6,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
}
NAN_AT = 5  # the step, counted from 1, whose mini-batch is poisoned; in the middle of a rollout


class Moments(TrainerCallback):
    """Weights and the optimizer's whole state after every step."""

    def __init__(self) -> None:
        self.trainer, self.by_step = None, {}

    def on_step_end(self, args, state, control, **kwargs):
        optimizer, result = self.trainer.optimizer, {}
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                result[f"{g}/{i}"] = parameter.detach().clone()
                for name, value in optimizer.state[parameter].items():
                    result[f"{g}/{i}/{name}"] = torch.as_tensor(value).clone()
        self.by_step[state.global_step] = result


def build(folder, poison=None, steps=(NAN_AT,), **options):
    """A trainer whose mini-batches are poisoned at some steps, and what it leaves after each step."""
    moments = Moments()
    trainer, _ = scripted_trainer(folder, callbacks=[moments], **{**RUN, **options})
    moments.trainer = trainer
    if poison is not None:
        poison(trainer, lambda: trainer.state.global_step + 1 in steps)
    return trainer, moments


def run(folder, poison=None, steps=(NAN_AT,), **options):
    trainer, moments = build(folder, poison, steps, **options)
    trainer.train()
    return trainer, moments


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# ----------------------------------------------------------------------------- poisons


def the_loss(trainer, due):
    original = trainer._compute_loss
    trainer._compute_loss = lambda m, i: original(m, i) * (math.nan if due() else 1.0)


def the_loss_alone(trainer, due):
    """Its value, not its gradient."""
    original = trainer._compute_loss
    trainer._compute_loss = lambda m, i: original(m, i) + (math.inf if due() else 0.0)


def one_weight(trainer, due):
    """One element of one gradient of the policy."""
    weight = next(trainer.model.parameters())

    def poisoned(grad):
        grad = grad.clone()
        grad[0, 0] = math.inf if due() else grad[0, 0]
        return grad

    weight.register_hook(poisoned)


def the_critic(trainer, due):
    original = trainer._critic_grads.add
    trainer._critic_grads.add = lambda loss: original(loss * (math.nan if due() else 1.0))


def the_clipped_terms(trainer, due):
    after_optimizer = trainer._after_optimizer

    def install(optimizer):
        after_optimizer(optimizer)
        original = trainer._correction.add
        trainer._correction.add = lambda loss, **k: original(
            loss * (math.inf if due() else 1.0), **k
        )

    trainer._after_optimizer = install


def an_old_logprob(trainer, due):
    original = trainer._compute_loss

    def poisoned(model, inputs):
        if due():
            old = inputs["old_per_token_logps"].clone()
            row, token = inputs["loss_mask"].nonzero()[0]
            old[row, token] = math.nan
            inputs = {**inputs, "old_per_token_logps": old}
        return original(model, inputs)

    trainer._compute_loss = poisoned


POISONS = {
    the_loss: "the loss (process 0), the policy's gradient (process 0)",
    the_loss_alone: "the loss (process 0)",
    one_weight: "the policy's gradient (process 0)",
    the_critic: "the critic's gradient (process 0)",
    the_clipped_terms: "the gradient of the clipped terms",
    an_old_logprob: "the loss (process 0), the policy's gradient (process 0)",
}


# ------------------------------------------------------------------------ skipped steps


@pytest.mark.parametrize("poison", POISONS, ids=lambda p: p.__name__)
def test_a_step_that_is_not_finite_changes_nothing(poison, tmp_path, caplog):
    trainer, moments = run(tmp_path, poison, learning_rate=1e-3)
    after = moments.by_step
    assert sorted(after) == [1, 2, 3, 4, 5, 6], "the step counts"
    assert same(after[4], after[5])
    assert not any(same(after[n], after[n + 1]) for n in (1, 2, 3, 5)), "all others move"
    assert all(tensor.isfinite().all() for tensor in after[6].values())
    assert logged(trainer, "guard/skipped_steps") == [0, 0, 0, 0, 1, 1]
    assert f"Step 5 is skipped, not finite: {POISONS[poison]}." in caplog.text
    rates = logged(trainer, "learning_rate")
    assert rates[4] > rates[5], "the schedule goes on"
    assert trainer.stop_reason is None


@pytest.mark.parametrize("optim", ["sgd", "paged_adamw_32bit"])
def test_other_optimizers_skip_as_well(optim, tmp_path):
    steps = {"optim": optim, "optim_args": "momentum=0.9" if optim == "sgd" else None}
    _, moments = run(tmp_path, the_loss, **steps)
    after = moments.by_step
    assert same(after[4], after[5])
    assert not same(after[5], after[6])
    assert any(name.count("/") == 2 for name in after[4]), "there is state to be kept"


def test_one_bad_micro_batch_skips_the_whole_mini_batch(tmp_path):
    calls = []

    def second_half(trainer, due):
        original = trainer._compute_loss

        def poisoned(model, inputs):
            calls.append(len(inputs["loss_mask"]))
            return original(model, inputs) * (math.nan if due() and len(calls) % 2 == 0 else 1.0)

        trainer._compute_loss = poisoned

    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    _, moments = run(tmp_path, second_half, **halves)
    assert calls == [4] * 12
    assert same(moments.by_step[4], moments.by_step[5])
    saved = torch.load(tmp_path / "skipped" / "step-5-rank0.pt", weights_only=True)
    assert [math.isfinite(loss) for loss in saved["losses"]] == [True, False]
    assert [len(batch["completion_ids"]) for batch in saved["micro_batches"]] == [4, 4]
    ids = saved["micro_batches"][0]["completion_ids"]
    assert ids.untyped_storage().nbytes() == ids.nbytes, "not the whole rollout batch with it"


def test_the_skipped_mini_batch_is_saved_for_inspection(tmp_path):
    trainer, _ = run(tmp_path, one_weight)
    saved = torch.load(tmp_path / "skipped" / "step-5-rank0.pt", weights_only=True)
    assert (saved["step"], saved["process_index"]) == (5, 0)
    assert saved["not_finite"] == POISONS[one_weight]
    assert saved["gradients"] == ["transformer.wte.weight"], "the one, before clipping spreads it"
    (batch,), (texts,) = saved["micro_batches"], saved["texts"]
    assert {"prompt_ids", "completion_ids", "advantages", "old_per_token_logps"} <= batch.keys()
    assert len(texts) == len(batch["completion_ids"]) == 8
    ids = batch["completion_ids"][0][batch["completion_mask"][0].bool()]
    assert texts[0]["completion"] == trainer._tokenizer.decode(ids)


def test_the_first_ten_skipped_mini_batches_are_kept(tmp_path):
    steps = range(1, 13)
    trainer, _ = run(tmp_path, the_loss, steps, max_steps=12, max_consecutive_skips=99)
    names = {path.name for path in (tmp_path / "skipped").iterdir()}
    assert names == {f"step-{n}-rank0.pt" for n in range(1, 11)}
    assert logged(trainer, "guard/skipped_steps")[-1] == 12


def test_a_disk_that_cannot_take_the_file_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "skipped").write_text("in the way")
    trainer, _ = run(tmp_path, the_loss)
    assert trainer.state.global_step == 6
    assert "could not be written" in caplog.text


def test_a_nan_under_an_observation_is_inert(tmp_path):
    def under_observations(trainer, due):
        original = trainer._compute_loss

        def poisoned(model, inputs):
            old = inputs["old_per_token_logps"].masked_fill(inputs["turn_index"] < 0, math.nan)
            assert old.isnan().any()
            return original(model, {**inputs, "old_per_token_logps": old})

        trainer._compute_loss = poisoned

    _, clean = run(tmp_path / "clean")
    trainer, poisoned = run(tmp_path / "poisoned", under_observations)
    assert logged(trainer, "guard/skipped_steps")[-1] == 0
    assert same(clean.by_step[6], poisoned.by_step[6])


def test_a_turn_reward_that_is_not_finite_is_named(tmp_path):
    def rewards(prompts, trainer):
        result = play_script(prompts)
        result["turn_rewards"][3][1] = math.nan
        return result

    with pytest.raises(ValueError, match=r"turn_rewards\[3\]\[1\].*must be a finite number"):
        run(tmp_path, rollout_func=rewards)


def test_values_of_a_broken_critic_stop_the_run_before_the_weights_are_gone(tmp_path):
    """NaN from the rollout on: whitening spreads it to every advantage of the batch."""

    def values(trainer, due):
        original = trainer._rollout_values

        def poisoned(batch):
            before, last = original(batch)
            before[0, 0] = math.nan if due() else before[0, 0]
            return before, last

        trainer._rollout_values = poisoned

    trainer, moments = build(tmp_path, values, steps=(4,))
    with pytest.raises(NonFiniteError, match="step 6, the last of 3"):
        trainer.train()
    assert same(moments.by_step[3], moments.by_step[6])


# ----------------------------------------------------------------- too many, one by one


def test_too_many_skips_in_a_row_end_the_run_with_a_checkpoint_to_go_on_from(tmp_path):
    trainer, moments = build(tmp_path, the_loss, steps=(3, 4, 5), max_steps=9)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    message = str(caught.value)
    for part in (
        "The loss (process 0), the policy's gradient (process 0) was not finite at step 5",
        "`max_consecutive_skips`",
        str(tmp_path / "checkpoint-5"),
        "the checkpoint before it: none",
        str(tmp_path / "skipped"),
        "learning_rate",
    ):
        assert part in message
    assert trainer.stop_reason.startswith("not finite: the loss")
    assert same(moments.by_step[2], moments.by_step[5])

    resumed, later = build(tmp_path, max_steps=9)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert sorted(later.by_step) == [6, 7, 8, 9]
    assert not same(moments.by_step[5], later.by_step[6])
    assert logged(resumed, "guard/skipped_steps")[-1] == 3, "the total goes on"


def test_a_good_step_between_them_starts_the_count_anew(tmp_path):
    trainer, _ = run(tmp_path, the_loss, steps=(1, 2, 4, 5), max_consecutive_skips=3)
    assert trainer.state.global_step == 6
    assert logged(trainer, "guard/skipped_steps") == [1, 2, 2, 3, 4, 4]


def test_one_skip_is_enough_where_it_is_asked_for_and_older_checkpoints_are_named(tmp_path):
    save = {"save_strategy": "steps", "save_steps": 2, "max_consecutive_skips": 1}
    trainer, _ = build(tmp_path, the_critic, **save)
    with pytest.raises(NonFiniteError, match=r"checkpoint before it: .*checkpoint-4"):
        trainer.train()
    assert trainer.state.global_step == 5


def test_a_checkpoint_keeps_the_count_of_skips_in_a_row(tmp_path):
    save = {"save_strategy": "steps", "save_steps": 1}
    run(tmp_path, the_loss, steps=(4, 5), max_steps=5, **save)
    trainer, _ = build(tmp_path, the_loss, steps=(6,), **save)
    with pytest.raises(NonFiniteError, match="step 6, the last of 3"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_where_the_engine_steps_inside_backward_the_loss_is_checked_before(tmp_path):
    trainer, moments = build(tmp_path, an_old_logprob, save_strategy="steps", save_steps=2)
    original = trainer._compute_loss

    def as_deepspeed(model, inputs):
        trainer.is_deepspeed_enabled = True
        try:
            return original(model, inputs)
        finally:
            trainer.is_deepspeed_enabled = False

    trainer._compute_loss = as_deepspeed
    message = r"The loss \(process 0\) was not finite at step 5. DeepSpeed .*checkpoint-4.*skipped"
    with pytest.raises(NonFiniteError, match=message):
        trainer.train()
    assert sorted(moments.by_step) == [1, 2, 3, 4]
    assert (tmp_path / "skipped" / "step-5-rank0.pt").exists()


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
