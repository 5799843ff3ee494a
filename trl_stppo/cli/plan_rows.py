"""What a dry run shows of a planned run: its batches, its length, its memory, what it would load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..hub.description import Description
from ..models.memory import GIB
from ..redaction import redacted
from ..trainer.publishing.describe import description_of
from .names import looks_like_path
from .planned import Plan, known_size, loaded_options, memory_rows


def described(run: Plan, rollout: Any) -> list[tuple[str, str, str]]:
    """The rows of the table: section, name, value.

    Args:
        run: what is planned.
        rollout: who plays its episodes; None where that could not be decided.
    """
    parts = {
        "run": _run_rows(run, rollout),
        "one rollout": _batch_rows(run),
        "in all": _total_rows(run),
        "memory": memory_rows(run.setup, run.launch.engine),
        "to load": _download_rows(run),
    }
    return [(section, *row) for section, rows in parts.items() for row in rows]


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
    planned, stabilizers = planned_run(run, rollout), ", ".join(config.stabilizers)
    ratio = f"{config.importance_sampling_level} ratio"
    yield "variant", f"{config.variant}: {', '.join(filter(None, (ratio, stabilizers)))}"
    yield "policy", f"{planned.model}, {planned.training}"
    source = f", from {config.value_model_name_or_path or 'the policy'}"
    shared = ": an adapter on the policy's backbone"
    yield "critic", planned.critic + {"none": "", "shared": shared}.get(planned.critic, source)
    engine = "" if launch.engine == "none" else f", {launch.engine}"
    yield "processes", f"{launch.processes}{engine}"
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
    length = sampled = config.max_completion_length
    if config.max_turns and config.max_turn_tokens:
        sampled = min(length, config.max_turns * config.max_turn_tokens)
    turns = f"{config.max_turns} turns" if config.max_turns else "any number of turns"
    yield "episode at most", f"{turns}, {length} tokens, {sampled} of them sampled"
    prompts = "" if run.prompt else " and the prompts"
    yield "tokens at most", f"{episodes * (length + run.prompt):,}{prompts}"


def _total_rows(run: Plan) -> Iterator[tuple[str, str]]:
    config = run.config
    each = config.num_mini_batches * config.num_iterations
    steps = config.max_steps
    if steps <= 0 and hasattr(run.train, "__len__"):
        prompts = config.generation_batch_size // config.num_generations
        rollouts = math.ceil(config.num_train_epochs * max(1, len(run.train) // prompts))
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
        known = known_size(name, model_args.model_revision)
        size = "size not known" if known is None else f"about {known / GIB:.1f} GiB"
        yield name, "in the cache" if is_cached(name) else f"from the Hub, {size} in 16 bits"
    data = run.args.rows_name
    if run.train is None:
        yield data, "not here"
    elif hasattr(run.train, "__len__"):
        yield data, f"here, {len(run.train):,} rows"
    else:
        yield data, "here, as a stream"


def is_cached(name: str) -> bool:
    """Whether weights of a Hub model are in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "model.safetensors.index.json")
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
    except ValueError:  # no name that the Hub could have
        return False


def plan_table(rows: list[tuple[str, str, str]], notes: list[str], problems: list[str]) -> None:
    """What a run would be: section, name and value; what is not known; what would stop it."""
    console = Console(highlight=False)
    table = Table(title="What would run", show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")  # a name without spaces is no less worth reading
    before = None
    for section, name, value in rows:
        if before not in (None, section):
            table.add_section()
        table.add_row(
            section if section != before else "", escape(redacted(name)), escape(redacted(value))
        )
        before = section
    if rows:
        console.print(table)
    for note in notes:
        console.print(redacted(f"note: {note}"), markup=False, soft_wrap=True)
    for problem in problems:
        console.print(redacted(f"PROBLEM: {problem}"), markup=False, soft_wrap=True)
    console.print(
        f"{len(problems)} problem{'' if len(problems) == 1 else 's'}: this would not start."
        if problems
        else "OK. Weights and network were not checked."
    )
