"""The settings: aliases, batch arithmetic, defaults that follow, and what a parser makes of them."""

import dataclasses
import json

import pytest
from transformers import training_args

from trl_stppo import PPOConfig, STGRPOConfig, STPPOConfig
from trl_stppo.trainer import ppo_config

CONFIGS = (PPOConfig, STPPOConfig)
PLAIN = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": "none"}
ALIASES = [
    ("num_ppo_epochs", "num_iterations", 2),
    ("cliprange", "epsilon", 0.3),
    ("response_length", "max_completion_length", 77),
]


def config(cls: type[PPOConfig] = PPOConfig, **options) -> PPOConfig:
    return cls(**PLAIN, **options)


@pytest.mark.parametrize("cls", CONFIGS)
@pytest.mark.parametrize(("alias", "name", "value"), ALIASES)
def test_an_alias_and_its_grpo_name_hold_the_same_value(alias, name, value, cls):
    for given in ({alias: value}, {name: value}, {alias: value, name: value}):
        args = config(cls, **given)
        assert getattr(args, alias) == getattr(args, name) == value
    assert getattr(config(cls), alias) == getattr(config(cls), name)


LEVELS = [("token", 0.2, 0.95), ("turn", None, None), ("sequence", None, None)]


@pytest.mark.parametrize(("level", "width", "lam"), LEVELS)
def test_clip_range_and_lambda_follow_the_ratio(level, width, lam):
    args = config(STPPOConfig, importance_sampling_level=level)
    assert args.cliprange == args.epsilon == width
    assert args.lam == lam
    assert config(STPPOConfig, importance_sampling_level=level, cliprange=0.1).epsilon == 0.1
    # One bound alone: the other is PPO's.
    assert config(STPPOConfig, importance_sampling_level=level, epsilon_high=0.3).epsilon == 0.2
    assert config(STPPOConfig, importance_sampling_level=level, lam=0.7).lam == 0.7


@pytest.mark.parametrize(
    ("batch", "accumulation", "parts", "rollout"),
    # rollout batch = batch * R; each epoch M steps of R / M micro-batches
    [(4, 8, 2, 32), (4, 8, 8, 32), (4, 8, 1, 32), (1, 6, 3, 6), (64, 1, 1, 64)],
)
def test_ppo_batch_arithmetic(batch, accumulation, parts, rollout):
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    args = config(**sizes, num_mini_batches=parts)
    assert args.steps_per_generation == accumulation
    assert args.gradient_accumulation_steps == accumulation // parts
    assert args.generation_batch_size == rollout
    assert args.num_mini_batches == parts


@pytest.mark.parametrize(("options", "parts"), [
    ({"steps_per_generation": 8, "gradient_accumulation_steps": 2}, 4),
    ({"generation_batch_size": 32, "gradient_accumulation_steps": 4}, 2),
    ({"steps_per_generation": 8, "gradient_accumulation_steps": 2, "num_mini_batches": 4}, 4),
    ({"gradient_accumulation_steps": 4}, 1),
])  # fmt: skip
def test_grpo_style_sizes_keep_their_meaning(options, parts):
    args = config(per_device_train_batch_size=4, **options)
    assert args.gradient_accumulation_steps == options["gradient_accumulation_steps"]
    assert args.num_mini_batches == parts
    assert args.steps_per_generation == parts * args.gradient_accumulation_steps
    assert args.generation_batch_size == 4 * args.steps_per_generation


# Rollout batch 16, 3 epochs, 2 mini-batches: 6 optimizer steps a rollout.
@pytest.mark.parametrize(("episodes", "steps"), [(1, 6), (16, 6), (17, 12), (160, 60)])
def test_total_episodes_sets_max_steps(episodes, steps):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    sizes |= {"num_mini_batches": 2, "num_ppo_epochs": 3, "total_episodes": episodes}
    assert config(**sizes).max_steps == steps
    assert config(**sizes, max_steps=steps).max_steps == steps


@pytest.mark.parametrize(
    ("rate", "expected"), [(1e-7, 1e-5), (1e-6, 1e-5), (3e-5, 3e-4), (1e-2, 1e-3), (0.0, 1e-5)]
)
def test_the_critics_rate_follows_the_policys_unless_it_is_set(rate, expected):
    assert config(STPPOConfig, learning_rate=rate).critic_learning_rate == expected
    assert config(learning_rate=rate, critic_learning_rate=0.5).critic_learning_rate == 0.5


@pytest.mark.parametrize(("cls", "options", "steps"), [
    (PPOConfig, {}, 4),
    (STPPOConfig, {"num_ppo_epochs": 3, "num_mini_batches": 2}, 6),
    (STGRPOConfig, {}, 4),
    (STGRPOConfig, {"variant": "grpo"}, 1),
    (STGRPOConfig, {"num_ppo_epochs": 1}, 1),
    (STPPOConfig, {"logging_steps": 10}, 10),
    (STPPOConfig, {"logging_steps": 0.25}, 0.25),
])  # fmt: skip
def test_unless_it_is_set_there_is_one_log_per_rollout_batch(cls, options, steps):
    args = config(cls, **{"gradient_accumulation_steps": 2, "eval_strategy": "steps", **options})
    assert args.logging_steps == steps
    assert args.eval_steps == options.get("logging_steps", 10), "as upstream has it"


PRECISIONS = [
    ({}, False, False),
    ({"use_cpu": True}, True, False),
    ({"use_cpu": True, "bf16": True}, False, True),
    ({}, True, True),
]


@pytest.fixture
def accelerator(monkeypatch):
    """Says whether there is one with bfloat16."""

    def there(is_there: bool) -> None:
        for module in (ppo_config, training_args):
            monkeypatch.setattr(module, "is_torch_bf16_gpu_available", lambda: is_there)

    return there


@pytest.mark.parametrize(("options", "accelerated", "bf16"), PRECISIONS)
@pytest.mark.parametrize("cls", [PPOConfig, STGRPOConfig])
def test_a_run_on_the_cpu_is_in_float32_unless_bf16_is_set(
    cls, options, accelerated, bf16, accelerator, caplog
):
    accelerator(accelerated)
    assert cls(output_dir="out", report_to="none", **options).bf16 is bf16
    said = [record for record in caplog.records if "`bf16`" in record.getMessage()]
    assert len(said) == (not bf16)


@pytest.mark.parametrize("cls", [*CONFIGS, STGRPOConfig])
@pytest.mark.parametrize("given", [
    {}, {"num_mini_batches": 2, "gradient_accumulation_steps": 4}, {"generation_batch_size": 64},
    {"steps_per_generation": 2}, {"total_episodes": 64}, {"stop_token": "eos"},
])  # fmt: skip
def test_a_copy_of_a_configuration_is_equal(cls, given):
    args = cls(**PLAIN, **given)
    dictionary = args.to_dict()
    copies = [
        dataclasses.replace(args, seed=7), cls(**dictionary), cls(**json.loads(args.to_json_string())),
    ]  # fmt: skip
    assert copies[0].seed == 7
    for copy in copies:
        assert {**copy.to_dict(), "seed": args.seed} == dictionary


def test_whole_numbers_are_floats_where_generation_wants_floats():
    given = {"generation_kwargs": {"min_p": 0}, "eval_generation_kwargs": {"temperature": 2}}
    args = STPPOConfig(**PLAIN, temperature=2, repetition_penalty=2, **given)
    values = [args.temperature, args.repetition_penalty, args.generation_kwargs["min_p"]]
    values.append(args.eval_generation_kwargs["temperature"])
    assert [type(value) for value in values] == [float] * 4
