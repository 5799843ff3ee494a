"""The text of each token, such that all of them together are the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Open tokens in a row, until the whole text before them is decoded once more.
MAX_OPEN = 32

Decode = Callable[[list[int]], str]


class TokenPieces:
    """Cuts texts into the pieces of their tokens; remembers tokens it has seen.

    Args:
        decode: ids to text, without cleaning up and with special tokens.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """One piece per token; their concatenation is the decoded text, whatever the tokenizer."""
        ids = list(ids)
        for token in set(ids) - self._known.keys():
            self._known[token] = self._decode([token])
        pieces = [self._known[token] for token in ids]
        text = self._decode(ids)
        return pieces if "".join(pieces) == text else self._in_context(ids, text)

    def _in_context(self, ids: list[int], text: str) -> list[str]:
        """Pieces of tokens whose text depends on their neighbours.

        Bytes of one character, words that lose their space at the start of a text. Decodes a sliding
        window, and gives each token what of the window is new and in the text; a token that completes
        nothing gets "", and what never finds its place goes to the last one.
        """
        pieces: list[str] = []
        done = base = 0  # how far in the text pieces are given out, and where the open tokens begin
        begin = first_open = 0  # the window: tokens of context, then open ones
        context = ""
        for end in range(1, len(ids) + 1):
            new = self._decode(ids[begin:end])[len(context) :]
            size = _common(new, text[base : base + len(new)])
            settled = bool(new) and size == len(new)
            if not settled and end - first_open > MAX_OPEN:
                size, settled = _common(self._decode(ids[:end]), text) - base, True
            upto = max(done, base + size)
            pieces.append(text[done:upto])
            done = upto
            if settled:
                begin, first_open, base = first_open, end, done
                context = self._decode(ids[begin:end])
        if pieces:
            pieces[-1] += text[done:]
        return pieces


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
