"""A decoder and a tokenizer small enough to train on a laptop, built only from text.

Both are Qwen2, because a tokenizer of another class saved beside a Qwen2 model is loaded as
`Qwen2Tokenizer`, with other ids and without an error.
"""

import json
from collections.abc import Iterable

from transformers import Qwen2Config, Qwen2Tokenizer

PAD_TOKEN = "<|pad|>"
END_OF_TURN = "<|end|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")

# One token comes before and one after each message, so that a longer conversation only appends tokens.
# The generation block marks the trained text and renders to nothing.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('role must be system, user or assistant: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def tiny_tokenizer(
    texts: Iterable[str], *, vocab_size: int = 512, markers: Iterable[str] = ()
) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer with a chat template whose end of turn is the EOS token.

    Args:
        texts: training texts of the merges; any other text still round-trips, in more tokens.
        vocab_size: tokens before `markers` are added, >= 300 (the bytes take 256).
        markers: strings that are always one token each and survive `skip_special_tokens`, such as
            the tags of a protocol.
    """
    if vocab_size < 300:
        raise ValueError(f"vocab_size is {vocab_size}; allowed are 300 and more. Raise it.")
    special = [PAD_TOKEN, END_OF_TURN, *ROLE_TOKENS]
    blank = Qwen2Tokenizer(unk_token=PAD_TOKEN, eos_token=END_OF_TURN, pad_token=PAD_TOKEN)
    tokenizer = blank.train_new_from_iterator(
        texts, vocab_size=vocab_size, new_special_tokens=special, show_progress=False
    )
    pairs = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    trained = Qwen2Tokenizer(
        vocab=tokenizer.get_vocab(),
        merges=[tuple(pair) for pair in pairs],
        unk_token=PAD_TOKEN,
        eos_token=END_OF_TURN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=list(ROLE_TOKENS),
        padding_side="left",
    )
    trained.add_tokens(list(markers))
    trained.chat_template = CHAT_TEMPLATE
    return trained


def tiny_config(tokenizer: Qwen2Tokenizer, **overrides: int | float) -> Qwen2Config:
    """Return the configuration of a two-layer Qwen2 with about half a million parameters."""
    settings: dict[str, int | float] = {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    # Tie the embeddings: copying a name is easier to learn if input and output share its vector.
    return Qwen2Config(**{**settings, **overrides}, bos_token_id=None, tie_word_embeddings=True)
