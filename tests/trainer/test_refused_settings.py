"""Settings that are refused: by their type, with the field and its value, and the fix within a few lines."""

import math
from dataclasses import fields

import pytest
import torch
from trl import GRPOConfig

from trl_stppo import PPOConfig, STGRPOConfig, STPPOConfig
from trl_stppo.trainer.config_checks import LIMITS
from trl_stppo.trainer.ppo_config import ALIASES

NAN = math.nan
CONFIGS = [PPOConfig, STPPOConfig, STGRPOConfig]
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate"}
ADAPTERS = {"model_adapter_name": "policy", "ref_adapter_name": "reference"}
UNBOUNDED = {"vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": None}
# The message names the first of each, and shows its value. A name comes up twice with two kinds of mistake.
REFUSED = [
    # sizes
    {"num_mini_batches": 3, "gradient_accumulation_steps": 8},
    {"num_mini_batches": 0},
    {"num_mini_batches": 3, "steps_per_generation": 8, "gradient_accumulation_steps": 2},
    {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
    {"total_episodes": 0},
    {"total_episodes": 64, "per_device_train_batch_size": 8, "max_steps": 5},
    {"num_generations": 0},
    {"critic_warmup_steps": 3, "num_ppo_epochs": 2},
    # two names of one setting
    {"num_ppo_epochs": 2, "num_iterations": 3},
    {"cliprange": 0.3, "epsilon": 0.25},
    {"response_length": 77, "max_completion_length": 78},
    # variants and the clipping bias
    *({"variant": name} for name in ("st_ppo", "grpo")),
    {"importance_sampling_level": "token", "variant": "st-ppo"},
    {"stabilizers": ["share"], "variant": "ppo"},
    {"stabilizers": ["winner"]},
    {"stabilizers": ["share", "triggered"]},
    *({"stabilizers": ["triggered"], "max_grad_norm": limit} for limit in (0.0, None, math.inf)),
    # what has no faithful form here
    *({"loss_type": name} for name in ("cispo", "sapo", "luspo", "vespo", "dappo")),
    {"scale_rewards": "batch"},
    {"multi_objective_aggregation": "normalize_then_sum"},
    {"top_entropy_quantile": 0.2},
    {"use_adaptive_entropy": True},
    {"fp16": True},
    {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"optim": "lomo"},
    {"metric_for_best_model": "eval_loss"},
    {"rollout_staleness": 2, "use_vllm": True},
    *({name: value} for name, value in ADAPTERS.items()),
    # dictionaries
    {"generation_kwargs": {"temperature": 0.5}},
    *({"generation_kwargs": {name: 3}} for name in ("max_new_tokens", "max_tokens", "eos_token_id")),
    *(
        {"generation_kwargs": {name: 3}}
        for name in ("stop", "stop_strings", "stop_token_ids", "logit_bias", "seed", "n")
    ),
    *({"eval_generation_kwargs": {"temperature": value}} for value in (-1.0, NAN)),
    {"eval_generation_kwargs": {"top_p": 0.0}},
    *({"eval_generation_kwargs": {"top_k": value}} for value in (-1, "3")),
    {"eval_generation_kwargs": {"max_completion_length": 0}},
    {"num_generations_eval": -2},
    {"vllm_engine_kwargs": {"enable_lora": True}, **COLOCATED},
    {"vllm_engine_kwargs": {"dtype": "float32"}, "use_vllm": True, "vllm_mode": "server"},
    # the sampler
    {"vllm_importance_sampling_mode": "episode_mask"},
    {"vllm_importance_sampling_mode": "turn"},
    # ranges
    *({"gamma": value} for value in (0.0, 1.01)),
    *({"lam": value} for value in (-0.1, 1.1)),
    {"vf_coef": 0.0},
    {"cliprange_value": 0.0},
    {"temperature": 0.0},
    *({"top_p": value} for value in (0.0, 1.5)),
    {"top_k": -1},
    {"max_completion_length": None},
    {"cliprange": -0.1},
    {"epsilon_high": -0.1},
    {"delta": 1.2},
    {"num_ppo_epochs": 0},
    *({name: 0} for name in ("max_turns", "max_turn_tokens", "max_images", "generation_slots")),
    {"env_timeout_seconds": 0.0},
    # names
    {"kl_estimator": "k2"},
    {"advantage_level": "sequence"},
    {"importance_sampling_level": "word", "variant": None},
    {"stop_token": "period"},
]
# settings, words of the message: two fields that exclude each other, and what a field of another type takes
TOGETHER = [
    ({"stop_token": "eos", "stop_token_id": 5}, "`stop_token` and `stop_token_id`"),
    ({"generation_kwargs": {"topk": 1.5}}, "topk=1.5: set a name"),
    (
        {"generation_batch_size": 16, "steps_per_generation": 4},
        "`generation_batch_size=16` contradicts `steps_per_generation=4`",
    ),
    ({"stop_token_id": 5, "use_vllm": True}, "`stop_token_id` .* `use_vllm"),
    ({"importance_sampling_level": "turn"}, "`importance_sampling_level='turn'`"),
    ({"critic_learning_rate": "1e-5"}, r"`critic_learning_rate='1e-5'.* 1\.0e-5"),
    ({"eval_generation_kwargs": {"temprature": 0}}, "`eval_generation_kwargs` has 'temprature'"),
    ({"eval_generation_kwargs": {"min_p": 0.1}}, "`eval_generation_kwargs` has 'min_p'"),
    # an upstream check, with one generation too
    ({"vllm_importance_sampling_mode": "token_truncate", **UNBOUNDED}, "importance_sampling_clip"),
]
# Ours, where less than nothing means something: a price may be paid.
SIGNED = {"missing_eos_penalty"}


def settings(config: type[PPOConfig] = STPPOConfig, **options) -> PPOConfig:
    return config(output_dir="out", report_to="none", **{"use_cpu": True, "bf16": False, **options})


@pytest.mark.parametrize("options", REFUSED, ids=str)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have bfloat16")
def test_a_setting_is_refused_with_its_name_and_value(options):
    (field, value), *_ = options.items()
    with pytest.raises(ValueError) as caught:
        settings(**options)
    message = str(caught.value)
    shown = next(iter(value.items())) if isinstance(value, dict) else (value,)
    assert f"`{field}" in message or f"`{ALIASES.get(field)}" in message
    assert all(str(part).strip("[]") in message for part in shown), message
    assert len(message) < 900


@pytest.mark.parametrize(("options", "words"), TOGETHER, ids=str)
def test_settings_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        settings(PPOConfig, **options)


def test_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match="max_turn"):
        STPPOConfig(output_dir="out", max_turn=1)


