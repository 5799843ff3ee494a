"""What commands share: flags of an agent's task, and what they stand for.

The trainer follows from `variant`, environments and reward functions are named as `module:name`, data
is the demo's, a file of rows, a folder of such, or a dataset of the Hub.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from trl import ModelConfig

from ..trainer.stgrpo_config import GROUP_VARIANTS, STGRPOConfig
from ..trainer.stppo_config import VARIANTS, STPPOConfig
from .arguments import ARGUMENTS, TRAINERS, AgentArguments, TrainArguments
from .early import peeked
from .flags import read_flags
from .names import ROWS, check_name
from .objects import default_environment, factory_of, offered_by
from .usage import UsageError

FIND_DATA = "Check the path; scripts/prepare_data.py writes data/search and data/medical"


# ------------------------------------------------------------------ flags and trainers


def config_of(variant: str | None) -> type:
    """The configuration that knows a variant.

    Raises:
        UsageError: nobody knows it.
    """
    if variant is None or variant in VARIANTS:
        return STPPOConfig
    if variant in GROUP_VARIANTS:
        return STGRPOConfig
    with_critic, without = (", ".join(map(repr, names)) for names in (VARIANTS, GROUP_VARIANTS))
    raise UsageError(
        f"`variant={variant!r}`: allowed are {with_critic}, and without a critic {without}."
    )


def trainer_of(config: type) -> type:
    """The trainer that a configuration is for."""
    from ..trainer.stgrpo_trainer import STGRPOTrainer
    from ..trainer.stppo_trainer import STPPOTrainer

    return STGRPOTrainer if config is STGRPOConfig else STPPOTrainer


def flag_types(arguments: type, words: Sequence[str]) -> tuple[type, type, type]:
    """The dataclasses whose fields are the flags of a training or an evaluation."""
    return arguments, config_of(peeked(words, "variant", "st-ppo")), ModelConfig


def types_of(command: str) -> list[type]:
    """The dataclasses of all flags of a command."""
    own = ARGUMENTS[command]
    if command not in TRAINERS:
        return [own]
    task = own if issubclass(own, AgentArguments) else TrainArguments
    return list(dict.fromkeys((own, *flag_types(task, []))))


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


def load_eval_environment(
    args: AgentArguments, count_tokens: Callable[[str], int] | None = None
) -> Callable[[], Any] | None:
    """The one of evaluation; None for that of training."""
    path, arguments = args.eval_environment, args.eval_environment_kwargs
    if path is None and arguments is None:
        return None
    path = args.environment if path is None else path
    return factory_of(path, arguments, count_tokens, flag="eval_environment_kwargs")


# ----------------------------------------------------------------------------- data


def own_datasets(args: AgentArguments) -> dict[str, Callable[[str], Any]]:
    """Names that stand for rows, of the default environment and of the one that is named."""
    paths = (default_environment(), args.environment)
    return {k: v for path in paths for k, v in (offered_by(path, "datasets") or {}).items()}


def load_splits(args: AgentArguments) -> tuple[Any, Any]:
    """Training rows, and held-out rows where the dataset has them; streams with `dataset_streaming`."""
    own = own_datasets(args)
    if args.dataset_name is None:
        args.dataset_name = next(iter(offered_by(args.environment, "datasets") or ()), None)
    if args.dataset_name is None:
        raise UsageError(
            f"`dataset_name` is not set, and environment={args.environment} has no rows of its own. "
            f"Name a file or a folder of rows, or a data set of the Hub."
        )
    if args.dataset_name in own:
        return own[args.dataset_name]("train"), own[args.dataset_name]("test")
    loaded = loaded_dataset(args)
    if not isinstance(loaded, dict):
        return loaded, None
    if args.dataset_train_split not in loaded:
        raise UsageError(
            f"`dataset_train_split={args.dataset_train_split!r}`: {args.dataset_name} has "
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
                f"`{name}={value}`, but {args.dataset_name} has no split {args.dataset_test_split!r}. Set "
                f"dataset_test_split, or {name} to {off}."
            )
    if not hasattr(train, "__len__") and config.max_steps <= 0:
        raise UsageError(
            f"`dataset_streaming={args.dataset_streaming}` leaves the length of the training open. Set "
            f"max_steps or total_episodes."
        )


def drawn(rows: Any, number: int) -> Any:
    """A few rows, drawn with a fixed seed; of a stream out of its first, and kept."""
    few = rows.shuffle(seed=0).take(number)
    return few if hasattr(few, "__len__") else Dataset.from_list(list(few))


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
