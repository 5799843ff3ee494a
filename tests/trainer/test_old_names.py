"""Names of TRL's former PPOTrainer: attributes answer with a warning, arguments with the new name."""

from __future__ import annotations

import pytest
from peft import LoraConfig

from tests.builders import build
from tests.fakes import char_tokenizer, tiny_policy, tiny_value_model
from trl_stppo import PPOConfig, PPOTrainer, STGRPOTrainer, STPPOTrainer


def test_attributes_answer_under_their_old_names(tmp_path):
    tokenizer = char_tokenizer()
    policy, critic, reward = tiny_policy(tokenizer), tiny_value_model(tokenizer), None
    reward = tiny_value_model(tokenizer, seed=2)
    trainer = build(
        tmp_path, arguments={"model": policy, "value_model": critic, "reward_model": reward}
    )
    with pytest.warns(FutureWarning, match=r"`trainer.policy_model` is `trainer.model` here"):
        assert trainer.policy_model is policy
    with pytest.warns(FutureWarning, match=r"`trainer.value_model` is `trainer.critic.model`"):
        assert trainer.value_model is critic
    with pytest.warns(FutureWarning, match=r"`trainer.reward_model` is `trainer.reward_funcs`"):
        assert trainer.reward_model is reward
    trainer.train()
    with pytest.warns(FutureWarning):
        assert trainer.policy_model is trainer.model


def test_what_a_trainer_has_not_is_no_attribute_of_it(tmp_path):
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    trainer = build(tmp_path, STPPOTrainer, arguments=lora)
    with pytest.raises(AttributeError, match=r"see `trainer.critic` \(a SharedCritic\)"):
        trainer.value_model  # noqa: B018
    with pytest.raises(AttributeError, match=r"see `trainer.reward_funcs`"):
        trainer.reward_model  # noqa: B018
    with pytest.raises(AttributeError, match=r"^'STPPOTrainer' object has no attribute 'sett'$"):
        trainer.sett  # noqa: B018
    assert getattr(trainer, "anything", 1) == 1


def test_a_step_of_ones_own_leads_to_train(tmp_path):
    trainer = build(tmp_path)
    with pytest.raises(AttributeError, match=r"`trainer.train\(\)` plays the rollouts"):
        trainer.step([], [], [])
    assert not hasattr(trainer, "step")


@pytest.mark.parametrize("kind", [PPOTrainer, STGRPOTrainer])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("config", "args"),
        ("policy", "model"),
        ("ref_policy", "ref_model"),
        ("tokenizer", "processing_class"),
        ("dataset", "train_dataset"),
    ],
)
def test_arguments_of_old_name_the_new_ones(kind, old, new):
    with pytest.raises(TypeError, match=rf"^{kind.__name__} .*`{old}` \(TRL's .*\) is `{new}`"):
        kind(model=None, **{old: None})


def test_all_of_them_are_named_at_once(tmp_path):
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match=r"`config` .* is `args`; `policy` .* is `model`; `ref_pol"):
        PPOTrainer(config=config, policy=None, ref_policy=None)


def test_a_trainer_needs_a_policy():
    with pytest.raises(TypeError, match="PPOTrainer needs a `model`"):
        PPOTrainer()


def test_a_misspelt_argument_is_asked_about():
    with pytest.raises(TypeError, match=r"`reward_func` is none .*Did you mean `reward_funcs`"):
        PPOTrainer(model=None, reward_func=None)


def test_an_environment_under_another_name_is_told_its_own():
    with pytest.raises(TypeError, match=r"`env` is none .*`environment_factory` \(docs") as error:
        PPOTrainer(model=None, env=None)
    assert "TRL's PPO" not in str(error.value)
