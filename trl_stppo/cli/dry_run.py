"""`train --dry_run`: check and show the settings of a run before a model loads."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, ProcessorMixin, TrainingArguments
from trl import ModelConfig

from ..envs.base import Row
from ..envs.check import HandPlayer, check_env
from ..errors import EnvironmentContractError
from ..hub.loading import load_processor, model_class
from ..rollout.images import images_of
from ..trainer.planning import plan
from ..trainer.planning.data import rows_with_prompts, training_rows
from ..trainer.planning.rewards import check_reward_weights
from ..trainer.ppo_trainer import PPOTrainer
from ..trainer.setup.images import make_reader
from . import agents
from .flags import TrainArguments
from .objects import offered_by
from .usage import UsageError

JOINING = (
    *("LOCAL_RANK", "WORLD_SIZE", "RANK", "MASTER_ADDR"),
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"),
)


@dataclass
class Plan:
    """A planned run: flags, number of processes, rows, and what the first image costs."""

    args: TrainArguments
    config: Any
    model_args: ModelConfig
    trainer_class: type[PPOTrainer]
    processes: int
    train: Any = None
    image: str | None = None


class Findings:
    """Problems that would stop the run, and notes on what could not be checked."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def check(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function and return its result; record an error as a problem and return None."""
        try:
            return call(*args)
        except Exception as error:
            self.problems.append(str(error) or type(error).__name__)


def run(words: Sequence[str]) -> int:
    """Print the plan of a run; return 0 if the run would start, else 1. This needs no GPU."""
    found, processes = Findings(), int(os.environ.get("WORLD_SIZE", 1))
    if not torch.cuda.is_available():
        words = [*words, "--use_cpu", "true"]
    with alone(processes):
        plan_of_run = Plan(*agents.parse_flags(TrainArguments, words), processes)
        look(plan_of_run, found)
        rows = resolved(plan_of_run) | ({"first image": plan_of_run.image} if plan_of_run.image else {})
    if os.environ.get("RANK", "0") != "0":
        return int(bool(found.problems))
    console, table = Console(highlight=False), Table(title="What would run", show_header=False)
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)
    for kind, texts in (("note", found.notes), ("PROBLEM", found.problems)):
        for text in dict.fromkeys(texts):
            console.print(f"{kind}: {text}", markup=False, soft_wrap=True)
    console.print("This would not start." if found.problems else "OK")
    return int(bool(found.problems))


@contextmanager
def alone(processes: int) -> Iterator[None]:
    """Context manager that sets the world size to `processes`, without joining a process group."""
    size = property(lambda self: processes)
    with patch.object(TrainingArguments, "world_size", size), patch.dict(os.environ):
        for name in JOINING:
            os.environ.pop(name, None)
        yield


def look(run: Plan, found: Findings) -> None:
    """Build all parts of a training except the weights, and collect the errors in `found`."""
    args, config, model_args = run.args, run.config, run.model_args
    critic, has_critic = args.value_model_name_or_path, run.trainer_class.has_critic
    found.check(agents.check_models, model_args, critic, has_critic)
    rewards = found.check(agents.load_rewards, args) or []
    found.check(check_reward_weights, config, len(rewards))
    held_out = None
    try:
        run.train, held_out = agents.load_splits(args)
    except Exception as error:
        # Rows of the Hub are not downloaded, so an error about them is only a note.
        wrong = isinstance(error, (UsageError, FileNotFoundError))
        offered = None if wrong else offered_by(args.environment, "datasets")
        here = all(name in (offered or {}) or Path(name).exists() for name in args.row_sources)
        (found.problems if wrong or here else found.notes).append(str(error))
    if run.train is not None:
        found.check(agents.check_splits, args, config, run.train, held_out)
    name, revision = str(model_args.model_name_or_path), model_args.model_revision
    # Without a tokenizer here count characters: a text rarely has more tokens than characters.
    counter, processor = cast(agents.Counter, len), None
    with suppress(Exception):
        processor = load_processor(name, revision, local_files_only=True)
        counter = agents.token_counter(name, revision)
    factory = found.check(agents.load_environment, args, counter)
    if factory is None and args.environment not in (None, "none"):
        return
    agent = found.check(agents.load_agent, args)
    rollout = found.check(plan.plan_rollout, config, factory, None, None, agent)
    if rollout is None:
        return
    if processor is not None:
        found.check(plan.fitted_tokenizer, processor, rollout)
    if not rollout.brings_rewards and not rewards:
        found.problems.append("There is no reward: set `environment`, `agent` or `reward_funcs`.")
    if run.train is not None:
        found.check(training_rows, run.train, config, rollout)
    if factory is not None and run.train is not None:
        found.check(_play, factory, run, found)
    if isinstance(processor, ProcessorMixin):
        run.image = found.check(cost_of_image, run, factory, processor)


def cost_of_image(run: Plan, factory: Any, processor: Any) -> str | None:
    """Describe the cost of the first image of a run; None if the first row and observation have no image."""
    row: Row = next(iter(run.train or ()), {})
    (read,), _ = rows_with_prompts([row], processor.tokenizer, owns_prompts=True, sees=True)
    player, messages = HandPlayer(), read["prompt"] if isinstance(read["prompt"], list) else []
    if factory is not None:
        messages = [*messages, {"content": player.reset(player.make(factory), row)}]
        player.close()
    images = images_of(messages)
    if not images:
        return None
    config = AutoConfig.from_pretrained(str(run.model_args.model_name_or_path), local_files_only=True)
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    reader = make_reader(model, processor)
    image = reader.read(images[0])
    size = sum(tensor.nbytes for tensor in reader.fields(image).values()) / 2**20
    return f"{image} are {size:.2g} MiB of tensors, and {len(image.png) / 2**20:.2g} MiB are kept"


def _play(factory: Callable[[], object], run: Plan, found: Findings) -> None:
    """Play two rows to check the environment. An unreachable server becomes a note, not a problem."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_env(factory, list(islice(run.train, 2)))
        except EnvironmentContractError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            found.notes.append(str(error))


def how_trained(run: Plan) -> str:
    """Describe the policy's training in words, such as `LoRA of rank 16 on 4-bit weights, bfloat16`."""
    model_args = run.model_args
    how = f"LoRA of rank {model_args.lora_r}" if model_args.use_peft else "fully trained"
    if model_args.load_in_4bit or model_args.load_in_8bit:
        how += f" on {4 if model_args.load_in_4bit else 8}-bit weights"
    dtype = agents.model_options(model_args, run.config.model_init_kwargs).get("dtype") or "float32"
    return f"{how}, {dtype}"


def resolved(run: Plan) -> dict[str, str]:
    """Return the resolved settings of a run as texts by name, for the table of `--dry_run`."""
    args, config = run.args, run.config
    episodes, group = config.generation_batch_size, config.num_generations
    each = config.steps_per_rollout
    steps = config.max_steps
    if steps <= 0 and hasattr(run.train, "__len__"):
        batches = max(1, len(run.train) // (episodes // group))
        steps = math.ceil(config.num_train_epochs * batches) * each
    critic = "none"
    if run.trainer_class.has_critic:
        separate = args.value_model_name_or_path or not run.model_args.use_peft
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
        "processes": str(run.processes),
        "environment": args.agent or f"{args.environment or 'none'} {args.environment_kwargs or ''}".strip(),
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
