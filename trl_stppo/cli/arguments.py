"""Flags of `train` and `evaluate` that are not in the trainer's or the model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trl import DatasetMixtureConfig, ScriptArguments

from ..trainer.options import option
from .usage import UsageError


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
    eval_environment: str | None = option(None, "module:factory of evaluation; default training's.")
    eval_environment_kwargs: str | None = option(None, "JSON object of arguments for that factory.")

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):
            self.reward_funcs = [self.reward_funcs]
        try:
            super().__post_init__()
            if not all(hasattr(part, "path") for part in self.datasets):
                raise TypeError(repr(self.datasets))
        except TypeError as error:
            raise UsageError(f"`datasets`: {error}. It is a list of `path: NAME`.") from error

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
    """Flags of `train`: the flags of the task, the critic's checkpoint, and `dry_run`."""

    value_model_name_or_path: str | None = option(
        None, "Checkpoint of a separate critic, instead of the shared one."
    )
    dry_run: bool = option(False, "Check everything but the weights, show the plan, and stop.")


@dataclass
class EvaluateArguments(AgentArguments):
    """Flags of `evaluate`. The help text in `cli.evaluate` explains each flag."""

    models: list[str] | None = None
    labels: list[str] | None = None
    output: str | None = None
    max_rows: int | None = None
    show: int = 0
    figures: list[str] | None = None
