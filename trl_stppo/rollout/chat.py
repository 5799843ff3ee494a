"""Conversion of messages to token ids for a conversation that only grows at its end.

Sampled ids are kept as sampled. An observation is tokenised once, as the suffix that the chat
template puts after an assistant message, so no text is decoded and encoded again. It holds only
control tokens that the template has written, unless its environment is trusted.
"""

from __future__ import annotations

import functools
from typing import Any

from .control_tokens import ControlTokens

Message = dict[str, Any]
_DUMMY: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


class ChatRenderer:
    """Renders prompts and observations for one tokenizer and template.

    `chat_template` overrides the tokenizer's own; `eos_token_ids` end a turn.

    Attributes:
        control: keeps control tokens out of observations.
        template: arguments of `apply_chat_template` besides messages and tools.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: list[int],
        *,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = set(eos_token_ids)
        self.template = {"chat_template": chat_template, **(template_kwargs or {})}
        self.control = ControlTokens(tokenizer, self.template)

    def prompt_ids(
        self,
        prompt: list[Message] | str,
        tools: list[Any] | None = None,
        *,
        opening: str | list[Any] = "",
        trusted: bool = False,
    ) -> list[int]:
        """Return the token ids of a prompt, up to the start of the model's turn.

        `opening` is an environment's opening text, appended to the last message; if `trusted`, it may
        hold control tokens.
        """
        if opening and not trusted:
            opening = self.control.split(opening, before=_end_of(prompt))
        prompt = with_opening(prompt, opening)
        if isinstance(prompt, str):
            return self.control.text_ids(prompt, special=True)
        # `or None`: some templates render boilerplate for an empty list.
        return self._render(prompt, add_generation_prompt=True, tools=tools or None)

    def observation_ids(
        self, text: str, *, conversational: bool, turn_ended: bool, trusted: bool = False
    ) -> list[int]:
        """Return the token ids of an observation: a user message, or plain text if not `conversational`.

        `turn_ended`: whether the turn before ended with an end-of-turn token of its own. If not (it was
        cut), the observation begins with the template's. `trusted` text may hold control tokens.
        """
        text = text if trusted else self.control.split(text)
        if not conversational:
            return self.control.text_ids(text)
        return self.suffix_ids([{"role": "user", "content": text}], turn_ended=turn_ended)

    def suffix_ids(self, messages: list[Message], *, turn_ended: bool) -> list[int]:
        """Return the token ids of user messages that follow a turn. `turn_ended`: see `observation_ids`.

        Raises:
            ValueError: the template renders earlier messages differently once these follow.
        """
        before, end = self._boundary
        after = self._render([*_DUMMY, *messages], add_generation_prompt=True)
        cut = end + 1 if turn_ended else end
        if after[:cut] != before[:cut]:
            raise ValueError(
                f"The chat template of {self._template_name} renders earlier messages differently once later "
                f"ones follow. Set a prefix-preserving `chat_template`."
            )
        return after[cut:]

    def without_control_tokens(self, messages: list[Message]) -> list[Message]:
        """Return the messages with control tokens made plain text. System messages stay unchanged."""
        # Tags such as `<think>` are the agent's tokens; its turns are decoded without special ones.
        by_role = {"assistant": ControlTokens(self.tokenizer, written=False), "system": None}
        controls = [by_role.get(message["role"], self.control) for message in messages]
        pairs = zip(messages, controls, strict=True)
        return [control.split(message) if control else message for message, control in pairs]

    def check_template(self) -> None:
        """Raise ValueError unless the chat template lets a conversation grow by appending tokens."""
        self.observation_ids("x", conversational=True, turn_ended=True)

    def ended(self, ids: list[int]) -> bool:
        """Whether a turn ended with an end-of-turn token."""
        return bool(ids) and ids[-1] in self.eos_token_ids

    def decode_action(self, ids: list[int]) -> str:
        """Decode a turn to the text that the environment receives."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    @functools.cached_property
    def _boundary(self) -> tuple[list[int], int]:
        """Return a rendered dummy conversation, and the position where its assistant message ends."""
        ids = self._render(_DUMMY, add_generation_prompt=False)
        for position in range(len(ids) - 1, -1, -1):
            if ids[position] in self.eos_token_ids:
                return ids, position
        raise ValueError(
            f"The chat template of {self._template_name} does not end an assistant message with any of the "
            f"end-of-turn ids {sorted(self.eos_token_ids)}. Set the tokenizer's eos_token."
        )

    @property
    def _template_name(self) -> str:
        name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        return f"{name!r}{' (given as `chat_template`)' if self.template['chat_template'] else ''}"

    def _render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        tools: list[Any] | None = None,
    ) -> list[int]:
        if not self.template["chat_template"]:
            check_template(self.tokenizer)
        return self.control.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **self.template,
        )


def check_template(tokenizer: Any, rows: str = "") -> None:
    """Raise ValueError if the tokenizer has no chat template."""
    # Tokenizers of other libraries may render messages without a template.
    if not getattr(tokenizer, "chat_template", "its own"):
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise ValueError(
            f"The prompts{rows} are messages, but the tokenizer {name!r} has no chat template."
        )


def with_opening(prompt: list[Message] | str, opening: str | list[Any]) -> list[Message] | str:
    """Append an environment's opening text to the prompt's last message."""
    if not opening:
        return prompt
    if isinstance(prompt, str):
        return prompt + str(opening)
    last, content = prompt[-1], prompt[-1]["content"]
    if isinstance(opening, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(opening, str) and isinstance(content, list):
        opening = [{"type": "text", "text": opening}]
    return [*prompt[:-1], {**last, "content": content + opening}]


def _end_of(prompt: list[Message] | str) -> str:
    """Return the text at the end of a prompt, to which an opening is appended."""
    content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if isinstance(content, list):
        content = content[-1].get("text") if content else ""
    return content if isinstance(content, str) else ""
