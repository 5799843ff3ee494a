"""Flags of the commands that the configurations of trainer and model do not have; quick to import."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args, get_type_hints

from trl import DatasetMixtureConfig, ScriptArguments

from ..trainer.config.names import option
from .usage import UsageError


@dataclass
class AgentArguments(DatasetMixtureConfig, ScriptArguments):
    """An agent's task, and how to look at it."""

    dataset_name: str | None = option(
        None,
        "A file or folder of rows (.jsonl, .json, .csv, .parquet), a Hub id, or a name that "
        "the environment knows; default the environment's own rows.",
    )
    environment: str | None = option(
        None,
        "module:factory of an environment, with tools or text; default (or 'none') plain prompts.",
    )
    environment_kwargs: str | None = option(
        None, "JSON object of arguments for the environment's factory."
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
        "says how they are sampled.",
    )
    eval_environment: str | None = option(
        None, "module:factory of evaluation; default environment."
    )
    eval_environment_kwargs: str | None = option(
        None, "JSON object of arguments for eval_environment."
    )

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):  # of a file
            self.reward_funcs = [self.reward_funcs]
        (kind,) = get_args(get_type_hints(DatasetMixtureConfig)["datasets"])
        try:
            super().__post_init__()
            if not all(isinstance(part, kind) for part in self.datasets):
                raise TypeError(repr(self.datasets))
        except TypeError as error:
            known = ", ".join(spec.name for spec in fields(kind))
            raise UsageError(
                f"`datasets`: {error}. It is a list of data sets. Each has {known}; only path is needed."
            ) from error

    @property
    def row_sources(self) -> list[str]:
        """Names of what the rows are from: data sets, files, folders."""
        return [part.path for part in self.datasets] or [str(self.dataset_name)]

    @property
    def rows_name(self) -> str:
        """What lines and tables call the rows."""
        return "+".join(Path(name).name for name in self.row_sources)


@dataclass
class TrainArguments(AgentArguments):
    """What to train on, and whether only to look."""

    dry_run: bool = option(
        False, "Check everything but the weights, show what would run, and stop."
    )


@dataclass
class EvaluateArguments(AgentArguments):
    """What to evaluate, and where to write it."""

    models: list[str] | None = option(
        None, "Agents: checkpoints, Hub ids, adapter folders; default model_name_or_path alone."
    )
    labels: list[str] | None = option(None, "Names in the tables; default their folders' names.")
    output: str | None = option(None, "JSON file to write, with figures and settings.")
    max_rows: int | None = option(None, "Most rows of each data set, drawn with a fixed seed.")
    figures: list[str] | None = option(
        None,
        "Reward functions to report without counting them in the score; 'none' for none; default the "
        "environment's.",
    )
    candidates: int = option(1, "Candidate turns to sample in each state; the best is played.")
    verifier: str | None = option(
        None,
        "Who picks the best: 'critic' for the one saved with the agent, a function as module:name, or a "
        "causal language model by name, which is asked whether the turn helps.",
    )


@dataclass
class EstimateArguments:
    """Short names of what decides over memory.

    `model`, `length` and `rows` stand for one flag of `train` each (`cli.estimate`).
    """

    model: str | None = option(None, "The model; short for --model_name_or_path.")
    length: int | None = option(None, "Tokens of an episode; short for --max_completion_length.")
    rows: int | None = option(
        None, "Episodes per micro-batch; short for --per_device_train_batch_size."
    )
    lora: bool = option(False, "Adapters on 16-bit weights; without lora and qlora all is trained.")
    qlora: bool = option(False, "Adapters on 4-bit weights.")
    card: str | None = option(
        None, "A GPU's memory in GB: says whether the run fits, and what would make it smaller."
    )


# Command -> the dataclass of its own flags.
ARGUMENTS: dict[str, type] = {
    "train": TrainArguments,
    "evaluate": EvaluateArguments,
    "estimate": EstimateArguments,
}
