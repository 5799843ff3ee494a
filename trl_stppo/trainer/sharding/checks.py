"""Checks, at construction, for settings that cannot train with DeepSpeed or FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..ppo_config import PPOConfig

# Engine -> kind of policy -> critics that the engine can train. "copied": made from the policy's weights;
# "named": `value_model` is a name; "given": `value_model` is a model; "shared": an adapter of a LoRA policy.
CRITICS: dict[str, dict[str, tuple[str, ...]]] = {
    "ZeRO-1": {"full": ("copied", "named", "given"), "LoRA": ("shared", "named", "given")},
    "ZeRO-2": {"full": ("copied", "named", "given"), "LoRA": ("shared", "named", "given")},
    "ZeRO-3": {"full": ("named", "given"), "LoRA": ("named", "given")},
    "FSDP2": {"full": ("copied", "named", "given"), "LoRA": ("shared", "named", "given")},
}
# Optimizers that step each element by itself, so that a step on shards equals a step on full weights.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# Sections of DeepSpeed's configuration that would override the trainer's settings.
DEEPSPEED_SECTIONS = ("optimizer", "scheduler", "tensor_parallel", "sequence_parallel_size")
# Untested options of DeepSpeed's ZeRO section, and the value that switches each option off.
DEEPSPEED_OPTIONS = {
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zenflow": None,
    "mics_shard_size": -1,
    "zero_hpz_partition_size": 1,
}
PARALLEL_SIZES = ("tp_size", "cp_size", "sp_size", "dp_replicate_size")
Refusals = Iterator[tuple[bool, str]]


@dataclass(frozen=True)
class EngineRun:
    """Facts about a run that the checks need."""

    engine: str
    plugin: Any
    args: PPOConfig
    critic: str | None = None
    lora: bool = False
    quantised: bool = False
    own_optimizer: bool = False
    copies_adapter: bool = False
    rewards: Sequence[object] = ()
    parallelism: object = None


def check(run: EngineRun) -> None:
    """Raise ValueError for a combination that would train wrongly or fail."""
    if not run.engine.startswith(("ZeRO", "FSDP")):
        return
    if run.engine not in CRITICS:
        raise ValueError(f"{run.engine} is not supported. Allowed: {', '.join(CRITICS)} and DDP.")
    own = _of_fsdp(run.plugin) if run.engine == "FSDP2" else _of_deepspeed(run)
    for refused, what in (*own, *_of_any(run)):
        if refused:
            what, _, allowed = what.partition("; ")
            raise ValueError(f"{what} is not supported with {run.engine}; {allowed}.")


def _of_any(run: EngineRun) -> Refusals:
    args, engine, policy = run.args, run.engine, "LoRA" if run.lora else "full"
    sizes = (getattr(run.parallelism, size, 1) or 1 for size in PARALLEL_SIZES)
    yield any(size > 1 for size in sizes), "`parallelism_config`; leave it unset"
    critics = CRITICS[engine][policy]
    yield (
        run.critic is not None and run.critic not in critics,
        f"A {run.critic} critic of a {policy} policy; allowed: {' and '.join(critics)} ones "
        f"(`value_model`), or another engine",
    )
    yield run.own_optimizer, f"An optimizer of your own; `optim` may be {', '.join(ELEMENTWISE)}"
    optim = str(getattr(args.optim, "value", args.optim))
    yield optim not in ELEMENTWISE, f"`optim={optim!r}`; allowed: {', '.join(ELEMENTWISE)}"
    yield (
        args.takes_second_gradient,
        "`stabilizers` that need exact norms; allowed are those for which estimates do",
    )
    staleness = args.rollout_staleness
    yield args.rollout_overlap, "`rollout_overlap=True`; allowed: False, or DDP"
    yield bool(staleness), f"`rollout_staleness={staleness}`; allowed: 0"
    if engine not in ("ZeRO-3", "FSDP2"):
        return
    other = "use DDP, ZeRO-1 or ZeRO-2"
    yield run.quantised, f"A quantised policy; {other}"
    yield args.sync_ref_model, f"`sync_ref_model=True`; {other}"
    batching = args.use_transformers_continuous_batching
    yield batching, "`use_transformers_continuous_batching=True`; allowed: False"
    if engine == "FSDP2":
        return
    gathers = args.ds3_gather_for_generation or args.use_vllm
    yield not gathers, "`ds3_gather_for_generation=False`; without vLLM allowed: True"
    yield (
        run.copies_adapter,
        "A KL to an adapter that changes the output from the start; merge it, pass `ref_model`, or set "
        "kl_coef=0.0 and beta=0.0",
    )
    scores = any(isinstance(func, str | nn.Module) for func in run.rewards)
    yield scores, "A reward model; call it in a reward function"


def _of_deepspeed(run: EngineRun) -> Refusals:
    config, here = run.plugin.deepspeed_config, "in DeepSpeed's configuration"
    for name in DEEPSPEED_SECTIONS:
        yield config.get(name) not in (None, {}, 1), f"`{name}` {here}; use the trainer's settings"
    zero = config.get("zero_optimization", {})
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        yield device not in (None, "none"), f"`{part}` to {device!r}; allowed: 'none'"
    for name, off in DEEPSPEED_OPTIONS.items():
        yield zero.get(name) not in (None, off), f"`zero_optimization.{name}` {here}; remove it"
    own = run.engine == "ZeRO-1" and run.critic not in (None, "shared")
    types = f"`data_types` {here}, beside a critic of its own,; remove it, or use ZeRO-2"
    yield own and bool(config.get("data_types")), types


def _of_fsdp(plugin: Any) -> Refusals:
    offloads = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    yield offloads, "`fsdp_offload_params: true`; allowed: false"
    loads = bool(plugin.cpu_ram_efficient_loading)
    yield loads, "`fsdp_cpu_ram_efficient_loading: true`; allowed: false"
    checkpoints = bool(plugin.activation_checkpointing)
    yield checkpoints, "`fsdp_activation_checkpointing: true`; use `gradient_checkpointing=True`"
    kind = plugin.state_dict_type
    whole = "FULL_STATE_DICT" in str(kind)
    yield not whole, f"`fsdp_state_dict_type` {kind}; allowed: FULL_STATE_DICT"
