"""The models of a run, compared with the tokens that they will read."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import cached_file

from ...hub.loading import load_tokenizer
from ...models.critic import SeparateCritic
from .._trl import get_config_model_id, max_context_tokens
from ..bridge import Bridge
from ..planning.rewards import RewardPlan
from .players import renderer

logger = logging.getLogger(__name__)
# Tokens that a reward model's template and tokenizer may add to an episode.
MARGIN = 16
POLICYS_TOKENS = ("model", "ref_model", "value_model")


def check_readers(host: Bridge, rewards: RewardPlan) -> int | None:
    """Refuse models that cannot read what they will get; return the shortest context, in tokens."""
    unwrap, reads = host.accelerator.unwrap_model, host.text_tokenizer
    critic = host.critic.model if isinstance(host.critic, SeparateCritic) else None
    models = zip(POLICYS_TOKENS, (host.model, host.ref_model, critic), [reads] * 3, strict=True)
    judges = zip(rewards.fields, host.reward_funcs, host.reward_processing_classes, strict=False)
    shortest, own = max_context_tokens(host), get_config_model_id(unwrap(host.model).config)
    for field, wrapped, tokenizer in (*models, *judges):
        model: Any = unwrap(wrapped) if isinstance(wrapped, nn.Module) else None
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            continue
        _check_rows(field, model, tokenizer, host)
        if (name := get_config_model_id(model.config)) not in ("", own, tokenizer.name_or_path):
            _check_words(field, name, tokenizer)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(context, int):
            continue
        if field not in POLICYS_TOKENS:
            # The tokenizer of a reward model may need more tokens than the policy's.
            check = partial(_check_length, field, context)
            model.register_forward_pre_hook(check, with_kwargs=True)
            context -= MARGIN
        if shortest is None or context < shortest:
            logger.warning("`%s` reads so few tokens that no episode exceeds %s.", field, context)
            shortest = context
    return shortest


def _check_rows(field: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, host: Bridge) -> None:
    """Refuse tokens beyond the model's vocabulary, except special ones that no template writes."""
    rows = getattr(model.config.get_text_config(), "vocab_size", len(tokenizer))
    text = renderer(host, host.text_tokenizer).control.template_text if len(tokenizer) > rows else ""
    for number in range(rows, len(tokenizer)):
        token = tokenizer.convert_ids_to_tokens(number)
        known = tokenizer.added_tokens_decoder.get(number)
        if known is None or not known.special or token == tokenizer.pad_token or token in text:
            raise ValueError(
                f"`{field}` has {rows} rows, but its `processing_class` has the token {token!r}, number "
                f"{number}; resize the model."
            )


def _check_words(field: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model whose own tokenizer, if it has one, has other words under the same numbers."""
    words: dict[int, str] = {}
    with suppress(Exception):
        # Without this file transformers makes a tokenizer of the model's type.
        cached_file(name, TOKENIZER_CONFIG_FILE)
        words = {number: word for word, number in load_tokenizer(name).get_vocab().items()}
    for word, number in tokenizer.get_vocab().items():
        if number not in tokenizer.added_tokens_decoder and words.get(number, word) != word:
            raise ValueError(
                f"`{field}` has its own vocabulary: token {number} is {words[number]!r} in {name!r}, but "
                f"{word!r} in what it will read."
            )


def _check_length(field: str, context: int, module: nn.Module, args: object, inputs: dict[str, Any]) -> None:
    """Refuse a row that is longer than its reward model can read."""
    if (tokens := inputs["input_ids"].shape[1]) > context:
        raise ValueError(
            f"`{field}` reads at most {context} tokens, and an episode has {tokens}: set a smaller "
            f"`max_completion_length`."
        )
