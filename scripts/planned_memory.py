"""Memory of a run that is only planned: the package's memory model, from flags instead of a trainer.

What a sharding engine saves is reckoned here in the plainest way: what it shares out is divided by the
number of processes, what it gathers for a rollout is counted whole, its buffers are left out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from trl import ModelConfig

from agent_models import has_critic
from agents import TrainArguments
from trl_stppo.models.geometry import QWEN25, Geometry, geometry_of
from trl_stppo.models.memory import Setup, estimate, make_setup

# Bytes of an element; whatever else a checkpoint may be loaded in counts as float32.
DTYPES = {"bfloat16": 2, "float16": 2}
CARDS = (16, 24, 40, 48, 80, 141)


def known_geometry(name: str, revision: str | None = None) -> Geometry | None:
    """Shape of a model that is on this machine, or is one of the well-known ones; None otherwise."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
        return geometry_of(config.get_text_config())
    except Exception:  # not here, or of a family whose memory is not known
        size = re.fullmatch(r"Qwen/Qwen2\.5-([\d.]+B)(-Instruct)?", name)
        return None if size is None or Path(name).exists() else QWEN25.get(size[1])


def planned_setup(
    args: TrainArguments,
    config: Any,
    model_args: ModelConfig,
    *,
    engine: str,
    processes: int,
    prompt: int = 0,
) -> Setup | str:
    """The run as the memory model takes it, or why that is not known.

    Args:
        args: of the script.
        config: of the trainer.
        model_args: of the models.
        engine: "none", "DDP", "ZeRO-1" to "ZeRO-3" or "FSDP2".
        processes: number of them.
        prompt: tokens of the longest prompt, as far as known.
    """
    geometry = known_geometry(model_args.model_name_or_path, model_args.model_revision)
    if geometry is None:
        return f"the shape of {model_args.model_name_or_path} is not known on this machine"
    if model_args.load_in_8bit:
        return "weights in 8 bits are not counted"
    setup = _policy(geometry, model_args)
    setup = _with_critic(setup, args, config, model_args)
    if isinstance(setup, str):
        return setup
    if setup.full and (config.kl_coef or config.beta):
        setup = replace(setup, reference_weights=setup.weights)
    setup = _with_settings(setup, config, prompt)
    if engine not in ("none", "DDP"):
        return _shared_out(setup, engine, processes)
    if processes > 1:  # buckets in which DDP reduces gradients
        setup = replace(setup, other=setup.trainable * setup.trainable_bytes)
    return setup


def _policy(geometry: Geometry, model_args: ModelConfig) -> Setup:
    size = DTYPES.get(str(model_args.dtype), 4)
    rank = model_args.lora_r
    if not model_args.use_peft:
        full = make_setup(geometry, "full")
        return replace(full, weights=size * geometry.parameters, weight_bytes=size)
    if not model_args.load_in_4bit:
        lora = make_setup(geometry, "lora", rank=rank)
        return replace(lora, weights=size * geometry.parameters, weight_bytes=size)
    double = model_args.use_bnb_nested_quant
    weights = geometry.four_bit_weights(size, double=double)
    return replace(make_setup(geometry, "qlora", rank=rank), weights=weights, weight_bytes=size)


def _with_critic(
    setup: Setup, args: TrainArguments, config: Any, model_args: ModelConfig
) -> Setup | str:
    shape, shared = setup.geometry, setup.critic_weights == 0
    own = setup.trainable * setup.trainable_bytes
    if not has_critic(config):
        none = replace(setup, critic_weights=0, critic_trainable=0, critic_full=False)
        return replace(none, adapters=0 if setup.full else own)
    name = config.value_model_name_or_path
    if shared and name is None:
        trainable = shape.lora_parameters(config.critic_lora_r or model_args.lora_r)
        trainable += shape.hidden + 1
        adapters = own + trainable * setup.trainable_bytes
        return replace(setup, critic_trainable=trainable, adapters=adapters)
    critic = shape if name is None else known_geometry(name)
    if critic is None:
        return f"the shape of the critic {name} is not known on this machine"
    parameters, rank = critic.critic_parameters, args.value_model_lora_r
    backbone = setup.weight_bytes if rank is None else (2 if config.bf16 else setup.weight_bytes)
    trainable = parameters if rank is None else critic.lora_parameters(rank) + critic.hidden
    return replace(
        setup,
        critic_geometry=critic,
        critic_weights=backbone * parameters,
        critic_trainable=trainable,
        critic_full=rank is None,
        adapters=(0 if setup.full else own) + (0 if rank is None else 4 * trainable),
    )


def _with_settings(setup: Setup, config: Any, prompt: int) -> Setup:
    batch = config.per_device_train_batch_size * (config.steps_per_generation or 1)
    exact = config.log_clip_bias and config.clip_bias_estimator != "logits"
    extra = config.entropy_coef != 0.0 or config.beta != 0.0
    return replace(
        setup,
        rows=config.per_device_train_batch_size,
        prompt=prompt,
        completion=config.max_completion_length,
        accumulates=config.gradient_accumulation_steps > 1,
        checkpointing=config.gradient_checkpointing,
        optim=str(getattr(config.optim, "value", config.optim)),
        compute_bytes=2 if config.bf16 else setup.weight_bytes,
        bias_buffers=(2 if extra else 1) if exact else 0,
        slots=0 if config.use_vllm else min(batch, config.generation_slots or batch),
        scoring_rows=config.local_rollout_forward_batch_size or 0,
    )


def _shared_out(setup: Setup, engine: str, processes: int) -> Setup:
    """The same on one process of an engine; the critic stays whole outside of it."""
    trained, n = setup.trainable, processes
    if not setup.full:  # adapters are small; frozen weights are shared out by two of them
        if engine not in ("ZeRO-3", "FSDP2"):
            return replace(setup, bias_buffers=0)
        gathered = setup.weights
        return replace(setup, bias_buffers=0, weights=gathered // n, other=gathered)
    if engine == "FSDP2":
        weights, gathered, reference = setup.weights // n, setup.weights, setup.reference_weights
        reference //= n
    else:
        half, masters = 2 * trained, 4 * trained // n  # computed with, and stepped
        whole = engine != "ZeRO-3"
        weights = (half if whole else half // n) + masters
        gathered = 0 if whole else half
        reference = (half if whole else half // n) if setup.reference_weights else 0
    unreduced = 2 * trained if engine == "ZeRO-1" else 0
    return replace(
        setup,
        weights=weights,
        reference_weights=reference,
        trainable=trained // n,
        bias_buffers=0,
        other=gathered + unreduced,
        weight_bytes=setup.weight_bytes if engine == "FSDP2" else 2,
    )


def smallest_card(peak: int, share: float) -> int | None:
    """GB of the smallest common card that holds a peak; None where none does."""
    return next((card for card in CARDS if peak <= share * card * 2**30), None)


def peak_of(setup: Setup) -> tuple[int, str, dict[str, int]]:
    """Bytes at the peak, its phase, and what is alive then."""
    expected = estimate(setup)
    return expected.peak, expected.phase, expected.parts
