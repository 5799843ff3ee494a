"""What the trainers' constructor decides before anything is loaded: arguments, rollout, rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..envs.base import without_prompt
from ..rollout.chat import ChatRenderer
from ..rollout.environments import Factories, split_environments
from ..rollout.reward_funcs import guarded
from . import text_only
from ._trl import get_config_model_id
from .ppo_config import PPOConfig

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

logger = logging.getLogger(__name__)

PLACEHOLDER_PROMPT = [{"role": "user", "content": ""}]
# Options that only the rollout engine honours, None where unset.
ENGINE_LIMITS = (
    "max_turns",
    "max_turn_tokens",
    "max_malformed_actions",
    "episode_timeout_seconds",
    "generation_slots",
)


def default_config(config_class: type[PPOConfig], model: Any, name: str) -> PPOConfig:
    """The configuration of a trainer that was given none."""
    model_id = model if isinstance(model, str) else get_config_model_id(model.config)
    return config_class(f"{model_id.split('/')[-1]}-{name}")


def check_arguments(
    args: PPOConfig,
    config_class: type[PPOConfig],
    processing_class: Any,
    data_collator: Any,
    model: Any,
    ref_model: Any,
) -> None:
    """Refuse what cannot work before anything is loaded."""
    if not isinstance(args, config_class):
        raise TypeError(
            f"`args` is a {type(args).__name__}; this trainer needs a {config_class.__name__}, which "
            f"accepts every field of GRPOConfig."
        )
    if args._TRAINER != config_class._TRAINER:
        raise TypeError(
            f"`args` is a {type(args).__name__}, some of whose options only {args._TRAINER} honours; they "
            f"would be ignored here. Use {args._TRAINER}, or a {config_class.__name__}."
        )
    text_only.check_tokenizer(processing_class, model)
    if processing_class is not None and processing_class.pad_token is None:
        raise ValueError(
            "`processing_class` has no pad token, and episodes of different lengths need one. Set it "
            "before building the trainer, for example `tokenizer.pad_token = tokenizer.eos_token`."
        )
    if data_collator is not None and not hasattr(data_collator, "tokenizer"):
        raise ValueError(
            f"`data_collator` is a {type(data_collator).__name__}, but rows are collated after the "
            f"rollout. Only padding collators (DataCollatorWithPadding) are accepted, and have nothing "
            f"to do; change the dataset instead."
        )
    if ref_model is not None and ref_model is model:
        raise ValueError(
            "`ref_model` and `model` are the same object, so the reference would be trained along. "
            "Pass a copy, or leave ref_model unset: a copy is made."
        )


def check_distinct(**models: Any) -> None:
    """Refuse one model in two roles of which one trains it."""
    given = {name: model for name, model in models.items() if model is not None}
    for name in ("model", "reward_model"):
        value_model = given.get("value_model")
        if isinstance(value_model, str):  # a name; each loads a model of its own
            continue
        if value_model is not None and given.get(name) is value_model:
            raise ValueError(
                f"`value_model` and `{name}` are the same object, and the critic is trained. Pass a copy."
            )


# ---------------------------------------------------------------------- rollout


@dataclass
class RolloutPlan:
    """Who plays the episodes: the engine, the caller's function, or one plain generation.

    Attributes:
        text: factories of text environments, by name.
        tools: factories of tool environments, by name.
        probes: the instance that each factory made when it was looked at.
        standalone_tools: tools that belong to no environment.
        user_func: the caller's rollout_func, or None.
    """

    text: Factories = field(default_factory=dict)
    tools: Factories = field(default_factory=dict)
    probes: dict[str | None, Any] = field(default_factory=dict)
    standalone_tools: list[Any] = field(default_factory=list)
    user_func: Callable[..., dict[str, Any]] | None = None

    @property
    def uses_engine(self) -> bool:
        """Whether episodes have turns that our engine plays."""
        return bool(self.text or self.tools or self.standalone_tools)

    @property
    def pays_turns(self) -> bool:
        """Whether rewards may come with the turns, so that no reward function is needed."""
        return bool(self.text or self.user_func or self.tools)

    @property
    def tool_environments(self) -> Any:
        """What GRPOTrainer gets as environment_factory, which it calls once, to look at it."""
        looked_at = {name: self._probe_of(name) for name in self.tools}
        if not looked_at:
            return None
        return looked_at.get(None, looked_at)

    def _probe_of(self, name: str | None) -> Callable[[], Any]:
        return lambda: self.probes[name]


def plan_rollout(
    args: PPOConfig, environment_factory: Any, rollout_func: Any, tools: Any
) -> RolloutPlan:
    """Decide who plays the episodes."""
    text, tool_environments, probes = split_environments(environment_factory)
    plan = RolloutPlan(text, tool_environments, probes, list(tools or []), rollout_func)
    if rollout_func is not None and (tools or tool_environments):
        raise ValueError(
            "`rollout_func` together with `tools` or a tool `environment_factory`: each plays the whole "
            "episode. Call the tools inside rollout_func, or leave it out."
        )
    if text and tools:
        raise ValueError(
            "`tools` and a text `environment_factory` were both given. A text environment reads the "
            "model's words itself; pass one of them."
        )
    if text and rollout_func is not None:
        raise ValueError(
            "`rollout_func` and a text `environment_factory` were both given, and each plays the "
            "whole episode. Pass one of them."
        )
    if not plan.uses_engine:
        _check_unused_limits(args)
    return plan


def _check_unused_limits(args: PPOConfig) -> None:
    """Refuse limits that nobody would keep."""
    for name in ENGINE_LIMITS:
        if getattr(args, name) is not None:
            raise ValueError(
                f"`{name}={getattr(args, name)}` limits episodes with an environment or tools, and there "
                f"are none. Leave it unset; a rollout_func keeps its own limits, and "
                f"max_completion_length bounds a single turn."
            )


def check_dataset(dataset: Any, args: PPOConfig, rollout: RolloutPlan) -> Any:
    """Refuse datasets that would fail late or never start; make one for environments with data."""
    from datasets import Dataset

    if dataset is None:
        if rollout.text and None not in rollout.text:
            raise ValueError(
                f"`train_dataset` is missing, but `environment_factory` has the names "
                f"{list(rollout.text)}: rows with a column `environment` must choose among them."
            )
        if not rollout.text:
            return None  # GRPOTrainer decides, and explains
        if args.max_steps <= 0:
            raise ValueError(
                "Without `train_dataset` the environment supplies the tasks, and the length of the "
                "training is unknown: set `max_steps` or `total_episodes`."
            )
        rows = args.generation_batch_size // args.num_generations
        return Dataset.from_dict({"prompt": [PLACEHOLDER_PROMPT] * rows})
    if not isinstance(dataset, Dataset):
        return dataset  # streams have no length; GRPOTrainer checks the type
    _check_rows(dataset, "train_dataset", rollout)
    needed = args.generation_batch_size // args.num_generations
    if len(dataset) < needed:
        raise ValueError(
            f"`train_dataset` has {len(dataset)} rows, fewer than the {needed} prompts of one rollout "
            f"batch, so training would never start. Lower per_device_train_batch_size or "
            f"gradient_accumulation_steps, raise num_generations, or add rows."
        )
    return dataset


def check_eval_dataset(dataset: Any, rollout: RolloutPlan) -> None:
    """The same checks for evaluation data, before a run has spent hours."""
    from datasets import Dataset

    parts = dataset if isinstance(dataset, dict) else {None: dataset}
    for name, part in parts.items():
        if isinstance(part, Dataset):
            _check_rows(
                part, "eval_dataset" if name is None else f"eval_dataset[{name!r}]", rollout
            )


def _check_rows(dataset: Any, name: str, rollout: RolloutPlan) -> None:
    if len(dataset) == 0:
        raise ValueError(f"`{name}` is empty. Check its split and filters.")
    columns = set(dataset.column_names)
    text_only.check_columns(f"`{name}`", columns)
    owns_prompt = bool(rollout.text or rollout.tools)
    if not owns_prompt and not {"prompt", "input_ids"} & columns:
        raise ValueError(
            f"`{name}` has the columns {dataset.column_names}, but neither `prompt` (a string or a list "
            f"of messages) nor `input_ids` (token ids). Rename or map one of them."
        )
    said = without_prompt(name, dataset.column_names) if owns_prompt else None
    if said is not None:
        logger.warning(said)
    if rollout.uses_engine and "input_ids" in columns and "prompt" not in columns:
        raise ValueError(
            f"`{name}` is pre-tokenised (`input_ids`), but environments and tools need a `prompt` to add "
            f"their words to. Give the prompt as text or messages."
        )


def rows_with_prompts(
    rows: list[dict[str, Any]], tokenizer: Any, rollout: RolloutPlan
) -> tuple[list[dict[str, Any]], list[list[int]] | None]:
    """Rows as GRPOTrainer reads them, each with a `prompt`; the dataset's own are not changed.

    Returns:
        The rows, and for pre-tokenised ones their exact prompt ids, otherwise None.
    """
    text_only.check_rows(rows)
    pretokenized = "prompt" not in rows[0] and "input_ids" in rows[0]
    if pretokenized:
        ids = [unpadded(row, tokenizer.pad_token_id) for row in rows]
        texts = [tokenizer.decode(i) for i in ids]
        return [{**row, "prompt": t} for row, t in zip(rows, texts, strict=True)], ids
    if rollout.text or rollout.tools:
        return [{**row, "prompt": prompt_of(row)} for row in rows], None
    return [dict(row) for row in rows], None


def prompt_of(row: dict[str, Any]) -> Any:
    """The row's prompt; an empty one where the environment has the task."""
    prompt = row.get("prompt")  # None where datasets with and without prompts were joined
    return list(PLACEHOLDER_PROMPT) if prompt is None else prompt


