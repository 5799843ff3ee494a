"""What `trl-stppo train --dry_run` does: check a run and show it, without weights and without network.

Everything that a trainer's constructor decides before it loads a model is decided here by the same
functions, so what it refuses is refused with the same words. Problems are collected, not the first
alone.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import get_peft_config, get_quantization_config

from ..envs.check import check_env
from ..errors import CheckpointError, EnvironmentContractError
from ..hub.loading import load_tokenizer
from ..trainer import build, checkpoint_files, engine_checks, plan, turn_rewards
from ..trainer.evaluation_settings import check_best_metric, plan_evaluation
from ..trainer.memory import longest_prompt
from .agent_models import TokenCounter, check_value_model, local_config
from .agents import (
    load_environment,
    load_eval_environment,
    load_splits,
    own_datasets,
    parse_flags,
)
from .arguments import TrainArguments
from .early import peeked
from .launches import Launch, launched_as, launcher
from .names import check_name, looks_like_path
from .objects import load_object
from .plan_packages import missing_packages
from .plan_rows import Plan, described
from .reporting import plan_table

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

    def check(self, call: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        """The call's result; what it raises is a problem."""
        try:
            return call(*args)
        except Exception as error:
            text = str(error) or type(error).__name__
            self.problems += [text] if text not in self.problems else []
            return default

    @contextmanager
    def warnings_of(self, logger: logging.Logger) -> Iterator[None]:
        """Note what the run would warn of, in place of the log."""

        def note(record: logging.LogRecord) -> bool:
            self.notes.append(record.getMessage())
            return False

        logger.addFilter(note)
        try:
            yield
        finally:
            logger.removeFilter(note)


def dry_run(words: Sequence[str], launch_words: Sequence[str] = ()) -> int:
    """Print the plan of a run; 0 where everything would start, 1 where something would not.

    Args:
        words: flags of the training.
        launch_words: flags for accelerate's launcher.
    """
    found = Findings()
    launch = found.check(launcher, words, launch_words)
    if launch is not None:
        with launched_as(launch):
            run = found.check(parsed, words, launch, found)
            if run is not None:
                look(run, found)
    if os.environ.get("RANK", "0") == "0":
        plan_table(found.rows, found.notes, found.problems)
    return 1 if found.problems else 0


def parsed(words: Sequence[str], launch: Launch, found: Findings) -> Plan:
    """Flags as the run would read them, on a machine that may lack the accelerator."""
    words = list(words)
    if not torch.cuda.is_available() and peeked(words, "use_cpu", None) is None:
        found.notes.append("no GPU here: checked as if on a machine that has one")
        words += ["--use_cpu", "true"]
    return Plan(*parse_flags(TrainArguments, words), launch)


def look(run: Plan, found: Findings) -> None:
    """Build all but the weights, and note what there is."""
    model_args = run.model_args
    tokenizer = local_tokenizer(model_args.model_name_or_path, model_args.model_revision)
    counter: Any = TokenCounter(model_args.model_name_or_path or "", model_args.model_revision)
    if tokenizer is None:
        counter = count_words  # an environment is only built, nothing is played
        found.notes.append(f"the tokenizer of {model_args.model_name_or_path} is not here")
    for problem, elsewhere in missing_packages(run):
        (found.notes if elsewhere else found.problems).append(problem)
    found.check(check_output, Path(run.config.output_dir))
    with found.warnings_of(checkpoint_files.logger):
        found.check(check_resume, run.config)
    held_out = find_data(run, found)
    rewards = found.check(check_rewards, run, default=[])
    check_models(run, rewards, found)
    rollout = check_task(run, held_out, rewards, counter, found)
    run.prompt = longest_prompt(run.train, tokenizer)
    found.rows += found.check(described, run, rollout, default=[])


# ----------------------------------------------------------------------------- task


def check_task(run: Plan, held_out: Any, rewards: Any, counter: Any, found: Findings) -> Any:
    """Check environments, data and evaluation; who plays the episodes, None if that cannot be told."""
    args, config = run.args, run.config
    factory = found.check(load_environment, args, counter, default=FAILED)
    if factory is FAILED:
        return None
    rollout = found.check(plan.plan_rollout, config, factory, None, None)
    if rollout is None:
        return None
    eval_factory = found.check(load_eval_environment, args, counter)
    found.check(plan_evaluation, config, eval_factory, rollout)
    if not rollout.pays_turns and not rewards:
        found.problems.append(
            "Nothing pays a reward: `environment=none` without `reward_funcs`. Name one as module:name."
        )
    if run.train is not None:
        check_episodes(factory, run.train, found)
        with found.warnings_of(plan.logger):
            found.check(plan.check_dataset, run.train, config, rollout)
            found.check(plan.check_eval_dataset, held_out, rollout)
        found.check(check_best_metric, config, held_out)
    return rollout


def check_episodes(factory: Any, rows: Any, found: Findings) -> None:
    """Play two rows as `env check` does, which says most clearly what an environment does wrong."""
    if factory is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_env(factory, list(islice(rows, 2)))
        except EnvironmentContractError as error:
            # Who is not reached from here may be from where the run will be.
            elsewhere = isinstance(error.__cause__, OSError)
            (found.notes if elsewhere else found.problems).append(str(error))


