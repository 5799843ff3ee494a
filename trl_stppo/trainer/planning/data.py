"""The rows of a run, checked before any model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ...envs.base import Row, tool_names, without_prompt
from ...errors import EnvironmentContractError
from ...rollout.images import TEXTS_ONLY
from ...rollout.messages import check_turn, has_image, read_messages
from ...rollout.reward_funcs import unmatched
from .._trl import prepare_multimodal_messages
from ..ppo_config import PPOConfig
from .plan import RolloutPlan

Rows: TypeAlias = Dataset | IterableDataset | None
EvaluationRows: TypeAlias = Rows | Mapping[str, Rows]
PLACEHOLDER_PROMPT = [{"role": "user", "content": ""}]
logger = logging.getLogger(__name__)
ROWS_AT_ONCE = 1000
# Columns that hold images.
IMAGE_COLUMNS = ("image", "images")
# Columns that can hold the prompt; the first column that a row has is used.
PROMPTS = ("prompt", "input_ids")


def rows_with_prompts(
    rows: list[Row], tokenizer: PreTrainedTokenizerBase, *, owns_prompts: bool, sees: bool = False
) -> tuple[list[Row], list[list[int]] | None]:
    """Return copies whose prompts have the form of chat templates, and the pre-tokenised ids or None."""
    pretokenized = "prompt" not in rows[0] and "input_ids" in rows[0]
    if pretokenized:
        ids = [unpadded(row, tokenizer) for row in rows]
        texts = [tokenizer.decode(i) for i in ids]
        return [{**row, "prompt": t} for row, t in zip(rows, texts, strict=True)], ids
    prompts = [read_prompt(row.get("prompt")) for row in rows]
    # A prompt is None if datasets with and without prompts were joined.
    if owns_prompts:
        prompts = [list(PLACEHOLDER_PROMPT) if p is None else p for p in prompts]
    prompts = [with_images(p, row, sees=sees) for p, row in zip(prompts, rows, strict=True)]
    return [{**row, "prompt": p} for row, p in zip(rows, prompts, strict=True)], None


def with_images(prompt: Any, row: Row, *, sees: bool) -> Any:
    """Return a row's prompt with the images of the columns `image` or `images`, placed as TRL places them."""
    one = row.get("image")
    images = row.get("images") or ([] if one is None else [one])
    if images and not sees:
        raise ValueError(f"A row has images, and {TEXTS_ONLY}.")
    if images and isinstance(prompt, str):
        raise ValueError(f"`prompt` is {prompt!r:.40}; allowed beside images are messages.")
    return prepare_multimodal_messages(prompt, images=images) if images else prompt


