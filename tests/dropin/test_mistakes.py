"""What people get wrong, one case each: the message has the field, its value, what is allowed, and the fix.

How each check works, its edges included, is tested where it lives (tests/trainer/test_config.py,
test_errors.py, test_messages.py, test_refusals.py); here a person reads the message.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import Qwen2Model
from trl import GRPOConfig

from tests.builders import build
from tests.fakes import CountEnv, char_tokenizer, tiny_config, tiny_policy
from tests.script_kit import AGENT
from trl_stppo import PPOConfig, STGRPOConfig, STPPOConfig, STPPOTrainer
from trl_stppo.cli.main import main

NAN = math.nan
# id -> (settings, field, its value as the message shows it, words of the fix)
SETTINGS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # sizes
    "mini-batches-do-not-divide": (
        {"gradient_accumulation_steps": 8, "num_mini_batches": 3},
        *("num_mini_batches", "3", "Set gradient_accumulation_steps to 9"),
    ),
    "no-mini-batch": ({"num_mini_batches": 0}, "num_mini_batches", "0", "at least 1"),
    "no-generation": ({"num_generations": 0}, "num_generations", "0", "1 or more"),
    "several-rollouts-a-step": (
        {"steps_per_generation": 1, "gradient_accumulation_steps": 16},
        *("steps_per_generation", "1", "or set gradient_accumulation_steps=1"),
    ),
    "three-sizes-that-disagree": (
        {
            "num_mini_batches": 3,
            "steps_per_generation": 8,
            "gradient_accumulation_steps": 2,
        },
        *("num_mini_batches", "3", "Leave one of the three unset"),
    ),
    "episodes-against-steps": (
        {"total_episodes": 64, "per_device_train_batch_size": 8, "max_steps": 5},
        *("max_steps", "5", "Set only one"),
    ),
    "no-episode": ({"total_episodes": 0}, "total_episodes", "0", "at least 1"),
    "warm-up-of-half-a-rollout": (
        {"critic_warmup_steps": 3, "num_ppo_epochs": 2},
        *("critic_warmup_steps", "3", "Nearest: 4"),
    ),
    "two-names-of-one-setting": (
        {"cliprange": 0.3, "epsilon": 0.25},
        *("cliprange", "0.3", "Set only one"),
    ),
    # names
    "temperature-of-generate": (
        {"generation_kwargs": {"temperature": 0.5}},
        *("generation_kwargs", "0.5", "Set temperature=0.5"),
    ),
    # variants and the clipping bias
    "misspelt-variant": ({"variant": "st_ppo"}, "variant", "'st_ppo'", "'st-ppo'"),
    "variant-of-the-other-trainer": ({"variant": "grpo"}, "variant", "'grpo'", "STGRPOConfig"),
    "level-against-variant": (
        {"variant": "st-ppo", "importance_sampling_level": "token"},
        *("importance_sampling_level", "'token'", "Choose the variant"),
    ),
    "correction-against-variant": (
        {"variant": "ppo", "stabilizers": "share"},
        *("stabilizers", "'share'", "Choose the variant"),
    ),
    "power-of-nothing": ({"clip_bias_power": 0.0}, "clip_bias_power", "0.0", "positive"),
    "misspelt-stabilizer": ({"stabilizers": ["winner"]}, "stabilizers", "'winner'", "'winners'"),
    "two-sizes-of-a-step": (
        {"stabilizers": ["share", "triggered"]},
        *("stabilizers", "'share' and 'triggered'", "Choose one"),
    ),
    "amplified-without-clip": (
        {"stabilizers": "triggered", "max_grad_norm": 0.0},
        *("max_grad_norm", "0.0", "Set max_grad_norm=1.0"),
    ),
    "optimizer-that-is-not-scaled": (
        {"optim": "schedule_free_adamw"},
        *("optim", "'schedule_free_adamw'", "Use a variant"),
    ),
    # what has no form here
    "half-precision": ({"fp16": True}, "fp16", "True", "use bf16=True"),
    "misspelt-loss": ({"loss_type": "dappo"}, "loss_type", "'dappo'", "'dapo'"),
    "scaled-by-group": (
        {"scale_rewards": "batch"},
        "scale_rewards",
        "'batch'",
        "whiten_advantages",
    ),
    "early-optimizer": ({"optim": "lomo"}, "optim", "'lomo'", "Use an AdamW"),
    "loss-as-best-metric": (
        {"metric_for_best_model": "eval_loss"},
        *("metric_for_best_model", "'eval_loss'", "Use 'episode/score'"),
    ),
    "stale-with-vllm": (
        {"rollout_staleness": 2, "use_vllm": True},
        *("rollout_staleness", "2", "Set it to 0"),
    ),
    "engine-argument-with-a-field": (
        {
            "vllm_engine_kwargs": {"max_model_len": 512},
            "use_vllm": True,
            "vllm_mode": "colocate",
        },
        *("vllm_engine_kwargs", "512", "`vllm_max_model_length`"),
    ),
    "engine-with-adapters-by-force": (
        {
            "vllm_engine_kwargs": {"enable_lora": True},
            "use_vllm": True,
            "vllm_mode": "colocate",
        },
        *("vllm_engine_kwargs", "True", "allowed is False"),
    ),
    "engine-argument-of-a-server": (
        {"vllm_engine_kwargs": {"dtype": "float32"}, "use_vllm": True, "vllm_mode": "server"},
        *("vllm_engine_kwargs", "float32", "`vllm serve --dtype`"),
    ),
    "other-stop-token": ({"stop_token": "period"}, "stop_token", "'period'", "'eos'"),
    "metric-that-cannot-be-read": (
        {"stop_when": "reward_std below 0.1"},
        *("stop_when", "'reward_std below 0.1'", "reward_std < 0.01 for 5"),
    ),
    "key-of-evaluation": (
        {"eval_generation_kwargs": {"temprature": 0}},
        *("eval_generation_kwargs", "'temprature'", "temperature"),
    ),
    # numbers
    "no-discount": ({"gamma": 0.0}, "gamma", "0.0", "leave it out (default: 1.0)"),
    "lam-above-one": ({"lam": 1.1}, "lam", "1.1", "leave it out (default: 0.95)"),
    "kl-of-nan": ({"kl_coef": NAN}, "kl_coef", "nan", "finite"),
    "weights-of-nan": ({"turn_reward_weights": [1.0, NAN]}, "turn_reward_weights", "nan", "finite"),
    "number-as-text": (
        {"critic_learning_rate": "1e-5"},
        "critic_learning_rate",
        "'1e-5'",
        "1.0e-5",
    ),
    "bound-below-the-clip": ({"delta": 1.1}, "delta", "1.1", "must exceed 1 + epsilon_high"),
    "unknown-failure-mode": ({"on_env_error": "ignore"}, "on_env_error", "'ignore'", "'penalise"),
    "unknown-isolation": ({"env_isolation": "fork"}, "env_isolation", "'fork'", "'process'"),
}


def settings(config: type[PPOConfig] = STPPOConfig, **options: Any) -> PPOConfig:
    return config(output_dir="out", report_to="none", **{"use_cpu": True, "bf16": False, **options})


def read(message: str, field: str, *_: str) -> None:
    """Assert that a message names the field, and is no longer than a person reads."""
    assert field in message, message
    assert len(message) < 900


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have bfloat16")
def test_a_setting(case):
    options, field, *parts = SETTINGS[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        settings(**options)
    read(str(caught.value), f"`{field}", *parts)


# Ours, where less than nothing means something: a price may be paid, a weight may be a fine.
SIGNED = {"missing_eos_penalty", "turn_reward_weights"}


def own_numbers(config: type[PPOConfig]) -> list[str]:
    upstream = {spec.name for spec in fields(GRPOConfig)}
    own = [f for f in fields(config) if f.name not in upstream]
    return [f.name for f in own if "int" in str(f.type) or "float" in str(f.type)]


@pytest.mark.parametrize("bad", [-1, NAN, "1e-5"])
@pytest.mark.parametrize("config", [PPOConfig, STPPOConfig, STGRPOConfig])
def test_no_number_of_ours_may_be_negative_or_nan_or_text(config, bad):
    names = [name for name in own_numbers(config) if bad != -1 or name not in SIGNED]
    assert {"gamma", "num_mini_batches", "stop_token_id", "critic_max_grad_norm"} <= {*names}
    for name in names:
        with pytest.raises(ValueError, match=rf"`.*\b{name}\b.*{bad}|{bad}.*\({name}\)"):
            settings(config, **{name: bad})


# ------------------------------------------------------------------------ the trainer's arguments


def unpadded():
    tokenizer = char_tokenizer()
    tokenizer.pad_token = None
    return tokenizer


def bare():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def headless():
    return Qwen2Model(tiny_config(char_tokenizer()))


def causal():
    return tiny_policy(char_tokenizer())


def plain_config():
    return GRPOConfig(output_dir="out", use_cpu=True, bf16=False, report_to="none")


def nan_reward(completions, **kwargs):
    return [NAN] * len(completions)


def word_reward(completions, **kwargs):
    return ["good"] * len(completions)


def one_reward(completions, **kwargs):
    return 0.5


def short_reward(completions, **kwargs):
    return [0.5] * (len(completions) - 1)


def strict_reward(completions, answer, **kwargs):
    return [0.5] * len(completions)


class ThreeValues(CountEnv):
    """What `step` returns has neither truncated nor info."""

    def step(self, action):
        return "more", 0.0, True


def rollout(prompts, trainer, **changes):
    ids = [[5, 6]] * len(prompts)
    return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None, **changes}


def too_few(prompts, trainer):
    return rollout(prompts[1:], trainer)


def short_mask(prompts, trainer):
    return rollout(prompts, trainer, env_mask=[[1]] * len(prompts))


DICTS = Dataset.from_list([{"prompt": {"role": "user", "content": "hi"}}] * 8)
# id -> (arguments, made anew where that is a function in LAZY; settings; field, value, fix)
LAZY = ("processing_class", "value_model", "reward_model", "args", "environment_factory")
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    "wrong-columns": (
        {"train_dataset": Dataset.from_dict({"question": ["?"] * 8})},
        {},
        *("train_dataset", "['question']", "Rename or map"),
    ),
    "reward-by-name": (
        {"reward_funcs": "accuracy_reward"},
        {},
        *("reward_funcs[0]", "'accuracy_reward'", "trl.rewards.accuracy_reward"),
    ),
    "prompt-is-a-dict": (
        {"train_dataset": DICTS},
        {},
        *("prompt", "{'role': 'user'", "list of messages"),
    ),
    "config-of-trl": ({"args": plain_config}, {}, "args", "GRPOConfig", "needs a STPPOConfig"),
    "no-pad-token": ({"processing_class": unpadded}, {}, "processing_class", "", "eos_token`"),
    "no-chat-template": ({"processing_class": bare}, {}, "train_dataset", "", "chat_template"),
    "critic-without-head": (
        {"value_model": headless},
        {},
        *("value_model", "Qwen2Model", "num_labels=1"),
    ),
    "reward-model-that-speaks": (
        {"reward_model": causal},
        {},
        *("reward_model", "Qwen2ForCausalLM", "num_labels=1"),
    ),
    "instance-for-a-factory": (
        {"environment_factory": CountEnv},
        {},
        *("environment_factory", "CountEnv", "Pass the class"),
    ),
    "limit-without-episodes": ({}, {"max_turns": 3}, "max_turns", "3", "Leave it unset"),
    # that shows in a rollout only
    "reward-of-nan": ({"reward_funcs": nan_reward}, {}, "nan_reward()[0]", "nan", "finite"),
    "reward-of-a-word": ({"reward_funcs": word_reward}, {}, "word_reward()[0]", "'good'", "number"),
    "reward-of-one-number": ({"reward_funcs": one_reward}, {}, "one_reward", "0.5", "a list"),
    "rewards-for-some": (
        {"reward_funcs": short_reward},
        {},
        "short_reward",
        "7",
        "exactly one reward per completion",
    ),
    "reward-without-column": ({"reward_funcs": strict_reward}, {}, "answer", "none", "Rename"),
    "step-of-three": (
        {"environment_factory": lambda: ThreeValues},
        {"max_steps": 10},  # five rollouts; each of them warns
        *("step", "3", "observation, reward, terminated, truncated, info"),
    ),
    "too-few-episodes": (
        {"rollout_func": too_few, "reward_funcs": short_reward},
        {},
        *("rollout_func", "7 episodes", "one episode per prompt"),
    ),
    "mask-of-other-length": (
        {"rollout_func": short_mask, "reward_funcs": short_reward},
        {},
        *("env_mask", "1 entries", "mark each token 1"),
    ),
    "no-source-of-reward": ({"reward_funcs": None}, {}, "reward", "No", "Pass `reward_funcs`"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument(case, tmp_path):
    arguments, options, *parts = ARGUMENTS[case]
    fresh = {name: make() if name in LAZY else make for name, make in arguments.items()}
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        build(tmp_path, STPPOTrainer, arguments=fresh, **options).train()
    read(str(caught.value), *parts)


@pytest.mark.parametrize("wanted", [True, "nowhere"])
def test_a_checkpoint_that_is_not_there(wanted, tmp_path):
    trainer = build(tmp_path / "run")
    with pytest.raises(ValueError) as caught:
        trainer.train(resume_from_checkpoint=wanted)
    read(str(caught.value), "`resume_from_checkpoint", repr(wanted), "path")


# --------------------------------------------------------------------------------- the commands


# words or settings of a file -> key, value, fix
WORDS = {
    "unknown-command": (["trian"], "", "trian", "train"),
    "unknown-flag": (["train", "--max_turn", "3"], "`--max_turn`", "max_turns", "Did you mean"),
    "flag-of-another-type": (["train", "--max_turns", "many"], "max_turns", "many", "int"),
}
FILES = {
    "unknown-key": ({"max_turn": 3}, "max_turn", "", "Did you mean `max_turns`"),
    "unknown-reward": (
        {"reward_funcs": ["think_fromat_reward"]},
        *("reward_funcs", "think_fromat_reward", "think_format_reward"),
    ),
    "unknown-model": (
        {"model_name_or_path": "./nowhere"},
        "model_name_or_path",
        "nowhere",
        "folder",
    ),
}


@pytest.mark.parametrize("case", [*WORDS, *FILES])
def test_a_command(case, tmp_path, capsys):
    words, key, value, fix = (WORDS | FILES)[case]
    if case in FILES:
        plain = {"model_name_or_path": AGENT, "use_cpu": True, "bf16": False, "report_to": "none"}
        plain |= {"reward_funcs": ["think_format_reward"], "output_dir": str(tmp_path / "run")}
        Dataset.from_dict({"prompt": ["hi"] * 8}).to_json(tmp_path / "train.jsonl")
        plain["dataset_name"] = str(tmp_path)
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**plain, **words}))
        words = ["train", "--config", str(tmp_path / "run.yaml")]
    assert main(words) != 0
    message = " ".join(capsys.readouterr().err.split())
    assert all(part in message for part in (key, value, fix)), message
    assert "Traceback" not in message
