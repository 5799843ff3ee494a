"""Messages and texts from outside, converted to the form that chat templates take.

Rows of data sets, clients of OpenAI's API, tools and `reset` have forms of their own, which templates
misread or refuse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..envs.base import joined_text

# Types of content blocks.
IMAGES = ("image", "image_url", "input_image")


def read_messages(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return a conversation in the form of chat templates. A conversation in this form stays equal.

    Text blocks become text, `developer` becomes `system`, arguments of calls become mappings, a tool's
    message gets the name of its call, and keys without a value are dropped (Arrow adds keys of other rows).
    A message without a role, content that is not text, and a call without a name raise ValueError.
    """
    names: dict[str, str] = {}
    return [read_message(message, names) for message in messages]


def read_message(message: Any, names: dict[str, str]) -> dict[str, Any]:
    """Convert a message as `read_messages` does. `names` collects each tool's name by call id."""
    read = _given(message)
    role = read.get("role") if isinstance(read, dict) else None
    if not (isinstance(role, str) and role):
        raise ValueError(f"{message!r:.80} has no `role`")
    read["role"] = {"developer": "system"}.get(role, role)
    if "content" in message:
        read["content"] = _text(read.get("content"))
    if calls := read.get("tool_calls"):
        read["tool_calls"] = [_call(call) for call in calls]
        for call in calls:
            names[call.get("id", "")] = call.get("function", call)["name"]
    if "tool_call_id" in read and not read.get("name"):
        read["name"] = names.get(read["tool_call_id"], "tool")
    return read


def check_turn(prompt: list[dict[str, Any]] | str) -> None:
    """Raise ValueError if a prompt ends with an assistant message: the next turn is not the model's."""
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise ValueError("it ends with an assistant message; allowed is one of another role")


def has_image(content: Any) -> bool:
    """Return whether a message's content, or a tool's result, holds an image."""
    blocks = content if isinstance(content, list) else []
    return any(isinstance(block, Mapping) and block.get("type") in IMAGES for block in blocks)


def _given(value: Any) -> Any:
    """Remove entries that are None from mappings, at every depth."""
    if isinstance(value, Mapping):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list) else value


def _text(content: Any) -> Any:
    if has_image(content) and all(map(_is_block, content)):
        return content
    text = content or "" if isinstance(content, str | None) else joined_text(content)
    if text is None:
        raise ValueError(f"`content` is {content!r:.80}; allowed are text and blocks of text")
    return text


def _is_block(block: Any) -> bool:
    """Return whether a block is an image, or has a text."""
    return block.get("type") == "image" or isinstance(block.get("text"), str)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise ValueError(f"`tool_calls` has {call!r:.80}, which names no function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Text that is no JSON stays as the model wrote it.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
