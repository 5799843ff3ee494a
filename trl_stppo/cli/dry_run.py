"""What `trl-stppo train --dry_run` does: check a run and show it, without weights and without network.

Everything that a training decides before it loads a model is decided here by the same functions, so what
it refuses is refused with the same words. Problems are collected, not the first alone.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from trl import get_peft_config

from ..envs.check import check_env
from ..errors import CheckpointError, EnvironmentContractError
from ..hub.loading import load_tokenizer
from ..trainer.checkpoints import files
from ..trainer.evaluation.settings import check_best_metric, plan_evaluation
from ..trainer.loop import turn_rewards
from ..trainer.setup import models, plan
from ..trainer.setup.rewards import check_reward_weights
from ..trainer.sharding import checks
from ..trainer.watching.memory import longest_prompt
from .agent_models import TokenCounter, check_policy, check_value_model
from .agents import (
    check_splits,
    load_environment,
    load_eval_environment,
    load_rewards,
    load_splits,
    parse_flags,
    rows_are_here,
)
from .arguments import TrainArguments
from .early import peeked
from .launches import Launch, launched_as, launcher
from .names import UNPAID, looks_like_path
from .plan_rows import described, plan_table
from .planned import Plan, loaded_options, planned_setup
from .usage import UsageError

FAILED: Any = object()
# Attention -> modules of which one must be there.
ATTENTION = {
    "flash_attention_2": ("flash_attn", "kernels"),
    "flash_attention_3": ("flash_attn_interface", "kernels"),
}


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
    """Print the plan of a run; 0 where everything would start, 1 where something would not."""
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
    words, use_cpu = list(words), peeked(words, "use_cpu", None)
    if not torch.cuda.is_available() and use_cpu is None:
        found.notes.append("no GPU here: checked as if on a machine that has one")
        words += ["--use_cpu", "true"]
    run = Plan(*parse_flags(TrainArguments, words), launch)
    run.on_cpu = use_cpu is not None and run.config.use_cpu
    return run


def look(run: Plan, found: Findings) -> None:
    """Make all but the weights, by the functions that a training calls, and note what there is."""
    args, config, model_args = run.args, run.config, run.model_args
    tokenizer = local_tokenizer(model_args.model_name_or_path, model_args.model_revision)
    counter: Any = TokenCounter(model_args.model_name_or_path or "", model_args.model_revision)
    if tokenizer is None:
        counter = count_words  # an environment is only built, nothing is played
        found.notes.append(f"the tokenizer of {model_args.model_name_or_path} is not here")
    check_others(run, found)
    found.check(check_output, Path(config.output_dir))
    with found.warnings_of(files.logger):
        found.check(check_resume, config)
    held_out = find_data(run, found)
    rewards = found.check(check_rewards, run, default=[])
    check_models(run, rewards, found)
    factory = found.check(load_environment, args, counter, default=FAILED)
    rollout = None
    if factory is not FAILED:
        rollout = found.check(plan.plan_rollout, config, factory, None, None)
    if rollout is not None:
        eval_factory = found.check(load_eval_environment, args, counter)
        found.check(plan_evaluation, config, eval_factory, rollout)
        check_task(run, held_out, rewards, factory, rollout, found)
    run.prompt = longest_prompt(run.train, tokenizer)
    run.setup = found.check(planned_setup, run)
    found.rows += found.check(described, run, rollout, default=[])


def check_others(run: Plan, found: Findings) -> None:
    """Packages that the libraries look for late, once a model is loaded."""
    config = run.config
    for name in config.report_to:
        for callback in found.check(get_reporting_integration_callbacks, name, default=[]):
            found.check(callback)
    attention = str(loaded_options(run).get("attn_implementation"))
    kernels = ("kernels",) if "/" in attention else ()
    needed: list[tuple[str, bool, tuple[str, ...]]] = [
        (f"attn_implementation={attention}", True, ATTENTION.get(attention, kernels)),
        ("use_liger_kernel=True", config.use_liger_kernel, ("liger_kernel",)),
        ("use_vllm=True", config.use_vllm, ("vllm",)),
        ("distributed_type=DEEPSPEED", run.launch.engine.startswith("ZeRO"), ("deepspeed",)),
    ]
    for setting, wanted, modules in needed:
        if wanted and modules and not any(map(importlib.util.find_spec, modules)):
            # A launch that is read from a file may be meant for another machine.
            elsewhere = run.launch.pretended and modules == ("deepspeed",)
            (found.notes if elsewhere else found.problems).append(
                f"`{setting}` needs the package {' or '.join(modules)}, which is not installed here. "
                f"Install it, or change the setting."
            )


# ----------------------------------------------------------------------------- task


def check_task(
    run: Plan, held_out: Any, rewards: Any, factory: Any, rollout: Any, found: Findings
) -> None:
    """Check that something pays, and the rows against what plays their episodes."""
    if not rollout.pays and not rewards:
        found.problems.append(f"Nothing pays a reward: {UNPAID}")
    if run.train is None:
        return
    if factory is not None:
        check_episodes(factory, run.train, found)
    with found.warnings_of(plan.logger):
        found.check(plan.check_dataset, run.train, run.config, rollout)
        found.check(plan.check_eval_dataset, held_out, rollout)
    found.check(check_best_metric, run.config, held_out)


def check_episodes(factory: Any, rows: Any, found: Findings) -> None:
    """Play two rows as `env check` does, which says most clearly what an environment does wrong."""
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
    functions = load_rewards(run.args)
    check_reward_weights(run.config, len(functions))
    # No flag names functions that score turns.
    turn_rewards.check_lengths(0, turn_reward_weights=run.config.turn_reward_weights)
    return functions


def find_data(run: Plan, found: Findings) -> Any:
    """Rows that are on this machine, for training (kept in the plan) and held out (returned)."""
    args, config = run.args, run.config
    try:
        run.train, held_out = load_splits(args)
    except Exception as error:
        wrong = isinstance(error, UsageError) or any(map(looks_like_path, args.row_sources))
        if wrong or rows_are_here(args):
            found.problems.append(str(error))
            return None
        found.notes.append(f"data could not be loaded, and is not checked: {error}")
        return None
    found.check(check_splits, args, config, run.train, held_out)
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
        files.to_resume(run_dir, config.resume_from_checkpoint)
    except CheckpointError:
        if not files.unpublished(run_dir):  # `train` puts those in place first
            raise


# ---------------------------------------------------------------------------- models


def check_models(run: Plan, rewards: Sequence[Any], found: Findings) -> None:
    """Check names, adapters, critic, reference, and that the engine takes them."""
    args, config, model_args = run.args, run.config, run.model_args
    found.check(check_policy, model_args)
    found.check(check_value_model, args, config, model_args, run.trainer_class)
    peft = found.check(get_peft_config, model_args)
    given, lora = args.value_model_lora_r is not None, peft is not None
    found.check(lambda: models.check_critic_rank(config, shared=lora and not given))
    name = model_args.model_name_or_path or ""
    reference = found.check(models.plan_reference, config, name, None, peft)
    kind = checks.critic_kind(config, given=given, lora=lora)
    planned = checks.EngineRun(
        engine=run.launch.engine,
        plugin=run.launch.plugin,
        args=config,
        critic=kind if run.trainer_class.has_critic else None,
        lora=lora,
        quantised=model_args.load_in_4bit or model_args.load_in_8bit,
        copies_adapter=reference is not None and reference.adapter,
        rewards=rewards,
    )
    found.check(checks.check, planned)
