"""Models of published shapes with random weights: memory and speed do not depend on the values."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_stppo.models.small import tiny_tokenizer

# Published configurations of Qwen2.5; `tiny` and `small` (1.1M and 110M parameters) are for the CPU.
GEOMETRIES: dict[str, dict[str, int | bool]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "tie_word_embeddings": True,
    },
    "small": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


def geometry(name: str) -> Qwen2Config:
    """The configuration of one of `GEOMETRIES`."""
    return Qwen2Config(max_position_embeddings=32768, rope_theta=1e6, **GEOMETRIES[name])


def save_random_model(
    name: str, folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> str:
    """Write model and tokenizer the way the Hub would hold them; returns the folder.

    The tokenizer is small, so that its ids fit every geometry.
    """
    tokenizer = tiny_tokenizer(["one two three four five six seven"], vocab_size=300)
    config = geometry(name)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def episode_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of agent episodes: log-normal, median a quarter of the longest, which occurs once.

    Prompt and completion together; multi-turn episodes end when the task is solved, so a few long
    ones stand beside many short ones.
    """
    draw = random.Random(seed)
    lengths = [
        min(longest, max(longest // 16, round(longest / 4 * draw.lognormvariate(0.0, 0.6))))
        for _ in range(count)
    ]
    lengths[draw.randrange(count)] = longest
    return lengths
