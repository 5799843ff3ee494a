"""The text of each token, such that all of them together are the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Open tokens in a row, until the whole text before them is decoded once more.
MAX_OPEN = 32
# Tokens that are tried together, if they are the text as they are, before fewer are.
STRIDES = (1024, 64, 8, 1)

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
            # Behind itself: at the start of a text, some tokenizers drop the space of a word.
            alone = len(self._decode([token]))
            self._known[token] = self._decode([token, token])[alone:]
        usual = [self._known[token] for token in ids]
        text = self._decode(ids)
        return usual if "".join(usual) == text else self._in_context(ids, usual, text)

    def _in_context(self, ids: list[int], usual: list[str], text: str) -> list[str]:
        """Pieces where the text of some tokens depends on their neighbours.

        Bytes of one character, words that lose their space at the start of a text. What fits the text
        as usual is taken. Elsewhere it decodes a sliding window, and gives each token what of the window
        is new and in the text; a token that completes nothing gets "", and what never finds its place
        goes to the last one.
        """
        pieces: list[str] = []
        done = base = 0  # how far in the text pieces are given out, and where the open tokens begin
        begin = first_open = 0  # the window: tokens of context, then open ones
        while (end := len(pieces)) < len(ids):
            fitting = _fitting(usual, end, text, done) if first_open == end else 0
            if fitting:
                pieces += usual[end : end + fitting]
                done += sum(map(len, usual[end : end + fitting]))
                begin, first_open, base = end + fitting - 1, end + fitting, done
                continue
            end += 1
            context = self._decode(ids[begin:first_open])
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
        if pieces:
            pieces[-1] += text[done:]
        return pieces


def _fitting(usual: list[str], start: int, text: str, done: int) -> int:
    """How many tokens from here on are the text as they are; a part is enough, and 0 if not even one."""
    if not usual[start]:
        return 0
    for stride in STRIDES:
        if text.startswith("".join(usual[start : start + stride]), done):
            return len(usual[start : start + stride])
    return 0


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
