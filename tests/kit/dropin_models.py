"""Small models and data on disk, in the layout of those that TRL's example scripts load from the Hub."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from tests.kit.tool_model import tool_tokenizer
from trl_stppo.models.small import tiny_config

WORDS = [
    *("the", "film", "was", "slow", "and", "the", "score", "was", "fine", "but"),
    *("we", "liked", "how", "it", "ended", "on", "a", "quiet", "note"),
]


@cache
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """One like Pythia's: EOS and unknown are one token, no pad token, no chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    core.train_from_iterator([" ".join(WORDS)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )


def plain_models(folder: Path) -> tuple[str, str]:
    """A policy and a reward model of Pythia's kind; returns their paths."""
    tokenizer = plain_tokenizer()
    settings = {
        "vocab_size": -(-(len(tokenizer) + 1) // 64) * 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(0)
    models = {
        "policy": GPTNeoXForCausalLM(GPTNeoXConfig(**settings)),
        "reward": GPTNeoXForSequenceClassification(GPTNeoXConfig(**settings, num_labels=1)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "policy"), str(folder / "reward")


def agent_model(folder: Path, calls: list[str]) -> str:
    """A model that says one of a few things, tool calls among them; returns its path.

    Each of `calls` is one token, and what comes next is decided by the last token alone: one of them
    after a line break, with which every turn of the model starts, and then the end of the turn.
    """
    tokenizer = tool_tokenizer([" ".join(WORDS)])
    tokenizer.add_tokens(calls)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "max_position_embeddings": 4096}
    config = tiny_config(tokenizer, **sizes)
    config.tie_word_embeddings = False
    model = Qwen2ForCausalLM(config)
    said = tokenizer.convert_tokens_to_ids(calls)
    (start,) = tokenizer("\n")["input_ids"]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        seen = torch.nn.functional.rms_norm(model.model.embed_tokens.weight, (64,)) * 12 / 64
        model.lm_head.weight.zero_()
        model.lm_head.weight[said] = seen[start]
        model.lm_head.weight[tokenizer.eos_token_id] = seen[said].sum(dim=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_split(folder: Path, split: str, columns: dict[str, list[Any]]) -> None:
    """One split of a data set on disk, as `load_dataset(folder)` finds it."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    path = folder / "data" / f"{split}-00000-of-00001.parquet"
    Dataset.from_dict(columns).to_parquet(str(path))


def texts(count: int) -> list[str]:
    """Sentences of a few words each, all different at the start."""
    return [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(4 + i % 3)) for i in range(count)]
