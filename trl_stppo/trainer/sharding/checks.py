"""Checks, at construction, for settings that cannot train with DeepSpeed or FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..bridge import Bridge
from ..engine import engine_of

ENGINES = ("ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")
# Optimizers that step each element by itself, so that a step on shards equals a step on full weights.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# Sections of DeepSpeed's configuration that would override the trainer's settings.
DEEPSPEED_SECTIONS = ("optimizer", "scheduler", "tensor_parallel", "sequence_parallel_size")
PARALLEL_SIZES = ("tp_size", "cp_size", "sp_size", "dp_replicate_size")
# Whether a setting is refused, what it is, and what is allowed.
Refusals = Iterator[tuple[Any, str, str]]


def check(host: Bridge, critic: str | None, *, copies_adapter: bool) -> None:
    """Raise ValueError for a combination that would train wrongly or fail.

    `critic`: "copied" from the policy's weights, "shared" with a LoRA policy, "named" or "given" as
    `value_model`, or None. `copies_adapter`: whether the reference is a copy of the policy's adapter.
    """
    engine, state = engine_of(host.accelerator).name, host.accelerator.state
    if not engine.startswith(("ZeRO", "FSDP")):
        return
    if engine not in ENGINES:
        raise ValueError(f"{engine} is not supported. Allowed: {', '.join(ENGINES)} and DDP.")
    own = _of_fsdp(state.fsdp_plugin) if engine == "FSDP2" else _of_deepspeed(host)
    gathered = _of_gathered(host) if engine in ("ZeRO-3", "FSDP2") else ()
    zero3 = _of_zero3(host, critic, copies_adapter) if engine == "ZeRO-3" else ()
    for refused, what, allowed in (*own, *_of_any(host), *gathered, *zero3):
        if refused:
            raise ValueError(f"{what} is not supported with {engine}; {allowed}.")


def _of_any(host: Bridge) -> Refusals:
    args, parallelism = host.args, getattr(host.accelerator, "parallelism_config", None)
    sizes = [getattr(parallelism, size, 1) or 1 for size in PARALLEL_SIZES]
    yield max(sizes) > 1, "`parallelism_config`", "leave it unset"
    optim, allowed = str(getattr(args.optim, "value", args.optim)), ", ".join(ELEMENTWISE)
    own = (host.optimizer, host.optimizer_cls_and_kwargs) != (None, None)
    yield own, "An optimizer of your own", f"`optim` may be {allowed}"
    yield optim not in ELEMENTWISE, f"`optim={optim!r}`", f"allowed: {allowed}"
    exact = "`stabilizers` that need exact norms"
    yield args.takes_second_gradient, exact, "allowed are those for which estimates do"
    yield args.rollout_overlap, "`rollout_overlap=True`", "allowed: False, or DDP"
    staleness = args.rollout_staleness
    yield staleness, f"`rollout_staleness={staleness}`", "allowed: 0"


def _of_gathered(host: Bridge) -> Refusals:
    """Refusals of engines that gather weights for a forward pass."""
    args, model, other = host.args, host.model, "use DDP, ZeRO-1 or ZeRO-2"
    quantised = getattr(model, "quantization_method", None)
    yield quantised, "A quantised policy", other
    yield args.sync_ref_model, "`sync_ref_model=True`", other
    batching = args.use_transformers_continuous_batching
    yield batching, "`use_transformers_continuous_batching=True`", "allowed: False"


def _of_zero3(host: Bridge, critic: str | None, copies_adapter: bool) -> Refusals:
    made = critic in ("copied", "shared")
    yield made, f"A {critic} critic", "pass `value_model`, or use another engine"
    gathers = host.args.ds3_gather_for_generation or host.args.use_vllm
    yield not gathers, "`ds3_gather_for_generation=False`", "without vLLM allowed: True"
    copied = "A KL to an adapter that changes the output from the start"
    yield copies_adapter, copied, "merge it, pass `ref_model`, or set kl_coef=0.0 and beta=0.0"
    scores = any(isinstance(func, str | nn.Module) for func in host.reward_funcs)
    yield scores, "A reward model", "call it in a reward function"


def _of_deepspeed(host: Bridge) -> Refusals:
    config = host.accelerator.state.deepspeed_plugin.deepspeed_config
    for name in DEEPSPEED_SECTIONS:
        section = f"`{name}` in DeepSpeed's configuration"
        yield config.get(name) not in (None, {}, 1), section, "use the trainer's settings"
    zero = config.get("zero_optimization", {})
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        yield device not in (None, "none"), f"`{part}` to {device!r}", "allowed: 'none'"
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zenflow"):
        yield zero.get(name), f"`zero_optimization.{name}`", "remove it"


def _of_fsdp(plugin: Any) -> Refusals:
    offloads = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    yield offloads, "`fsdp_offload_params: true`", "allowed: false"
    yield plugin.cpu_ram_efficient_loading, "`fsdp_cpu_ram_efficient_loading: true`", "allowed: false"
    instead = "use `gradient_checkpointing=True`"
    yield plugin.activation_checkpointing, "`fsdp_activation_checkpointing: true`", instead
    kind = str(plugin.state_dict_type)
    yield "FULL_STATE_DICT" not in kind, f"`fsdp_state_dict_type` {kind}", "allowed: FULL_STATE_DICT"
