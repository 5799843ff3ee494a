"""Checks of `PPOConfig`: refusal of unsupported options and of values out of range."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers import GenerationConfig

from ..core import KL_ESTIMATORS, LOSS_TYPES, TOKEN_CLIPRANGE
from ._trl import GRPOConfig

# Option of GRPOConfig -> its allowed values. Other values have no meaning, or no exact form, with a critic
# and token-level advantages.
REFUSED: dict[str, tuple[Any, ...]] = {
    "scale_rewards": ("none", "group"),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "top_entropy_quantile": (1.0,),
    "use_adaptive_entropy": (False,),
    "fp16": (False,),
    "model_adapter_name": (None, "default"),
    "ref_adapter_name": (None, "ref"),
}
# Key of `generation_kwargs` without effect, as limits and ends are set per turn -> the setting to use.
OF_TURNS = {
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "`max_completion_length` or `max_turn_tokens`"),
    "eos_token_id": "`stop_token_id`, or `model.generation_config.eos_token_id` for several",
}
# Further keys without vLLM, because texts that stop a turn would need the tokenizer.
WITHOUT_VLLM = dict.fromkeys(("stop", "stop_strings", "stop_token_ids"), "`stop_token_id`")
# Settings that generation accepts only as floats.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")
# Level and form of the sampler's correction; TRL has no turn level.
SAMPLER_CORRECTIONS = tuple(
    f"{level}_{form}" for level in ("turn", "token", "sequence") for form in ("truncate", "mask")
)
# Optimizers that step inside the backward pass, before the critic's gradient and the clipping bias exist.
EARLY_OPTIMIZERS = ("lomo", "layerwise")
# Upper bounds; infinity means no limit, like None, and is passed on unchanged.
LIMITS = {
    *("epsilon_high", "delta", "cliprange_value", "max_grad_norm"),
    "off_policy_mask_threshold",
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
}
AMOUNTS = ("kl_coef", "critic_warmup_steps", "rollout_staleness", "trace_episodes")
OPTIONAL_COUNTS = (
    *("max_turns", "max_turn_tokens", "max_images", "generation_slots"),
    *("num_generations_eval", "local_rollout_forward_batch_size"),
)
NOT_NEGATIVE = ("epsilon_high", "critic_learning_rate", "stop_token_id")
POSITIVE = ("cliprange_value", "env_timeout_seconds")
Ranges = dict[str, tuple[Callable[[Any], bool], str]]
SAMPLING: Ranges = {
    "temperature": (lambda v: v > 0, "temperature > 0"),
    "top_p": (lambda v: 0 < v <= 1, "0 < top_p <= 1"),
    "top_k": (lambda v: v is None or v >= 0, "top_k >= 0 (0: all tokens)"),
}
# Field -> (check of its value, the rule in words).
RANGES: Ranges = {
    **SAMPLING,
    "num_iterations": (lambda v: v >= 1, "num_iterations (num_ppo_epochs) >= 1"),
    "epsilon": (lambda v: v is None or v >= 0, "epsilon (cliprange) >= 0"),
    "max_completion_length": (
        lambda v: v is not None and v >= 1,
        "max_completion_length (response_length) >= 1",
    ),
    "gamma": (lambda v: 0 < v <= 1, "0 < gamma <= 1"),
    "lam": (lambda v: v is None or 0 <= v <= 1, "0 <= lam <= 1"),
    "vf_coef": (lambda v: v > 0, "vf_coef > 0"),
    **{name: (lambda v: v >= 0, f"{name} >= 0") for name in AMOUNTS},
    **{name: (lambda v: v is None or v >= 1, f"{name} >= 1 or None") for name in OPTIONAL_COUNTS},
    **{name: (lambda v: v is None or v >= 0, f"{name} >= 0 or None") for name in NOT_NEGATIVE},
    **{name: (lambda v: v is None or v > 0, f"{name} > 0 or None") for name in POSITIVE},
}
# Key of `eval_generation_kwargs` -> (check of its value, the rule in words).
EVAL_RANGES: Ranges = {
    **SAMPLING,
    "temperature": (lambda v: v >= 0, "temperature >= 0"),
    "max_completion_length": (lambda v: v >= 1, "max_completion_length >= 1"),
}


def check_vllm(config: GRPOConfig) -> None:
    """Raise ValueError for options that vLLM does not support, or that contradict each other."""
    if config.rollout_staleness and config.use_vllm and not config.rollout_overlap:
        raise ValueError(
            f"`rollout_staleness={config.rollout_staleness}` is not supported with `use_vllm=True`."
        )
    if config.stop_token_id is not None and config.use_vllm:
        raise ValueError(
            "`stop_token_id` is not supported with `use_vllm=True`; use generation_kwargs' stop_token_ids."
        )
    kwargs = config.vllm_engine_kwargs
    if kwargs is None:
        return
    if not config.use_vllm or config.vllm_mode != "colocate":
        raise ValueError(
            f"`vllm_engine_kwargs={kwargs!r}` is about a colocated engine (`use_vllm=True`, "
            f"`vllm_mode='colocate'`). A server has flags of its own, such as `vllm serve --dtype`."
        )
    if kwargs.get("enable_lora"):
        raise ValueError(f"`vllm_engine_kwargs` has enable_lora={kwargs['enable_lora']!r}; allowed: False.")


def as_floats(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with floats in place of whole numbers, as YAML gives them, for `FLOATS`."""
    return {k: float(v) if k in FLOATS and isinstance(v, int) else v for k, v in settings.items()}


