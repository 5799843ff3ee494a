"""What `train_stppo.py --dry_run` does: check a run and show it, without weights and without network.

Everything that a trainer's constructor decides before it loads a model is decided here by the same
functions, so what it refuses is refused with the same words. Problems are collected, not the first
alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import ModelConfig, get_peft_config, get_quantization_config

from agent_models import TokenCounter, check_value_model, has_critic, load_tokenizer
from agents import (
    STDLIB_SEARCH,
    TrainArguments,
    load_environment,
    load_eval_environment,
    load_object,
    load_splits,
    parse_flags,
    peeked,
)
from launches import Launch, hidden_launcher, launcher, pretended_processes
from plan_rows import Plan, described
from reporting import plan_table
from trl_stppo.trainer import build, engine_checks, plan
from trl_stppo.trainer.evaluation_settings import check_best_metric, plan_evaluation
from trl_stppo.trainer.memory import SAMPLED_ROWS

FAILED: Any = object()


@dataclass
class Findings:
    """What there is to show.

    Attributes:
        rows: section, name, value.
        notes: what could not be looked at.
        problems: what would stop the run.
    """

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def check(self, call: Callable[[], Any], default: Any = None) -> Any:
        """The call's result; what it raises is a problem."""
        try:
            return call()
        except Exception as error:
            text = str(error) or type(error).__name__
            self.problems += [text] if text not in self.problems else []
            return default


def dry_run(words: Sequence[str]) -> int:
    """Print the plan of a run; 0 where everything would start, 1 where something would not."""
    found = Findings()
    surroundings = found.check(lambda: launcher(words))
    run = None
    if surroundings is not None:
        launch, processes = surroundings
        with pretended_processes(processes), hidden_launcher():
            run = found.check(lambda: parsed(words, launch.engine, processes, found))
            if run is not None:
                look(run, launch, found)
    if os.environ.get("RANK", "0") == "0":
        plan_table(found.rows, found.notes, found.problems)
    return 1 if found.problems else 0


# --------------------------------------------------------------------------- checks


def parsed(words: Sequence[str], engine: str, processes: int, found: Findings) -> Plan:
    """Flags as the run would read them, on a machine that may lack the accelerator."""
    words = list(words)
    if not torch.cuda.is_available() and peeked(words, "use_cpu", None) is None:
        found.notes.append("no GPU here: checked as if on a machine that has one")
        words += ["--use_cpu", "true"]
    args, config, model_args, _ = parse_flags(TrainArguments, words)
    return Plan(args, config, model_args, engine, processes)


def look(run: Plan, launch: Launch, found: Findings) -> None:
    """Build all but the weights, and note what there is."""
    args, config, model_args = run.args, run.config, run.model_args
    found.check(lambda: check_model_name(model_args.model_name_or_path))
    held_out = find_data(run, found)
    tokenizer = local_tokenizer(model_args)
    counter: Any = TokenCounter(model_args.model_name_or_path or "", model_args.model_revision)
    if tokenizer is None:
        counter = count_words  # an environment is only built, nothing is played
        found.notes.append(f"the tokenizer of {model_args.model_name_or_path} is not here")
    factory = found.check(lambda: load_environment(args, counter), FAILED)
    rollout = None
    if factory is not FAILED:
        rollout = found.check(lambda: plan.plan_rollout(config, factory, None, None))
    rewards = found.check(lambda: [load_object(path) for path in args.reward_funcs or []], [])
    peft = found.check(lambda: get_peft_config(model_args))
    quantised = found.check(lambda: get_quantization_config(model_args))
    found.check(lambda: check_adapters(quantised, peft))
    found.check(lambda: check_value_model(args, config, model_args))
    found.check(lambda: check_critic_rank(config, model_args))
    name = model_args.model_name_or_path or ""
    reference = found.check(lambda: build.plan_reference(config, name, None, peft))
    reference = build.ReferencePlan() if reference is None else reference
    found.check(lambda: check_engine(run, launch, quantised, reference, rewards))
    if rollout is not None:
        eval_factory = found.check(lambda: load_eval_environment(args, counter))
        found.check(lambda: plan_evaluation(config, eval_factory, rollout))
        if not rollout.pays_turns and not rewards:
            found.problems.append(
                "Nothing pays a reward: `environment=none` without `reward_funcs`. Name one as module:name."
            )
        if run.train is not None:
            found.check(lambda: plan.check_dataset(run.train, config, rollout))
            found.check(lambda: plan.check_eval_dataset(held_out, rollout))
            found.check(lambda: check_best_metric(config, held_out))
    run.prompt = longest_prompt(run.train, tokenizer)
    found.rows += found.check(lambda: described(run, rollout), [])


