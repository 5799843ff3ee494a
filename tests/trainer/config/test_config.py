"""The settings: aliases, batch arithmetic, defaults that follow, and what a parser makes of them."""

import copy
import pickle
from dataclasses import InitVar, dataclass

import pytest
import yaml
from transformers import training_args
from trl import TrlParser

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


def test_ppo_has_the_clip_range_and_the_lambda_of_tokens():
    args = config(PPOConfig)
    assert (args.cliprange, args.lam) == (0.2, 0.95)


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


def test_one_generation_is_the_default_and_a_plain_number():
    assert type(config().num_generations) is int
    assert config().num_generations == 1
    assert config(num_generations=2, per_device_train_batch_size=4).num_generations == 2


class Wider(STPPOConfig):
    """What a user may do: a constructor of one's own."""

    def __init__(self, *args, mine=0, **others):
        super().__init__(*args, **others)
        self.mine = mine


@dataclass
class Wrapped(STPPOConfig):
    mine: InitVar[int] = 0

    def __post_init__(self, mine):
        super().__post_init__()


@pytest.mark.parametrize("cls", [Wider, Wrapped])
def test_subclasses_may_take_more(cls):
    args = cls(mine=3, **PLAIN)
    assert copy.deepcopy(args).max_turns == pickle.loads(pickle.dumps(args)).max_turns
    with pytest.raises(TypeError, match="max_turn"):
        cls(max_turn=3, **PLAIN)


@pytest.mark.parametrize(
    "options",
    [
        {
            "vllm_importance_sampling_mode": f"{level}_{form}",
            f"vllm_importance_sampling_{end}": None,
        }
        for level, form, end in [
            *(("turn", "truncate", "clip_min"), ("token", "truncate", "clip_min")),
            *(("sequence", "truncate", "clip_min"), ("turn", "mask", "clip_max")),
            *(("token", "mask", "clip_max"), ("sequence", "mask", "clip_max")),
        ]
    ]
    + [{"vllm_importance_sampling_mode": "turn_truncate"}]
    + [{"gamma": 1.0}, {"lam": 0.0}, {"kl_coef": 0.0}, {"epsilon": 10.0}, {"delta": 1.3}]
    + [{"env_timeout_seconds": None}, {"cliprange_value": None}]
    + [{"gradient_checkpointing_kwargs": {"use_reentrant": False}}],
    ids=str,
)
def test_the_ends_of_the_ranges_are_allowed(options):
    args = config(**options)
    assert {name: getattr(args, name) for name in options} == options
    assert config().vllm_importance_sampling_mode == "turn_truncate"


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


@pytest.mark.parametrize("cls", CONFIGS)
@pytest.mark.parametrize("source", ["command line", "yaml"])
def test_the_fields_of_ppo_scripts_parse(source, cls, tmp_path):
    expected = {
        **{"sft_model_path": "sft", "reward_model_path": "rm", "missing_eos_penalty": 1.0},
        **{"local_rollout_forward_batch_size": 2, "ds3_gather_for_generation": False},
        **{"stop_token": "eos", "num_ppo_epochs": 2, "total_episodes": 32},
    }
    options = {**expected, **PLAIN}
    if source == "yaml":
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(options))
        words = ["--config", str(tmp_path / "config.yaml")]
    else:
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    (args,) = TrlParser((cls,)).parse_args_and_config(words)
    assert {key: getattr(args, key) for key in expected} == expected
    assert args.num_iterations == 2


def test_the_parser_reads_st_ppos_own_fields(tmp_path):
    options = {
        **{"output_dir": str(tmp_path), "bf16": False, "variant": None, "cliprange_value": None},
        **{"importance_sampling_level": "sequence", "stabilizers": ["winners", "share"]},
        "eval_generation_kwargs": {"temperature": 0.0},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(options))
    words = ["--config", str(tmp_path / "config.yaml"), "--target_kl", "2"]
    (args,) = TrlParser((STPPOConfig,)).parse_args_and_config(words)
    assert args.target_kl == 2.0
    assert {key: getattr(args, key) for key in options} == options


def test_dictionaries_parse_as_flags(tmp_path):
    words = ["--output_dir", str(tmp_path), "--bf16", "false"]
    words += ["--eval_generation_kwargs", '{"temperature": 0.5, "top_k": 3}']
    (args,) = TrlParser((PPOConfig,)).parse_args_and_config(words)
    assert args.eval_generation_kwargs == {"temperature": 0.5, "top_k": 3}


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


def test_bf16_without_an_accelerator_and_a_launchers_precision_are_upstreams(
    accelerator, monkeypatch
):
    accelerator(False)
    with pytest.raises(ValueError, match="bf16"):
        PPOConfig(output_dir="out", bf16=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert PPOConfig(output_dir="out", use_cpu=True).mixed_precision == "bf16"
