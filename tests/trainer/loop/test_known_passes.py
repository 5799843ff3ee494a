"""Passes that would repeat known numbers are left out, and nothing else changes."""

import pytest
import torch

from tests.kit.builders import build
from trl_stppo import STPPOTrainer
from trl_stppo.models.adapters import is_fresh_lora
from trl_stppo.trainer.training_loop import TrainingLoop

SGD = {"optim": "sgd", "num_mini_batches": 1, "num_ppo_epochs": 3, "max_steps": 6}


class Loop(TrainingLoop):
    """Computes the old log-probabilities before the update in any case, and counts passes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.references = self.olds = 0

    def logprobs_under(self, model, batch):
        self.olds += model is self.host.model
        self.references += model is not self.host.model
        return super().logprobs_under(model, batch)


class Computed(Loop):
    def add_old_logprobs(self, batch):
        batch["old_per_token_logps"] = self.logprobs_under(self.host.model, batch)


def lengths(completion_ids, **kwargs):
    return [float(len(ids) + ids[0] % 3) for ids in completion_ids]


def trained(folder, loop, **options):
    kind = type("Trainer", (STPPOTrainer,), {"loop_class": loop})
    arguments = {"reward_funcs": lengths}
    if options.pop("lora", False):
        peft = pytest.importorskip("peft")
        arguments["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = build(folder, kind, arguments=arguments, **{**SGD, **options})
    trainer.train()
    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_the_rows_are_numbered_on_the_device_of_the_batch(tmp_path):
    loop = build(tmp_path, STPPOTrainer, kl_coef=0.0, **SGD)._loop
    batch = {"completion_ids": torch.empty(3, 2, device="meta")}
    loop.add_old_logprobs(batch)
    assert batch["row"].device.type == "meta"


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"critic_warmup_steps": 3}, {"gradient_accumulation_steps": 4}]
)
def test_the_first_steps_log_probabilities_are_the_old_ones(tmp_path, options):
    options = {"kl_coef": 0.0, **options}
    left_out = trained(tmp_path / "a", Loop, **options)
    computed = trained(tmp_path / "b", Computed, **options)
    assert (left_out._loop.olds, computed._loop.olds) == (0, 2)
    torch.testing.assert_close(weights(left_out), weights(computed), rtol=1e-5, atol=1e-6)
    logged = [e for e in left_out.state.log_history if "policy/ratio_max" in e]
    first, *later = logged
    assert first["policy/ratio_max"] == 1.0
    assert any(entry["policy/ratio_max"] != 1.0 for entry in later)


@pytest.mark.long
def test_a_run_that_goes_on_after_the_first_step_is_the_whole_one(tmp_path):
    options = {"kl_coef": 0.0, "save_strategy": "steps", "save_steps": 1}
    whole = trained(tmp_path / "a", Loop, **options)
    again = build(
        tmp_path / "b", type("Trainer", (STPPOTrainer,), {"loop_class": Loop}),
        arguments={"reward_funcs": lengths}, **SGD, **options,
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert torch.equal(weights(whole), weights(again))


def test_a_first_pass_that_is_not_finite_spoils_no_later_step(tmp_path):
    trainer = build(tmp_path, STPPOTrainer, kl_coef=0.0, **SGD)
    passes = trainer._loop.forward.policy

    def broken_once(*args, **kwargs):
        logprobs, *others = passes(*args, **kwargs)
        is_broken = trainer.state.global_step == SGD["num_ppo_epochs"]
        return (logprobs * torch.nan if is_broken else logprobs, *others)

    trainer._loop.forward.policy = broken_once
    trainer.train()
    assert trainer.state.log_history[-2]["guard/skipped_steps"] == 1


def test_later_mini_batches_need_the_old_ones_before_the_update(tmp_path):
    trainer = trained(
        tmp_path, Loop, kl_coef=0.0, num_mini_batches=2, num_ppo_epochs=1, max_steps=4
    )
    assert trainer._loop.olds == 2


@pytest.mark.long
def test_the_kl_needs_the_old_ones_before_the_update(tmp_path):
    assert trained(tmp_path, Loop, kl_coef=0.05)._loop.olds == 2


@pytest.mark.long
def test_a_fresh_lora_policy_is_its_reference(tmp_path):
    trainer = trained(tmp_path, Loop, kl_coef=0.05, lora=True)
    # Of two rollouts the first has no pass of the reference, which is the policy without its adapter.
    assert trainer._loop.olds == 3
    assert not is_fresh_lora(trainer.model)


def test_fresh_means_that_all_second_matrices_are_zero(tmp_path):
    peft = pytest.importorskip("peft")
    arguments = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"])}
    model = build(tmp_path, STPPOTrainer, arguments=arguments).model
    assert is_fresh_lora(model)
    seconds = [p for n, p in model.named_parameters() if ".lora_B.default" in n]
    with torch.no_grad():
        seconds[-1][0, 0] = 1e-9
    assert not is_fresh_lora(model)
    assert not is_fresh_lora(build(tmp_path / "full", STPPOTrainer).model)
