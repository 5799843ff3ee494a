"""What a dry run shows of a planned run: its batches, its length, its memory, what it would load.

The memory is that of the package's model, from flags instead of a trainer. What a sharding engine saves
is reckoned in the plainest way: what it shares out is divided by the number of processes, what it gathers
for a rollout is counted whole, its buffers are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trl import ModelConfig

from ..hub.description import Description
from ..models.geometry import QWEN25, Geometry, geometry_of
from ..models.memory import FITS, GIB, Setup, estimate, make_setup
from ..trainer.describe import description_of
from .agent_models import local_config, model_options
from .arguments import TrainArguments
from .launches import Launch
from .names import looks_like_path

# Bytes of an element; whatever else a checkpoint may be loaded in counts as float32.
DTYPES = {"bfloat16": 2, "float16": 2}
CARDS = (16, 24, 40, 48, 80, 141)


@dataclass
class Plan:
    """The run as far as it is known: flags, surroundings, rows."""

    args: TrainArguments
    config: Any
    model_args: ModelConfig
    trainer_class: Any
    launch: Launch = field(default_factory=Launch)
    train: Any = None
    prompt: int = 0


def described(run: Plan, rollout: Any) -> list[tuple[str, str, str]]:
    """The rows of the table: section, name, value.

    Args:
        run: what is planned.
        rollout: who plays its episodes; None where that could not be decided.
    """
    return [
        (section, name, value)
        for section, part in (
            ("run", _run_rows(run, rollout)),
            ("one rollout", _batch_rows(run)),
            ("in all", _total_rows(run)),
            ("memory", _memory_rows(run)),
            ("to load", _download_rows(run)),
        )
        for name, value in part
    ]


def planned_run(run: Plan, rollout: Any = None) -> Description:
    """What the run would be.

    Args:
        run: what is planned.
        rollout: who plays its episodes; None where that is not known.
    """
    config, model_args, rank = run.config, run.model_args, run.args.value_model_lora_r
    critic = "none" if not run.trainer_class.has_critic else "shared"
    if critic == "shared" and (not model_args.use_peft or config.value_model_name_or_path):
        critic = "separate" if rank is None else f"separate, LORA of rank {rank}"
    adapter = {"type": "LORA", "r": model_args.lora_r}
    stored = {f"load_in_{bits}bit": getattr(model_args, f"load_in_{bits}bit") for bits in (4, 8)}
    return description_of(
        run.trainer_class,
        config,
        rollout,
        run.train,
        model=str(model_args.model_name_or_path),
        dtype=str(loaded_options(run).get("dtype")),
        adapter=adapter if model_args.use_peft else None,
        quantization=stored if any(stored.values()) else None,
        critic=critic,
    )


def _run_rows(run: Plan, rollout: Any) -> Iterator[tuple[str, str]]:
    args, config, launch = run.args, run.config, run.launch
    planned, correction = planned_run(run, rollout), config.clip_bias_normalization
    yield (
        "variant",
        f"{config.variant}: {config.importance_sampling_level} ratio"
        + ("" if correction == "none" else f", clipping bias corrected ({correction})"),
    )
    yield "policy", f"{planned.model}, {planned.training}"
    source = f", from {config.value_model_name_or_path or 'the policy'}"
    shared = ": an adapter on the policy's backbone"
    yield "critic", planned.critic + {"none": "", "shared": shared}.get(planned.critic, source)
    yield (
        "processes",
        f"{launch.processes}" + (f", {launch.engine}" if launch.engine != "none" else ""),
    )
    yield "environment", planned.environment
    if args.reward_funcs:
        yield "reward functions", ", ".join(args.reward_funcs)
    rates = f"policy {config.learning_rate:g}"
    if planned.critic != "none":
        rates += f", critic {config.critic_learning_rate:g}"
    yield "learning rates", f"{rates} ({getattr(config.optim, 'value', config.optim)})"


def _batch_rows(run: Plan) -> Iterator[tuple[str, str]]:
    config = run.config
    episodes, group = config.generation_batch_size, config.num_generations
    prompts = f"{episodes // group} prompts x {group}" if group > 1 else "one per prompt"
    yield "episodes", f"{episodes} ({prompts})"
    rows = config.per_device_train_batch_size
    yield "micro-batches", f"{config.steps_per_generation} of {rows} episodes on each process"
    parts = config.num_mini_batches
    yield "mini-batches", f"{parts} of {episodes // parts} episodes"
    yield "epochs", f"{config.num_iterations}"
    yield "optimizer steps", f"{parts * config.num_iterations}"
    sampled = config.max_completion_length
    if config.max_turns and config.max_turn_tokens:
        sampled = min(sampled, config.max_turns * config.max_turn_tokens)
    turns = f"{config.max_turns} turns" if config.max_turns else "any number of turns"
    yield (
        "episode at most",
        f"{turns}, {config.max_completion_length} tokens, {sampled} of them sampled",
    )
    yield (
        "tokens at most",
        f"{episodes * (config.max_completion_length + run.prompt):,}"
        + ("" if run.prompt else " and the prompts"),
    )


def _total_rows(run: Plan) -> Iterator[tuple[str, str]]:
    config = run.config
    each = config.num_mini_batches * config.num_iterations
    steps = config.max_steps
    if steps <= 0 and hasattr(run.train, "__len__"):
        prompts = config.generation_batch_size // config.num_generations
        rollouts = math.ceil(config.num_train_epochs * (len(run.train) // prompts))
        steps = rollouts * each
    if steps <= 0:
        yield "optimizer steps", "not known: neither max_steps nor the number of rows is"
        return
    rollouts = math.ceil(steps / each)
    yield "rollouts", f"{rollouts:,}"
    yield "episodes", f"{rollouts * config.generation_batch_size:,}"
    yield "optimizer steps", f"{steps:,}"
    warmup = config.get_warmup_steps(steps)
    kind = getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type)
    yield "schedule", f"{kind}, {warmup} optimizer steps of warm-up" if warmup else str(kind)
    if hasattr(run.train, "__len__"):
        share = rollouts * config.generation_batch_size / config.num_generations / len(run.train)
        yield "passes over the data", f"{share:.2f} ({len(run.train):,} rows)"


def _memory_rows(run: Plan) -> Iterator[tuple[str, str]]:
    setup = planned_setup(run)
    if isinstance(setup, str):
        yield "each process", f"not known: {setup}"
        return
    expected = estimate(setup)
    peak = expected.peak
    rough = (
        ""
        if run.launch.engine in ("none", "DDP")
        else ", roughly: the engine's buffers are left out"
    )
    yield "each process", f"about {peak / GIB:.1f} GiB at the peak ({expected.phase}){rough}"
    order = sorted(expected.parts.items(), key=lambda part: -part[1])
    yield "of that", ", ".join(f"{k} {v / GIB:.1f}" for k, v in order if v / GIB >= 0.05)
    card = smallest_card(peak, FITS)
    yield "smallest card", "none of the common ones" if card is None else f"{card} GB"


def _download_rows(run: Plan) -> Iterator[tuple[str, str]]:
    model_args = run.model_args
    names = [model_args.model_name_or_path, getattr(run.config, "value_model_name_or_path", None)]
    for name in dict.fromkeys(n for n in names if n):
        if Path(name).exists():
            yield name, "here"
            continue
        if looks_like_path(name):
            yield name, "not found"
            continue
        shape = known_geometry(name, model_args.model_revision)
        size = "size not known" if shape is None else f"about {2 * shape.parameters / GIB:.1f} GiB"
        yield name, "in the cache" if is_cached(name) else f"from the Hub, {size} in 16 bits"
    data = str(run.args.dataset_name)
    if run.train is not None:
        yield (
            data,
            f"here, {len(run.train):,} rows"
            if hasattr(run.train, "__len__")
            else "here, as a stream",
        )
    else:
        yield data, "not here"


def is_cached(name: str) -> bool:
    """Whether weights of a Hub model are in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "model.safetensors.index.json")
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
    except ValueError:  # no name that the Hub could have
        return False


