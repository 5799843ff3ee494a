"""Resolved settings of a planned run, computed without weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from trl import ModelConfig

from ..hub.loading import load_tokenizer
from .agent_models import model_options
from .agents import parse_flags
from .arguments import TrainArguments
from .flags import peeked
from .launch import Launch


@dataclass
class Plan:
    """A planned run: parsed flags, launch, training rows."""

    args: TrainArguments
    config: Any
    model_args: ModelConfig
    trainer_class: Any
    launch: Launch = field(default_factory=Launch)
    train: Any = None


def planned(words: Sequence[str], launch: Launch) -> Plan:
    """Parse the flags of a run into a `Plan`. On a machine without GPU, `use_cpu` is set."""
    if not torch.cuda.is_available() and peeked(words, "use_cpu", None) is None:
        words = [*words, "--use_cpu", "true"]
    return Plan(*parse_flags(TrainArguments, words), launch)


def local_tokenizer(run: Plan) -> Any:
    """Return the policy's tokenizer if it is on this machine, else None."""
    try:
        name, revision = str(run.model_args.model_name_or_path), run.model_args.model_revision
        return load_tokenizer(name, revision, local_files_only=True)
    except Exception:
        return None


def how_trained(run: Plan) -> str:
    """Describe the policy's training in words, such as `LoRA of rank 16 on 4-bit weights, bfloat16`."""
    model_args = run.model_args
    how = f"LoRA of rank {model_args.lora_r}" if model_args.use_peft else "fully trained"
    if model_args.load_in_4bit or model_args.load_in_8bit:
        how += f" on {4 if model_args.load_in_4bit else 8}-bit weights"
    dtype = model_options(model_args, run.config.model_init_kwargs).get("dtype") or "float32"
    return f"{how}, {dtype}"


def resolved(run: Plan) -> dict[str, str]:
    """Return the resolved settings of a run as texts by name, for the table of `--dry_run`."""
    args, config, launch = run.args, run.config, run.launch
    episodes, group = config.generation_batch_size, config.num_generations
    each = config.steps_per_rollout
    steps = config.max_steps
    if steps <= 0 and hasattr(run.train, "__len__"):
        batches = max(1, len(run.train) // (episodes // group))
        steps = math.ceil(config.num_train_epochs * batches) * each
    critic = "none"
    if run.trainer_class.has_critic:
        separate = config.value_model_name_or_path or not run.model_args.use_peft
        critic = "separate" if separate else "shared"
        critic += f", learning rate {config.critic_learning_rate:g}"
    prompts = f"{episodes // group} prompts x {group}" if group > 1 else "one per prompt"
    optim = getattr(config.optim, "value", config.optim)
    ratio = ", ".join([f"{config.importance_sampling_level} ratio", *config.stabilizers])
    return {
        "variant": f"{config.variant}: {ratio}",
        "policy": f"{run.model_args.model_name_or_path}, {how_trained(run)}",
        "learning rate": f"{config.learning_rate:g}, {optim}",
        "critic": critic,
        "processes": f"{launch.processes}{'' if launch.engine == 'none' else f', {launch.engine}'}",
        "environment": args.agent
        or f"{args.environment or 'none'} {args.environment_kwargs or ''}".strip(),
        "reward functions": ", ".join(args.reward_funcs or []) or "none",
        "rows": f"{args.rows_name}, {len(run.train):,}" if hasattr(run.train, "__len__") else "?",
        "rollout batch": f"{episodes} episodes ({prompts}), {config.steps_per_generation} "
        f"micro-batches of {config.per_device_train_batch_size} on each process",
        "optimizer steps": f"{each} per rollout batch ({config.num_mini_batches} mini-batches of "
        f"{episodes // config.num_mini_batches}, {config.num_iterations} epochs)",
        "episode at most": f"{config.max_turns or 'any number of'} turns, "
        f"{config.max_completion_length} tokens",
        "in all": f"{steps} optimizer steps, {math.ceil(steps / each)} rollout batches"
        if steps > 0
        else "not known: max_steps and the number of rows are not set",
    }
