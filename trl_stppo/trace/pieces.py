"""The text of each token, such that all of them together are the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

# How far a piece is looked for behind the one before: what stands between the two is text that no token
# alone has, the space of a word or a character of several tokens.
GAP = 32


def cut(ids: Sequence[int], decode: Callable[[list[int]], str], backend: Any) -> list[str]:
    """One piece per token; their concatenation is the decoded text, whatever the tokenizer.

    A token that completes no character gets ""; what never finds its place goes to the last one.

    Args:
        ids: of the tokens.
        decode: ids to text, without cleaning up and with special tokens.
        backend: the tokenizer of `tokenizers` behind it, None where there is none.
    """
    text, pieces, done = decode(list(ids)), [], 0
    stream = DecodeStream(skip_special_tokens=False)
    for token in ids:
        try:
            piece = decode([token]) if backend is None else stream.step(backend, token)
        except Exception:  # a decoder that takes back what it has given, as for half a character
            stream = DecodeStream(skip_special_tokens=False)
            piece = stream.step(backend, token)
        piece = piece or ""
        found = text.find(piece, done, done + len(piece) + GAP)
        upto = done if found < 0 else found + len(piece)
        pieces.append(text[done:upto])
        done = upto
    if pieces:
        pieces[-1] += text[done:]
    return pieces
