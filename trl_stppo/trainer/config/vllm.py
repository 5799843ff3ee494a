"""Checks of the options that concern vLLM."""

from __future__ import annotations

from .._trl import GRPOConfig

# Arguments of `vllm.LLM` that TRL sets -> the option for them, if there is one.
TAKEN = {
    **dict.fromkeys(("model", "seed", "distributed_executor_backend", "logprobs_mode")),
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
    "model_impl": "vllm_model_impl",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "trust_remote_code": "trust_remote_code",
}


def check_vllm(config: GRPOConfig) -> None:
    """Raise ValueError for options that vLLM cannot honour, or that contradict each other."""
    if config.rollout_staleness and config.use_vllm and not config.rollout_overlap:
        raise ValueError(
            f"`rollout_staleness={config.rollout_staleness}` is not supported with `use_vllm=True`."
        )
    if config.stop_token_id is not None and config.use_vllm:
        raise ValueError(
            "`stop_token_id` is not supported with `use_vllm=True`; use generation_kwargs' stop_token_ids."
        )
    bounds = (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
    if config.vllm_importance_sampling_mode == "turn_truncate" and bounds == (None, None):
        raise ValueError(
            "`vllm_importance_sampling_mode='turn_truncate'` needs a bound: set "
            "`vllm_importance_sampling_clip_max` or `vllm_importance_sampling_clip_min`."
        )
    if config.vllm_engine_kwargs is not None:
        _check_engine_kwargs(config)


def _check_engine_kwargs(config: GRPOConfig) -> None:
    kwargs = config.vllm_engine_kwargs
    if not isinstance(kwargs, dict):
        raise ValueError(
            f"`vllm_engine_kwargs={kwargs!r}`: must be a dictionary, such as {{'dtype': 'bfloat16'}}."
        )
    if not config.use_vllm or config.vllm_mode != "colocate":
        raise ValueError(
            f"`vllm_engine_kwargs={kwargs!r}` is about a colocated engine (`use_vllm=True`, "
            f"`vllm_mode='colocate'`). A server has flags of its own, such as `vllm serve --dtype`."
        )
    for name in {*kwargs} & {*TAKEN}:
        instead = f"set `{TAKEN[name]}`" if TAKEN[name] else "leave it out"
        raise ValueError(
            f"`vllm_engine_kwargs` has {name}={kwargs[name]!r}, which TRL gives: {instead}."
        )
    if kwargs.get("enable_lora"):
        raise ValueError(
            f"`vllm_engine_kwargs` has enable_lora={kwargs['enable_lora']!r}; allowed: False."
        )
