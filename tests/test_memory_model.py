"""The memory model of benchmarks/: shapes against real models, sizes against autograd and sums by hand."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from tests.kit.script_kit import scripts
from trl_stppo.generation.slots import SlotCache, Span

with scripts():
    memory: Any = importlib.import_module("_memory_model")

SMALL = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "mistral": MistralConfig(**SMALL, tie_word_embeddings=False),
}
LINEAR = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256)
SHAPE = memory.Geometry(
    hidden=64, intermediate=256, layers=3, vocab=1000, query=64, key=32,
    parameters=LINEAR + 1000 * 64 + 7 * 64, linear=LINEAR, largest=64 * 256,
)  # fmt: skip
SETUP = memory.Setup(
    geometry=SHAPE, weights=10_000_000, trainable=1000, critic_trainable=500, adapters=6000, rows=2,
    prompt=20, completion=100, slots=3,
)  # fmt: skip


def lora(rank: int = 5) -> LoraConfig:
    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def shape(name: str) -> Any:
    return memory.policy_shape(CONFIGS[name], "float32")


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decoder_is_read_without_its_adapters(name):
    found = memory.geometry_of(shape(name))
    attention, mlp = ((64, 64), (64, 32), (64, 32), (64, 64)), ((64, 192), (64, 192), (192, 64))
    assert (found.hidden, found.intermediate, found.layers, found.vocab) == (64, 192, 3, 500)
    assert (found.query, found.key, found.largest) == (64, 32, 64 * 192)
    assert found.linear == 3 * sum(a * b for a, b in (*attention, *mlp))
    assert found.parameters == count(shape(name))
    assert memory.geometry_of(memory.policy_shape(CONFIGS[name], "float32", lora())) == found


def test_rollout():
    parts = memory.phases(SETUP)["rollout"]
    assert (parts["weights"], parts["adapters"], parts["optimizer"]) == (10_000_000, 6000, 12_000)
    # 3 slots of 120 tokens and one for padding, half as much again.
    assert parts["KV cache"] == 4 * 180 * (2 * 3 * 2 * 16 * 2)
    # 360 tokens: residual 2, float32 norm 4, its output 2; four times the MLP's width in 2 bytes.
    assert parts["forward"] == 360 * (64 * 8 + 4 * 256 * 2) + 3 * 1000 * 16


def test_update_with_checkpointing():
    parts = memory.phases(SETUP)["update"]
    assert parts["gradients"] == 4000 + 2000
    assert parts["activations"] == 240 * 3 * 64 * 2 + 240 * 64 * 4 + 2 * 120 * 120 * 3
    # 200 completion tokens, the full width of a tile; their hidden states and gradients.
    assert parts["log-probabilities"] == 200 * 32768 * 2 + 200 * 64 * 6


def test_update_without_checkpointing():
    setup = replace(SETUP, checkpointing=False, completion=8, prompt=8, trainable_bytes=2)
    parts = memory.phases(setup)["update"]
    layer = 64 * 2 + 2 * 64 * 4 + 2 * 64 * 2 + 5 * 64 * 2 + 4 * 256 * 2
    assert parts["activations"] == 3 * 32 * layer + 32 * 64 * 4 + 2 * 16 * 16 * 3
    assert parts["log-probabilities"] == 16 * 32768 * 2 + 16 * 64 * 6


def test_the_rollouts_cache_takes_no_more_than_is_expected():
    """The real one, whose episodes grow token by token to their full length."""
    cache = SlotCache(keep_ids=False, device=torch.device("cpu"))
    # Two heads of 16.
    states, largest = torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16), 0
    for length in range(16, SETUP.length + 1):
        cache.reserve(SETUP.slots, length)
        cache.span = Span([0], torch.tensor([[length - 1]]), length, False)
        for layer in range(SHAPE.layers):
            cache.update(states, states, layer)
        tensors = [t.data for layer in cache.layers for t in (layer.keys, layer.values)]
        largest = max(largest, sum(t.numel() * t.element_size() for t in tensors))
    expected = memory.phases(SETUP)["rollout"]["KV cache"]
    assert 0.6 * expected < largest <= expected
