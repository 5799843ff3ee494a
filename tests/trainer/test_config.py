"""The settings: aliases, batch arithmetic, ranges, and what is refused by name."""

from __future__ import annotations

import copy
import math
import pickle
import re
from dataclasses import InitVar, dataclass, fields

import pytest

from trl_stppo import PPOConfig, STGRPOConfig, STPPOConfig
from trl_stppo.trainer.config.checks import LIMITS

CONFIGS = (PPOConfig, STPPOConfig)


def config(cls: type[PPOConfig] = PPOConfig, **options) -> PPOConfig:
    return cls(output_dir="out", use_cpu=True, bf16=False, report_to="none", **options)


# --------------------------------------------------------------------- aliases

ALIASES = [
    ("num_ppo_epochs", "num_iterations", 2),
    ("cliprange", "epsilon", 0.3),
    ("response_length", "max_completion_length", 77),
]


@pytest.mark.parametrize("cls", CONFIGS)
@pytest.mark.parametrize(("alias", "name", "value"), ALIASES)
def test_an_alias_and_its_grpo_name_hold_the_same_value(alias, name, value, cls):
    for given in ({alias: value}, {name: value}, {alias: value, name: value}):
        args = config(cls, **given)
        assert getattr(args, alias) == getattr(args, name) == value


@pytest.mark.parametrize(("alias", "name", "value"), ALIASES)
def test_unset_aliases_show_the_default_of_the_grpo_name(alias, name, value):
    args = config()
    assert getattr(args, alias) == getattr(args, name) is not None


@pytest.mark.parametrize(("alias", "name", "value"), ALIASES)
def test_an_alias_that_contradicts_its_grpo_name_raises_with_both(alias, name, value):
    with pytest.raises(ValueError, match=f"`{alias}={value}` contradicts `{name}={value + 1}`"):
        config(**{alias: value, name: value + 1})


# ------------------------------------------------------------ batch arithmetic


@pytest.mark.parametrize(
    ("batch", "accumulation", "parts", "rollout"),
    # rollout batch = batch * R; each epoch M steps of R / M micro-batches
    [(4, 8, 2, 32), (4, 8, 8, 32), (4, 8, 1, 32), (1, 6, 3, 6), (64, 1, 1, 64)],
)
def test_ppo_batch_arithmetic(batch, accumulation, parts, rollout):
    args = config(
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=parts,
    )
    assert args.steps_per_generation == accumulation
    assert args.gradient_accumulation_steps == accumulation // parts
    assert args.generation_batch_size == rollout
    assert args.num_mini_batches == parts


def test_sizes_that_do_not_divide_say_how_to_change_them():
    message = r"`gradient_accumulation_steps=8` .* multiple of `num_mini_batches=3`\. Nearest: 9"
    with pytest.raises(ValueError, match=message):
        config(gradient_accumulation_steps=8, num_mini_batches=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_mini_batches": 0}, "`num_mini_batches` must be at least 1, got 0"),
        (
            {
                "num_mini_batches": 3,
                "steps_per_generation": 8,
                "gradient_accumulation_steps": 2,
            },
            "`num_mini_batches=3` contradicts `steps_per_generation=8` with "
            "`gradient_accumulation_steps=2`",
        ),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "`steps_per_generation=3` must be a multiple of `gradient_accumulation_steps=2`",
        ),
        ({"total_episodes": 0}, "`total_episodes` must be at least 1, got 0"),
        (
            {"total_episodes": 64, "per_device_train_batch_size": 8, "max_steps": 5},
            "`total_episodes=64` means 32 optimizer steps and contradicts `max_steps=5`",
        ),
    ],
)
def test_contradicting_sizes_raise_with_both_names(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**options)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"steps_per_generation": 8, "gradient_accumulation_steps": 2}, 4),
        ({"generation_batch_size": 32, "gradient_accumulation_steps": 4}, 2),
        ({"steps_per_generation": 8, "gradient_accumulation_steps": 2, "num_mini_batches": 4}, 4),
        ({"gradient_accumulation_steps": 4}, 1),
    ],
)
def test_grpo_style_sizes_keep_their_meaning(options, parts):
    args = config(per_device_train_batch_size=4, **options)
    assert args.gradient_accumulation_steps == options["gradient_accumulation_steps"]
    assert args.num_mini_batches == parts
    assert args.steps_per_generation == parts * args.gradient_accumulation_steps
    assert args.generation_batch_size == 4 * args.steps_per_generation