def check_model_name(name: str | None) -> None:
    """Refuse what is neither a folder here nor the form of a name on the Hub."""
    if name is None:
        raise ValueError(
            "`model_name_or_path` is missing. Name a checkpoint, or a model of the Hub."
        )
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).exists():
        raise ValueError(f"`model_name_or_path={name}` is no folder here. Check the path.")


def find_data(run: Plan, found: Findings) -> Any:
    """Rows that are on this machine, for training (kept in the plan) and held out (returned)."""
    try:
        run.train, held_out = load_splits(run.args)
    except (ValueError, FileNotFoundError, ConnectionError, OSError) as error:
        if Path(str(run.args.dataset_name)).exists() or run.args.dataset_name == STDLIB_SEARCH:
            found.problems.append(str(error))
            return None
        found.notes.append(f"data could not be loaded, and is not checked: {error}")
        return None
    if run.args.eval_episodes and held_out is None:
        found.problems.append(
            f"`eval_episodes={run.args.eval_episodes}`, but {run.args.dataset_name} has no split "
            f"{run.args.dataset_test_split!r}. Set dataset_test_split, or eval_episodes to 0."
        )
    return held_out


def local_tokenizer(model_args: ModelConfig) -> Any:
    """The tokenizer where it is on this machine, else None."""
    try:
        return load_tokenizer(
            model_args.model_name_or_path, model_args.model_revision, local_files_only=True
        )
    except Exception:
        return None


def count_words(text: str) -> int:
    """In place of a tokenizer that is not here."""
    return len(text.split())


def check_adapters(quantised: Any, peft: Any) -> None:
    """Refuse to train packed weights themselves."""
    if quantised is not None and peft is None:
        raise ValueError(
            "A model in 4 or 8 bits cannot be trained itself. Set `use_peft: true`, or load it whole."
        )


def check_critic_rank(config: Any, model_args: ModelConfig) -> None:
    """Refuse the rank of an adapter that will not be there."""
    rank = getattr(config, "critic_lora_r", None)
    if rank is not None and (not model_args.use_peft or config.value_model_name_or_path):
        raise ValueError(
            f"`critic_lora_r={rank}` is the rank of the shared critic's adapter, but the critic is "
            f"separate here. Leave it unset, or set use_peft without a value model."
        )


def check_engine(run: Plan, launch: Launch, quantised: Any, reference: Any, rewards: Any) -> None:
    """The constructor's checks of DeepSpeed and FSDP, on as much of a trainer as they look at."""
    model = SimpleNamespace(quantization_method=None if quantised is None else "bitsandbytes")
    if run.model_args.use_peft:
        model.peft_config = {}
    config: Any = run.config
    trainer: Any = SimpleNamespace(
        args=config,
        model=model,
        accelerator=launch.accelerator(run.processes),
        is_deepspeed_enabled=launch.engine.startswith("ZeRO"),
        has_critic=has_critic(config),
        optimizer=None,
        optimizer_cls_and_kwargs=None,
        reward_funcs=rewards,
        use_vllm=config.use_vllm,
        use_transformers_continuous_batching=config.use_transformers_continuous_batching,
    )
    given = None if run.args.value_model_lora_r is None else object()
    engine_checks.check(trainer, given, reference, None)


def longest_prompt(rows: Any, tokenizer: Any) -> int:
    """Tokens of the longest of a few prompts; 0 where rows or tokenizer are not here."""
    if rows is None or tokenizer is None:
        return 0
    try:
        few = rows.select(range(min(SAMPLED_ROWS, len(rows))))
        return max(plan_prompt_length(row, tokenizer) for row in few)
    except Exception:  # the task may be the environment's
        return 0


def plan_prompt_length(row: dict[str, Any], tokenizer: Any) -> int:
    """Tokens of one prompt, through the chat template where it has messages."""
    text = row["prompt"]
    if not isinstance(text, str):
        text = tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])