def check_finite(config: GRPOConfig) -> None:
    """Raise ValueError if a numeric option is NaN, infinite or text."""
    for spec in fields(config):
        value, kind = getattr(config, spec.name), str(spec.type)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, str) and "str" not in kind and ("int" in kind or "float" in kind):
                raise ValueError(f"`{spec.name}={value!r}`: must be a number; in YAML 1.0e-5, not 1e-5.")
            if not isinstance(number, float) or math.isfinite(number):
                continue
            if spec.name in LIMITS and number == math.inf:
                continue
            raise ValueError(f"`{spec.name}={value!r}`: must be a finite number.")


def check_refused(config: GRPOConfig) -> None:
    """Raise ValueError for options that the trainer does not support, and list the allowed values."""
    for name, allowed in REFUSED.items():
        if name not in config._HONOURS and getattr(config, name) not in allowed:
            raise ValueError(
                f"`{name}={getattr(config, name)!r}` is not supported by {type(config).__name__}. "
                f"Allowed: {' or '.join(map(repr, allowed))}."
            )
    if "fp16" in (
        getattr(config, "mixed_precision", None),
        os.environ.get("ACCELERATE_MIXED_PRECISION"),
    ):
        raise ValueError(
            "Mixed precision 'fp16' (set by the launcher) is not supported; allowed: bf16 or no."
        )
    optim = str(getattr(config.optim, "value", config.optim)).lower()
    if any(part in optim for part in EARLY_OPTIMIZERS):
        raise ValueError(
            f"`optim={optim!r}` steps in the backward pass; allowed: AdamW, SGD and Adafactor variants."
        )
    if (config.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "`gradient_checkpointing_kwargs={'use_reentrant': True}` is not supported; allowed: False."
        )
    if (config.metric_for_best_model or "").removeprefix("eval_") == "loss":
        raise ValueError(
            f"`metric_for_best_model={config.metric_for_best_model!r}` does not exist. Use 'episode/score'."
        )
    known, refused = vars(GenerationConfig()), OF_TURNS | ({} if config.use_vllm else WITHOUT_VLLM)
    for name, value in (config.generation_kwargs or {}).items():
        instead = refused.get(name)
        if not (instead or config.use_vllm or name in known):
            instead = "a name of GenerationConfig"
        if instead:
            raise ValueError(f"`generation_kwargs` has {name}={value!r}: set {instead}.")
    if config.stop_token not in (None, "eos"):
        raise ValueError(f"`stop_token={config.stop_token!r}`: allowed are None and 'eos'.")
    if config.stop_token is not None and config.stop_token_id is not None:
        raise ValueError("`stop_token` and `stop_token_id` contradict: set only one of them.")
    check_vllm(config)


def check_values(config: GRPOConfig) -> None:
    """Raise ValueError for unsupported, out-of-range or contradictory values."""
    check_refused(config)
    choices = {
        "loss_type": LOSS_TYPES,
        "importance_sampling_level": config._VALID_LEVELS,
        "advantage_level": ("token", "turn"),
        "kl_estimator": KL_ESTIMATORS,
        "vllm_importance_sampling_mode": SAMPLER_CORRECTIONS,
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(
                f"`{name}={getattr(config, name)!r}`: allowed are {', '.join(map(repr, allowed))}."
            )
    for name, (valid, rule) in RANGES.items():
        if not valid(getattr(config, name)):
            raise ValueError(f"`{name}={getattr(config, name)}`: must satisfy {rule}.")
    _check_eval_kwargs(config)
    _check_combinations(config)


def _check_eval_kwargs(config: GRPOConfig) -> None:
    """Refuse settings of evaluation that are unknown or out of range."""
    kwargs = config.eval_generation_kwargs or {}
    for name, value in kwargs.items():
        if name not in EVAL_RANGES:
            raise ValueError(f"`eval_generation_kwargs` has {name!r}: allowed are {', '.join(EVAL_RANGES)}.")
        valid, rule = EVAL_RANGES[name]
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number or not valid(value):
            raise ValueError(f"`eval_generation_kwargs` has {name}={value!r}: must satisfy {rule}.")


def _check_combinations(config: GRPOConfig) -> None:
    """Refuse values that are each valid but contradict each other."""
    rollout_steps = config.steps_per_rollout
    if config.critic_warmup_steps % rollout_steps != 0:
        nearest = math.ceil(config.critic_warmup_steps / rollout_steps) * rollout_steps
        raise ValueError(
            f"`critic_warmup_steps={config.critic_warmup_steps}` must be a multiple of the {rollout_steps} "
            f"optimizer steps of one rollout. Nearest: {nearest}."
        )
    for option, is_set in (
        ("vllm_mode='colocate'", config.use_vllm and config.vllm_mode == "colocate"),
        ("use_transformers_continuous_batching=True", config.use_transformers_continuous_batching),
    ):
        if config.rollout_overlap and is_set:
            raise ValueError(
                f"`rollout_overlap=True` is not supported with `{option}`; allowed: `vllm_mode='server'`."
            )
    temperature = (config.generation_kwargs or {}).get("temperature", config.temperature)
    if temperature != config.temperature:
        raise ValueError(
            f"`generation_kwargs` has {temperature=}; allowed: `temperature={config.temperature}`."
        )
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    upper = 1 + (TOKEN_CLIPRANGE if high is None else high)
    if config.delta is not None and config.delta <= upper:
        raise ValueError(f"`delta={config.delta}` must exceed 1 + epsilon_high = {upper}.")
