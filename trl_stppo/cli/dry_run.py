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
from timeit import timeit
from typing import Any, cast
from unittest.mock import patch

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, PreTrainedModel, ProcessorMixin, TrainingArguments
from trl import ModelConfig

from ..envs.base import Row, is_text_environment
from ..envs.check import DEFAULT_ACTIONS, HandPlayer, check_env
from ..errors import EnvironmentContractError
from ..generation.slots import supports
from ..hub.loading import load_processor, model_class
from ..rollout.contexts import AgentRequest
from ..rollout.images import is_image
from ..trainer.planning import plan
from ..trainer.planning.data import rows_with_prompts, training_rows
from ..trainer.planning.rewards import check_reward_weights
from ..trainer.ppo_trainer import PPOTrainer
from ..trainer.precision import SAMPLE, WAYS_OUT, rounded_away
from ..trainer.setup.images import make_reader
from ..watch.runs import duration
from . import agents
from .env_check import play_agent, render
from .flags import TrainArguments
from .objects import offered_by
from .usage import UsageError

ENGINES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
JOINING = ("LOCAL_RANK", "WORLD_SIZE", "RANK", "MASTER_ADDR", *ENGINES)


@dataclass
class Plan:
    """A planned run: flags, number of processes, rows, policy without weights, what an image costs."""

    args: TrainArguments
    config: Any
    model_args: ModelConfig
    trainer_class: type[PPOTrainer]
    processes: int
    train: Any = None
    model: PreTrainedModel | None = None
    images: str | None = None


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
    """Print the plan of a run; return 0 if it would start, 1 if not. It is planned without a GPU, too."""
    found, processes = Findings(), int(os.environ.get("WORLD_SIZE", 1))
    engines = [name for name in ENGINES if os.environ.get(name) == "true"]
    if not torch.cuda.is_available():
        words = [*words, "--use_cpu", "true"]
    with alone(processes):
        plan_of_run = Plan(*agents.parse_flags(TrainArguments, words), processes)
        plan_of_run.model = shape_of(plan_of_run)
        look(plan_of_run, found)
        rows = resolved(plan_of_run)
        if plan_of_run.images is not None:
            rows["first image"] = plan_of_run.images
    # DeepSpeed takes steps with float32 copies of the weights; FSDP2 does in mixed precision.
    masters = bool(engines) and (plan_of_run.config.bf16 or engines == ["ACCELERATE_USE_DEEPSPEED"])
    if not masters and (facts := rounding(plan_of_run)) is not None:
        found.notes.append(f"for weights of the usual size, {facts}. {WAYS_OUT}")
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
    found.check(agents.load_eval_environment, args, counter)
    agent = found.check(agents.load_agent, args)
    rollout = found.check(plan.plan_rollout, config, factory, None, None, agent)
    if rollout is None:
        return
    if processor is not None:
        tokenizer = found.check(plan.fitted_tokenizer, processor, rollout)
        if agent is not None:
            found.check(_render, agent, run, tokenizer)
    if not rollout.brings_rewards and not rewards:
        found.problems.append("There is no reward: set `environment`, `agent` or `reward_funcs`.")
    if run.train is not None:
        found.check(training_rows, run.train, config, rollout)
    if factory is not None and run.train is not None:
        found.check(_play, factory, run, found)
    if isinstance(processor, ProcessorMixin):
        run.images = found.check(cost_of_images, run, factory, processor)


def cost_of_images(run: Plan, factory: Any, processor: Any) -> str | None:
    """Describe what the first image of a run costs; None if the first row and turn show none."""
    row: Row = next(iter(run.train or ()), {})
    (read,), _ = rows_with_prompts([row], processor.tokenizer, owns_prompts=True, sees=True)
    messages = read["prompt"] if isinstance(read["prompt"], list) else []
    contents = [message.get("content") for message in messages]
    if factory is not None:
        player = HandPlayer()
        env = player.make(factory)
        contents.append(player.reset(env, row))
        if is_text_environment(env):
            contents.append(player.play(env, DEFAULT_ACTIONS[0]).observation)
        player.close()
    blocks = [b for content in contents if isinstance(content, list) for b in content]
    picture = next((block["image"] for block in blocks if is_image(block)), None)
    if run.model is None or picture is None:
        return None
    reader = make_reader(run.model, processor)
    image = reader.read(picture)
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


