"""Pieces of tokens add up to the text, whatever the tokenizer makes of bytes and spaces."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trl_stppo.trace.pieces import MAX_OPEN, TokenPieces


def byte_tokenizer() -> Tokenizer:
    """One token per byte, as byte-level BPE without a merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """Words that carry the space before them, as SentencePiece has it: the first one loses it."""
    words = ["▁the", "▁cat", "s", "▁", "▁ran", ".", "<x>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<x>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize("text", ["plain", "naïve €5", "👩\u200d💻!", "日本語\x00\u202e", ""])
def test_a_character_of_several_tokens_belongs_to_its_last_one(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    pieces = TokenPieces(tokenizer.decode)(ids)
    expected = [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]
    assert pieces == expected


def test_any_bytes_add_up_to_their_text():
    """A policy that has learned nothing samples halves of characters all the time."""
    tokenizer, draw = byte_tokenizer(), random.Random(0)
    cut = TokenPieces(tokenizer.decode)
    for _ in range(200):
        ids = [draw.randrange(256) for _ in range(draw.randrange(1, 60))]
        pieces = cut(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids)


def test_words_keep_the_space_before_them():
    tokenizer = word_tokenizer()
    pieces = TokenPieces(tokenizer.decode)([0, 1, 2, 4, 5, 3, 0])
    assert pieces == ["the", " cat", "s", " ran", ".", " ", " the"]


def test_a_decoder_that_rewrites_its_past_still_adds_up():
    """No such window can be matched; whole texts are, once in a while."""

    def decode(ids):
        return "".join("ab"[i % 2] for i in ids)[::-1] + f"/{len(ids)}"

    ids = list(range(3 * MAX_OPEN))
    pieces = TokenPieces(decode)(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == decode(ids)


def test_one_odd_character_costs_a_long_text_little():
    tokenizer, calls = byte_tokenizer(), []

    def decode(ids):
        calls.append(len(ids))
        return tokenizer.decode(ids)

    cut = TokenPieces(decode)
    text = "a plain word " * 500
    cut(tokenizer.encode("€ " + text).ids)
    calls.clear()
    pieces = cut(tokenizer.encode(text + "€" + text).ids)
    assert pieces == [*text, "", "", "€", *text]
    assert len(calls) < 20
