"""Arguments that cannot work are refused at construction, by the name of the argument to change."""

from __future__ import annotations

import re

import pytest
import torch
from datasets import Dataset
from transformers import (
    DataCollatorWithPadding,
    ProcessorMixin,
    Qwen2ForSequenceClassification,
    Qwen2Model,
)
from trl import GRPOConfig

from tests.builders import build, quick_config, share_of_a
from tests.fakes import CountEnv, char_tokenizer, tiny_config, tiny_policy, tiny_value_model
from trl_stppo import PPOConfig, PPOTrainer, STPPOConfig, STPPOTrainer

TOKENIZER = char_tokenizer()


class NoReset:
    def step(self, action: str):
        return "", 0.0, True, False, {}


class ToolEnv:
    def reset(self, **row):
        return None

    def look(self, word: str) -> str:
        """Look a word up.

        Args:
            word: the word.
        """
        return word

    def get_reward(self) -> float:
        return 0.0


def unpadded_tokenizer():
    tokenizer = char_tokenizer()
    tokenizer.pad_token = None
    return tokenizer


def two_outputs():
    return Qwen2ForSequenceClassification(tiny_config(TOKENIZER, num_labels=2))


def frozen():
    return tiny_value_model(TOKENIZER).requires_grad_(False)


def no_rollout(prompts, trainer):
    raise AssertionError("not reached")


