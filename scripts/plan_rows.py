"""What a dry run shows of a planned run: its batches, its length, its memory, what it would load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl import ModelConfig

from agent_models import has_critic
from agents import TrainArguments
from planned_memory import known_geometry, peak_of, planned_setup, smallest_card
from trl_stppo.models.memory import FITS, GIB


@dataclass
class Plan:
    """The run as far as it is known: flags, surroundings, rows."""

    args: TrainArguments
    config: Any
    model_args: ModelConfig
    engine: str
    processes: int
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


def _run_rows(run: Plan, rollout: Any) -> Iterator[tuple[str, str]]:
    args, config, model_args = run.args, run.config, run.model_args
    correction = config.clip_bias_normalization
    yield (
        "variant",
        f"{config.variant}: {config.importance_sampling_level} ratio"
        + ("" if correction == "none" else f", clipping bias corrected ({correction})"),
    )
    yield "policy", f"{model_args.model_name_or_path}, {_training(model_args)}"
    yield "critic", _critic(run)
    yield "processes", f"{run.processes}" + (f", {run.engine}" if run.engine != "none" else "")
    kinds = [type(probe).__name__ for probe in rollout.probes.values()] if rollout else []
    yield "environment", ", ".join(kinds) or "none"
    if args.reward_funcs:
        yield "reward functions", ", ".join(args.reward_funcs)
    rates = f"policy {config.learning_rate:g}"
    if has_critic(config):
        rates += f", critic {config.critic_learning_rate:g}"
    yield "learning rates", f"{rates} ({getattr(config.optim, 'value', config.optim)})"


def _training(model_args: ModelConfig) -> str:
    if not model_args.use_peft:
        return f"fully trained, {model_args.dtype}"
    bits = "4-bit " if model_args.load_in_4bit else "8-bit " if model_args.load_in_8bit else ""
    return f"LoRA of rank {model_args.lora_r} on {bits}weights, {model_args.dtype}"


def _critic(run: Plan) -> str:
    config, rank = run.config, run.args.value_model_lora_r
    if not has_critic(config):
        return "none"
    name = config.value_model_name_or_path
    if run.model_args.use_peft and name is None:
        return "adapter on the policy's backbone"
    how = "fully trained" if rank is None else f"LoRA of rank {rank}"
    return f"{name or 'copy of the policy'}, {how}"


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
    if steps <= 0 and run.train is not None and hasattr(run.train, "__len__"):
        prompts = config.generation_batch_size // config.num_generations
        rollouts = math.ceil(config.num_train_epochs * (len(run.train) // prompts))
        steps = rollouts * each
    if steps <= 0:
        yield "updates", "not known: neither max_steps nor the number of rows is"
        return
    rollouts = math.ceil(steps / each)
    yield "rollouts", f"{rollouts:,}"
    yield "episodes", f"{rollouts * config.generation_batch_size:,}"
    yield "updates", f"{steps:,}"
    warmup = config.get_warmup_steps(steps)
    kind = getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type)
    yield "schedule", f"{kind}, {warmup} updates of warm-up" if warmup else str(kind)
    if run.train is not None:
        share = rollouts * config.generation_batch_size / config.num_generations / len(run.train)
        yield "passes over the data", f"{share:.2f} ({len(run.train):,} rows)"


def _memory_rows(run: Plan) -> Iterator[tuple[str, str]]:
    setup = planned_setup(
        run.args,
        run.config,
        run.model_args,
        engine=run.engine,
        processes=run.processes,
        prompt=run.prompt,
    )
    if isinstance(setup, str):
        yield "each process", f"not known: {setup}"
        return
    peak, phase, parts = peak_of(setup)
    rough = "" if run.engine in ("none", "DDP") else ", roughly: the engine's buffers are left out"
    yield "each process", f"about {peak / GIB:.1f} GiB at the peak ({phase}){rough}"
    order = sorted(parts.items(), key=lambda part: -part[1])
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
        shape = known_geometry(name, model_args.model_revision)
        size = "size not known" if shape is None else f"about {2 * shape.parameters / GIB:.1f} GiB"
        yield name, "in the cache" if is_cached(name) else f"from the Hub, {size} in 16 bits"
    data = str(run.args.dataset_name)
    if run.train is not None:
        yield data, f"here, {len(run.train):,} rows" if hasattr(run.train, "__len__") else "here"
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