def unpadded(row: dict[str, Any], pad_token_id: int) -> list[int]:
    """Ids of a pre-tokenised prompt without its left padding."""
    ids = [int(i) for i in row["input_ids"]]
    if row.get("attention_mask") is not None:
        return [i for i, keep in zip(ids, row["attention_mask"], strict=True) if keep]
    start = 0
    while start < len(ids) - 1 and ids[start] == pad_token_id:
        start += 1
    return ids[start:]


def is_conversational(dataset: Any) -> bool:
    """Whether the rows of a dataset have messages as prompts; a row without one gets messages."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
        return isinstance(dataset, Dataset)
    return not isinstance(dataset[0]["prompt"], str)


def renderer(trainer: PPOTrainer) -> ChatRenderer:
    """The renderer for the trainer's tokenizer and template."""
    return ChatRenderer(
        trainer._tokenizer,
        trainer.eos_token_ids,
        chat_template=trainer.chat_template,
        template_kwargs=trainer.chat_template_kwargs,
    )


# ---------------------------------------------------------------------- rewards


@dataclass
class RewardPlan:
    """Reward functions as GRPOTrainer gets them.

    Attributes:
        repeated: index of the function that repeats what the turns have earned, for the log and to
            satisfy GRPOTrainer's demand for at least one; not added to the score.
    """

    funcs: list[Any] = field(default_factory=list)
    processing_classes: list[Any] = field(default_factory=list)
    repeated: int | None = None

    @contextmanager
    def extended_weights(self, args: PPOConfig) -> Iterator[None]:
        """Give the functions we added a weight of one, where the caller set weights."""
        given = args.reward_weights
        if given is not None:
            args.reward_weights = [*given, *[1.0] * (len(self.funcs) - len(given))]
        try:
            yield
        finally:
            args.reward_weights = given


