"""Memory estimate of a configured run on an engine, and hints at settings that lower memory use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .memory import Setup, estimate, make_qlora


def settings_of(args: Any, prompt: int = 0) -> dict[str, Any]:
    """Return the fields of `Setup` that a configuration sets. `prompt` is the longest prompt in tokens."""
    batch = args.per_device_train_batch_size * (args.steps_per_generation or 1)
    exact = getattr(args, "takes_second_gradient", False)
    extra = args.entropy_coef != 0.0 or args.beta != 0.0
    return {
        "rows": args.per_device_train_batch_size,
        "prompt": prompt,
        "completion": args.max_completion_length,
        "accumulates": args.gradient_accumulation_steps > 1,
        "checkpointing": args.gradient_checkpointing,
        "optim": str(getattr(args.optim, "value", args.optim)),
        "bias_buffers": (2 if extra else 1) if exact else 0,
        "slots": 0 if args.use_vllm else min(batch, args.generation_slots or batch),
        "overlaps": args.rollout_overlap,
        "scoring_rows": args.local_rollout_forward_batch_size or 0,
        **({"compute_bytes": 2} if args.bf16 else {}),
    }


def shared_out(setup: Setup, engine: str, processes: int) -> Setup:
    """Return one process's share of a run's `setup` under DDP, ZeRO or FSDP with `processes` processes.

    The model of an engine is simple: sharded sizes are divided by the number of processes, weights
    gathered for a rollout count in full there, and the engine's buffers are left out. DDP
    adds the buckets in which it reduces gradients.
    """
    trained, n = setup.trainable, processes
    if not engine.startswith(("ZeRO", "FSDP")):
        buckets = trained * setup.trainable_bytes if n > 1 else 0
        return replace(setup, other=setup.other + buckets)
    setup = _critic_shared_out(setup, engine, n)
    if not setup.full:  # adapters are small; two of the engines shard frozen weights
        if engine not in ("ZeRO-3", "FSDP2"):
            return replace(setup, bias_buffers=0)
        gathered = setup.weights
        return _gathering(replace(setup, bias_buffers=0, weights=gathered // n), gathered)
    if engine == "FSDP2":
        weights, reference = setup.weights // n, setup.reference_weights // n
        gathered = setup.weights * setup.compute_bytes // setup.weight_bytes  # in bfloat16, if that
    else:
        half = 2 * trained  # of float32 masters
        weights = _of_zero(trained, engine, n)
        gathered = half if engine == "ZeRO-3" else 0
        reference = weights - 4 * trained // n if setup.reference_weights else 0
    unreduced = 2 * trained if engine == "ZeRO-1" else 0
    setup = replace(
        setup,
        weights=weights,
        reference_weights=reference,
        trainable=trained // n,
        trainable_bytes=4,  # both step masters in float32
        bias_buffers=0,
        other=setup.other + unreduced,
        weight_bytes=setup.weight_bytes if engine == "FSDP2" else 2,
    )
    return _gathering(setup, gathered)


def _critic_shared_out(setup: Setup, engine: str, processes: int) -> Setup:
    """Return the setup with the critic's share on one process. ZeRO shards only a separate critic."""
    weights, trained = setup.critic_weights, setup.critic_trainable
    pieces, other = weights // processes, setup.other
    if engine != "FSDP2" and not setup.critic_full:
        return replace(setup, critic_weights=pieces if engine == "ZeRO-3" else weights)
    if engine != "FSDP2":
        pieces = _of_zero(trained, engine, processes)
        other += 2 * trained if engine == "ZeRO-1" else 0  # before it is reduced
    return replace(setup, critic_weights=pieces, critic_trainable=trained // processes, other=other)


def _of_zero(trained: int, engine: str, processes: int) -> int:
    """Return one process's bytes of weights under ZeRO: bfloat16 weights and float32 masters."""
    half, masters = 2 * trained, 4 * trained // processes
    return (half // processes if engine == "ZeRO-3" else half) + masters


def _gathering(setup: Setup, weights: int) -> Setup:
    """Add the bytes of weights gathered for a rollout, if the policy itself samples the turns."""
    return replace(setup, gathered=weights) if setup.slots else setup


def hints(setup: Setup) -> list[tuple[str, int]]:
    """Return settings that would save memory and the bytes that each saves, most effective first."""
    now = estimate(setup).peak
    options = [(text, now - estimate(other).peak) for text, other in _alternatives(setup)]
    return sorted((o for o in options if o[1] > 0.01 * now), key=lambda option: -option[1])


def _alternatives(setup: Setup) -> Iterable[tuple[str, Setup]]:
    if setup.rows > 1:
        smaller = replace(setup, rows=1, scoring_rows=min(1, setup.scoring_rows), accumulates=True)
        text = "per_device_train_batch_size=1 with gradient_accumulation_steps times"
        yield f"{text} {setup.rows}", smaller
    if not setup.checkpointing:
        yield "gradient_checkpointing=True", replace(setup, checkpointing=True)
    if not setup.four_bit:
        own = ", critic on the same backbone" if setup.critic_weights else ""
        yield f"QLoRA: load_in_4bit with LoRA{own}", make_qlora(setup)
    if setup.completion >= 512:
        half = setup.completion // 2
        yield f"max_completion_length={half}", replace(setup, completion=half)
    if not setup.optim.startswith("paged"):
        yield "optim=paged_adamw_8bit", replace(setup, optim="paged_adamw_8bit")
    if setup.slots > 1:
        half = setup.slots // 2
        yield f"generation_slots={half}", replace(setup, slots=half)
