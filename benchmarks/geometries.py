"""Models of published shapes with random weights: memory and speed do not depend on the values.

Adapters, quantization and critics of the benchmarks' models are here too.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trl_stppo.models.small import tiny_tokenizer

# `make pretrained` makes this folder.
SMOLLM2 = Path(__file__).parents[1] / "runs" / "pretrained" / "smollm2-135m-instruct"
_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
# Published configurations of Qwen2.5; `tiny` and `small` (1.1M and 110M parameters) are for the CPU.
_SIZES = {
    "tiny": (128, 384, 4, 4, 2, 2048, True), "small": (768, 2048, 12, 12, 12, 32000, True),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152064, False),
}  # fmt: skip
GEOMETRIES = {name: dict(zip(_NAMES, sizes, strict=True)) for name, sizes in _SIZES.items()}


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


def lora(task: str = "CAUSAL_LM") -> LoraConfig:
    """Adapters on all linear layers, as QLoRA has them."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task)


def four_bit(dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4 with double quantization, which computes in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def separate_critic(model: str, dtype: torch.dtype, *, adapters: bool) -> Any:
    """A sequence-classification model on a backbone of its own, fully trained without adapters."""
    critic = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=dtype)
    return get_peft_model(critic, lora("SEQ_CLS")) if adapters else critic