def unpadded(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of a pre-tokenised prompt without its left padding."""
    ids = [int(i) for i in row["input_ids"]]
    if row.get("attention_mask") is not None:
        return [i for i, keep in zip(ids, row["attention_mask"], strict=True) if keep]
    start, pad = 0, tokenizer.pad_token_id
    # Keep all tokens, because the first token may be the prompt's own BOS.
    if pad == tokenizer.bos_token_id:
        return ids
    while start < len(ids) - 1 and ids[start] == pad:
        start += 1
    return ids[start:]


def is_conversational(dataset: object) -> bool:
    """Return whether a dataset's prompts are messages; also True without a prompt column."""
    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
        return isinstance(dataset, Dataset)
    return not isinstance(dataset[0]["prompt"], str)


@dataclass(frozen=True)
class DataPlan:
    """The rows of a run, and the form of their prompts.

    Attributes:
        messages: name of the first argument whose prompts are messages to render, or None.
        plain: the first text prompt, or None.
        columns: columns of the training rows that reward functions get; None if they are unknown, or
            if a `rollout_func` may add columns.
        images: the first place with images, for error texts, or None.
    """

    train: Rows
    evaluation: EvaluationRows
    messages: str | None
    plain: str | None
    columns: tuple[str, ...] | None
    images: str | None = None


def plan_data(
    args: PPOConfig,
    train: Rows,
    evaluation: EvaluationRows,
    rollout: RolloutPlan,
    evaluation_plan: RolloutPlan,
) -> DataPlan:
    """Check the training and evaluation rows against their environments, and return the plan."""
    rows = training_rows(train, args, rollout)
    check_eval_dataset(evaluation, rollout, evaluation_plan)
    parts = [("train_dataset", rows), *_parts(evaluation)]
    unread = [n for n, part in parts if "tools" in (getattr(part, "column_names", None) or ())]
    if unread and not (rollout.owns_prompts or rollout.user_func):
        logger.warning("The column `tools` of `%s` has no effect: pass `tools` to the trainer.", unread[0])
    images = next(filter(None, (_images_in(name, part) for name, part in parts)), None)
    if rollout.user_func is not None:
        return DataPlan(rows, evaluation, None, None, None, images)
    rendered = [
        (name, part) for name, part in parts
        if isinstance(part, Dataset) and "input_ids" not in part.column_names
    ]  # fmt: skip
    messages = [name for name, part in rendered if is_conversational(part)]
    plain = [part[0]["prompt"] for _, part in rendered if not is_conversational(part)]
    hidden, columns = ("prompt", "completion", "completion_ids"), None
    if names := getattr(train, "column_names", None):
        columns = tuple(name for name in names if name not in hidden)
    first_messages, first_plain = next(iter(messages), None), next(iter(plain), None)
    return DataPlan(rows, evaluation, first_messages, first_plain, columns, images)


def _images_in(name: str, dataset: Rows) -> str | None:
    """Return where a dataset has images: its column, or its first prompt; None if it has none."""
    for column in IMAGE_COLUMNS:
        if column in (getattr(dataset, "column_names", None) or ()):
            return f"The column `{column}` of `{name}`"
    prompt = dataset[0].get("prompt") if isinstance(dataset, Dataset) else None
    seen = isinstance(prompt, list) and any(has_image(m.get("content")) for m in prompt)
    return f"The `prompt` of `{name}`" if seen else None


def training_rows(dataset: Rows, args: PPOConfig, rollout: RolloutPlan) -> Rows:
    """Return the checked training rows: repeated if too few, placeholders if there is no dataset."""
    if dataset is None:
        # Only an unnamed text environment or an agent plays without rows; GRPOTrainer refuses all else.
        if None not in rollout.text and not rollout.agent:
            return None
        if args.max_steps <= 0:
            raise ValueError("Without `train_dataset` set `max_steps` or `total_episodes`.")
        rows = args.generation_batch_size // args.num_generations
        return Dataset.from_dict({"prompt": [PLACEHOLDER_PROMPT] * rows})
    if not isinstance(dataset, Dataset):
        # A stream has no length to check; GRPOTrainer refuses other types.
        return dataset
    _check_rows(dataset, "train_dataset", rollout, rollout)
    needed = args.generation_batch_size // args.num_generations
    times = -(-needed // len(dataset))
    if times > 1:
        logger.warning(
            "`train_dataset` has %s rows, fewer than the %s of one rollout batch: each is repeated %s times.",
            len(dataset), needed, times,
        )  # fmt: skip
    return dataset.repeat(times) if times > 1 else dataset


def check_eval_dataset(
    dataset: EvaluationRows, rollout: RolloutPlan, evaluation_plan: RolloutPlan | None = None
) -> None:
    """Check evaluation rows against the environments of `evaluation_plan` (default: `rollout`)."""
    for name, part in _parts(dataset):
        if isinstance(part, Dataset):
            _check_rows(part, name, rollout, evaluation_plan or rollout)


def _parts(dataset: EvaluationRows) -> list[tuple[str, Rows]]:
    """Return each evaluation dataset with its name for error texts."""
    if isinstance(dataset, dict):
        return [(f"eval_dataset[{name!r}]", part) for name, part in dataset.items()]
    return [("eval_dataset", dataset)]


def _check_rows(dataset: Dataset, name: str, rollout: RolloutPlan, evaluation_plan: RolloutPlan) -> None:
    """Refuse a dataset that lacks usable prompts or has columns that do not fit the environments."""
    if len(dataset) == 0:
        raise ValueError(f"`{name}` is empty. Check its split and filters.")
    columns, owns_prompt = set(dataset.column_names), rollout.owns_prompts
    if not owns_prompt and not {"prompt", "input_ids"} & columns:
        raise ValueError(
            f"`{name}` has the columns {dataset.column_names}, but neither `prompt` nor `input_ids`."
        )
    _check_each_row(dataset, name, rollout)
    _check_resets(name, dataset.column_names, evaluation_plan)
    warning = without_prompt(name, dataset.column_names) if rollout.probes else None
    if warning is not None:
        logger.warning(warning)
    if rollout.plays_environment and "input_ids" in columns and "prompt" not in columns:
        raise ValueError(
            f"`{name}` has `input_ids`, but environments and tools need a `prompt`, as text or messages."
        )


def _check_each_row(dataset: Dataset, name: str, rollout: RolloutPlan) -> None:
    """Refuse rows without a usable prompt, and rows that name an unknown environment."""
    # A custom transform may compute these columns from other columns, so keep them all.
    if dataset.format["type"] != "custom":
        wanted = [c for c in (*PROMPTS, "environment") if c in dataset.column_names]
        dataset = dataset.with_format(None).select_columns(wanted)
    named = bool(rollout.probes) and None not in rollout.probes
    parts = dataset.iter(ROWS_AT_ONCE)
    rows = ((part, values) for part in parts for values in zip(*part.values(), strict=True))
    for number, (names, values) in enumerate(rows):
        row, where = dict(zip(names, values, strict=True)), f"row {number} of `{name}`"
        environment = row.get("environment") if named else None
        if named and environment not in rollout.probes:
            raise ValueError(
                f"`environment` of {where} is {environment!r}; allowed are {list(rollout.probes)}."
            )
        _check_prompt(row, where, rollout, environment)


def _check_prompt(row: Row, where: str, rollout: RolloutPlan, environment: str | None) -> None:
    """Refuse a row whose prompt cannot be played in its environment."""
    column, value = next(((c, row[c]) for c in PROMPTS if c in row), ("prompt", None))
    if rollout.user_func is None and not value and (not rollout.owns_prompts or value == []):
        raise ValueError(f"`{column}` of {where} is {value!r}; drop such rows.")
    if column == "input_ids":
        return
    # An environment may add a message to the prompt, so the prompt need not be complete.
    complete = rollout.user_func is None and not rollout.owns_prompts
    read_prompt(value, where, complete=complete)
    has_tools = environment in rollout.tools and tool_names(rollout.probes[environment])
    if isinstance(value, str) and (rollout.standalone_tools or has_tools):
        raise ValueError(f"The `prompt` of {where} is a string; tools need messages.")


def _check_resets(name: str, columns: list[str], rollout: RolloutPlan) -> None:
    """Refuse rows whose columns do not fit an environment's `reset`."""
    for key, env in rollout.probes.items():
        given = [column for column in columns if key is None or column != "environment"]
        # A text environment also gets a seed, and gets only the columns that its `reset` names.
        is_text = key in rollout.text
        missing, left = unmatched(env.reset, [*given, "seed"] if is_text else given)
        method = f"`{type(env).__name__}.reset`"
        if missing:
            raise EnvironmentContractError(
                f"{method} needs `{'`, `'.join(missing)}`, and `{name}` has no such column: it has "
                f"{', '.join(columns)}. Rename the column or the parameter, or give the parameter a default."
            )
        if left and not is_text:
            raise EnvironmentContractError(
                f"{method} does not take `{'`, `'.join(left)}`: it gets every column of `{name}`. Add "
                f"`**row` to its parameters."
            )


def read_prompt(prompt: Any, row: str = "a row", *, complete: bool = False) -> Any:
    """Return a prompt in the form of chat templates; refuse a prompt that is neither text nor text messages.

    A `complete` prompt must not end with an assistant message.
    """
    if prompt is None or isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list | tuple) or not all(_has_content(part) for part in prompt):
        raise ValueError(
            f"The `prompt` of {row} is {prompt!r:.80}; allowed are text, or a list of messages "
            f"({{'role': 'user', 'content': ...}})."
        )
    try:
        messages = read_messages(prompt)
        if complete:
            check_turn(messages)
        return messages
    except ValueError as error:
        raise ValueError(f"The `prompt` of {row} is not supported: {error}.") from error


def _has_content(part: object) -> bool:
    """Return whether `part` is a message with content or tool calls."""
    if not isinstance(part, Mapping):
        return False
    return part.get("content") is not None or bool(part.get("tool_calls"))
