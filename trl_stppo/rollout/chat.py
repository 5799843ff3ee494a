"""Conversion of messages to token ids for a conversation that only grows at its end.

Sampled ids are kept as sampled. The text after a turn (an environment's text, tool results, an agent's next
messages) is rendered by the chat template after a placeholder turn, cut off there and tokenised once, so no
text is decoded and encoded again. It holds only control tokens that the template has written, unless its
environment is trusted.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from itertools import takewhile, zip_longest
from typing import Any

from .control_tokens import ControlTokens
from .images import TEXTS_ONLY, Content, ImageReader, as_blocks, images_of

Message = dict[str, Any]
# Placeholder whose position in a rendered text is searched: a Unicode noncharacter, which no text has.
_GAP = "\ufdd1"
# Name of a tool that no text has.
_TOOL = "tool_of_a_probe"
# Roles of messages to which an environment's opening is appended.
_READ_ROLES = ("user", "tool")
IMAGE_AFTER_TEXT = "an image follows a prompt of text; allowed is a prompt of messages"


class ChatRenderer:
    """Renders prompts and observations for one tokenizer and template.

    `chat_template` overrides the tokenizer's own; `eos_token_ids` end a turn.

    Attributes:
        control: keeps control tokens out of observations.
        template: arguments of `apply_chat_template` besides messages and tools.
        reader: reads images; None if the policy reads only text.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: list[int],
        *,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer, self.reader = tokenizer, reader
        self.eos_token_ids = set(eos_token_ids)
        self.template = {"chat_template": chat_template, **(template_kwargs or {})}
        self.control = ControlTokens(tokenizer, self.template)
        self._of_rows: dict[str, ChatRenderer] = {}

    def with_options(self, **options: Any) -> ChatRenderer:
        """Return a renderer with other values of `template`."""
        options = {**self.template, **options}
        ends, reader = [*self.eos_token_ids], self.reader
        return ChatRenderer(self.tokenizer, ends, template_kwargs=options, reader=reader)

    def for_row(self, row: dict[str, Any]) -> ChatRenderer:
        """Return the renderer of a row's episode, with the settings in its column `chat_template_kwargs`."""
        given = (row.get("chat_template_kwargs") or {}).items()
        # Arrow adds the settings of other rows, with None as their value.
        own = {name: value for name, value in given if value is not None}
        if self.reader is not None and own.get("add_vision_id"):
            # Qwen's templates have this option, and each message is rendered alone.
            raise ValueError(
                "`chat_template_kwargs` has add_vision_id=True, which would number the images of each "
                "message from 1. Leave it out."
            )
        return self._of_rows.setdefault(repr(own), self.with_options(**own)) if own else self

    def prompt_ids(
        self,
        prompt: list[Message] | str,
        tools: list[Any] | None = None,
        *,
        opening: Content = "",
        trusted: bool = False,
    ) -> list[int]:
        """Return the token ids of a prompt, up to the start of the model's turn.

        `opening` is an environment's opening text (see `with_opening`); if `trusted`, it may hold control
        tokens.
        """
        if opening and not trusted:
            opening = self.control.split(opening)
        prompt = with_opening(prompt, opening)
        if isinstance(prompt, str):
            return self.control.text_ids(prompt, special=True)
        # Pass None for an empty list, because some templates render boilerplate for it.
        tools = tools or None
        ids = self.control.render(
            self._form(prompt), tools=tools, add_generation_prompt=True, **self._own_template
        )
        return self._expanded(ids, prompt)

    def observation_ids(
        self,
        messages: list[Message],
        *,
        last: int,
        conversational: bool = True,
        trusted: bool = False,
    ) -> list[int]:
        """Return the token ids of an observation: tool results, or a user message.

        A user message is plain text if not `conversational`. `last`: see `suffix_ids`. `trusted` text may
        hold control tokens.
        """
        messages = messages if trusted else self.control.split(messages)
        if messages[0]["role"] == "user" and not conversational:
            if images_of(messages):
                raise ValueError(IMAGE_AFTER_TEXT)
            return self.control.text_ids(messages[0]["content"])
        return self._expanded(self.suffix_ids(messages, last=last), messages)

    def read(self, prompt: list[Message] | str) -> list[Message] | str:
        """Return a prompt whose images were read."""
        if self.reader is None and images_of(prompt):
            raise ValueError(f"has an image, and {TEXTS_ONLY}")
        if self.reader is None or isinstance(prompt, str):
            return prompt
        read = self.reader.read_content
        return [{**m, "content": read(m["content"])} if "content" in m else m for m in prompt]

    def _form(self, messages: list[Message]) -> list[Message]:
        """Return messages in the form that templates of vision models take: content is a list of blocks."""
        if self.reader is None:
            return messages
        return [{**m, "content": as_blocks(m.get("content") or "")} for m in messages]

    def _expanded(self, ids: list[int], messages: list[Message]) -> list[int]:
        return ids if self.reader is None else self.reader.expand(ids, images_of(messages))

    def suffix_ids(self, messages: list[Message], *, last: int) -> list[int]:
        """Return the token ids of messages that follow a turn, and of the header of the next turn.

        `last` is the turn's last token. If no token has ended the turn (it was cut), the ids begin with the
        template's own end of a turn. A sampled end is not repeated. Some models end a turn with the
        first token of the next message (GLM), which is not repeated either.

        Raises:
            ValueError: the template leaves out the turn that the messages follow.
        """
        results = takewhile(lambda message: message["role"] == "tool", messages)
        names = [message["name"] for message in results]
        _, asked, after = self._around_turn(messages, names)
        ids, ended = self.control.text_ids(after), self.ended([last])
        ends_message = [last, *self.control.text_ids(asked)[:1]]
        if names or (ended and not self.ended(ids[:1])):
            # Drop the template's tokens before the turn's end (the rest of a call), because the policy has
            # already written this text.
            alone = self.control.text_ids(self._around_turn([], names)[2])
            pairs = enumerate(zip_longest(ids, alone))
            ids = ids[next(n for n, (a, b) in pairs if a != b or a in self.eos_token_ids) :]
        return ids[1:] if ended and ids[0] in ends_message else ids

    def without_control_tokens(self, messages: list[Message]) -> list[Message]:
        """Return the messages with control tokens made plain text. System messages stay unchanged."""
        # In the agent's turns keep tags such as `<think>`, but no special tokens, which decoding leaves out.
        by_role = {"assistant": ControlTokens(self.tokenizer, written=False), "system": None}
        controls = [by_role.get(message["role"], self.control) for message in messages]
        pairs = zip(messages, controls, strict=True)
        return [control.split(message) if control else message for message, control in pairs]

    @cached_property
    def shows_tools(self) -> bool:
        """Return whether the chat template writes a request's tools; True if it refuses the request."""
        tool = {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
        options = {"tools": [{"type": "function", "function": tool}], **self._own_template}
        asked = self._form([{"role": "user", "content": ""}])
        with suppress(Exception):
            return _TOOL in self.control.rendered_text(asked, **options)
        return True

    def preserves_turns(self) -> bool:
        """Return whether the chat template renders the beginning of a conversation equally, whatever follows.

        Raises:
            ValueError: the template ends no turn with an end-of-turn token.
        """
        *before, alone = self._around_turn([])
        *earlier, after = self._around_turn([{"role": "user", "content": "x"}])
        ends = self.control.text_ids(alone) + self.control.text_ids(after)[:1]
        if self.eos_token_ids.isdisjoint(ends):
            raise ValueError(
                f"The chat template of {self._template_name} does not end an assistant message with any of "
                f"the end-of-turn ids {sorted(self.eos_token_ids)}. Set the tokenizer's eos_token."
            )
        return before == earlier

    def ended(self, ids: list[int]) -> bool:
        """Return whether a turn ended with an end-of-turn token."""
        return bool(ids) and ids[-1] in self.eos_token_ids

    def decode_action(self, ids: list[int]) -> str:
        """Decode a turn to the text that the environment receives.

        Special tokens are left out, except for tags of the task, such as `<answer>`.
        """
        if not self.control.tags.intersection(ids):
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        hidden = self.control.special.keys() - self.control.tags | self.eos_token_ids
        return self.tokenizer.decode([token for token in ids if token not in hidden])

    def _around_turn(self, messages: list[Message], names: list[str] | None = None) -> list[str]:
        """Render a user message, a turn and `messages`; split the text at the contents of the first two.

        These contents are placeholders; with `names`, the tools that the turn calls, an argument of the last
        call is the placeholder. Nothing is cached, because templates may write the date.
        """
        turn: Message = {"role": "assistant", "content": _GAP}
        if names:
            functions = [{"name": name, "arguments": {}} for name in names]
            functions[-1]["arguments"] = {"x": _GAP}
            calls = [{"type": "function", "function": function} for function in functions]
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
        options = {"add_generation_prompt": bool(messages), **self._own_template}
        conversation = [{"role": "user", "content": _GAP}, turn, *messages]
        try:
            parts = self.control.rendered_text(self._form(conversation), **options).split(_GAP, 2)
        except Exception:
            if not names:
                raise
            parts = []
        # Some templates render only one call of a turn, or none, but all results.
        if len(parts) < 3 and names:
            return self._around_turn(messages, names[:1] if len(names) > 1 else None)
        if len(parts) < 3:
            raise ValueError(
                f"The chat template of {self._template_name} leaves out a turn that messages of the roles "
                f"{[message['role'] for message in messages]} follow. Set a `chat_template` that keeps it."
            )
        return parts

    @property
    def _own_template(self) -> dict[str, Any]:
        """Return `template`, or raise ValueError if there is no chat template."""
        if not self.template["chat_template"]:
            check_template(self.tokenizer)
        return self.template

    @property
    def _template_name(self) -> str:
        name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        return f"{name!r}{' (given as `chat_template`)' if self.template['chat_template'] else ''}"


def check_template(tokenizer: Any, rows: str = "") -> None:
    """Raise ValueError if the tokenizer has no chat template."""
    # Skip tokenizers without this attribute, because other libraries may render without a template.
    if not getattr(tokenizer, "chat_template", "its own"):
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise ValueError(f"The prompts{rows} are messages, but the tokenizer {name!r} has no chat template.")


def with_opening(prompt: list[Message] | str, opening: Content) -> list[Message] | str:
    """Append an environment's opening to the prompt's last message.

    If this message is neither a user's message nor a tool's result, the opening becomes a separate user
    message, because some templates (Gemma) leave out a system message that no user message follows.
    """
    if not opening:
        return prompt
    if isinstance(prompt, str):
        if not isinstance(opening, str):
            raise ValueError(IMAGE_AFTER_TEXT)
        return prompt + opening
    if prompt[-1]["role"] not in _READ_ROLES:
        return [*prompt, {"role": "user", "content": opening}]
    content = prompt[-1]["content"]
    if not (isinstance(content, str) and isinstance(opening, str)):
        content, opening = as_blocks(content), as_blocks(opening)
    return [*prompt[:-1], {**prompt[-1], "content": content + opening}]
