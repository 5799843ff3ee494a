"""Checks that tokenizer, rows and prompts contain text only, because images are not supported."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import AutoProcessor, ProcessorMixin

from ...rollout.chat import check_template
from ...rollout.messages import check_turn, read_messages
from .._trl import get_config_model_id
from ..ppo_config import PPOConfig

logger = logging.getLogger(__name__)

# Columns that GRPOTrainer passes to a model.
IMAGE_COLUMNS = ("image", "images")


def check_tokenizer(processing_class: Any, model: Any) -> None:
    """Raise ValueError if `processing_class` is a multimodal processor instead of a tokenizer."""
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"`processing_class`, given or loaded, is a {type(processing_class).__name__}: images are not "
            f"supported. Pass AutoTokenizer.from_pretrained({_name(model) or '<its name>'!r})."
        )


def tokenizer_of(
    model: Any, processing_class: Any, args: PPOConfig, messages: str | None, plain: str | None
) -> Any:
    """Return the given tokenizer, or load the model's tokenizer as GRPOTrainer would."""
    if processing_class is None:
        by_name = isinstance(model, str)
        processing_class = AutoProcessor.from_pretrained(
            _name(model),
            revision=(args.model_init_kwargs or {}).get("revision") if by_name else None,
            truncation_side="left",
            padding_side="left",
            trust_remote_code=args.trust_remote_code,
        )
        check_tokenizer(processing_class, model)
    if messages is not None:
        check_template(processing_class, f" of `{messages}`")
    if (
        plain
        and processing_class.chat_template
        and not any(mark in plain for mark in processing_class.all_special_tokens)
    ):
        logger.warning(
            "Prompts are plain text (%.40r), so the chat template is not used. A chat model needs "
            "[{'role': 'user', 'content': prompt}].",
            plain,
        )
    return processing_class


def _name(model: Any) -> str:
    return model if isinstance(model, str) else get_config_model_id(model.config)


def check_columns(name: str, columns: Iterable[str]) -> None:
    """Raise ValueError if the columns include images."""
    for column in IMAGE_COLUMNS:
        if column in columns:
            raise ValueError(f"{name} has a column `{column}`, and images are not supported.")


def read_prompt(prompt: Any, row: str = "a row", *, complete: bool = False) -> Any:
    """Return a prompt in the form of chat templates; refuse one that is neither text nor text messages.

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


def _has_content(part: Any) -> bool:
    """Whether `part` is a message with content or tool calls."""
    if not isinstance(part, Mapping):
        return False
    return part.get("content") is not None or bool(part.get("tool_calls"))
