"""Split the decoded text of tokens into one piece per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

# Search range for a piece after the previous one: text between them belongs to no single token, such as a
# space, or a character of several tokens.
GAP = 32


def cut(ids: Sequence[int], decode: Callable[[list[int]], str], backend: Any) -> list[str]:
    """Return one piece of text per token. Joined, the pieces are the decoded text, for any tokenizer.

    A token that completes no character gets ""; the last piece gets the rest. `decode` keeps special
    tokens and does not clean up; `backend` is the tokenizer of `tokenizers`, if any.
    """
    text, pieces, done = decode(list(ids)), [], 0
    stream = DecodeStream(skip_special_tokens=False)
    for token in ids:
        try:
            piece = decode([token]) if backend is None else stream.step(backend, token)
        except Exception:
            # Some decoders change earlier text, as for half a character.
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
