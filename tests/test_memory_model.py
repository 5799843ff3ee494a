"""The memory model of benchmarks/: shapes against real models, sizes against autograd and sums by hand."""

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from tests.kit.script_kit import scripts
from trl_stppo import STPPOConfig
from trl_stppo.generation.slots import SlotCache, Span
from trl_stppo.models.critic import SeparateCritic, SharedCritic

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
# The tile does not hide the rest.
NARROW = replace(SETUP, prompt=2000, geometry=replace(SHAPE, vocab=10), trainable_bytes=2)


def lora(rank: int = 5) -> LoraConfig:
    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def shape(name: str) -> Any:
    return memory.policy_shape(CONFIGS[name], "float32")


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


# --------------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decoder_is_read_without_its_adapters(name):
    found = memory.geometry_of(shape(name))
    attention, mlp = ((64, 64), (64, 32), (64, 32), (64, 64)), ((64, 192), (64, 192), (192, 64))
    assert (found.hidden, found.intermediate, found.layers, found.vocab) == (64, 192, 3, 500)
    assert (found.query, found.key, found.largest) == (64, 32, 64 * 192)
    assert found.linear == 3 * sum(a * b for a, b in (*attention, *mlp))
    assert found.parameters == count(shape(name))
    assert memory.geometry_of(memory.policy_shape(CONFIGS[name], "float32", lora())) == found


def test_nf4_takes_4_127_bits():
    rest = SHAPE.parameters - LINEAR
    assert SHAPE.four_bit_weights(2) == round(LINEAR * (4 + 0.126953125) / 8) + 2 * rest


# TRL casts adapters on packed weights.
@pytest.mark.parametrize(("four_bit", "each"), [(False, 4), (True, 2)])
def test_adapters_and_a_shared_critic(four_bit, each):
    policy = memory.policy_shape(CONFIGS["qwen2"], "bfloat16", lora(), four_bit=four_bit)
    found = memory.read_setup(policy, SharedCritic(policy), rows=7)
    whole = 2 * count(shape("qwen2"))
    assert found.weights == (found.geometry.four_bit_weights() if four_bit else whole)
    widths = 3 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))
    assert (found.trainable, found.critic_trainable) == (5 * widths, 5 * widths + 65)
    assert found.adapters == each * 2 * 5 * widths + 4 * 65
    assert (found.four_bit, found.full, found.rows) == (four_bit, False, 7)
    assert (found.weight_bytes, found.trainable_bytes) == (2, each)


def test_a_fully_trained_policy_with_a_critic_of_its_own():
    policy = memory.policy_shape(CONFIGS["qwen2"], "float32")
    with torch.device("meta"):
        critic = Qwen2ForSequenceClassification(Qwen2Config(**SMALL, num_labels=1)).bfloat16()
    found = memory.read_setup(policy, SeparateCritic(critic), policy)
    assert found.weights == found.reference_weights == 4 * found.trainable == 4 * count(policy)
    assert (found.critic_trainable, found.critic_weights) == (count(critic), 2 * count(critic))
    assert found.full
    assert found.critic_full


def test_settings_of_a_configuration(tmp_path):
    def settings(**options):
        args = STPPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4,
            gradient_accumulation_steps=4, num_mini_batches=2, max_completion_length=33, **options
        )  # fmt: skip
        return memory.settings_of(args, 9)

    found = settings(optim="adamw_torch", gradient_checkpointing=True)
    assert (found["rows"], found["prompt"], found["completion"]) == (4, 9, 33)
    assert (found["slots"], found["optim"]) == (16, "adamw_torch")
    assert found["accumulates"]
    assert found["checkpointing"]
    assert found["bias_buffers"] == 1
    assert settings(entropy_coef=0.1)["bias_buffers"] == 2
    assert settings(variant="ppo", entropy_coef=0.1)["bias_buffers"] == 0


# --------------------------------------------------------------------------- by hand


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


