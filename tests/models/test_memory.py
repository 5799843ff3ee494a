"""The memory model: shapes against real models, sizes against autograd and against sums by hand."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.kit.published import QWEN25, qwen25
from trl_stppo.generation.slots import SlotCache, Span
from trl_stppo.models.critic import SeparateCritic, SharedCritic
from trl_stppo.models.memory import GIB, Geometry, Setup, estimate, make_qlora, optimizer_bytes
from trl_stppo.models.shapes import critic_shape, geometry_of, policy_shape, read_setup

SMALL = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2 untied": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SMALL, head_dim=24, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SMALL, head_dim=32, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=16),
    "gpt2": GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=500),
}
LORA = LoraConfig(r=5, target_modules="all-linear", task_type="CAUSAL_LM")


def shape(name: str) -> Any:
    return policy_shape(CONFIGS[name], "float32")


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


class TestGeometry:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_parameters_and_lora_parameters_are_those_of_the_model(self, name):
        model = shape(name)
        found = geometry_of(model)
        assert found.parameters == count(model)
        adapted = policy_shape(CONFIGS[name], "float32", LORA)
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        # PEFT adapts the experts of a mixture as well, which are no linear layers.
        assert found.lora_parameters(5) == trained or name == "mixtral"
        assert geometry_of(adapted) == found, "adapters are no part of it"

    def test_a_llama_like_decoder_by_hand(self):
        found = geometry_of(shape("mistral"))
        attention = ((64, 128), (64, 64), (64, 64), (128, 64))  # heads of 32
        matrices = [*attention, (64, 192), (64, 192), (192, 64)]
        assert (found.hidden, found.intermediate, found.layers, found.vocab) == (64, 192, 3, 500)
        assert (found.query, found.key, found.largest) == (128, 64, 64 * 192)
        assert found.linear == 3 * sum(a * b for a, b in matrices)
        assert found.widths == 3 * sum(a + b for a, b in matrices)
        assert found.parameters == found.linear + 2 * 500 * 64 + 7 * 64

    def test_the_experts_of_a_token_are_its_mlp(self):
        assert geometry_of(shape("mixtral")).intermediate == 2 * 192
        assert geometry_of(shape("gpt2")).intermediate == 4 * 64

    @pytest.mark.parametrize("size", QWEN25)
    def test_the_shapes_of_qwen25_are_those_published(self, size):
        billions = {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.62, "14B": 14.77, "32B": 32.76}
        found = geometry_of(policy_shape(qwen25(size), "float32")).parameters / 1e9
        assert found == pytest.approx(billions[size], abs=0.006)

    def test_a_model_without_attention_is_refused_by_name(self):
        config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50)
        with pytest.raises(ValueError, match="memory of a 'mamba' model is unknown"):
            geometry_of(policy_shape(config, "float32"))

    def test_the_cache_of_a_7b_model_is_56_kib_per_token(self):
        found = geometry_of(policy_shape(qwen25("7B"), "bfloat16"))
        assert found.cache_per_token(2) == 2 * 28 * 4 * 128 * 2 == 57344

    def test_nf4_takes_4_127_bits(self):
        linear = 2 * (4 * 128 * 128 + 3 * 128 * 256)
        rest = 100 * 128 + 5 * 128
        found = replace(SHAPE, linear=linear, parameters=linear + rest)
        assert found.four_bit_weights(2) == round(linear * (4 + 0.126953125) / 8) + 2 * rest
        assert found.four_bit_weights(4, double=False) == round(linear * 4.5 / 8) + 4 * rest


LINEAR = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256)
SHAPE = Geometry(
    hidden=64, intermediate=256, layers=3, vocab=1000, query=64, key=32,
    parameters=LINEAR + 1000 * 64 + 7 * 64, linear=LINEAR, widths=3 * (2 * 128 + 2 * 96 + 3 * 320),
    largest=64 * 256,
)  # fmt: skip
SETUP = Setup(
    geometry=SHAPE, weights=10_000_000, trainable=1000, critic_trainable=500, adapters=6000, rows=2,
    prompt=20, completion=100, slots=3,
)  # fmt: skip

# Where the tile does not hide what else there is.
NARROW = replace(SETUP, prompt=2000, geometry=replace(SHAPE, vocab=10), trainable_bytes=2)


class TestByHand:
    """Each phase of one small set-up, added up here in other words."""

    def test_rollout(self):
        parts = estimate(SETUP).phases["rollout"]
        assert parts["weights"] == 10_000_000
        assert parts["adapters"] == 6000
        assert parts["optimizer"] == 1500 * 8
        # 3 slots of 120 tokens and one for padding, half as much again.
        assert parts["KV cache"] == 4 * 180 * (2 * 3 * 2 * 16 * 2)
        # 360 tokens: residual 2, float32 norm 4, its output 2; four times the MLP's width in 2 bytes.
        forward = 360 * (64 * 8 + 4 * 256 * 2)
        assert parts["forward"] == forward + 3 * 1000 * 16

    def test_update_with_checkpointing(self):
        parts = estimate(SETUP).phases["update"]
        assert parts["gradients"] == 4000 + 2000
        tokens = 240
        inputs, final, mask = tokens * 3 * 64 * 2, tokens * 64 * 4, 2 * 120 * 120 * 3
        # CUDA: 200 completion tokens, the full width of a tile; their hidden states and gradients.
        tile = 200 * 32768 * 2 + 200 * 64 * 6
        assert parts["activations"] == inputs + final + mask
        assert parts["log-probabilities"] == tile

    @pytest.mark.parametrize(("buffers", "fresh"), [(0, 1000), (1, 2000)])
    def test_new_gradients_are_held_beside_the_sums_while_they_accumulate(self, buffers, fresh):
        setup = replace(NARROW, bias_buffers=buffers)
        parts = estimate(setup).phases["update"]
        assert "log-probabilities" not in parts
        assert parts["gradients"] == 2000 * (1 + buffers) + 1000 + fresh

    def test_trained_embeddings_and_head_have_a_gradient_each(self):
        setup = replace(NARROW, full=True, accumulates=False)
        parts = estimate(setup).phases["update"]
        assert parts["gradients"] == 2000 + 1000 + 2 * 10 * 64 * 4

    def test_an_overlapped_rollout_has_a_copy_of_the_policy_and_its_cache_beside_the_update(self):
        alone, beside = estimate(SETUP), estimate(replace(SETUP, overlaps=True))
        cache = sum(alone.phases["rollout"][name] for name in ("KV cache", "forward"))
        assert beside.total("rollout") == alone.total("rollout") + 4000
        assert beside.total("update") == alone.total("update") + 4000 + cache
        served = replace(SETUP, overlaps=True, slots=0)
        assert estimate(served).peak == estimate(replace(SETUP, slots=0)).peak

    @pytest.mark.parametrize("buffers", [0, 1, 2])
    def test_the_clipping_bias_and_the_extra_terms_have_a_buffer_each(self, buffers):
        setup = replace(SETUP, bias_buffers=buffers, accumulates=False)
        assert estimate(setup).phases["update"]["gradients"] == 4000 * (1 + buffers) + 2000

    def test_update_without_checkpointing(self):
        setup = replace(SETUP, checkpointing=False, completion=8, prompt=8, trainable_bytes=2)
        parts = estimate(setup).phases["update"]
        layer = 64 * 2 + 2 * 64 * 4 + 2 * 64 * 2 + 5 * 64 * 2 + 4 * 256 * 2
        stored = 3 * 32 * layer + 32 * 64 * 4 + 2 * 16 * 16 * 3
        assert parts["activations"] == stored
        assert parts["log-probabilities"] == 16 * 32768 * 2 + 16 * 64 * 6

    def test_optimizer_step(self):
        parts = estimate(replace(SETUP, optim="adamw_torch")).phases["optimizer step"]
        assert parts["gradients"] == 6000
        assert parts["step's tables"] == 6000

    def test_the_peak_is_the_worst_phase_with_the_overhead(self):
        result = estimate(SETUP)
        sums = {name: sum(parts.values()) for name, parts in result.phases.items()}
        assert result.phase == max(sums, key=sums.get) == "update"
        assert result.peak == sums["update"] + result.overhead == result.total("update")
        assert result.overhead == round(0.7 * GIB)
        assert len(result.phases) == 4
        assert result.parts("rollout") == "overhead 0.7"


def test_the_rollouts_cache_takes_no_more_than_is_expected():
    """The real one, whose episodes grow token by token to their full length."""
    cache = SlotCache(keep_ids=False, device=torch.device("cpu"))
    states = torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16)  # two heads of 16
    largest = 0
    for length in range(16, SETUP.length + 1):
        cache.reserve(SETUP.slots, length)
        cache.span = Span([0], torch.tensor([[length - 1]]), length, False)
        for layer in range(SHAPE.layers):
            cache.update(states, states, layer)
        tensors = [t.data for layer in cache.layers for t in (layer.keys, layer.values)]
        largest = max(largest, sum(t.numel() * t.element_size() for t in tensors))
    expected = estimate(SETUP).phases["rollout"]["KV cache"]
    assert 0.6 * expected < largest <= expected


@pytest.mark.parametrize(("optim", "expected"), [
    ("adamw_torch_fused", 8000),
    ("adamw_8bit", 2000),
    ("paged_adamw_8bit", 2000),
    ("paged_adamw_32bit", 8000),
    ("lion_8bit", 1000),
    ("sgd", 0),
    ("some_new_name", 8000),
])  # fmt: skip
def test_optimizer_states(optim, expected):
    assert optimizer_bytes(optim, 1000) == expected


def test_torchs_optimizers_keep_their_state_in_the_parameters_dtype():
    assert optimizer_bytes("adamw_torch", 1000, 2) == 4000
    assert optimizer_bytes("paged_adamw_32bit", 1000, 2) == 8000


def test_the_states_of_real_optimizers():
    for name, make in (
        ("adamw_torch", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
    ):
        parameter = torch.nn.Parameter(torch.zeros(100, 10))
        parameter.grad = torch.ones_like(parameter)
        optimizer = make([parameter], lr=0.1)
        optimizer.step()
        states = [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor)]
        held = sum(t.numel() * t.element_size() for t in states if t.numel() > 1)
        assert optimizer_bytes(name, 1000) == held, name


def test_qlora_needs_no_second_backbone_and_no_reference():
    full = replace(SETUP, full=True, critic_full=True, critic_weights=7, reference_weights=5)
    qlora = make_qlora(full, rank=4)
    adapter = SHAPE.lora_parameters(4)
    assert (qlora.weights, qlora.critic_weights) == (SHAPE.four_bit_weights(), 0)
    assert qlora.reference_weights == 0
    assert (qlora.trainable, qlora.critic_trainable) == (adapter, adapter + 65)
    assert qlora.adapters == 2 * (2 * adapter + 65)
    assert qlora.four_bit
    assert not qlora.full


class TestReading:
    """Models on the meta device."""

    def test_adapters_and_a_shared_critic(self):
        config = CONFIGS["qwen2"]
        for four_bit, each in ((False, 4), (True, 2)):  # TRL casts adapters on packed weights
            policy = policy_shape(config, "bfloat16", LORA, four_bit=four_bit)
            found = read_setup(policy, SharedCritic(policy), rows=7)
            own = found.geometry
            assert found.weights == (
                own.four_bit_weights() if four_bit else 2 * count(shape("qwen2"))
            )
            assert found.trainable == own.lora_parameters(5)
            assert found.critic_trainable == own.lora_parameters(5) + 65
            head = 4 * 65
            assert found.adapters == each * (found.trainable + found.critic_trainable - 65) + head
            assert (found.four_bit, found.full, found.rows) == (four_bit, False, 7)
            assert (found.weight_bytes, found.trainable_bytes) == (2, each)

    def test_a_fully_trained_policy_with_a_critic_of_its_own(self):
        policy, critic = shape("llama"), critic_shape(CONFIGS["llama"], "bfloat16")
        found = read_setup(policy, SeparateCritic(critic), policy)
        assert found.weights == found.reference_weights == 4 * count(policy)
        # No head of the language, one of a scalar.
        assert found.critic_trainable == count(policy) - 500 * 64 + 64
        assert found.critic_weights == 2 * found.critic_trainable
        assert found.critic_geometry.linear == found.geometry.linear
        assert found.full
        assert found.critic_full


def test_paged_states_leave_the_card_while_others_need_it():
    phases = estimate(replace(SETUP, optim="paged_adamw_8bit")).phases
    assert phases["update"]["optimizer"] == 0
    assert phases["optimizer step"]["optimizer"] == 3000


MORE = {
    "geometry": replace(SHAPE, layers=6), "weights": 20_000_000, "trainable": 2000,
    "critic_trainable": 5000, "adapters": 12000, "critic_weights": 1000, "reference_weights": 1000,
    "critic_geometry": replace(SHAPE, layers=12, hidden=1024, intermediate=4096), "full": True,
    "weight_bytes": 4, "compute_bytes": 4, "trainable_bytes": 8, "rows": 3, "prompt": 200,
    "completion": 200, "checkpointing": False, "optim": "ademamix", "bias_buffers": 1, "slots": 300,
    "scoring_rows": 4000, "other": 1, "gathered": 1, "overlaps": True,
}  # fmt: skip


class TestMonotonic:
    def test_every_field_is_tried(self):
        rest = {"accumulates", "critic_full", "four_bit"}  # below
        assert {f.name for f in fields(Setup)} == MORE.keys() | rest

    @pytest.mark.parametrize("name", MORE)
    def test_more_takes_more_in_some_phase_and_less_in_none(self, name):
        more = estimate(replace(SETUP, **{name: MORE[name]})).phases
        sums = [
            (sum(more[phase].values()), sum(parts.values()))
            for phase, parts in estimate(SETUP).phases.items()
        ]
        assert all(new >= old for new, old in sums)
        assert any(new > old for new, old in sums)

    def test_accumulation_takes_more_than_one_micro_batch(self):
        assert estimate(NARROW).peak > estimate(replace(NARROW, accumulates=False)).peak

    @pytest.mark.parametrize("name", ["four_bit", "critic_full"])
    def test_dequantising_and_a_full_critic_take_more(self, name):
        assert estimate(replace(NARROW, **{name: True})).peak > estimate(NARROW).peak

    def test_what_is_gathered_is_there_in_the_rollout_alone(self):
        phases = estimate(replace(SETUP, gathered=7)).phases
        assert [name for name, parts in phases.items() if parts["others"] == 7] == ["rollout"]
