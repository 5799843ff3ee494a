"""What `PPOConfig` refuses: options without a faithful form here, and values out of range."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..core import KL_ESTIMATORS, LOSS_TYPES
from ..rollout.engine import ON_ENV_ERROR

if TYPE_CHECKING:
    from .ppo_config import PPOConfig

# Options of GRPOConfig that have no meaning, or no faithful form, with a critic and token-level
# advantages: field -> (the only value that is allowed, why, what to do instead).
REFUSED: dict[str, tuple[Any, str, str]] = {
    "scale_rewards": ("group", "it scales group-relative advantages", "use whiten_advantages"),
    "multi_objective_aggregation": (
        "sum_then_normalize",
        "rewards are summed before the advantages are estimated",
        "set reward_weights",
    ),
    "top_entropy_quantile": (
        1.0,
        "its quantile is taken per micro-batch, so the split would change the gradient",
        "leave it at 1.0",
    ),
    "use_adaptive_entropy": (
        False,
        "its controller lives inside GRPOTrainer's loss",
        "use entropy_coef",
    ),
    "fp16": (False, "clipping and norms need unscaled gradients", "use bf16=True"),
}
# Level and form of the correction for the gap to the sampler; the turn level is ours.
SAMPLER_CORRECTIONS = tuple(
    f"{level}_{form}" for level in ("turn", "token", "sequence") for form in ("truncate", "mask")
)
# These step inside the backward pass, before the critic's gradient and the clipping bias exist.
EARLY_OPTIMIZERS = ("lomo", "layerwise")


# Bounds from above, where infinity means what None does and is passed on as it is: nothing is cut off.
LIMITS = frozenset(
    (
        *("epsilon_high", "delta", "cliprange_value", "max_grad_norm", "critic_max_grad_norm"),
        *("target_kl", "max_clip_bias_ratio", "off_policy_mask_threshold"),
        *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    )
)


def check_finite(config: PPOConfig) -> None:
    """Raise ValueError for a field that holds NaN or infinity, whatever else its range is."""
    for spec in fields(config):
        value = getattr(config, spec.name)
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, float) or math.isfinite(number):
                continue
            if spec.name in LIMITS and number == math.inf:
                continue
            also = ", or inf for no limit" if spec.name in LIMITS else ""
            also += ", or None" if "None" in str(spec.type) else ""
            raise ValueError(f"`{spec.name}={value!r}`: must be a finite number{also}.")


def check_refused(config: PPOConfig) -> None:
    """Raise ValueError for options that cannot work here, and name what can."""
    for name, (allowed, why, instead) in REFUSED.items():
        if name not in config._HONOURS and getattr(config, name) != allowed:
            raise ValueError(
                f"`{name}={getattr(config, name)!r}` is not supported by {type(config).__name__}: "
                f"{why}. Allowed: {allowed!r}; {instead}."
            )
    if "fp16" in (
        getattr(config, "mixed_precision", None),
        os.environ.get("ACCELERATE_MIXED_PRECISION"),
    ):
        raise ValueError(
            "Mixed precision 'fp16' (set by the launcher) is not supported: clipping and norms need "
            "unscaled gradients. Launch with --mixed_precision bf16 or no."
        )
    optim = str(getattr(config.optim, "value", config.optim)).lower()
    if any(part in optim for part in EARLY_OPTIMIZERS):
        raise ValueError(
            f"`optim={optim!r}` is not supported: it steps inside the backward pass, before the "
            f"critic's gradient and the clipping bias are known. Use an AdamW, SGD or Adafactor variant."
        )
    if (config.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "`gradient_checkpointing_kwargs={'use_reentrant': True}` is not supported: separate "
            "gradients of critic and clipping bias need non-reentrant checkpointing. Drop it."
        )
    for name, only in (("model_adapter_name", "default"), ("ref_adapter_name", "ref")):
        if getattr(config, name) not in (None, only):
            raise ValueError(
                f"`{name}={getattr(config, name)!r}` is not supported; allowed: None or {only!r}. "
                f"Rename the adapter, or pass `ref_model`."
            )
    if config.enable_jit_checkpoint and not config.save_on_signal:
        raise ValueError(
            "`enable_jit_checkpoint=True` contradicts `save_on_signal=False`: both say what SIGTERM does. "
            "Set only save_on_signal."
        )
    if (config.metric_for_best_model or "").removeprefix("eval_") == "loss":
        raise ValueError(
            f"`metric_for_best_model={config.metric_for_best_model!r}`: evaluation plays episodes and "
            f"computes no loss. Use 'episode/score' (the default), 'episode/success_rate', or another "
            f"figure of docs/evaluation.md."
        )
    if config.rollout_staleness and config.use_vllm:
        raise ValueError(
            f"`rollout_staleness={config.rollout_staleness}` is not supported with `use_vllm=True`, which "
            f"keeps weights of its own. Set one of the two back."
        )
    if config.stop_token not in (None, "eos"):
        raise ValueError(f"`stop_token={config.stop_token!r}`: allowed are None and 'eos'.")
    if config.stop_token is not None and config.stop_token_id is not None:
        raise ValueError("`stop_token` and `stop_token_id` contradict: set only one of them.")
    if config.stop_token_id is not None and config.use_vllm:
        raise ValueError(
            "`stop_token_id` is not supported with `use_vllm=True`; set "
            "generation_kwargs={'stop_token_ids': [...]} instead."
        )


OPTIONAL_COUNTS = (
    *("max_turns", "max_turn_tokens", "max_malformed_actions", "generation_slots"),
    *("num_generations_eval", "eval_max_completion_length"),
)
TIMEOUTS = ("env_timeout_seconds", "episode_timeout_seconds")
# What a field may hold: field -> (check, the rule in words).
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_iterations": (lambda v: v >= 1, "num_iterations >= 1"),
    "epsilon": (lambda v: 0 <= v < 1, "0 <= epsilon < 1"),
    "epsilon_high": (lambda v: v is None or v >= 0, "epsilon_high >= 0 or None"),
    "gamma": (lambda v: 0 < v <= 1, "0 < gamma <= 1"),
    "lam": (lambda v: 0 <= v <= 1, "0 <= lam <= 1"),
    "kl_coef": (lambda v: v >= 0, "kl_coef >= 0"),
    "vf_coef": (lambda v: v > 0, "vf_coef > 0"),
    "critic_learning_rate": (lambda v: v >= 0, "critic_learning_rate >= 0"),
    "critic_warmup_steps": (lambda v: v >= 0, "critic_warmup_steps >= 0"),
    "cliprange_value": (lambda v: v is None or v > 0, "cliprange_value > 0 or None"),
    "critic_lora_r": (lambda v: v is None or v >= 1, "critic_lora_r >= 1 or None"),
    "eval_temperature": (lambda v: v is None or v >= 0, "eval_temperature >= 0 or None"),
    "eval_top_p": (lambda v: v is None or 0 < v <= 1, "0 < eval_top_p <= 1 or None"),
    "eval_top_k": (lambda v: v is None or v >= 0, "eval_top_k >= 0 or None"),
    "rollout_staleness": (lambda v: v >= 0, "rollout_staleness >= 0"),
    "env_workers": (lambda v: v >= 1, "env_workers >= 1"),
    "trace_episodes": (lambda v: v >= 0, "trace_episodes >= 0"),
    "env_error_penalty": (lambda v: v >= 0, "env_error_penalty >= 0"),
    "max_env_error_rate": (lambda v: 0 < v <= 1, "0 < max_env_error_rate <= 1"),
    "max_consecutive_skips": (lambda v: v >= 1, "max_consecutive_skips >= 1"),
    "collapse_patience": (lambda v: v >= 1, "collapse_patience >= 1"),
    "min_valid_action_rate": (
        lambda v: v is None or 0 < v <= 1,
        "0 < min_valid_action_rate <= 1 or None",
    ),
    **{name: (lambda v: v is None or v >= 1, f"{name} >= 1 or None") for name in OPTIONAL_COUNTS},
    **{
        name: (lambda v: v is None or v > 0, f"{name} > 0 or None")
        for name in ("target_kl", "min_reward_std", *TIMEOUTS)
    },
}


def check_values(config: PPOConfig) -> None:
    """Raise ValueError for values that are refused, or out of range, alone or together."""
    check_refused(config)
    choices = {
        "loss_type": LOSS_TYPES,
        "importance_sampling_level": config._VALID_LEVELS,
        "advantage_level": ("token", "turn"),
        "kl_estimator": KL_ESTIMATORS,
        "env_isolation": ("thread", "process"),
        "on_env_error": ON_ENV_ERROR,
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
    _check_combinations(config)


def _check_combinations(config: PPOConfig) -> None:
    """Values that are fine alone and contradict each other."""
    for name in ("eval_top_p", "eval_top_k"):
        if config.eval_temperature == 0 and getattr(config, name) is not None:
            raise ValueError(
                f"`{name}={getattr(config, name)}` has no effect with `eval_temperature=0`, which takes "
                f"the likeliest token. Leave {name} unset, or set eval_temperature above 0."
            )
    rollout_steps = config.num_iterations * (config.num_mini_batches or 1)
    if config.critic_warmup_steps % rollout_steps != 0:
        raise ValueError(
            f"`critic_warmup_steps={config.critic_warmup_steps}` must be a multiple of the "
            f"{rollout_steps} optimizer steps of one rollout (epochs x mini-batches), so that no "
            f"rollout is half warm-up. Nearest: "
            f"{math.ceil(config.critic_warmup_steps / rollout_steps) * rollout_steps}."
        )
    bounds = (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
    if config.vllm_importance_sampling_mode == "turn_truncate" and bounds == (None, None):
        raise ValueError(
            "`vllm_importance_sampling_mode='turn_truncate'` needs a bound: set "
            "`vllm_importance_sampling_clip_max` or `vllm_importance_sampling_clip_min`."
        )
    upper = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    if config.delta is not None and config.delta <= upper:
        raise ValueError(
            f"`delta={config.delta}` must exceed 1 + epsilon_high = {upper}; below it the two-sided "
            f"clip would cut into the ordinary one."
        )
