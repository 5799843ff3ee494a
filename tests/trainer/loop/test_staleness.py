"""`rollout_staleness`: episodes played by the policy of so many updates ago, in training alone."""

import pytest
import torch
from peft import LoraConfig

from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.scripted import LEARNS, assert_same_run, scripted_trainer
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.optimizers import policy_parameters
from trl_stppo.trainer.rollouts import StalePolicies
from trl_stppo.trainer.training_loop import TrainingLoop

EPOCHS, UPDATES = 2, 4
RUN = {
    **LEARNS,
    "num_ppo_epochs": EPOCHS,
    "max_steps": EPOCHS * UPDATES,
    "kl_coef": 0.0,
    "staleness": 0.0,
}
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


class WatchingLoop(TrainingLoop):
    """Notes the policy's weights whenever episodes have been played, and after each update."""

    def old_logprobs(self, tokens):
        self.host.played.append(weights_of(self.host))
        return super().old_logprobs(tokens)

    def targets(self, *args):
        self.host.trained.append(weights_of(self.host))
        return super().targets(*args)

    def observe(self, inputs, terms, old, log_ratio):
        self.host.largest.append(float(log_ratio.abs().max()))
        super().observe(inputs, terms, old, log_ratio)


class Watching(STPPOTrainer):
    loop_class = WatchingLoop

    def __init__(self, *args, **kwargs):
        self.played, self.trained, self.largest = [], [], []
        super().__init__(*args, **kwargs)


def weights_of(trainer):
    return torch.cat(
        [p.detach().flatten().clone() for _, p in policy_parameters(trainer.model, trainer.critic)]
    )


@pytest.mark.long
@pytest.mark.parametrize("staleness", quick([0, 1, 2, 9], 0, 2))
def test_the_policy_of_so_many_updates_ago_plays(staleness, tmp_path):
    options = {**RUN, "trainer_class": Watching, "rollout_staleness": staleness}
    trainer, _ = scripted_trainer(tmp_path, **options)
    trainer.train()
    assert len(trainer.played) == len(trainer.trained) == UPDATES
    for update, played in enumerate(trainer.played):
        assert torch.equal(played, trainer.trained[max(0, update - staleness)])
    assert not torch.equal(trainer.trained[0], trainer.trained[-1])


@pytest.mark.long
@pytest.mark.parametrize("adapters", quick([False, True], True))
def test_ratios_are_taken_to_the_policy_that_has_played(adapters, tmp_path):
    options = {**RUN, "trainer_class": Watching, "num_ppo_epochs": 1, "max_steps": 4}
    for staleness in (0, 1):
        if adapters:
            options |= {"model": tiny_policy(char_tokenizer()), "peft_config": LoraConfig(**LORA)}
        trainer, _ = scripted_trainer(tmp_path, **options, rollout_staleness=staleness)
        trainer.train()
        first, *later = trainer.largest
        assert first < 1e-5
        assert all((ratio > 1e-4) == bool(staleness) for ratio in later)


@pytest.mark.long
@pytest.mark.parametrize("step", quick([2, 4, 6], 4))
def test_a_resumed_run_has_the_same_past(step, tmp_path):
    options = {**LEARNS, "max_steps": 8, "rollout_staleness": 2, "save_strategy": "steps"}
    options |= {"save_steps": 1, "staleness": 0.0}
    whole, _ = scripted_trainer(tmp_path, **options)
    whole.train()
    resumed, _ = scripted_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert_same_run(resumed, whole)


@pytest.mark.long
def test_checkpoints_hold_the_past_and_a_new_run_forgets_it(tmp_path):
    options = {**RUN, "trainer_class": Watching, "rollout_staleness": 2}
    trainer, _ = scripted_trainer(tmp_path, **options, save_strategy="steps", save_steps=8)
    trainer.train()
    state = torch.load(tmp_path / "checkpoint-8" / "run_state.pt", weights_only=True)
    assert len(state["stale_policies"]) == 3
    trainer.train()
    assert torch.equal(trainer.played[UPDATES], trainer.trained[UPDATES])


def test_an_error_while_playing_brings_the_weights_back():
    weight = torch.nn.Parameter(torch.ones(2))
    past = StalePolicies([weight], 1)
    with past.keeping_present():
        pass
    with torch.no_grad():
        weight.fill_(2.0)

    def fail():
        with past.keeping_present(), past.past_weights():
            assert weight.tolist() == [1.0, 1.0]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert weight.tolist() == [2.0, 2.0]
