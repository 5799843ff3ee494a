"""Pieces of tokens add up to the text, whatever the tokenizer makes of bytes and spaces."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trl_stppo.trainer.recorder import cut


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


def fallback_tokenizer() -> Tokenizer:
    """Two words, and bytes for all else: a run of them that is no text takes back its valid beginning."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {"▁a": 256, "b": 257}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="b"))
    space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    return tokenizer


@pytest.mark.parametrize("text", ["plain", "naïve €5", "👩\u200d💻!", "日本語\x00\u202e", ""])
def test_a_character_of_several_tokens_belongs_to_its_last_one(text):
    tokenizer = byte_tokenizer()
    pieces = cut(tokenizer.encode(text).ids, tokenizer.decode, tokenizer)
    expected = [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]
    assert pieces == expected


@pytest.mark.parametrize("backed", [True, False])
@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer, fallback_tokenizer])
def test_any_tokens_add_up_to_their_text(make, backed):
    """A policy that has learned nothing samples halves of characters all the time."""
    tokenizer, draw = make(), random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(draw.randrange(60))]
        pieces = cut(ids, tokenizer.decode, tokenizer if backed else None)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids)


def test_a_decoder_that_rewrites_its_past_still_adds_up():
    def decode(ids):
        return "".join("ab"[i % 2] for i in ids)[::-1] + f"/{len(ids)}"

    ids = list(range(99))
    pieces = cut(ids, decode, None)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == decode(ids)
