"""What the trainers' constructor decides before anything is loaded: arguments, rollout, rewards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import ProcessorMixin

from ..rollout.chat import ChatRenderer
from ..rollout.kinds import split_environments
from ..rollout.reward_funcs import refuse_nan
from ..rollout.text_env import Limits, TextEnvRollout
from ._trl import (
    get_config_model_id,
)
from .ppo_config import PPOConfig

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

PLACEHOLDER_PROMPT = [{"role": "user", "content": ""}]


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
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"`processing_class` is a {type(processing_class).__name__}: images are not supported. "
            f"Pass a tokenizer."
        )
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
        if "value_model" in given and given.get(name) is given["value_model"]:
            raise ValueError(
                f"`value_model` and `{name}` are the same object, and the critic is trained. Pass a copy."
            )


# ---------------------------------------------------------------------- rollout


@dataclass
class RolloutPlan:
    """Who plays the episodes.

    Attributes:
        text: our loop for text environments, or None.
        user_func: the caller's rollout_func, or None.
        func: what GRPOTrainer gets as rollout_func.
        tool_environments: what GRPOTrainer gets as environment_factory.
    """

    text: TextEnvRollout | None = None
    user_func: Callable[..., dict[str, Any]] | None = None
    func: Callable[..., dict[str, Any]] | None = None
    tool_environments: Any = None

    @property
    def pays_turns(self) -> bool:
        """Whether rewards may come with the turns, so that no reward function is needed."""
        return any((self.text, self.user_func, self.tool_environments))


def plan_rollout(
    args: PPOConfig, environment_factory: Any, rollout_func: Any, tools: Any, trainer: PPOTrainer
) -> RolloutPlan:
    """Route each kind of environment to the loop that plays it."""
    text, tool_environments = split_environments(environment_factory)
    if rollout_func is not None and (tools or tool_environments is not None):
        raise ValueError(
            "`rollout_func` together with `tools` or a tool `environment_factory`: TRL would run its tool "
            "loop on top of the finished rollout. Call the tools inside rollout_func, or leave it out."
        )
    if text is not None:
        if tools:
            raise ValueError(
                "`tools` and a text `environment_factory` were both given. A text environment reads the "
                "model's words itself; pass one of them."
            )
        if rollout_func is not None:
            raise ValueError(
                "`rollout_func` and a text `environment_factory` were both given, and each plays the "
                "whole episode. Pass one of them."
            )
        limits = Limits(args.max_turns, args.max_turn_tokens, args.max_completion_length)
        return RolloutPlan(text=TextEnvRollout(text, limits), func=trainer._run_text_environments)
    if args.max_turns is not None or args.max_turn_tokens is not None:
        raise ValueError(
            "`max_turns` and `max_turn_tokens` act on text environments only. For tools set "
            "max_tool_calling_iterations; a rollout_func keeps its own limits."
        )
    if rollout_func is not None:
        return RolloutPlan(user_func=rollout_func, func=trainer._run_user_rollout)
    return RolloutPlan(tool_environments=tool_environments)


@contextmanager
def without_own_warning(plan: RolloutPlan) -> Iterator[None]:
    """Hide TRL's warning about `rollout_func` where it is ours, which the user cannot act on."""
    with warnings.catch_warnings():
        if plan.text is not None:
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
        yield


def check_dataset(dataset: Any, args: PPOConfig, rollout: RolloutPlan) -> Any:
    """Refuse datasets that would fail late or never start; make one for environments with data."""
    from datasets import Dataset

    if dataset is None:
        if rollout.text is None:
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
            f"gradient_accumulation_steps, or add rows."
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
    owns_prompt = rollout.text is not None or rollout.tool_environments is not None
    if not owns_prompt and not {"prompt", "input_ids"} & columns:
        raise ValueError(
            f"`{name}` has the columns {dataset.column_names}, but neither `prompt` (a string or a list "
            f"of messages) nor `input_ids` (token ids). Rename or map one of them."
        )
    if rollout.text is not None and "input_ids" in columns and "prompt" not in columns:
        raise ValueError(
            f"`{name}` is pre-tokenised (`input_ids`), but a text environment adds its opening words to "
            f"a `prompt`. Give the prompt as text or messages."
        )


def rows_with_prompts(
    rows: list[dict[str, Any]], tokenizer: Any, rollout: RolloutPlan
) -> tuple[list[dict[str, Any]], list[list[int]] | None]:
    """Rows as GRPOTrainer reads them, each with a `prompt`; the dataset's own are not changed.

    Returns:
        The rows, and for pre-tokenised ones their exact prompt ids, otherwise None.
    """
    pretokenized = "prompt" not in rows[0] and "input_ids" in rows[0]
    if pretokenized:
        ids = [unpadded(row, tokenizer.pad_token_id) for row in rows]
        texts = [tokenizer.decode(i) for i in ids]
        return [{**row, "prompt": t} for row, t in zip(rows, texts, strict=True)], ids
    if rollout.text is not None:
        return [{"prompt": list(PLACEHOLDER_PROMPT), **row} for row in rows], None
    return [dict(row) for row in rows], None


def unpadded(row: dict[str, Any], pad_token_id: int) -> list[int]:
    """Ids of a pre-tokenised prompt without its left padding."""
    ids = [int(i) for i in row["input_ids"]]
    if row.get("attention_mask") is not None:
        return [i for i, keep in zip(ids, row["attention_mask"], strict=True) if keep]
    start = 0
    while start < len(ids) - 1 and ids[start] == pad_token_id:
        start += 1
    return ids[start:]


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


def plan_rewards(
    args: PPOConfig,
    reward_funcs: Any,
    processing_classes: Any,
    reward_model: Any,
    tokenizer: Any,
    rollout: RolloutPlan,
    trainer: PPOTrainer,
) -> RewardPlan:
    """Collect every source of reward in GRPOTrainer's form."""
    funcs = [] if reward_funcs is None else reward_funcs
    funcs = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
    classes = processing_classes if isinstance(processing_classes, list) else [processing_classes]
    classes = [None] * len(funcs) if processing_classes is None else list(classes)
    if args.reward_weights is not None and len(args.reward_weights) != len(funcs):
        raise ValueError(
            f"`reward_weights` has {len(args.reward_weights)} entries for {len(funcs)} reward "
            f"functions; give one each (reward_model and environments count with weight 1)."
        )
    if reward_model is not None:
        funcs.append(reward_model)
        classes.append(tokenizer)
    plan = RewardPlan([refuse_nan(func) for func in funcs], classes)
    if rollout.text is not None or (rollout.pays_turns and not funcs):
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
        raise ValueError(
            "No turn has a reward, and there are no `reward_funcs`, so nothing could be learned. Let "
            "`rollout_func` return `turn_rewards`, let the environment's tools append to a list "
            "attribute `turn_rewards` or define `get_reward()`, or pass reward_funcs."
        )

    return turn_rewards
