"""What cannot be trained with DeepSpeed or FSDP, refused when the trainer is built.

The tables below are the ones of `docs/many_gpus.md`; `tests/trainer/test_engines.py` holds both
against what happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..host import Host
from .runtime import sharding_name

# Engine -> policy -> critics that it trains. "copied" is made from the policy's weights, "named" by
# `value_model_name_or_path`, "given" passed as `value_model`, "shared" an adapter of a LoRA policy.
CRITICS: dict[str, dict[str, tuple[str, ...]]] = {
    "ZeRO-1": {"full": ("copied", "named", "given"), "LoRA": ("shared", "named", "given")},
    "ZeRO-2": {"full": ("copied", "named", "given"), "LoRA": ("shared", "named", "given")},
    "ZeRO-3": {"full": ("named", "given"), "LoRA": ("named", "given")},
    "FSDP2": {"full": ("copied", "named", "given"), "LoRA": ("shared", "named", "given")},
}
WHY_NOT = {
    "copied": "the policy's weights may be in pieces, so that none can be copied",
    "shared": "in the policy's engine one norm would clip both, so that the critic shortens its steps",
}
HOW = {
    "copied": "no value model",
    "named": "value_model_name_or_path",
    "given": "value_model",
    "shared": "no value model",
}
# Each element of the weights is stepped by itself, so that steps on pieces are steps on the whole.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# Parts of DeepSpeed's configuration, and why not.
DEEPSPEED_SECTIONS = {
    "optimizer": "set `optim`, `learning_rate` and `weight_decay`",
    "scheduler": "set `lr_scheduler_type` and `warmup_steps`",
    "tensor_parallel": "remove it",
    "sequence_parallel_size": "remove it",
}
# Options of its ZeRO section that are untested, and the value that leaves each of them off.
DEEPSPEED_OPTIONS = {
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zenflow": None,
    "mics_shard_size": -1,
    "zero_hpz_partition_size": 1,
}


@dataclass(frozen=True)
class EngineRun:
    """What the checks look at, of a trainer or of a run that is only planned.

    Attributes:
        engine: as `sharding_name` has it.
        plugin: accelerate's, of DeepSpeed or FSDP.
        args: configuration.
        critic: which of `HOW` it is; None where the method has none.
        lora: the policy has adapters.
        quantised: the policy is.
        own_optimizer: the caller's.
        copies_adapter: the reference is a copy of the policy's adapter.
        rewards: reward functions, those that score turns too.
        parallelism: accelerate's `parallelism_config`.
    """

    engine: str
    plugin: Any
    args: Any
    critic: str | None = None
    lora: bool = False
    quantised: bool = False
    own_optimizer: bool = False
    copies_adapter: bool = False
    rewards: Sequence[Any] = ()
    parallelism: Any = None


def critic_kind(args: Any, *, given: bool, lora: bool) -> str:
    """Which of `HOW` the critic is."""
    if given:
        return "given"
    if args.value_model_name_or_path is not None:
        return "named"
    return "shared" if lora else "copied"


def run_of(
    host: Host, value_model: Any, turn_reward_funcs: Any, *, copies_adapter: bool
) -> EngineRun:
    """What the checks look at, of a host.

    Args:
        host: as GRPOTrainer's constructor has left it.
        value_model: the constructor's argument.
        turn_reward_funcs: the constructor's argument.
        copies_adapter: whether the reference is a copy of the policy's adapter.
    """
    state, model = host.accelerator.state, host.model
    lora = hasattr(model, "peft_config")
    kind = critic_kind(host.args, given=value_model is not None, lora=lora)
    turns = (
        turn_reward_funcs if isinstance(turn_reward_funcs, list | tuple) else [turn_reward_funcs]
    )
    return EngineRun(
        engine=sharding_name(host.accelerator),
        plugin=getattr(state, "deepspeed_plugin", None) or getattr(state, "fsdp_plugin", None),
        args=host.args,
        critic=kind if host.has_critic else None,
        lora=lora,
        quantised=bool(getattr(model, "quantization_method", None))
        or any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)),
        own_optimizer=(host.optimizer, host.optimizer_cls_and_kwargs) != (None, None),
        copies_adapter=copies_adapter,
        rewards=[*host.reward_funcs, *turns],
        parallelism=getattr(host.accelerator, "parallelism_config", None),
    )


def check(run: EngineRun) -> None:
    """Raise ValueError for a combination that would train wrongly, or not at all."""
    engine, args = run.engine, run.args
    if not engine.startswith(("ZeRO", "FSDP")):
        return
    if engine not in CRITICS:
        raise ValueError(
            f"{engine} is not supported. Allowed: {', '.join(CRITICS)} and DDP; the files in "
            f"trl_stppo/cli/accelerate_configs/ set each of them up."
        )
    if engine.startswith("ZeRO"):
        _check_deepspeed(run.plugin.deepspeed_config)
    else:
        _check_fsdp(run.plugin)
    _check_parallelism(run.parallelism, engine)
    if run.critic is not None:
        _check_critic(run, run.critic)
    _check_optimizer(run)
    if args.rollout_staleness:
        raise _refuse(
            f"`rollout_staleness={args.rollout_staleness}`",
            engine,
            "the engine holds the weights, and older ones could not be put in their place",
            "Set it to 0, or use DDP.",
        )
    if engine in ("ZeRO-3", "FSDP2"):
        _check_whole_weights(run)
    if engine == "ZeRO-3":
        _check_zero3(run)


def _refuse(what: str, engine: str, why: str, instead: str) -> ValueError:
    return ValueError(f"{what} is not supported with {engine}: {why}. {instead}")


def _check_deepspeed(config: dict[str, Any]) -> None:
    for section, instead in DEEPSPEED_SECTIONS.items():
        if config.get(section) not in (None, {}, 1):
            raise _refuse(
                f"`{section}` in DeepSpeed's configuration",
                "this trainer",
                "the trainer's own settings would not be followed",
                f"Instead, {instead}.",
            )
    zero = config.get("zero_optimization", {})
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        if device not in (None, "none"):
            raise _refuse(
                f"`{part}` to {device!r}",
                "DeepSpeed here",
                "it replaces the optimizer, and has not been tested",
                "Set its device to 'none'; a higher ZeRO stage, LoRA or more GPUs save memory too.",
            )
    for option, plain in DEEPSPEED_OPTIONS.items():
        if zero.get(option) not in (None, plain):
            raise _refuse(
                f"`zero_optimization.{option}`", "DeepSpeed here", "it is untested", "Remove it."
            )


def _check_fsdp(plugin: Any) -> None:
    options = {
        "fsdp_offload_params": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        "fsdp_cpu_ram_efficient_loading": bool(plugin.cpu_ram_efficient_loading),
        "fsdp_activation_checkpointing": bool(plugin.activation_checkpointing),
    }
    instead = {
        "fsdp_activation_checkpointing": "Set it to false and `gradient_checkpointing=True`.",
    }
    for name, on in options.items():
        if on:
            raise _refuse(
                f"`{name}: true`",
                "FSDP2 here",
                "critic and reference are made from whole weights on every process",
                instead.get(name, "Set it to false."),
            )
    if "FULL_STATE_DICT" not in str(plugin.state_dict_type):
        raise _refuse(
            f"`fsdp_state_dict_type` {plugin.state_dict_type}",
            "FSDP2 here",
            "save_model() would write nothing",
            "Set it to FULL_STATE_DICT.",
        )


def _check_parallelism(config: Any, engine: str) -> None:
    sizes = ("tp_size", "cp_size", "sp_size", "dp_replicate_size")
    if config is not None and any((getattr(config, size, 1) or 1) > 1 for size in sizes):
        raise _refuse(
            "`parallelism_config`",
            engine,
            "episodes are dealt out to all processes alike",
            "Leave it unset: data parallelism over all processes.",
        )


def _check_critic(run: EngineRun, kind: str) -> None:
    engine, policy = run.engine, "LoRA" if run.lora else "full"
    allowed = CRITICS[engine][policy]
    if kind not in allowed:
        ways = " or ".join(dict.fromkeys(HOW[k] for k in allowed))
        raise _refuse(
            f"A {kind} critic of a {'LoRA' if run.lora else 'fully trained'} policy",
            engine,
            WHY_NOT[kind],
            f"Pass {ways}; or use DDP, FSDP2, ZeRO-1 or ZeRO-2.",
        )
    if engine == "ZeRO-1" and kind != "shared" and run.plugin.deepspeed_config.get("data_types"):
        raise _refuse(
            "`data_types` in DeepSpeed's configuration",
            "a critic under ZeRO-1",
            "it brings another optimizer, of which a gradient cannot be dropped",
            "Remove it, or use ZeRO-2.",
        )


def _check_optimizer(run: EngineRun) -> None:
    engine, args = run.engine, run.args
    if run.own_optimizer:
        raise _refuse(
            "An optimizer of your own",
            engine,
            "the engine needs to build it",
            f"Set `optim` to one of {', '.join(ELEMENTWISE)}.",
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim not in ELEMENTWISE:
        raise _refuse(
            f"`optim={optim!r}`",
            engine,
            "it would see flat pieces of the weights, and has not been tested on them",
            f"Allowed: {', '.join(ELEMENTWISE)}.",
        )
    pieces = "the gradient is in pieces inside the engine"
    if getattr(args, "needs_exact_norms", False):
        raise _refuse(
            f"`stabilizers={args.stabilizers}`", engine, pieces, "List 'share', not 'triggered'."
        )


def _check_whole_weights(run: EngineRun) -> None:
    engine, args = run.engine, run.args
    if run.quantised:
        raise _refuse(
            "A quantised policy",
            engine,
            "its packed weights cannot be cut into pieces and gathered without further settings",
            "Use DDP, ZeRO-1 or ZeRO-2.",
        )
    if args.sync_ref_model:
        raise _refuse(
            "`sync_ref_model=True`",
            engine,
            "policy and reference are cut into different pieces",
            "Use DDP, ZeRO-1 or ZeRO-2.",
        )
    if args.use_transformers_continuous_batching:
        raise _refuse(
            "`use_transformers_continuous_batching=True`",
            engine,
            "processes that generate different numbers of tokens would wait for each other for ever",
            "Leave it off.",
        )


def _check_zero3(run: EngineRun) -> None:
    if not run.args.ds3_gather_for_generation and not run.args.use_vllm:
        raise _refuse(
            "`ds3_gather_for_generation=False`",
            "ZeRO-3",
            "processes that generate different numbers of tokens would wait for each other for ever",
            "Leave it True.",
        )
    if run.copies_adapter:
        raise _refuse(
            "A policy whose adapter does something from the start, with a KL to it,",
            "ZeRO-3",
            "the adapter's weights may be in pieces, so that none can be copied",
            "Merge the adapter first, pass `ref_model`, or set kl_coef=0.0 and beta=0.0.",
        )
    if any(isinstance(func, str | nn.Module) for func in run.rewards):
        raise _refuse(
            "A reward model",
            "ZeRO-3",
            "it would be cut into pieces along with the policy, which is untested",
            "Call it in a reward function, or use ZeRO-2.",
        )