@pytest.mark.parametrize(("buffers", "fresh"), [(0, 1000), (1, 2000)])
def test_new_gradients_are_held_beside_the_sums_while_they_accumulate(buffers, fresh):
    parts = memory.phases(replace(NARROW, bias_buffers=buffers))["update"]
    assert parts["gradients"] == 2000 * (1 + buffers) + 1000 + fresh
    alone = memory.phases(replace(NARROW, bias_buffers=buffers, accumulates=False))["update"]
    assert alone["gradients"] == 2000 * (1 + buffers) + 1000


def test_trained_embeddings_and_head_have_a_gradient_each():
    parts = memory.phases(replace(NARROW, full=True, accumulates=False))["update"]
    assert parts["gradients"] == 2000 + 1000 + 2 * 10 * 64 * 4


def test_states_of_the_optimizer():
    step = memory.phases(replace(SETUP, optim="adamw_torch"))["optimizer step"]
    assert (step["gradients"], step["optimizer"], step["step's tables"]) == (6000, 12_000, 6000)
    paged = memory.phases(replace(SETUP, optim="paged_adamw_8bit"))
    assert paged["update"]["optimizer"] == 0, "it leaves the card while others need it"
    assert paged["optimizer step"]["optimizer"] == 3000
    parameter = torch.nn.Parameter(torch.zeros(15, 100))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    held = [t for t in optimizer.state[parameter].values() if t.numel() > 1]
    assert sum(t.numel() * t.element_size() for t in held) == 12_000


def test_the_peak_is_the_worst_phase():
    sums = {name: sum(parts.values()) for name, parts in memory.phases(SETUP).items()}
    assert list(sums) == ["rollout", "scoring", "update", "optimizer step"]
    assert memory.peak(SETUP) == sums["update"] == max(sums.values())


# ----------------------------------------------------------------- against real ones


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


def test_packed_weights_are_counted_with_their_constants():
    weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.uint8), requires_grad=False)
    inner = SimpleNamespace(absmax=torch.zeros(2), code=torch.zeros(3))
    weight.quant_state = SimpleNamespace(
        absmax=torch.zeros(5, dtype=torch.uint8), code=torch.zeros(16), offset=torch.zeros(()),
        state2=inner,
    )  # fmt: skip
    assert memory.byte_size([weight, torch.zeros(2)]) == 32 + (5 + 64 + 4) + (8 + 12) + 8


@pytest.mark.parametrize("adapted", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, True), (torch.float32, True)],
    ids=["float32", "bfloat16", "float32 under autocast"],
)
def test_what_autograd_keeps_of_a_layer(dtype, autocast, adapted):
    """Two layers more, so that only what belongs to layers counts; within 5 percent."""
    per_layer = (saved(dtype, autocast, adapted, 3) - saved(dtype, autocast, adapted, 1)) / 2
    stored = []
    for layers in (1, 3):
        geometry = memory.geometry_of(memory.policy_shape(layered(layers), "float32"))
        setup = memory.Setup(
            geometry=geometry, weights=0, trainable=0, critic_trainable=0, full=not adapted,
            weight_bytes=dtype.itemsize, compute_bytes=2 if autocast else dtype.itemsize,
            trainable_bytes=4 if adapted else dtype.itemsize, rows=2, completion=128,
            checkpointing=False,
        )  # fmt: skip
        stored.append(memory._graph(setup, not adapted)[0])
    assert (stored[1] - stored[0]) / 2 == pytest.approx(per_layer, rel=0.05)


def layered(layers: int) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip


def saved(dtype: torch.dtype, autocast: bool, adapted: bool, layers: int) -> int:
    """Bytes that a forward pass leaves for the backward pass, weights not counted."""
    model = AutoModelForCausalLM.from_config(layered(layers)).to(dtype)
    if adapted:
        model = get_peft_model(model, lora(4))
        model.enable_input_require_grads()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(512, (2, 128))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    backbone = model.get_base_model().model if adapted else model.model
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        backbone(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
