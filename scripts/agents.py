"""What the scripts share: flags of an agent's task, and what they stand for.

The trainer follows from `variant`, environments and reward functions are named as `module:name`, data
is the demo's, a folder, or a dataset of the Hub.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from early import peeked, quieten

quieten()

from datasets import Dataset, load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser

import trl_stppo
from trl_stppo.trainer.stgrpo_config import GROUP_VARIANTS
from trl_stppo.trainer.stppo_config import VARIANTS

STDLIB_SEARCH = "stdlib-search"


@dataclass
class AgentArguments(ScriptArguments):
    """What to train on, and how to look at it.

    Parameters:
        environment (`str`, *optional*): `module:factory` of an environment (tools or text).
        environment_kwargs (`str`, *optional*): JSON object of arguments for the factory.
        reward_funcs (`list[str]`, *optional*): `module:function` of reward functions.
        eval_episodes (`int`): held-out rows to evaluate on, before and after; 0 for none. How they
            are sampled is in STPPOConfig's `eval_temperature` and its like.
        eval_environment, eval_environment_kwargs (`str`, *optional*): likewise, of evaluation; where
            neither is set, those of training.
        live_lines (`bool`): one short line per logging step instead of TRL's dictionaries.
    """

    dataset_name: str | None = field(
        default=STDLIB_SEARCH, metadata={"help": "Or a Hub id, or a path."}
    )
    environment: str | None = field(
        default="trl_stppo.envs:StdlibSearchEnv",
        metadata={"help": "module:factory; 'none' for none."},
    )
    environment_kwargs: str | None = field(
        default=None, metadata={"help": "JSON object of arguments for the environment's factory."}
    )
    reward_funcs: list[str] | None = field(default=None, metadata={"help": "module:function ..."})
    eval_episodes: int = field(default=0, metadata={"help": "Held-out episodes before and after."})
    eval_environment: str | None = field(
        default=None, metadata={"help": "module:factory of evaluation; default environment."}
    )
    eval_environment_kwargs: str | None = field(
        default=None, metadata={"help": "JSON object of arguments for eval_environment."}
    )
    live_lines: bool = field(default=True, metadata={"help": "One short line per logging step."})


@dataclass
class TrainArguments(AgentArguments):
    """What to train on, and whether only to look.

    Parameters:
        value_model_lora_r (`int`, *optional*): train a separate critic through LoRA adapters of this
            rank, on `value_model_name_or_path` or else a copy of the policy's checkpoint. For a policy
            that is fully trained where a whole second model would not fit.
        dry_run (`bool`): check everything but the weights, show what would run, and stop.
        dry_run_processes (`int`, *optional*): as if on so many processes.
        dry_run_accelerate_config (`str`, *optional*): as if launched with this file of accelerate's.
    """

    value_model_lora_r: int | None = field(
        default=None,
        metadata={"help": "Rank of a separate critic's adapters; default fully trained."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Check and show; load no weights."})
    dry_run_processes: int | None = field(
        default=None, metadata={"help": "In a dry run: number of processes."}
    )
    dry_run_accelerate_config: str | None = field(
        default=None, metadata={"help": "In a dry run: file for accelerate launch."}
    )


# ------------------------------------------------------------------ flags and trainers


def trainer_of(variant: str | None) -> tuple[type, type]:
    """The trainer and the configuration that know a variant.

    Raises:
        ValueError: nobody knows it.
    """
    if variant is None or variant in VARIANTS:
        return trl_stppo.STPPOTrainer, trl_stppo.STPPOConfig
    if variant in GROUP_VARIANTS:
        return trl_stppo.STGRPOTrainer, trl_stppo.STGRPOConfig
    with_critic, without = (", ".join(map(repr, names)) for names in (VARIANTS, GROUP_VARIANTS))
    raise ValueError(
        f"`variant={variant!r}`: allowed are {with_critic}, and without a critic {without}."
    )


def parse_flags(
    arguments: type, words: Sequence[str] | None = None
) -> tuple[Any, Any, ModelConfig, type]:
    """Script arguments, the trainer's configuration, the model's, and the trainer's class.

    A YAML file may hold flags of train_stppo.py that another script does without; on the command line
    they are refused.
    """
    words = list(sys.argv[1:] if words is None else words)
    trainer, config = trainer_of(peeked(words, "variant", "st-ppo"))
    *parsed, from_file, unknown = TrlParser((arguments, config, ModelConfig)).parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    trainings = {f"--{spec.name}" for spec in fields(TrainArguments)}
    unknown += [flag for flag in from_file[::2] if flag not in trainings]
    if unknown:
        raise ValueError(
            f"{' '.join(unknown)}: not known here. Correct the name, or take it out; --help lists all flags."
        )
    args, training_args, model_args = parsed
    return args, training_args, model_args, trainer


# --------------------------------------------------------------- objects that flags name


def load_object(path: str) -> Any:
    """The object behind `module:name`."""
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"`{path}` does not name an object; write it as module:name.")
    return getattr(importlib.import_module(module), name)


def load_environment(
    args: AgentArguments, count_tokens: Callable[[str], int] | None = None
) -> Callable[[], Any] | None:
    """The environment factory that the flags name, with its arguments bound."""
    return factory_of(args.environment, args.environment_kwargs, count_tokens)


def load_eval_environment(
    args: AgentArguments, count_tokens: Callable[[str], int] | None = None
) -> Callable[[], Any] | None:
    """The one of evaluation; None for that of training."""
    path, arguments = args.eval_environment, args.eval_environment_kwargs
    if path is None and arguments is None:
        return None
    path = args.environment if path is None else path
    return factory_of(path, arguments, count_tokens, flag="eval_environment_kwargs")


def factory_of(
    path: str | None,
    arguments: str | None,
    count_tokens: Callable[[str], int] | None = None,
    *,
    flag: str = "environment_kwargs",
) -> Callable[[], Any] | None:
    """The factory `module:factory`, with arguments bound that are written as a JSON object.

    Args:
        path: of the factory; None or "none" for none.
        arguments: the JSON object.
        count_tokens: bound as well where the factory takes it and caps observations in tokens.
        flag: that the JSON object comes from.
    """
    if path in (None, "none"):
        return None
    factory = load_object(str(path))
    bound = {} if arguments is None else parsed_arguments(arguments, flag)
    defaults = parameters_of(factory)
    cap = bound.get("max_observation_tokens", defaults.get("max_observation_tokens"))
    if count_tokens is not None and cap is not None and "count_tokens" in defaults:
        bound.setdefault("count_tokens", count_tokens)
    return functools.partial(factory, **bound) if bound else factory


def parsed_arguments(arguments: str, flag: str) -> dict[str, Any]:
    """The arguments of a factory, from JSON."""
    try:
        read = json.loads(arguments)
    except json.JSONDecodeError as error:
        read = error
    if not isinstance(read, dict):
        raise ValueError(
            f"`{flag}={arguments}` is no JSON object ({read}); write it as in "
            f"'{{\"top_k\": 3}}', with double quotes inside."
        )
    return read


def parameters_of(factory: Any) -> dict[str, Any]:
    """Names and defaults of what can be given by name; none where nobody can tell."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: None if p.default is p.empty else p.default for p in named}


