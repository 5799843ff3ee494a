"""Builds the reader of images, and compares chat template and processor with it before any rollout."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import ProcessorMixin

from ...generation.slots import base_of
from ...rollout.images import ImageReader, with_pictures
from ..bridge import Bridge
from .players import renderer

# Arguments by which models learn which tokens are images.
KINDS = ("mm_token_type_ids", "token_type_ids")
# Annotations of tools that return no images.
TEXTS = (str, int, float, bool, dict, None, "str", "int", "float", "bool", "dict", "None")


def build_reader(host: Bridge) -> ImageReader | None:
    """Return the reader of a policy with a processor, or None."""
    processor: Any = host.processing_class
    if not isinstance(processor, ProcessorMixin):
        return None
    reader = make_reader(host.accelerator.unwrap_model(host.model), processor)
    host.reader = reader
    # `generation_kwargs` replace what TRL sets.
    config = host.generation_config
    config.suppress_tokens = sorted({*(config.suppress_tokens or ()), reader.image_id})
    if host.chat_template or host.text_tokenizer.chat_template:
        _check_template(host, reader)
    return reader


def make_reader(model: nn.Module, processor: Any) -> ImageReader:
    """Make the reader of a model's processor, or raise ValueError if they do not fit."""
    base = base_of(model)
    token, kind = getattr(base.config, "image_token_id", None), type(processor).__name__
    if token is None or getattr(processor, "image_token", None) is None:
        raise ValueError(
            f"`processing_class` is a {kind}; allowed beside a {type(base).__name__} is a tokenizer."
        )
    # Upstream renders and parses with the templates that are set at the processor.
    for name in ("chat_template", "response_template", "response_schema"):
        if getattr(processor, name, None) is not None:
            setattr(processor.tokenizer, name, getattr(processor, name))
    rope_index = getattr(base.base_model, "get_rope_index", None)
    known = inspect.signature(base.forward).parameters
    kinds = next((name for name in KINDS if name in known), None)
    reader = ImageReader(processor, token, base.dtype, rope_index, kinds)
    if any(not image.tokens for image in reader.samples()):
        raise ValueError(f"`processing_class` is a {kind} of another model: it writes no token {token}.")
    return reader


def _check_template(host: Bridge, reader: ImageReader) -> None:
    """Compare tokens and tensors of messages with images with the processor's own."""
    chat, processor = renderer(host, host.text_tokenizer), host.processing_class
    one, other = reader.samples()
    blocks: list[dict[str, Any]] = [{"type": "image", "image": each} for each in (one, other)]
    blocks = [{"type": "text", "text": "x"}, *blocks, {"type": "text", "text": "y"}]
    first: dict[str, Any] = {"role": "user", "content": blocks}
    answers: dict[str, dict[str, Any]] = {"user": {"role": "assistant", "content": "z"}}
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **chat.template}
    options["chat_template"] = options["chat_template"] or host.text_tokenizer.chat_template

    def theirs(*messages: dict[str, Any]) -> Any:
        shown = [with_pictures([*messages])]
        return processor.apply_chat_template(shown, add_generation_prompt=True, **options)

    def refusal(why: str) -> ValueError:
        return ValueError(
            f"The chat template of `processing_class` ({type(processor).__name__}) {why}. Set a "
            f"`chat_template` that writes each image once and keeps it in later messages, such as TRL's."
        )

    try:
        made, ids = theirs(first), chat.prompt_ids([first])
    except Exception as error:
        # Chat templates raise various errors.
        raise refusal(f"fails for an image: {error}") from error
    tensors = reader.joined([one, other], made["input_ids"].device)
    same = all(made[name].to(own.dtype).equal(own) for name, own in tensors.items())
    if not same or made["input_ids"][0].tolist() != ids:
        raise refusal("changes or drops the images of a message")
    show = [t.__name__ for t in host.tools if inspect.signature(t).return_annotation not in TEXTS]
    if show:
        # Some templates write results of tools only after their calls.
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        answers["tool"] = {"role": "assistant", "content": "", "tool_calls": [call]}
    for role, answer in answers.items():
        later = {"role": role, "name": "f", "content": blocks}
        try:
            suffix = chat.observation_ids([later], last=host.eos_token_ids[0])
            whole = theirs(first, answer, later)["input_ids"][0].tolist()
            why = None if whole[-len(suffix) :] == suffix else "are changed"
        except Exception as error:
            why = f"are refused ({error})"
        if why:
            whose = "" if role == "user" else f" of tools ({show} are not annotated as `-> str`)"
            raise refusal(f"writes later images{whose} otherwise than the first: they {why}")
