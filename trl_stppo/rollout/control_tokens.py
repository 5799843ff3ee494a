"""Tokenisation of text from outside, so that this text yields no control tokens.

A tokenizer reads `<|im_end|>` as the end of a turn wherever it stands, so the author of a passage, a web
page or a tool's answer could write as system or assistant. Here a mark splits each such string before the
chat template gets it, and the rendered text is tokenised piece by piece between the marks. So only strings
that the template itself has written become control tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from typing import Any

# A noncharacter of Unicode, which texts do not contain.
MARK = "\ufdd0"
# Templates compare the values of these fields of a message.
_STRUCTURE = ("role", "type")
_TURN = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
_CALL = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
# Conversations whose rendering shows the strings that a template writes.
_PROBES = (
    [*_TURN, _TURN[0]],
    [_TURN[0], {**_TURN[1], "tool_calls": _CALL}, {"role": "tool", "name": "f", "content": "x"}],
)


class ControlTokens:
    """The strings that a tokenizer reads as control tokens, and tokenisation that makes them plain text.

    They are the special tokens, and all other added tokens that the chat template writes
    (`<tool_response>`, `<think>`), unless `written` is False. Tokens of a single character do not count.

    `template` has arguments of `apply_chat_template`; None as `chat_template` is the tokenizer's own.
    """

    def __init__(
        self, tokenizer: Any, template: dict[str, Any] | None = None, *, written: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self._template, self._written = template or {}, written

    def split(self, data: Any) -> Any:
        """Insert a mark into each control token, also if its parts stand in two neighbouring texts."""
        before = ""

        def walk(part: Any) -> Any:
            nonlocal before
            if isinstance(part, str):
                marked = self._split(part, before)
                before = (before + part)[-self._longest :]
                return marked
            if isinstance(part, list):
                return [walk(item) for item in part]
            if isinstance(part, dict):
                return {self.split(k): v if _is_word(k, v) else walk(v) for k, v in part.items()}
            return part

        return walk(data)

    def render(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of messages; without a mark, by `apply_chat_template`."""
        if not any(MARK in text for text in _texts(messages)):
            return list(self.tokenizer.apply_chat_template(messages, return_dict=False, **options))
        return self._ids(self.rendered_text(messages, **options))

    def rendered_text(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the text that the chat template renders of messages, with the marks in it."""
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def text_ids(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text. It continues a row; with `special` it is a whole row."""
        if not special:
            return self._ids(MARK + text)
        first, begin = text.split(MARK)[0], self.tokenizer.bos_token
        row = list(self.tokenizer(first)["input_ids"])
        if begin and first.startswith(begin) and row[1:2] == [self.tokenizer.bos_token_id]:
            # Drop the token that the tokenizer adds, because a rendered text begins with it already.
            row = row[1:]
        if MARK not in text:
            return row
        bare = self._plain(first)
        start = next(i for i in range(len(row) + 1) if row[i : i + len(bare)] == bare)
        return [*row[:start], *self._ids(text), *row[start + len(bare) :]]

    def _split(self, text: str, before: str) -> str:
        text = self._as_read(text.replace(MARK, "\ufffd"))
        tail, head = before[1 - self._longest :], text[: self._longest - 1]
        arising = self._count(tail + head) > self._count(tail) + self._count(head)
        return (MARK if tail and arising else "") + self._pattern.sub(rf"\g<0>{MARK}", text)

    def _as_read(self, text: str) -> str:
        """Return the normalised text if normalisation reveals a control token, else the text unchanged."""
        if self._normalize is None:
            return text
        normal = self._normalize(text)
        return normal if self._count(normal) > self._count(text) else text

    def _count(self, text: str) -> int:
        return len(self._pattern.findall(text))

    def _ids(self, text: str) -> list[int]:
        first, *rest = text.split(MARK)
        ids = self._plain(first)
        for piece in rest:
            ids += self._inside(piece)
        return ids

    def _inside(self, piece: str) -> list[int]:
        """Return the token ids of a text after another text; some tokenizers add a space to a first text."""
        # Use the first of these characters that stays a token of its own.
        for before in "\n)x":
            line, more = self._plain(before), self._plain(before + piece)
            if more[: len(line)] == line:
                return more[len(line) :]
        return self._plain(piece)

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @functools.cached_property
    def _added(self) -> dict[int, Any]:
        """Added tokens by id; empty for mistral-common, where no text becomes an added token."""
        try:
            return self.tokenizer.added_tokens_decoder
        except NotImplementedError:
            return {}

    @functools.cached_property
    def special(self) -> dict[int, str]:
        """Strings of special tokens by id."""
        return {id: token.content for id, token in self._added.items() if token.special}

    @functools.cached_property
    def tags(self) -> set[int]:
        """Ids of a task's special tokens, such as `<answer>`: neither eos, pad etc. nor in the template."""
        named = {*self.tokenizer.SPECIAL_TOKENS_ATTRIBUTES} if self._added else set()
        frame = {getattr(self.tokenizer, f"{name}_id", None) for name in named}
        return {id for id, text in self.special.items() if id not in frame and text not in self.template_text}

    @functools.cached_property
    def _contents(self) -> list[str]:
        """Strings of all control tokens, normalised forms included."""
        if not self._added:
            return []
        contents = {*self.special.values(), *self.tokenizer.all_special_tokens}
        if self._written:
            others = {t.content for t in self._added.values() if not t.content.isspace()}
            contents |= {content for content in others if content in self.template_text}
        if self._normalize is not None:
            contents |= {n for c in contents if c not in (n := self._normalize(c))}
        return sorted(content for content in contents if len(content) > 1)

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._contents), default=1)

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Pattern that matches the first character of each control token, even if tokens overlap."""
        starts = [
            f"{re.escape(first)}(?={'|'.join(re.escape(content[1:]) for content in group)})"
            for first, group in groupby(self._contents, key=lambda content: content[0])
        ]
        # Without control tokens the pattern matches nothing.
        return re.compile("|".join(starts) or "(?!)")

    @functools.cached_property
    def _normalize(self) -> Callable[[str], str] | None:
        """Function that normalises a text before the tokenizer searches it for added tokens, or None."""
        normalizer = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "normalizer", None)
        if normalizer is None:
            return None
        added = self.tokenizer.added_tokens_decoder.values()
        return normalizer.normalize_str if any(token.normalized for token in added) else None

    @property
    def split_tokens(self) -> list[str]:
        """Strings in the form of control tokens that the template writes and the tokenizer splits."""
        text = ""
        # A tokenizer of pre-tokenised rows may lack a template.
        with suppress(Exception):
            text = self.rendered_text(_PROBES[0], **self._template)
        written = dict.fromkeys(re.findall(r"<\|\w+\|>|<\w+_of_turn>", text))
        return [token for token in written if len(self._plain(token)) > 1]

    @functools.cached_property
    def template_text(self) -> str:
        """Source of the chat template, and its renderings of `_PROBES`."""
        own, given = self.tokenizer.chat_template, self._template.get("chat_template")
        known = [str(template) for template in (own, given) if template]
        options = {**self._template, "tokenize": False, "add_generation_prompt": True}
        for probe in _PROBES if known else ():
            # Ignore an error, because a template may refuse tools. Its source is used in any case.
            with suppress(Exception):
                known.append(self.tokenizer.apply_chat_template(probe, **options))
        return "\n".join(known)


def _is_word(key: Any, value: Any) -> bool:
    return key in _STRUCTURE and isinstance(value, str) and value.isidentifier()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(part)
