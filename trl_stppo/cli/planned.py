"""Resolved settings and predicted memory of a planned run, computed without weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from trl import ModelConfig, get_peft_config

from ..hub.loading import load_tokenizer
from ..models.critic import Critic, NoCritic, SeparateCritic, SharedCritic
from ..models.memory import FITS, GIB, Setup, estimate
from ..models.memory_of_runs import settings_of, shared_out
from ..models.shapes import critic_shape, policy_shape, read_setup
from ..trainer.planning.text_only import read_prompt
from .agent_models import local_config, model_options
from .agents import parse_flags
from .arguments import TrainArguments
from .flags import peeked
from .launch import Launch

CARDS = (16, 24, 40, 48, 80, 141)
SAMPLED_ROWS = 16  # of the data, to find the longest prompt


@dataclass
class Plan:
    """A planned run: parsed flags, launch, training rows, tokens of the longest prompt (0: not known)."""

    args: TrainArguments
    config: Any
    model_args: ModelConfig
    trainer_class: Any
    launch: Launch = field(default_factory=Launch)
    train: Any = None
    prompt: int = 0


def planned(words: Sequence[str], launch: Launch) -> Plan:
    """Parse the flags of a run on a GPU into a `Plan`. On a machine without one, `use_cpu` is set."""
    if not torch.cuda.is_available() and peeked(words, "use_cpu", None) is None:
        default = ["--bf16", "true"] if peeked(words, "bf16", None) is None else []
        words = [*words, "--use_cpu", "true", *default]
    return Plan(*parse_flags(TrainArguments, words), launch)


def local_tokenizer(run: Plan) -> Any:
    """Return the policy's tokenizer if it is on this machine, else None."""
    try:
        name, revision = str(run.model_args.model_name_or_path), run.model_args.model_revision
        return load_tokenizer(name, revision, local_files_only=True)
    except Exception:
        return None


def longest_prompt(run: Plan) -> int:
    """Return the token count of the longest prompt in the first rows; 0 without tokenizer or rows."""
    try:
        tokenizer = local_tokenizer(run)
        rows = run.train.select(range(min(SAMPLED_ROWS, len(run.train))))
        return max(_prompt_length(read_prompt(row["prompt"]), tokenizer) for row in rows)
    except Exception:
        return 0


def _prompt_length(prompt: Any, tokenizer: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def planned_setup(run: Plan, *, fetch: bool = False) -> Setup:
    """Return the input of the memory model. `fetch` downloads missing configurations, never weights."""
    config, model_args = run.config, run.model_args
    name, value_model = str(model_args.model_name_or_path), config.value_model_name_or_path
    shapes = {name: local_config(name, model_args.model_revision, fetch=fetch)}
    if value_model is not None:
        shapes[value_model] = local_config(value_model, fetch=fetch)
    for missing in (name for name, shape in shapes.items() if shape is None):
        raise ValueError(f"The memory is not known: the shape of {missing} is not on this machine.")
    if model_args.load_in_8bit or (config.use_vllm and config.vllm_mode == "colocate"):
        raise ValueError("The memory is not known with load_in_8bit, or with vLLM on the same GPU.")
    dtype = str(model_options(model_args, config.model_init_kwargs).get("dtype"))
    dtype = dtype if dtype in ("bfloat16", "float16") else "float32"
    four_bit, peft_config = model_args.load_in_4bit, get_peft_config(model_args)
    policy = policy_shape(shapes[name], dtype, peft_config, four_bit=four_bit)
    critic = _planned_critic(run, policy, shapes[value_model or name], dtype)
    reference = policy if peft_config is None and (config.kl_coef or config.beta) else None
    setup = read_setup(policy, critic, reference, **settings_of(config, run.prompt))
    if four_bit and not model_args.use_bnb_nested_quant:
        weights = setup.geometry.four_bit_weights(setup.weight_bytes, double=False)
        setup = replace(setup, weights=weights)
    return shared_out(setup, run.launch.engine, run.launch.processes)


def _planned_critic(run: Plan, policy: Any, shape: Any, dtype: str) -> Critic:
    """Return the critic that the flags describe, without weights."""
    config = run.config
    if not run.trainer_class.has_critic:
        return NoCritic()
    if run.model_args.use_peft and config.value_model_name_or_path is None:
        return SharedCritic(policy)
    return SeparateCritic(critic_shape(shape, dtype))


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


def memory_line(setup: Setup) -> str:
    """Describe the peak memory, its phase, and the smallest common GPU with enough memory."""
    expected = estimate(setup)
    fitting = (f"{card} GB" for card in CARDS if expected.peak <= FITS * card * GIB)
    card = next(fitting, "none of the common ones")
    peak = f"peak: about {expected.peak / GIB:.1f} GiB, in the {expected.phase}"
    return f"{peak}; smallest common card: {card}"
