"""Steps that are skipped, and runs that end of it: each seen through training."""

import math

import pytest

from tests.kit.guard_kit import build, run, same
from tests.kit.scripted import logged
from trl_stppo.errors import NonFiniteError
from trl_stppo.trainer.step import StepReport, Verdict


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
    grads = trainer._optimizer_step.critic_grads
    original = grads.add
    grads.add = lambda loss: original(loss * (math.nan if due() else 1.0))


def the_clipped_terms(trainer, due, factor=math.inf):
    step, attach = trainer._optimizer_step, trainer._optimizer_step.attach

    def attached(*args, **kwargs):
        attach(*args, **kwargs)
        bias = step.exact._bias
        original = bias.add
        bias.add = lambda loss, **k: original(loss * (factor if due() else 1.0), **k)

    step.attach = attached


def the_norm_of_the_clipped_terms(trainer, due):
    """It overflows, while each of them is finite."""
    the_clipped_terms(trainer, due, factor=1e250)


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
    the_norm_of_the_clipped_terms: "the gradient of the clipped terms",
    an_old_logprob: "the loss (process 0), the policy's gradient (process 0)",
}


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


def test_one_bad_micro_batch_skips_the_whole_mini_batch(tmp_path, caplog):
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
    assert "losses [nan] of 2" in caplog.text


@pytest.mark.long
def test_too_many_skips_in_a_row_end_the_run_with_a_checkpoint_to_go_on_from(tmp_path):
    trainer, moments = build(tmp_path, the_loss, steps=(3, 4, 5), max_steps=9)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    message = str(caught.value)
    for part in (
        "The loss (process 0), the policy's gradient (process 0) was not finite at step 5",
        "the last of 3 skipped steps in a row",
        str(tmp_path / "checkpoint-5"),
        "the checkpoint before it: none",
    ):
        assert part in message
    assert trainer.stop_reason.startswith("not finite: the loss")
    assert same(moments.by_step[2], moments.by_step[5])

    resumed, later = build(tmp_path, max_steps=9)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert sorted(later.by_step) == [6, 7, 8, 9]
    assert not same(moments.by_step[5], later.by_step[6])
    assert logged(resumed, "guard/skipped_steps")[-1] == 3, "the total goes on"


@pytest.mark.long
def test_a_checkpoint_keeps_the_count_of_skips_in_a_row(tmp_path):
    save = {"save_strategy": "steps", "save_steps": 1}
    run(tmp_path, the_loss, steps=(4, 5), max_steps=5, **save)
    trainer, _ = build(tmp_path, the_loss, steps=(6,), **save)
    with pytest.raises(NonFiniteError, match="step 6, the last of"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_where_the_engine_steps_inside_backward_the_loss_is_checked_before(tmp_path):
    trainer, moments = build(tmp_path, an_old_logprob, save_strategy="steps", save_steps=2)
    original = trainer._compute_loss

    def as_deepspeed(model, inputs):
        engine = trainer._optimizer_step.engine
        engine.steps_in_backward = True
        try:
            return original(model, inputs)
        finally:
            engine.steps_in_backward = False

    trainer._compute_loss = as_deepspeed
    message = r"The loss \(process 0\) was not finite at step 5. DeepSpeed .*checkpoint-3"
    with pytest.raises(NonFiniteError, match=message):
        trainer.train()
    assert sorted(moments.by_step) == [1, 2, 3, 4]


def test_a_finite_mini_batch_between_them_ends_a_row_of_skips(tmp_path):
    trainer, _ = build(tmp_path, an_old_logprob)
    guards, fault = trainer._guards, StepReport(faults="the loss (process 0)")
    for _ in range(2):
        assert guards.judge(fault, None) is Verdict.NOT_FINITE
    assert guards.judge(StepReport(exceeds=True), None) is Verdict.REFUSED
    guards.judge(fault, None)
    assert guards._ending.broken is None
    guards.judge(fault, None)
    guards.judge(fault, None)
    assert guards._ending.broken == "the loss (process 0)"