def check_reward_weights(args: PPOConfig, number: int) -> None:
    """Refuse weights that are not one for each of so many reward functions."""
    weights = args.reward_weights
    if weights is not None and len(weights) != number:
        raise ValueError(
            f"`reward_weights` has {len(weights)} entries for {number} reward functions; give one "
            f"each (reward_model and environments count with weight 1)."
        )


def plan_rewards(
    args: PPOConfig,
    reward_funcs: Any,
    processing_classes: Any,
    reward_model: Any,
    tokenizer: Any,
    rollout: RolloutPlan,
    trainer: PPOTrainer,
    *,
    scores_turns: bool = False,
) -> RewardPlan:
    """Collect every source of reward in GRPOTrainer's form; `scores_turns` with turn_reward_funcs."""
    funcs = [] if reward_funcs is None else reward_funcs
    funcs = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
    classes = processing_classes if isinstance(processing_classes, list) else [processing_classes]
    classes = [None] * len(funcs) if processing_classes is None else list(classes)
    check_reward_weights(args, len(funcs))
    if reward_model is not None:
        funcs.append(reward_model)
        classes.append(tokenizer)
    plan = RewardPlan([guarded(func, trainer._failed_rows) for func in funcs], classes)
    if rollout.text or ((rollout.pays_turns or scores_turns) and not funcs):
        plan.repeated = len(plan.funcs)
        plan.funcs.append(_turn_reward_sum(trainer))
        plan.processing_classes.append(None)
    return plan


def _turn_reward_sum(trainer: PPOTrainer) -> Callable[..., list[float] | list[None]]:
    """A reward function that reports what the turns of each episode have earned."""

    def turn_rewards(completions: list[Any], **kwargs: Any) -> list[float] | list[None]:
        earned = trainer._turn_returns()
        if earned is not None:
            return earned
        if len(trainer.reward_funcs) > 1:  # an environment's get_reward pays
            return [None] * len(completions)
        if trainer._turn_reward_funcs.funcs:  # they pay later
            return [0.0] * len(completions)
        raise ValueError(
            "No turn has a reward, and there are no `reward_funcs`, so nothing could be learned. Let "
            "`rollout_func` return `turn_rewards`, let the environment's tools append to a list "
            "attribute `turn_rewards` or define `get_reward()`, or pass reward_funcs or turn_reward_funcs."
        )

    return turn_rewards
