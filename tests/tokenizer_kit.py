"""Tokenizers of the kinds that models come with, small and made here: Qwen, Llama, Gemma, Mistral, GPT-2.

Each has the normaliser, pre-tokeniser, decoder, control tokens and chat template of its kind, and a
vocabulary learnt from a few lines.
"""

from __future__ import annotations

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
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

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
    """A tokenizer with what tests need to know of it.

    Attributes:
        tokenizer: itself.
        end: content of its end-of-turn token.
        controls: contents of all its control tokens.
        chats: whether it has a chat template.
        tools: whether that renders tools.
        whole: whether every text decodes to itself.
    """

    tokenizer: Any
    end: str
    controls: tuple[str, ...]
    chats: bool = True
    tools: bool = False
    whole: bool = True

    @property
    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer, [self.tokenizer.convert_tokens_to_ids(self.end)])

    @property
    def control_ids(self) -> set[int]:
        return set(self.tokenizer.convert_tokens_to_ids(list(self.controls)))


def qwen(template: str = "qwen3_training") -> Kind:
    """Byte-level BPE under NFC, ChatML, and tags that are added but not special."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tags += ("<think>", "</think>") if "qwen3" in template else ()
    core = _byte_level(QWEN_WORDS)
    core.normalizer = normalizers.NFC()
    tokenizer = _fast(core, special, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    tokenizer.chat_template = _trl(template)
    return Kind(tokenizer, "<|im_end|>", (*special, *tags), tools=True)


def llama3() -> Kind:
    """Byte-level BPE with headers, and a token at the beginning of each row."""
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
    special += ("<|eot_id|>", "<|python_tag|>", "<|reserved_special_token_0|>")
    core = _byte_level(QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))
    tokenizer = _fast(core, special, bos_token=special[0], eos_token="<|eot_id|>")
    _begins_with(tokenizer, special[0])
    tokenizer.chat_template = _trl("llama3_training")
    return Kind(tokenizer, "<|eot_id|>", special)


def gemma() -> Kind:
    """BPE on whole lines with bytes to fall back on, and runs of blanks as tokens."""
    special = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _train_with_bytes(core)
    tokenizer = _fast(core, special, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    blanks = ["\n", "\n\n", "▁▁", "▁▁▁", "<b>"]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in blanks])
    _begins_with(tokenizer, "<bos>")
    tokenizer.chat_template = _trl("gemma_training")
    return Kind(tokenizer, "<end_of_turn>", special)


def mistral(prepend: str = "first") -> Kind:
    """BPE on words with the blank in front, `[INST]` around what the user says.

    Args:
        prepend: where a blank is put in front: before the row ("first"), before each part between
            control tokens ("always"), or by the normaliser, as of old ("normalizer").
    """
    special = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    core = Tokenizer(models.BPE())
    if prepend == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        core.normalizer = normalizers.Sequence(steps)
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepend, split=False)
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
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


def byt5() -> Kind:
    """Transformers' own in Python, which ends each row with a token, with ChatML in its markers."""
    tokenizer = ByT5Tokenizer(extra_ids=2)
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "<extra_id_0>").replace(
        "<|im_end|>", "</s>"
    )
    controls = ("<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>")
    return Kind(tokenizer, "</s>", controls)


KINDS: dict[str, Callable[[], Kind]] = {
    "qwen2.5": lambda: qwen("qwen2_5_training"),
    "qwen3": qwen,
    "llama3": llama3,
    "gemma": gemma,
    "mistral": mistral,
    "mistral, always": lambda: mistral("always"),
    "mistral, of old": lambda: mistral("normalizer"),
    "gpt2": gpt2,
    "slow": slow,
    "byt5": byt5,
}


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
    core.model = models.BPE(
        {token: number for number, token in enumerate(tokens)},
        [tuple(pair) for pair in learnt["merges"]],
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )


def _fast(core: Tokenizer, special: tuple[str, ...], **named: str) -> PreTrainedTokenizerFast:
    others = [token for token in special if token not in named.values()]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        additional_special_tokens=others,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _begins_with(tokenizer: PreTrainedTokenizerFast, token: str) -> None:
    pair = (token, tokenizer.convert_tokens_to_ids(token))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[pair]
    )


def _trl(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()