def numbers(config: type[PPOConfig], kind: str) -> list[str]:
    return [spec.name for spec in fields(config) if kind in str(spec.type)]


@pytest.mark.parametrize("bad", [-1, NAN, "1e-5"])
@pytest.mark.parametrize("config", CONFIGS)
def test_no_number_of_ours_may_be_negative_or_nan_or_text(config, bad):
    upstream = {spec.name for spec in fields(GRPOConfig)}
    names = {*numbers(config, "int"), *numbers(config, "float")} - upstream
    assert {"gamma", "num_mini_batches", "stop_token_id"} <= names
    for name in sorted(names - (SIGNED if bad == -1 else set())):
        with pytest.raises(ValueError, match=rf"`.*\b{name}\b.*{bad}|{bad}.*\({name}\)"):
            settings(config, **{name: bad})


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("config", CONFIGS)
def test_no_number_may_be_infinite_or_nan_unless_it_is_a_limit(config, bad):
    names = numbers(config, "float")
    assert {"kl_coef", "learning_rate", "reward_weights", "env_timeout_seconds"} <= {*names}
    for name in (*names, "max_turns"):
        value = [1.0, bad] if name == "reward_weights" else bad
        if bad == math.inf and name in LIMITS:
            if config is STPPOConfig:
                assert getattr(settings(config, **{name: bad}), name) == bad
            continue
        with pytest.raises(ValueError) as caught:
            settings(config, **{name: value})
        assert f"`{name}={value!r}`" in str(caught.value)
