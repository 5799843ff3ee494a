"""Combinations that would train wrongly without a word are refused by name."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.builders import build, prompts, quick_config, share_of_a
from tests.fakes import CountEnv, char_tokenizer, tiny_policy, tiny_value_model
from trl_stppo import PPOConfig
from trl_stppo.models.critic import SharedCritic
from trl_stppo.trainer.stabilizers import check_linear


def test_a_reward_model_that_returns_nan_is_named(tmp_path):
    tokenizer = char_tokenizer()
    model = tiny_value_model(tokenizer)
    torch.nn.init.constant_(model.score.weight, float("nan"))
    arguments = {"reward_funcs": None, "reward_model": model, "processing_class": tokenizer}
    trainer = build(tmp_path, arguments=arguments)
    with pytest.raises(ValueError, match=r"reward model .* returned NaN"):
        trainer.train()


@pytest.mark.parametrize("role", ["reward_model", "model"])
def test_the_critic_may_not_be_another_role_s_model(tmp_path, role):
    make = tiny_policy if role == "model" else tiny_value_model
    model = make(char_tokenizer())
    with pytest.raises(ValueError, match=f"`value_model` and `{role}` are the same object"):
        build(tmp_path, arguments={"value_model": model, role: model})


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_dict({"text": ["a"]}), "`eval_dataset` has the columns"),
        ({"hard": Dataset.from_dict({"prompt": []})}, r"`eval_dataset\['hard'\]` is empty"),
    ],
)
def test_evaluation_data_are_checked_before_training(tmp_path, dataset, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, arguments={"eval_dataset": dataset})


def test_pretokenised_rows_cannot_open_a_text_environment(tmp_path):
    arguments = {
        "environment_factory": CountEnv,
        "train_dataset": Dataset.from_dict({"input_ids": [[3, 4]] * 8}),
    }
    with pytest.raises(ValueError, match="`train_dataset` has `input_ids`"):
        build(tmp_path, arguments=arguments)


def test_a_rollout_func_runs_its_tools_itself(tmp_path):
    arguments = {"rollout_func": lambda prompts, trainer: {}, "tools": [share_of_a]}
    with pytest.raises(ValueError, match="`rollout_func` and `tools`"):
        build(tmp_path, arguments={**arguments, "train_dataset": prompts(8)})


def test_warm_up_ends_with_a_rollout(tmp_path):
    with pytest.raises(
        ValueError, match=r"`critic_warmup_steps=3` must be a multiple .* Nearest: 4"
    ):
        quick_config(
            tmp_path, PPOConfig, critic_warmup_steps=3, num_ppo_epochs=2, num_mini_batches=2,
            gradient_accumulation_steps=2,
        )  # fmt: skip


def test_half_precision_from_the_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="fp16"):
        quick_config(tmp_path, PPOConfig)


@pytest.mark.parametrize("name", ["Prodigy", "AdamWScheduleFree", "Rprop"])
def test_an_optimizer_instance_of_unknown_kind_is_not_scaled(name):
    with pytest.raises(ValueError, match="not known to be proportional"):
        check_linear(name)


def lora_policy(**changes):
    from peft import get_peft_model

    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes}
    )
    return get_peft_model(tiny_policy(char_tokenizer()), config)


def test_a_shared_critic_trains_adapters_of_embeddings_too():
    critic = SharedCritic(lora_policy(target_modules=["embed_tokens", "q_proj"]))
    assert any("lora_embedding_A" in name for name in critic.parameter_names)


def test_a_shared_critic_needs_a_backbone_whose_biases_rest():
    with pytest.raises(ValueError, match=r"`bias='all'` .* shared critic"):
        SharedCritic(lora_policy(bias="all"))


@pytest.mark.parametrize("rslora", [False, True])
def test_another_rank_keeps_the_scaling_of_the_adapter(rslora):
    policy = lora_policy(use_rslora=rslora, rank_pattern={"q_proj": 2})
    SharedCritic(policy, rank=16)
    layer = policy.get_base_model().model.layers[0].self_attn.v_proj
    assert layer.scaling["critic"] == pytest.approx(layer.scaling["default"])
    assert layer.r["critic"] == 16
    assert policy.get_base_model().model.layers[0].self_attn.q_proj.r["critic"] == 16


def test_rows_without_a_prompt_for_environments_are_pointed_at(tmp_path, caplog):
    def named(rows):
        caplog.clear()
        build(tmp_path, arguments={"environment_factory": CountEnv, "train_dataset": rows})
        return "no `prompt`: the model reads what `reset` returns" in caplog.text

    assert named(prompts(8).rename_column("prompt", "question"))
    assert not named(prompts(8))