def check_rewards(run: Plan) -> list[Any]:
    """The reward functions; refuse weights of others."""
    functions = [load_object(path) for path in run.args.reward_funcs or []]
    plan.check_reward_weights(run.config, len(functions))
    # No flag names functions that score turns.
    turn_rewards.check_lengths(0, turn_reward_weights=run.config.turn_reward_weights)
    return functions


def find_data(run: Plan, found: Findings) -> Any:
    """Rows that are on this machine, for training (kept in the plan) and held out (returned)."""
    args, config = run.args, run.config
    try:
        run.train, held_out = load_splits(args)
    except Exception as error:
        name = str(args.dataset_name)
        here = name in ("None", *own_datasets(args)) or Path(name).exists()
        if here or looks_like_path(name):
            found.problems.append(str(error))
            return None
        found.notes.append(f"data could not be loaded, and is not checked: {error}")
        return None
    strategy = str(getattr(config.eval_strategy, "value", config.eval_strategy))
    for name, value, off in (
        ("eval_episodes", args.eval_episodes, 0),
        ("eval_strategy", strategy, "no"),
    ):
        if value != off and held_out is None:
            found.problems.append(
                f"`{name}={value}`, but {args.dataset_name} has no split {args.dataset_test_split!r}. Set "
                f"dataset_test_split, or {name} to {off}."
            )
    if not hasattr(run.train, "__len__") and config.max_steps <= 0:
        found.problems.append(
            f"`dataset_streaming={args.dataset_streaming}` leaves the length of the training open. Set "
            f"max_steps or total_episodes."
        )
    return held_out


def local_tokenizer(name: str | None, revision: str | None) -> Any:
    """The tokenizer where it is on this machine, else None."""
    try:
        return load_tokenizer(name or "", revision, local_files_only=True)
    except Exception:
        return None


def count_words(text: str) -> int:
    """In place of a tokenizer that is not here."""
    return len(text.split())


# --------------------------------------------------------------------------- folders


def check_output(folder: Path) -> None:
    """Refuse an output directory that cannot be made or written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"`output_dir={folder}`: {there} is a file. Name a folder.")
    if not os.access(there, os.W_OK):
        raise ValueError(
            f"`output_dir={folder}`: {there} cannot be written to. Name another folder."
        )


def check_resume(config: Any) -> None:
    """Refuse a checkpoint that is not there, or not whole."""
    run_dir = Path(config.output_dir)
    try:
        if checkpoint_files.to_resume(run_dir, config.resume_from_checkpoint) is None:
            checkpoint_files.warn_of_earlier_run(run_dir)
    except CheckpointError:
        if not checkpoint_files.unpublished(run_dir):  # `train` puts those in place first
            raise


# ---------------------------------------------------------------------------- models


def check_models(run: Plan, rewards: Any, found: Findings) -> None:
    """Check names, adapters, critic, reference, and that the engine takes them."""
    args, config, model_args = run.args, run.config, run.model_args
    name, value_model = model_args.model_name_or_path, config.value_model_name_or_path
    if name is None:
        found.problems.append(
            "`model_name_or_path` is missing. Name a checkpoint, or a model of the Hub."
        )
    for flag, path in (("model_name_or_path", name), ("value_model_name_or_path", value_model)):
        found.check(check_name, flag, path)
    peft = found.check(get_peft_config, model_args)
    quantised = found.check(get_quantization_config, model_args)
    if quantised is not None and peft is None:
        found.problems.append(
            "A model in 4 or 8 bits cannot be trained itself. Set `use_peft: true`, or load it whole."
        )
    found.check(check_targets, name, model_args.model_revision, peft)
    found.check(check_value_model, args, config, model_args, run.trainer_class)
    shared = peft is not None and args.value_model_lora_r is None
    found.check(lambda: build.check_critic_rank(config, shared=shared))
    reference = found.check(build.plan_reference, config, name or "", None, peft)
    reference = build.ReferencePlan() if reference is None else reference
    found.check(check_engine, run, quantised, reference, rewards)


def check_targets(name: str | None, revision: str | None, peft: Any) -> None:
    """Refuse adapters on layers that the model, where its shape is here, does not have."""
    config = None if peft is None else local_config(name, revision)
    if config is None:
        return
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # shapes alone
        get_peft_model(
            AutoModelForCausalLM.from_config(config, trust_remote_code=False), copy.deepcopy(peft)
        )


def check_engine(run: Plan, quantised: Any, reference: Any, rewards: Any) -> None:
    """The constructor's checks of DeepSpeed and FSDP, on as much of a trainer as they look at."""
    model = SimpleNamespace(quantization_method=None if quantised is None else "bitsandbytes")
    if run.model_args.use_peft:
        model.peft_config = {}
    config: Any = run.config
    trainer: Any = SimpleNamespace(
        args=config,
        model=model,
        accelerator=run.launch.accelerator(),
        is_deepspeed_enabled=run.launch.engine.startswith("ZeRO"),
        has_critic=run.trainer_class.has_critic,
        optimizer=None,
        optimizer_cls_and_kwargs=None,
        reward_funcs=rewards,
        use_vllm=config.use_vllm,
        use_transformers_continuous_batching=config.use_transformers_continuous_batching,
    )
    given = None if run.args.value_model_lora_r is None else object()
    engine_checks.check(trainer, given, reference, None)
