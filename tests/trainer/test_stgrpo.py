"""STGRPOTrainer: GRPO's advantages under ST-PPO's ratio and correction, and no trace of a critic."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer

from tests.kit.builders import LIMITS, QUICK, TEXT, KeptGroups, build, logs, prompts, share_of_a
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy, tiny_value_model
from tests.kit.tiers import quick
from trl_stppo import STGRPOConfig, STGRPOTrainer
from trl_stppo.trainer.loop.sampler import TurnSampler

GROUP = {"num_generations": 4, "num_mini_batches": 1, "gradient_accumulation_steps": 2}


def paid_by_count(completions, **columns):
    """A reward function with different rewards within most groups."""
    return share_of_a(completions)


IN_ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
AS_TRL = [
    ("grpo", {"num_iterations": 3}),
    # Of several micro-batches upstream logs the mean of their mean KLs, whatever tokens they have.
    ("grpo", {"scale_rewards": "batch", "beta": 0.1, **IN_ONE}),
    ("grpo", {"scale_rewards": "none", "loss_type": "dr_grpo"}),
    # Long enough for some of each mini-batch to end: one without is no step here, but Adam's there.
    ("grpo", {"mask_truncated_completions": True, "max_completion_length": 80}),
    ("gspo", {"num_iterations": 2, "epsilon": 0.2}),
]


@pytest.mark.parametrize(("variant", "options"), quick(AS_TRL, AS_TRL[0], AS_TRL[1], AS_TRL[4]))
def test_one_turn_without_correction_is_trls_grpo(variant, options, tmp_path, monkeypatch):
    # Otherwise ours draws each answer from a seed of its own.
    monkeypatch.setattr(TurnSampler, "why_not_cached", lambda self: "As TRL does it.")
    # Of several epochs only the first rollout: dealing episodes anew draws random numbers.
    steps = options.get("num_iterations", 6)
    settings = {**QUICK, **options, "num_generations": 4, "max_steps": steps, "learning_rate": 1e-2}
    for name in ("critic_learning_rate", "num_mini_batches", "num_ppo_epochs"):
        del settings[name]
    settings |= {"steps_per_generation": settings["gradient_accumulation_steps"]}
    settings |= {"disable_dropout": True}
    settings = {"loss_type": "grpo", "num_iterations": 1, **settings}
    tokenizer, trained = char_tokenizer(), []
    tiny_policy(tokenizer).save_pretrained(tmp_path / "policy")
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (STGRPOTrainer, STGRPOConfig)):
        own = {"variant": variant}
        if trainer_class is GRPOTrainer:
            own = {"importance_sampling_level": "token" if variant == "grpo" else "sequence"}
        trainer = trainer_class(
            model=str(tmp_path / "policy"),
            reward_funcs=paid_by_count,
            args=config_class(output_dir=str(tmp_path), **settings, **own),
            train_dataset=prompts(),
            processing_class=tokenizer,
        )
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        trained.append((trainer, start))
    (theirs, start), (ours, _) = trained
    moved = 0.0
    for (name, p), q in zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True):
        moved = max(moved, float((p - start[name]).abs().max()))
        assert torch.allclose(p, q, atol=2e-5), name
    assert moved > 5e-3
    log, expected = logs(ours), logs(theirs)
    for name in ("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length"):
        # There upstream asks for the spread of the batch, ours always for that of each group.
        if (name, options.get("scale_rewards")) != ("frac_reward_zero_std", "batch"):
            assert log[name] == pytest.approx(expected[name], abs=1e-6), name
    if "beta" in options:
        assert log["kl"] == pytest.approx(expected["kl"], rel=1e-3) != 0.0


def test_nothing_of_a_critic_is_left(tmp_path):
    trainer = build(tmp_path, STGRPOTrainer, **GROUP, save_strategy="steps", save_steps=2)
    trainer.train()
    assert trainer.critic.parameters() == []
    assert not any(name.startswith("value/") for name in logs(trainer))
    assert len(trainer.optimizer.param_groups) == 2
    assert not list(tmp_path.rglob("critic"))


class Uneven(CountEnv):
    """Pays the row's `paid`, in halves by turn; breaks where it is None."""

    def reset(self, *, paid=None, **row):
        if paid is None:
            raise OSError("broken on purpose")
        self._paid, self._turns = paid, 0
        return "", {}

    def step(self, action):
        self._turns += 1
        return "go on", self._paid / 2, self._turns == 2, False, {}


def test_turn_rewards_count_and_failed_episodes_do_not(tmp_path):
    """Every row is a prompt of its own, so rows are repeated by hand: four neighbours are a group."""

    class Dealt(KeptGroups):
        def _generate_and_score_completions(self, inputs):
            paid = [1.0, 3.0, None, 5.0, 2.0, 2.0, 2.0, 2.0]
            rows = [{**row, "paid": paid[i % 8]} for i, row in enumerate(inputs)]
            return super()._generate_and_score_completions(rows)

    trainer = build(
        tmp_path, Dealt, arguments={"environment_factory": Uneven}, **GROUP, **LIMITS, max_steps=1
    )
    trainer.train()
    _, batch, turns, _, estimates = trainer.kept[-1]
    unit = 2.0 + 1e-4
    expected = torch.tensor([-2.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]) / unit
    mask = batch["loss_mask"]
    assert not mask[2].any()
    wanted = expected[:, None] * mask
    assert torch.allclose(estimates.advantages, wanted.to(estimates.advantages), atol=1e-6)
    assert turns.turn_rewards[0].sum() == pytest.approx(1.0)


def test_sample_episodes_need_not_make_groups(tmp_path):
    arguments = {**TEXT, "eval_dataset": prompts(5)}
    options = {**GROUP, **LIMITS, "per_device_eval_batch_size": 5}
    trainer = build(tmp_path, STGRPOTrainer, arguments=arguments, **options)
    trainer.generate_completions(sampling=True)
    trainer.num_generations_eval = 1
    assert trainer.evaluate()["eval_episodes"] == 5


def test_a_copied_adapter_as_reference_brings_no_dropout(tmp_path):
    tokenizer = char_tokenizer()
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.3)
    policy = get_peft_model(tiny_policy(tokenizer), lora)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    arguments = {"model": policy, "processing_class": tokenizer, **TEXT}
    trainer = build(tmp_path, STGRPOTrainer, arguments=arguments, **GROUP, **LIMITS, beta=0.1, max_steps=1)
    trainer.train()
    assert logs(trainer)["kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_value_model_is_refused(tmp_path):
    value_model = tiny_value_model(char_tokenizer())
    with pytest.raises(ValueError, match=r"`value_model` is a .*but STGRPOConfig has no critic"):
        build(tmp_path, STGRPOTrainer, arguments={"value_model": value_model}, **GROUP)
