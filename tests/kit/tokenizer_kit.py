"""Tokenizers of the kinds that models come with, small and made here: Qwen, Mistral, GPT-2, in Python.

Each has the normaliser, pre-tokeniser, decoder, control tokens and chat template of its kind, and a
vocabulary learnt from a few lines.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from trl_stppo.rollout.chat import ChatRenderer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TEXTS = [
    "The quick brown fox asks: what is the end of a turn? user, assistant, system, tool.",
    "def f(x):\n    return [x, 'im_start', \"start_of_turn\"]\n\n\n<b>INST</b> think of it, model",
    "Frage: Wie heißt der Ort?\tAntwort: Köln, 東京 & Łódź; response and header, endoftext.\n",
] * 4
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content | tojson + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


@dataclass
class Kind:
    """A tokenizer, its end-of-turn token, all its control tokens, and whether it has a template."""

    tokenizer: Any
    end: str
    controls: tuple[str, ...]
    chats: bool = True

    @property
    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer, [self.tokenizer.convert_tokens_to_ids(self.end)])

    @property
    def control_ids(self) -> set[int]:
        return set(self.tokenizer.convert_tokens_to_ids(list(self.controls)))


def qwen() -> Kind:
    """Byte-level BPE under NFC, ChatML, and tags that are added but not special."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tags += ("<think>", "</think>")
    core = _byte_level(QWEN_WORDS)
    core.normalizer = normalizers.NFC()
    tokenizer = _fast(core, special, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    tokenizer.chat_template = (TEMPLATES / "qwen3_training.jinja").read_text()
    return Kind(tokenizer, "<|im_end|>", (*special, *tags))


def mistral(prepend: str = "first") -> Kind:
    """BPE on words, a blank before the row ("first") or each part ("always"), `[INST]` around the user's."""
    special = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    _train_with_bytes(core)
    tokenizer = _fast(core, special, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    _begins_with(tokenizer, "<s>")
    tokenizer.chat_template = MISTRAL
    return Kind(tokenizer, "</s>", special)


def gpt2() -> Kind:
    """Byte-level BPE with one control token, and no chat template."""
    core = _byte_level(None)
    tokenizer = _fast(core, ("<|endoftext|>",), eos_token="<|endoftext|>")
    return Kind(tokenizer, "<|endoftext|>", ("<|endoftext|>",), chats=False)


class SlowBytes(PreTrainedTokenizer):
    """In Python: one token per byte."""

    vocab_size = 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        parts = (t.encode() if len(t) > 1 else bytes([ord(t)]) for t in tokens)
        return b"".join(parts).decode(errors="replace")


def slow() -> Kind:
    """In Python, with ChatML and a tag that is added but not special."""
    tokenizer = SlowBytes(
        eos_token="<|im_end|>", pad_token="<pad>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.add_tokens([AddedToken("<tool_response>", special=False)])
    tool = "{{ '<tool_response>' + m.content }}"
    tokenizer.chat_template = CHATML.replace(
        "{{ '<|im_start|>' + m.role",
        "{% if m.role == 'tool' %}" + tool + "{% else %}{{ '<|im_start|>' + m.role",
    ).replace("'<|im_end|>\n' }}{% endfor", "'<|im_end|>\n' }}{% endif %}{% endfor")
    return Kind(tokenizer, "<|im_end|>", ("<|im_start|>", "<|im_end|>", "<pad>", "<tool_response>"))


KINDS: dict[str, Callable[[], Kind]] = {
    "qwen": qwen, "mistral": mistral, "mistral, always": lambda: mistral("always"), "gpt2": gpt2,
    "slow": slow,
}  # fmt: skip


def _byte_level(words: str | None) -> Tokenizer:
    core = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    split = [] if words is None else [pre_tokenizers.Split(Regex(words), "isolated")]
    core.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 600, "initial_alphabet": alphabet, "show_progress": False}
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(**options))
    return core


def _train_with_bytes(core: Tokenizer) -> None:
    """Learn merges, and put the bytes before them; they are no added tokens."""
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learnt = json.loads(core.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    numbers = {token: number for number, token in enumerate(tokens)}
    merges, unknown = [tuple(pair) for pair in learnt["merges"]], {"unk_token": "<unk>"}
    core.model = models.BPE(numbers, merges, byte_fallback=True, fuse_unk=True, **unknown)


def _fast(core: Tokenizer, special: tuple[str, ...], **named: str) -> PreTrainedTokenizerFast:
    others = [token for token in special if token not in named.values()]
    named |= {"additional_special_tokens": others, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=core, **named)


def _begins_with(tokenizer: PreTrainedTokenizerFast, token: str) -> None:
    pair = (token, tokenizer.convert_tokens_to_ids(token))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[pair]
    )