@pytest.mark.parametrize(
    ("episodes", "steps"),
    # rollout batch 16, 3 epochs, 2 mini-batches: 6 optimizer steps a rollout
    [(1, 6), (16, 6), (17, 12), (160, 60)],
)
def test_total_episodes_sets_max_steps(episodes, steps):
    sizes = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_mini_batches": 2,
        "num_ppo_epochs": 3,
        "total_episodes": episodes,
    }
    assert config(**sizes).max_steps == steps
    assert config(**sizes, max_steps=steps).max_steps == steps


# ------------------------------------------------------------- num_generations


def test_one_generation_is_the_default_and_a_plain_number():
    assert type(config().num_generations) is int
    assert config().num_generations == 1
    assert config(num_generations=2, per_device_train_batch_size=4).num_generations == 2


@pytest.mark.parametrize("generations", [1, 2])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"vllm_importance_sampling_clip_min": 2.0, "vllm_importance_sampling_clip_max": 1.0},
            "vllm_importance_sampling_clip_min (2.0) must be less than",
        ),
        (
            {
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_min": None,
                "vllm_importance_sampling_clip_max": None,
            },
            "At least one of `vllm_importance_sampling_clip_min` or",
        ),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is not supported"),
    ],
)
def test_all_of_grpo_configs_checks_stay_in_force(options, message, generations):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(num_generations=generations, **options)


def test_generations_must_still_divide_the_rollout_batch():
    with pytest.raises(ValueError, match="num_generations"):
        config(num_generations=3, per_device_train_batch_size=4, gradient_accumulation_steps=4)


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
    options = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": "none"}
    args = cls(mine=3, **options)
    assert copy.deepcopy(args).max_turns == pickle.loads(pickle.dumps(args)).max_turns
    with pytest.raises(TypeError, match="max_turn"):
        cls(max_turn=3, **options)


def test_no_generation_at_all_is_refused():
    with pytest.raises(ValueError, match="`num_generations=0`: must be 1 or more"):
        config(num_generations=0)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("cls", CONFIGS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 0.0),
        ("gamma", 1.01),
        ("lam", -0.1),
        ("lam", 1.1),
        ("kl_coef", -0.1),
        ("vf_coef", 0.0),
        ("critic_learning_rate", -1e-5),
        ("critic_warmup_steps", -1),
        ("cliprange_value", 0.0),
        ("temperature", 0.0),
        ("top_p", 1.5),
        ("top_p", 0.0),
        ("top_k", -1),
        ("cliprange", -0.1),
        ("epsilon_high", -0.1),
        ("num_ppo_epochs", 0),
        ("max_turns", 0),
        ("max_turn_tokens", 0),
        ("max_malformed_actions", 0),
        ("generation_slots", 0),
        ("env_timeout_seconds", 0.0),
        ("env_timeout_seconds", -1.0),
        ("episode_timeout_seconds", 0.0),
        ("env_workers", 0),
        ("env_isolation", "fork"),
        ("on_env_error", "ignore"),
        ("on_env_error", "penalise -0.5"),
        ("on_env_error", "penalise much"),
        ("on_env_error", "mask 1"),
        ("vllm_importance_sampling_mode", "episode_mask"),
        ("vllm_importance_sampling_mode", "turn"),
        ("critic_lora_r", 0),
        ("delta", 1.2),
        ("kl_estimator", "k2"),
        ("advantage_level", "sequence"),
        ("importance_sampling_level", "word"),
        ("stop_token", "period"),
        ("model_adapter_name", "policy"),
        ("ref_adapter_name", "reference"),
    ],
)
def test_a_value_out_of_range_raises_with_name_and_value(name, value, cls):
    options = {"variant": None} if cls is STPPOConfig else {}
    shown = dict((alias, real) for alias, real, _ in ALIASES).get(name, name)
    with pytest.raises(ValueError, match=re.escape(f"`{shown}={value!r}`")):
        config(cls, **{name: value}, **options)