def _render(agent: Any, run: Plan, tokenizer: Any) -> None:
    """Render the calls that an agent makes in two rows, as far as made-up answers lead it."""
    for row in islice(run.train or (), 2):
        requests: list[AgentRequest] = []
        with suppress(EnvironmentContractError):
            play_agent(agent, row, DEFAULT_ACTIONS, 20, requests.append)
        render(tokenizer, row, requests, **(run.config.chat_template_kwargs or {}))


def how_trained(run: Plan) -> str:
    """Describe the policy's training in words, such as `LoRA of rank 16 on 4-bit weights, bfloat16`."""
    model_args = run.model_args
    how = f"LoRA of rank {model_args.lora_r}" if model_args.use_peft else "fully trained"
    if model_args.load_in_4bit or model_args.load_in_8bit:
        how += f" on {4 if model_args.load_in_4bit else 8}-bit weights"
    dtype = agents.model_options(model_args, run.config.model_init_kwargs).get("dtype") or "float32"
    return f"{how}, {dtype}"


def shape_of(run: Plan) -> PreTrainedModel | None:
    """Return the policy without weights if its configuration is on this machine, else None."""
    name, revision = str(run.model_args.model_name_or_path), run.model_args.model_revision
    with suppress(Exception):
        config = AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
        with torch.device("meta"):
            return model_class(config).from_config(config)
    return None


def rounding(run: Plan) -> str | None:
    """Describe which weights steps do not move, judged by the size of a new model's weights."""
    named = agents.model_options(run.model_args, run.config.model_init_kwargs).get("dtype")
    own = getattr(run.model, "dtype", torch.float32)
    dtype = getattr(torch, str(named or "float32").removeprefix("torch."), own)
    size = getattr(getattr(run.model, "config", None), "initializer_range", 0.02)
    usual, lora = (size * torch.randn(SAMPLE)).to(dtype), run.model_args.use_peft
    critic = run.trainer_class.has_critic and (run.args.value_model_name_or_path or not lora)
    full = {"learning_rate": not lora, "critic_learning_rate": critic}
    return rounded_away(run.config, {field: [usual] for field in full if full[field]})


def passes(run: Plan) -> str:
    """Describe whether forward passes would be packed."""
    if run.config.torch_compile:
        return "padded: `torch_compile` is set"
    if run.model is None:
        return "not known before the model is here"
    reason = supports(run.model)
    return "packed" if reason is None else f"padded. {reason}"


def length_of(run: Plan, rollouts: float) -> str:
    """Describe how long one rollout batch and its updates take, and all together, without prompts.

    A forward pass takes two operations per weight and token. A backward pass takes twice as many, or as many
    if only adapters are trained. On a CPU, passes are about half as fast as the matrix product that is timed
    here.
    """
    config, critic = run.config, int(run.trainer_class.has_critic)
    if run.model is None:
        return "not known before the model is here"
    if config.device.type != "cpu":
        return "not known: on a GPU, the launch of kernels takes most of the sampling"
    each = (2 if run.model_args.use_peft else 3) + int(config.gradient_checkpointing)
    scored = (config.steps_per_rollout > 1) + bool(config.kl_coef or config.beta) + critic
    rounds = 1 + scored + config.num_iterations * each * (1 + critic)
    tokens = config.generation_batch_size * config.max_completion_length
    matrix = torch.ones(1024, 1024)
    matrix @ matrix
    rate = 4 * 2 * 1024**3 / timeit(lambda: matrix @ matrix, number=4)
    weights = sum(parameter.numel() for parameter in run.model.parameters())
    seconds = 2 * weights * tokens * rounds / (rate / 2) / run.processes
    total = f", {duration(seconds * rollouts)} in all" if rollouts > 0 else ""
    least = duration(seconds / (config.max_turns or 1))
    return (
        f"about {least} (one turn each) to {duration(seconds)} (all tokens) per rollout batch{total}, if no "
        "two episodes begin alike. Prompts and evaluations come on top"
    )


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
        "forward passes": passes(run),
        "images": run.images or "none in the first row",
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
        "time here": length_of(run, steps / each),
    }
