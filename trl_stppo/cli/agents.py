"""Load the objects that a run's flags name: trainer class, environments, reward functions, rows."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, IterableDataset, load_dataset
from trl import ModelConfig, get_dataset

from ..hub.loading import load_tokenizer
from ..paths import ROWS, check_name
from ..trainer.planning.data import Rows
from ..trainer.ppo_config import PPOConfig
from ..trainer.stgrpo_config import STGRPOConfig
from .flags import AgentArguments, read_flags
from .objects import factory_of, load_object, load_reward, offered_by
from .usage import UsageError

if TYPE_CHECKING:
    from ..trainer.ppo_trainer import PPOTrainer

logger = logging.getLogger(__name__)
Counter = Callable[[str], int]
_loading = threading.Lock()
_tokenizer = functools.cache(load_tokenizer)


def parse_flags(
    arguments: type, words: Sequence[str]
) -> tuple[Any, PPOConfig, ModelConfig, type[PPOTrainer]]:
    """Parse flags; return script arguments, trainer configuration, model configuration, trainer class."""
    from ..trainer.ppo_trainer import STGRPOTrainer, STPPOTrainer

    args, training_args, model_args = read_flags(arguments, words)
    trainer_class = STGRPOTrainer if isinstance(training_args, STGRPOConfig) else STPPOTrainer
    return args, training_args, model_args, trainer_class


def load_environment(args: AgentArguments, count_tokens: Counter) -> Callable[[], object] | None:
    """Return the environment factory that the flags name, with its arguments bound."""
    return factory_of(args.environment, args.environment_kwargs, count_tokens)


def load_agent(args: AgentArguments) -> Callable[..., object] | None:
    """Return the agent function of `--agent`, or None without the flag."""
    return None if args.agent is None else load_object(args.agent)


def load_rewards(args: AgentArguments) -> list[Any]:
    """Return the reward model's name (if set) and the reward functions, in the order of `reward_weights`."""
    check_name("reward_model_name_or_path", args.reward_model_name_or_path)
    models = [args.reward_model_name_or_path] if args.reward_model_name_or_path else []
    return [*models, *(load_reward(path) for path in args.reward_funcs or [])]


def load_splits(args: AgentArguments) -> tuple[Dataset | IterableDataset, Rows]:
    """Load the training rows and the held-out rows (None without a test split), perhaps as streams."""
    offered = offered_by(args.environment, "datasets") or {}
    if args.datasets:
        if args.dataset_name is not None:
            logger.warning("`dataset_name=%s` is ignored: there are `datasets`.", args.dataset_name)
        args.dataset_name = None
        for source in args.row_sources:
            check_name("datasets", source)
        loaded = get_dataset(args)
    else:
        args.dataset_name = name = args.dataset_name or next(iter(offered), None)
        if name is None:
            raise UsageError(f"`dataset_name` is not set; environment={args.environment} has no rows.")
        if rows := offered.get(name):
            return rows("train"), rows("test")
        check_name("dataset_name", name)
        path, streaming = Path(name), args.dataset_streaming
        if not path.is_file():
            loaded = load_dataset(name, args.dataset_config, streaming=streaming)
        elif path.suffix in ROWS:
            files = {"data_files": {"train": name}, "streaming": streaming}
            loaded = load_dataset(ROWS[path.suffix], **files)
        else:
            raise UsageError(f"`dataset_name={name}`: a file must end in {', '.join(ROWS)}.")
    if args.dataset_train_split not in loaded:
        raise UsageError(
            f"`dataset_train_split={args.dataset_train_split!r}`: allowed are {', '.join(map(repr, loaded))}."
        )
    return loaded[args.dataset_train_split], loaded.get(args.dataset_test_split)


def check_splits(args: AgentArguments, config: PPOConfig, train: Rows, held_out: Rows) -> None:
    """Raise UsageError if evaluation has no held-out split, or if a stream has no number of steps."""
    strategy = str(getattr(config.eval_strategy, "value", config.eval_strategy))
    wanted = {"eval_episodes": (args.eval_episodes, 0), "eval_strategy": (strategy, "no")}
    for name, (value, off) in wanted.items():
        if value != off and held_out is None:
            raise UsageError(
                f"`{name}={value}`, but {args.rows_name} has no split {args.dataset_test_split!r}; set {off}."
            )
    if not hasattr(train, "__len__") and config.max_steps <= 0:
        name = "streaming" if args.datasets else "dataset_streaming"
        raise UsageError(f"`{name}=True`: a stream has no length. Set max_steps or total_episodes.")


def drawn(rows: Dataset | IterableDataset, number: int) -> Dataset:
    """Draw at most `number` rows with a fixed seed. The rows of a stream come from its beginning."""
    if hasattr(rows, "__len__") and len(rows) <= number:
        return rows
    few = rows.shuffle(seed=0).take(number)
    return few if hasattr(few, "__len__") else Dataset.from_list(list(few))


def model_options(model_args: ModelConfig, init_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a model's loading options: `init_kwargs`, overridden by flags that are not at their default."""
    options, unset = dict(init_kwargs or {}), ModelConfig()
    for flag in ("model_revision", "attn_implementation", "dtype"):
        name, value = flag.removeprefix("model_"), getattr(model_args, flag)
        if value is not None and (name not in options or value != getattr(unset, flag)):
            options[name] = value
    return options


def check_models(model_args: ModelConfig, critic: str | None, has_critic: bool) -> None:
    """Reject a policy that is not set or cannot be trained, and models that do not exist."""
    if critic is not None and not has_critic:
        raise UsageError(f"`value_model_name_or_path={critic}`: the variant has no critic.")
    check_name("value_model_name_or_path", critic)
    if model_args.model_name_or_path is None:
        raise UsageError("`--model_name_or_path` is not set: must name a model.")
    check_name("model_name_or_path", model_args.model_name_or_path)
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not model_args.use_peft:
        raise UsageError("`load_in_4bit` and `load_in_8bit` need `use_peft: true`.")


def token_counter(name: object, revision: str | None = None) -> Counter:
    """Return a counter of a text's tokens, for environments; a pickled counter holds only a name."""
    return functools.partial(_count_tokens, str(name), revision)


def _count_tokens(name: str, revision: str | None, text: str) -> int:
    # Do not use the trainer's tokenizer: it changes its padding, perhaps while another thread counts.
    with _loading:
        tokenizer = _tokenizer(name, revision)
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