def float_fields(cls: type[PPOConfig]) -> list[str]:
    return [spec.name for spec in fields(cls) if "float" in str(spec.type)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cls", [PPOConfig, STPPOConfig, STGRPOConfig])
def test_no_number_may_be_infinite_or_none_at_all(cls, bad):
    names = float_fields(cls)
    assert {"kl_coef", "learning_rate", "turn_reward_weights", "env_timeout_seconds"} <= {*names}
    assert ("clip_bias_power" in names) is (cls is not PPOConfig)
    for name in (*names, "max_turns"):
        if bad == math.inf and name in LIMITS:
            continue
        value = [1.0, bad] if name.endswith("reward_weights") else bad
        with pytest.raises(ValueError, match=re.escape(f"`{name}={value!r}`: must be a finite")):
            config(cls, **{name: value})


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_limit_may_be_infinite(name):
    args = config(STPPOConfig, **{name: math.inf})
    assert getattr(args, name) == math.inf


@pytest.mark.parametrize("level", ["turn", "token", "sequence"])
@pytest.mark.parametrize("form", ["truncate", "mask"])
def test_corrections_of_the_sampler(level, form):
    assert config().vllm_importance_sampling_mode == "turn_truncate"
    mode = f"{level}_{form}"
    assert config(vllm_importance_sampling_mode=mode).vllm_importance_sampling_mode == mode
    unbounded = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": None,
    }
    if form == "mask":
        assert config(**unbounded) is not None
    else:
        with pytest.raises(ValueError, match="`vllm_importance_sampling_clip_max`"):
            config(**unbounded)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 1.0),
        ("lam", 0.0),
        ("env_timeout_seconds", None),
        ("on_env_error", "penalise 0"),
        ("kl_coef", 0.0),
        ("cliprange_value", None),
        ("epsilon", 10.0),
        ("delta", 1.3),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(name, value):
    assert getattr(config(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token": "eos", "stop_token_id": 5}, "`stop_token` and `stop_token_id` contradict"),
        ({"stop_token_id": 5, "use_vllm": True}, "`stop_token_id` is not supported with `use_vllm"),
    ],
)
def test_stop_tokens_that_cannot_be_honoured_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_ppo_alone_has_no_turn_level():
    with pytest.raises(ValueError, match="`importance_sampling_level='turn'`: allowed are 'token'"):
        config(importance_sampling_level="turn")


# ------------------------------------------------------------ defaults that follow


@pytest.mark.parametrize(
    ("rate", "expected"), [(1e-7, 1e-5), (1e-6, 1e-5), (3e-5, 3e-4), (1e-2, 1e-3), (0.0, 1e-5)]
)
def test_the_critics_rate_follows_the_policys_unless_it_is_set(rate, expected):
    assert config(STPPOConfig, learning_rate=rate).critic_learning_rate == expected
    assert config(learning_rate=rate, critic_learning_rate=0.5).critic_learning_rate == 0.5


@pytest.mark.parametrize(
    ("cls", "options", "steps"),
    [
        (PPOConfig, {}, 4),
        (STPPOConfig, {"num_ppo_epochs": 3, "num_mini_batches": 2}, 6),
        (STGRPOConfig, {}, 1),
        (STPPOConfig, {"logging_steps": 10}, 10),
        (STPPOConfig, {"logging_steps": 0.25}, 0.25),
    ],
)
def test_unless_it_is_set_there_is_one_log_per_rollout_batch(cls, options, steps):
    args = config(cls, **{"gradient_accumulation_steps": 2, "eval_strategy": "steps", **options})
    assert args.logging_steps == steps
    assert args.eval_steps == options.get("logging_steps", 10), "as upstream has it"
