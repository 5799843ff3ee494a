"""What commands share: flags of an agent's task, and what they stand for.

The trainer follows from `variant`, environments and reward functions are named as `module:name`, data
is the environment's, a file of rows, a folder of such, a dataset of the Hub, or a mixture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from trl import ModelConfig, get_dataset

from ..trainer.stgrpo_config import STGRPOConfig
from .arguments import AgentArguments
from .flag_types import flag_types
from .flags import read_flags
from .names import ROWS, check_name, no_rows
from .objects import factory_of, load_reward, offered_by
from .usage import UsageError

logger = logging.getLogger(__name__)

FIND_DATA = (
    "Check the path; scripts/search/prepare_data.py writes data/search and data/medical, "
    "scripts/make_textworld.py data/textworld"
)


# ------------------------------------------------------------------ flags and trainers


def trainer_of(config: type) -> type:
    """The trainer that a configuration is for."""
    from ..trainer.stgrpo_trainer import STGRPOTrainer
    from ..trainer.stppo_trainer import STPPOTrainer

    return STGRPOTrainer if config is STGRPOConfig else STPPOTrainer


def parse_flags(arguments: type, words: Sequence[str]) -> tuple[Any, Any, ModelConfig, type]:
    """Script arguments, the trainer's configuration, the model's, and the trainer's class."""
    types = flag_types(arguments, words)
    args, training_args, model_args = read_flags(types, words)
    return args, training_args, model_args, trainer_of(types[1])


# --------------------------------------------------------------- objects that flags name


def load_environment(
    args: AgentArguments, count_tokens: Callable[[str], int] | None = None
) -> Callable[[], Any] | None:
    """The environment factory that the flags name, with its arguments bound."""
    return factory_of(args.environment, args.environment_kwargs, count_tokens)


def played_environment(
    args: AgentArguments, count_tokens: Callable[[str], int] | None = None
) -> Callable[[], Any]:
    """The same, where nothing else can be played."""
    factory = load_environment(args, count_tokens)
    if factory is None:
        raise UsageError(
            "`--environment` is missing, so there is nothing to play. Name one as module:factory, or the "
            "--config of a run that has one."
        )
    return factory


def load_eval_environment(
    args: AgentArguments, count_tokens: Callable[[str], int] | None = None
) -> Callable[[], Any] | None:
    """The one of evaluation; None for that of training."""
    path, arguments = args.eval_environment, args.eval_environment_kwargs
    if path is None and arguments is None:
        return None
    path = args.environment if path is None else path
    return factory_of(path, arguments, count_tokens, flag="eval_environment_kwargs")


def load_rewards(args: AgentArguments) -> list[Any]:
    """The reward model's name, if there is one, and the reward functions; TRL weighs them in this order."""
    check_name("reward_model_name_or_path", args.reward_model_name_or_path)
    models = [args.reward_model_name_or_path] if args.reward_model_name_or_path else []
    return [*models, *(load_reward(path, "reward_funcs") for path in args.reward_funcs or [])]


# ----------------------------------------------------------------------------- data


def rows_are_here(args: AgentArguments) -> bool:
    """Whether nothing has to be fetched for them, as far as can be told."""
    own = offered_by(args.environment, "datasets") or {}
    return all(name in own or Path(name).exists() for name in args.row_sources)


def load_splits(args: AgentArguments) -> tuple[Any, Any]:
    """Training rows, and held-out rows where the data has them; streams where flags ask for one."""
    own = offered_by(args.environment, "datasets") or {}
    if args.dataset_name is None and not args.datasets:
        args.dataset_name = next(iter(own), None)
    if args.datasets:
        loaded = mixed(args)
    elif args.dataset_name is None:
        raise no_rows(args.environment)
    elif args.dataset_name in own:
        return own[args.dataset_name]("train"), own[args.dataset_name]("test")
    else:
        loaded = loaded_dataset(args)
    if args.dataset_train_split not in loaded:
        raise UsageError(
            f"`dataset_train_split={args.dataset_train_split!r}`: {args.rows_name} has "
            f"{', '.join(map(repr, loaded))}. Name one of them."
        )
    return loaded[args.dataset_train_split], loaded.get(args.dataset_test_split)


def check_splits(args: AgentArguments, config: Any, train: Any, held_out: Any) -> None:
    """Refuse rows with which a training could not be evaluated, or would not end."""
    strategy = str(getattr(config.eval_strategy, "value", config.eval_strategy))
    for name, value, off in (
        ("eval_episodes", args.eval_episodes, 0),
        ("eval_strategy", strategy, "no"),
    ):
        if value != off and held_out is None:
            raise UsageError(
                f"`{name}={value}`, but {args.rows_name} has no split {args.dataset_test_split!r}. Set "
                f"dataset_test_split, or {name} to {off}."
            )
    if not hasattr(train, "__len__") and config.max_steps <= 0:
        name = "streaming" if args.datasets else "dataset_streaming"
        raise UsageError(
            f"`{name}=True` leaves the length of the training open. Set max_steps or total_episodes."
        )


def drawn(rows: Any, number: int) -> Any:
    """So many rows, drawn with a fixed seed, of a stream out of its first; all as they are if no more."""
    if hasattr(rows, "__len__") and len(rows) <= number:
        return rows
    few = rows.shuffle(seed=0).take(number)
    return few if hasattr(few, "__len__") else Dataset.from_list(list(few))


def mixed(args: AgentArguments) -> Any:
    """The mixture that `datasets` describes, as TRL makes it."""
    if args.dataset_name is not None:
        logger.warning("`dataset_name=%s` is ignored: there are `datasets`.", args.dataset_name)
        args.dataset_name = None  # and named nowhere
    for name in args.row_sources:
        check_name("datasets", name)
    if args.streaming and args.test_split_size is not None:
        raise UsageError(
            f"`test_split_size={args.test_split_size}` cannot be cut off a stream. Set streaming to false."
        )
    return get_dataset(args)


def loaded_dataset(args: AgentArguments) -> Any:
    """What `load_dataset` finds: in a file, in a folder, or on the Hub."""
    name, streaming = str(args.dataset_name), args.dataset_streaming
    check_name("dataset_name", name, FIND_DATA if name.startswith("data/") else "Check the path")
    path = Path(name)
    if path.is_file():
        if path.suffix not in ROWS:
            raise UsageError(
                f"`dataset_name={name}`: a file of rows must end in {', '.join(ROWS)}. Write it as one of "
                f"these, or name a folder of such files, or a data set of the Hub."
            )
        return load_dataset(ROWS[path.suffix], data_files={"train": name}, streaming=streaming)
    try:
        return load_dataset(name, args.dataset_config, streaming=streaming)
    except Exception as error:
        if path.exists():
            raise
        raise FileNotFoundError(
            f"`dataset_name={name}` is no file or folder here, and the Hub did not give a dataset of that "
            f"name ({type(error).__name__}). {FIND_DATA}; otherwise check the name and the network."
        ) from error