# -------------------------------------------------------------------------- memory


def known_geometry(name: str, revision: str | None = None) -> Geometry | None:
    """Shape of a model that is on this machine, or is one of the well-known ones; None otherwise."""
    try:
        return geometry_of(local_config(name, revision).get_text_config())
    except (AttributeError, ValueError):  # not here, or of a family whose memory is not known
        size = re.fullmatch(r"Qwen/Qwen2\.5-([\d.]+B)(-Instruct)?", name)
        return None if size is None or Path(name).exists() else QWEN25.get(size[1])


def planned_setup(run: Plan) -> Setup | str:
    """The run as the memory model takes it, or why that is not known."""
    config, model_args, launch = run.config, run.model_args, run.launch
    geometry = known_geometry(model_args.model_name_or_path or "", model_args.model_revision)
    if geometry is None:
        return f"the shape of {model_args.model_name_or_path} is not known on this machine"
    problem = _not_counted(run)
    if problem is not None:
        return problem
    setup = _with_critic(_policy(geometry, run), run)
    if isinstance(setup, str):
        return setup
    if setup.full and (config.kl_coef or config.beta):
        setup = replace(setup, reference_weights=setup.weights)
    setup = _with_settings(setup, config, run.prompt)
    if launch.engine not in ("none", "DDP"):
        return _shared_out(setup, launch.engine, launch.processes)
    if launch.processes > 1:  # buckets in which DDP reduces gradients
        setup = replace(setup, other=setup.trainable * setup.trainable_bytes)
    return setup


def loaded_options(run: Plan) -> dict[str, Any]:
    """How the policy is loaded."""
    return model_options(run.model_args, run.config.model_init_kwargs)


def _not_counted(run: Plan) -> str | None:
    """What the memory model does not cover."""
    config, model_args = run.config, run.model_args
    if model_args.load_in_8bit:
        return "weights in 8 bits are not counted"
    if config.use_vllm and config.vllm_mode == "colocate":
        return (
            f"vLLM on the same card reserves a share of it "
            f"(vllm_gpu_memory_utilization={config.vllm_gpu_memory_utilization:g})"
        )
    if not model_args.use_peft:
        return None
    if model_args.lora_target_modules != "all-linear":
        return (
            f"only all-linear is counted, not lora_target_modules={model_args.lora_target_modules}"
        )
    for name in ("lora_modules_to_save", "lora_target_parameters"):
        if getattr(model_args, name):
            return f"what {name} trains is not counted"
    return None


def _policy(geometry: Geometry, run: Plan) -> Setup:
    model_args = run.model_args
    size = DTYPES.get(str(loaded_options(run).get("dtype")), 4)
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


def _with_critic(setup: Setup, run: Plan) -> Setup | str:
    args, config, model_args = run.args, run.config, run.model_args
    shape, shared = setup.geometry, setup.critic_weights == 0
    own = setup.trainable * setup.trainable_bytes
    if not run.trainer_class.has_critic:
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
