"""The flags of `train` and `evaluate`, which TRL's parser reads from words and a YAML file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..trainer.options import option
from .usage import Parser, UsageError


@dataclass
class AgentArguments(DatasetMixtureConfig, ScriptArguments):
    """Flags of an agent's task and its evaluation."""

    dataset_name: str | None = option(
        None,
        "A file or folder of rows (.jsonl, .json, .csv, .parquet), a Hub id, or a name that "
        "the environment knows; default the environment's own rows.",
    )
    environment: str | None = option(
        None,
        "module:factory of an environment, with tools or text; default (or 'none') plain prompts.",
    )
    environment_kwargs: str | None = option(None, "JSON object of arguments for the factory.")
    agent: str | None = option(
        None, "module:function of an agent, `(client, row)`, in place of an environment."
    )
    value_model_name_or_path: str | None = option(
        None, "Checkpoint of a separate critic, instead of the shared one."
    )
    reward_model_name_or_path: str | None = option(
        None, "A sequence-classification model as reward, in front of the reward functions."
    )
    reward_funcs: list[str] | None = option(
        None, "Reward functions: names that `trl grpo` knows, module:function or module.function."
    )
    eval_episodes: int = option(
        0,
        "Held-out rows to evaluate on, before and after; 0 for none. eval_generation_kwargs "
        "holds settings of their sampling.",
    )

    @property
    def row_sources(self) -> list[str]:
        """Return the sources of the rows: names of data sets, files, folders."""
        return [part.path for part in self.datasets] or [str(self.dataset_name)]

    @property
    def rows_name(self) -> str:
        """Return the short name of the data set for printed lines and tables."""
        return "+".join(Path(name).name for name in self.row_sources)


@dataclass
class TrainArguments(AgentArguments):
    """Flags of `train`: the flags of the task, and `dry_run`."""

    dry_run: bool = option(False, "Check everything but the weights, show the plan, and stop.")


@dataclass
class EvaluateArguments(AgentArguments):
    """Flags of `evaluate`: the flags of the task, the agents, and the results."""

    models: list[str] | None = option(
        None, "Agents: checkpoints, Hub ids, adapter folders; default model_name_or_path."
    )
    output: str | None = option(None, "JSON file to write, with figures and settings.")
    max_rows: int | None = option(None, "Most rows of each data set, drawn with a fixed seed; default all.")
    show: int = option(0, "Print each agent's first N episodes.")


@dataclass
class EarlyArguments:
    """Flags that decide how the others are read."""

    variant: str | None = "st-ppo"
    dry_run: bool = False


class FlagParser(Parser, TrlParser):
    """TRL's parser, without abbreviated flags."""


def early(words: Sequence[str]) -> EarlyArguments:
    """Read the flags that decide how the others are read."""
    return _parsed([EarlyArguments], words, return_remaining_strings=True)[0]


def flag_types(arguments: type, variant: str | None = "st-ppo") -> list[type]:
    """Return the dataclasses of all flags. The variant selects the trainer's configuration."""
    from ..trainer.stgrpo_config import GROUP_VARIANTS, STGRPOConfig
    from ..trainer.stppo_config import STPPOConfig

    return [arguments, STGRPOConfig if variant in GROUP_VARIANTS else STPPOConfig, ModelConfig]


def types_of(command: str) -> list[type]:
    """Return the dataclasses of a command's flags."""
    return flag_types(EvaluateArguments if command == "evaluate" else TrainArguments)


def read_flags(arguments: type, words: Sequence[str]) -> list[Any]:
    """Read flags and their YAML file into script arguments, trainer and model configuration."""
    return list(_parsed(flag_types(arguments, early(words).variant), words))


def given(words: Sequence[str], names: Iterable[str]) -> set[str]:
    """Return the `names` that words or YAML file set, even to their default."""
    parser = FlagParser(add_help=False, argument_default=argparse.SUPPRESS)
    for name in names:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="*")
    found = parser.parse_args_and_config(words, return_remaining_strings=True)
    return set(vars(found[0])) if len(found) > 1 else set()


def _parsed(types: Sequence[type], words: Sequence[str], **options: Any) -> tuple[Any, ...]:
    try:
        return FlagParser(types, add_help=False).parse_args_and_config(words, **options)
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise UsageError(str(error)) from error