# name -> (arguments of the constructor, settings, what the message must name)
REFUSED = {
    "environment without reset": (
        {"environment_factory": NoReset},
        {},
        "`environment_factory` made a NoReset without a `reset`",
    ),
    "rollout_func and a tool environment": (
        {"environment_factory": ToolEnv, "rollout_func": no_rollout},
        {},
        "`rollout_func` and `tools` or a tool `environment_factory`",
    ),
    "tools and a text environment": (
        {"environment_factory": CountEnv, "tools": [no_rollout]},
        {},
        "`tools` and a text `environment_factory` were both given",
    ),
    "rollout_func and a text environment": (
        {"environment_factory": CountEnv, "rollout_func": no_rollout},
        {},
        "`rollout_func` and a text `environment_factory` were both given",
    ),
    **{
        f"{name} without an environment": (
            {},
            {name: 2},
            f"`{name}=2` is for episodes with",
        )
        for name in (
            "max_turns",
            "max_turn_tokens",
            "max_malformed_actions",
            "episode_timeout_seconds",
            "generation_slots",
        )
    },
    "max_turn_tokens with a rollout_func": (
        {"rollout_func": no_rollout},
        {"max_turn_tokens": 2},
        "`max_turn_tokens=2` is for episodes with",
    ),
    "empty dataset": (
        {"train_dataset": Dataset.from_dict({"prompt": []})},
        {},
        "`train_dataset` is empty",
    ),
    "neither prompt nor input_ids": (
        {"train_dataset": Dataset.from_dict({"question": ["?"] * 8})},
        {},
        "has the columns ['question'], but neither `prompt`",
    ),
    "no dataset and no length": (
        {"train_dataset": None, "environment_factory": CountEnv},
        {"max_steps": -1},
        "set `max_steps` or `total_episodes`",
    ),
    "no dataset and no environment": ({"train_dataset": None}, {}, "`train_dataset` is required"),
    "tokenizer without pad token": (
        {"processing_class": unpadded_tokenizer},
        {},
        "`processing_class` has no pad token",
    ),
    "unknown collator": (
        {"data_collator": lambda rows: rows},
        {},
        "`data_collator` is a function",
    ),
    "value model without head": (
        {"value_model": lambda: Qwen2Model(tiny_config(TOKENIZER))},
        {},
        "`value_model` is a Qwen2Model, which has no `score` head",
    ),
    "value model with two outputs": (
        {"value_model": two_outputs},
        {},
        "`value_model` has num_labels=2",
    ),
    "value model with nothing to train": (
        {"value_model": frozen},
        {},
        "`value_model` has no trainable parameter",
    ),
    "value model and its name": (
        {"value_model": lambda: tiny_value_model(TOKENIZER)},
        {"value_model_name_or_path": "somewhere"},
        "`value_model` and `value_model_name_or_path` were both given",
    ),
    "rank of a critic that is separate": ({}, {"critic_lora_r": 4}, "`critic_lora_r=4`"),
    "weights for other rewards": (
        {},
        {"reward_weights": [1.0, 2.0]},
        "`reward_weights` has 2 entries for 1 reward",
    ),
    "no source of reward": ({"reward_funcs": None}, {}, "No reward source"),
}
LAZY = ("processing_class", "value_model")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_by_name(case, tmp_path):
    arguments, options, message = REFUSED[case]
    arguments = {k: v() if k in LAZY else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        build(tmp_path, STPPOTrainer, arguments=arguments, **options)


def test_the_reference_must_be_another_object_than_the_policy(tmp_path):
    policy = tiny_policy(TOKENIZER)
    with pytest.raises(ValueError, match="`ref_model` and `model` are the same object"):
        build(tmp_path, arguments={"model": policy, "ref_model": policy})


@pytest.mark.parametrize("args", [{"max_steps": 1}, "config.yaml"])
def test_args_must_be_one_of_our_configs(args, tmp_path):
    with pytest.raises(TypeError, match=r"`args` is a (dict|str); .* needs a PPOConfig"):
        build(tmp_path, arguments={"args": args})


def test_a_plain_grpo_config_is_refused(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(TypeError, match="`args` is a GRPOConfig"):
        build(tmp_path, arguments={"args": args})


def test_st_ppo_needs_the_config_that_has_its_fields(tmp_path):
    args = quick_config(tmp_path, PPOConfig)
    with pytest.raises(TypeError, match="`args` is a PPOConfig; this trainer needs a STPPOConfig"):
        build(tmp_path, STPPOTrainer, arguments={"args": args})


def test_ppo_refuses_a_config_whose_correction_it_would_ignore(tmp_path):
    args = quick_config(tmp_path, STPPOConfig)
    with pytest.raises(TypeError, match="`args` is a STPPOConfig"):
        build(tmp_path, PPOTrainer, arguments={"args": args})


def test_image_processors_are_refused(tmp_path):
    class Processor(ProcessorMixin):
        def __init__(self):
            pass

    with pytest.raises(ValueError, match="is a Processor: images are not"):
        build(tmp_path, arguments={"processing_class": Processor()})


def test_padding_collators_of_ppo_scripts_are_accepted(tmp_path):
    collator = DataCollatorWithPadding(TOKENIZER)
    assert build(tmp_path, arguments={"data_collator": collator}) is not None


def test_a_shared_critic_needs_a_lora_policy(tmp_path):
    from peft import IA3Config

    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with pytest.raises(ValueError, match="`peft_config` is a IA3Config"):
        build(tmp_path, arguments={"peft_config": config})


def test_an_optimizer_with_half_of_the_critic_is_refused(tmp_path):
    value_model = tiny_value_model(TOKENIZER)
    some = list(value_model.parameters())[:2]
    policy = tiny_policy(TOKENIZER)
    optimizer = torch.optim.SGD([*policy.parameters(), *some], lr=0.1)
    arguments = {"model": policy, "value_model": value_model, "optimizers": (optimizer, None)}
    with pytest.raises(ValueError, match="`optimizers` is without"):
        build(tmp_path, arguments=arguments).train()


def test_a_message_names_the_function_whose_reward_is_not_a_number(tmp_path):
    def broken_reward(completions, **kwargs):
        return [float("nan"), *[0.0] * (len(completions) - 1)]

    trainer = build(tmp_path, arguments={"reward_funcs": [share_of_a, broken_reward]})
    with pytest.raises(ValueError, match=r"`broken_reward\(\)\[0\]` is nan"):
        trainer.train()


def test_a_rollout_without_any_reward_is_refused(tmp_path):
    def rollout(prompts, trainer):
        ids = [[5, 6]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}

    trainer = build(tmp_path, arguments={"rollout_func": rollout})
    with pytest.raises(ValueError, match="No turn has a reward"):
        trainer.train()