# ----------------------------------------------------------------------------- data


def load_splits(args: AgentArguments) -> tuple[Any, Any]:
    """Training rows, and held-out rows where the dataset has them; streams with `dataset_streaming`."""
    if args.dataset_name == STDLIB_SEARCH:
        from trl_stppo.envs.stdlib_docs import stdlib_search_dataset

        return stdlib_search_dataset("train"), stdlib_search_dataset("test")
    loaded = loaded_dataset(args)
    if not isinstance(loaded, dict):
        return loaded, None
    if args.dataset_train_split not in loaded:
        raise ValueError(
            f"`dataset_train_split={args.dataset_train_split!r}`: {args.dataset_name} has "
            f"{', '.join(map(repr, loaded))}. Name one of them."
        )
    return loaded[args.dataset_train_split], loaded.get(args.dataset_test_split)


def drawn(rows: Any, number: int) -> Any:
    """A few rows, drawn with a fixed seed; of a stream out of its first, and kept."""
    few = rows.shuffle(seed=0).take(number)
    return few if hasattr(few, "__len__") else Dataset.from_list(list(few))


def loaded_dataset(args: AgentArguments) -> Any:
    """What `load_dataset` finds; a folder that is not there is no dataset of the Hub's."""
    name = str(args.dataset_name)
    try:
        return load_dataset(name, args.dataset_config, streaming=args.dataset_streaming)
    except Exception as error:
        if Path(name).exists():
            raise
        raise FileNotFoundError(
            f"`dataset_name={name}` is no folder here, and the Hub did not give a dataset of that name "
            f"({type(error).__name__}). scripts/prepare_data.py writes data/search and data/medical; "
            f"otherwise check the name and the network."
        ) from error
