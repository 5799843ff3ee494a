"""Contexts (rows of tokens) of an agent's calls. A call continues, branches from or opens a context.

A call continues a context if its messages begin with those of the context's last turn. The sampled tokens
stay, the new messages follow as the chat template's suffix, and no text is tokenised again. A context always
holds what the policy read: if no match is found, the call takes a further row.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from .chat import ChatRenderer, Message
from .episode import Context, Episode, Limits
from .images import as_blocks, images_of, is_image

# Key for comparing messages: role, texts and keys of images, and calls by name and arguments.
Said = tuple[str, tuple[str | int, ...], tuple[tuple[str, str], ...]]
# Reasons to open a context: messages were rewritten or images left out, the tools changed, or the call
# continues an earlier turn.
OPENED = ("rewritten", "tools", "branch")


@dataclass(frozen=True)
class AgentRequest:
    """One call of an agent, with messages and tools in the form that chat templates take.

    Attributes:
        stop: the turn ends before the first of these texts.
        reads_tools: False leaves tool calls in the text.
        trains: False for a call that is not part of the episode.
        answer: the client's response, which is missing at first.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    reads_tools: bool = True
    trains: bool = True
    answer: Future[Any] = field(default_factory=Future, compare=False)


@dataclass(frozen=True)
class _Checkpoint:
    """A context after a turn: tokens after the prompt, messages with the turn, tools as JSON."""

    context: Context
    tokens: int
    said: tuple[Said, ...]
    tools: str


class AgentContexts:
    """The contexts of one episode of an agent, each within `limits`."""

    def __init__(self, episode: Episode, renderer: ChatRenderer, limits: Limits) -> None:
        self._episode, self._renderer, self._limits = episode, renderer, limits
        self._checkpoints: list[_Checkpoint] = []
        # Messages of the newest request after the turn that it continues.
        self.new: list[Message] = []

    def begin(self, request: AgentRequest) -> bool:
        """Make the request's context current. Return False, without a change, if the context is full."""
        said = tuple(_said(message) for message in request.messages)
        tools = json.dumps(request.tools, sort_keys=True)
        match, images = self._match(said, tools), images_of(request.messages)
        suffix = None if match is None else self._suffix(match, request.messages)
        prompt, more, reason = list[int](), list[int](), "branch"
        if match is not None and suffix is not None:
            context, more, new = match.context, suffix, request.messages[len(match.said) :]
            # Copy the context too if the call does not train, because it must not become part of the row.
            if match.tokens < len(context.ids) or not request.trains:
                prompt = context.prompt_ids + context.ids[: match.tokens] + suffix
        else:
            context, new = Context(), request.messages
            foreign = self._renderer.without_control_tokens(new)
            prompt = self._renderer.prompt_ids(foreign, request.tools)
            others = [each for each in self._checkpoints if each.tools != tools]
            same = any(each.said == said[: len(each.said)] for each in others)
            reason = "tools" if same else "rewritten"
        row = Context(prompt_ids=prompt or context.prompt_ids, ids=[] if prompt else context.ids + more)
        if row.turn_limit(self._limits) < 1:
            return False
        if prompt:
            context = self._opened(prompt, reason, trains=request.trains)
        else:
            context.append_observation(more)
        context.images = images
        self._episode.current, self.new = context, new
        return True

    def _opened(self, prompt: list[int], reason: str, *, trains: bool) -> Context:
        episode = self._episode
        if not trains:
            return Context(prompt_ids=prompt)
        if not episode.prompt_ids:
            episode.prompt_ids = prompt
            return episode
        episode.opened[reason] += 1
        episode.more.append(Context(prompt_ids=prompt))
        return episode.more[-1]

    def end(self, request: AgentRequest, answer: Message) -> None:
        """Record the turn that has been appended to the current context."""
        said = tuple(_said(message) for message in [*request.messages, answer])
        tools = json.dumps(request.tools, sort_keys=True)
        context = self._episode.context
        self._checkpoints.append(_Checkpoint(context, len(context.ids), said, tools))

    def _match(self, said: tuple[Said, ...], tools: str) -> _Checkpoint | None:
        """Return the longest matching state of a context; among matches of equal length, the latest."""
        found = [
            each for each in self._checkpoints
            if each.tools == tools and len(each.said) < len(said)
            and said[: len(each.said)] == each.said
            and all(role != "assistant" for role, *_ in said[len(each.said) :])
        ]  # fmt: skip
        return max(reversed(found), key=lambda each: len(each.said), default=None)

    def _suffix(self, match: _Checkpoint, messages: list[Message]) -> list[int] | None:
        """Return the tokens of the messages after a match, or None if the template cannot append them."""
        try:
            foreign = self._renderer.without_control_tokens(messages[len(match.said) :])
            last = match.context.ids[match.tokens - 1]
            return self._renderer.observation_ids(foreign, last=last, trusted=True)
        except Exception:
            # Chat templates raise various errors.
            return None


def _said(message: Message) -> Said:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    named = ((f["name"], json.dumps(f["arguments"], sort_keys=True)) for f in functions)
    blocks = as_blocks(message.get("content") or "")
    shown = tuple(b["image"].key if is_image(b) else b["text"] for b in blocks)
    return message["role"], shown, tuple(named)


def cut_at(
    stop: tuple[str, ...], ids: list[int], decode: Callable[[list[int]], str]
) -> tuple[list[int], str | None]:
    """Cut a turn after the token that ends the first stop string; return the turn and its text before `stop`.

    The text is None if the turn holds no stop string.
    """

    def holds(count: int) -> bool:
        return any(text in decode(ids[:count]) for text in stop)

    if not holds(len(ids)):
        return ids, None
    # If a beginning of the turn holds a stop string, every longer beginning holds it too.
    count = bisect_left(range(len(ids)), True, key=holds)
    text = decode(ids[:count])
    return ids[:count], text[: min(text.index(each) for each in stop if each in text)]
