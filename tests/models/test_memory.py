"""The memory model: shapes against real models, sizes against autograd and against sums by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from trl_stppo.generation.slots import SlotCache, Span
from trl_stppo.models.geometry import QWEN25, Geometry, geometry_of
from trl_stppo.models.memory import (
    GIB,
    Setup,
    estimate,
    make_qlora,
    make_setup,
    optimizer_bytes,
)

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2 untied": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SMALL, head_dim=24, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SMALL, head_dim=32),
}


def qwen25(shape: Geometry) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
    )


def count(auto, config, **options) -> int:
    with torch.device("meta"):
        model = auto.from_config(config, **options)
    return sum(p.numel() for p in model.parameters())


class TestGeometry:
    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
    def test_parameters_are_those_of_the_model(self, config):
        shape = geometry_of(config)
        assert shape.parameters == count(AutoModelForCausalLM, config)
        config.num_labels = 1
        expected = count(AutoModelForSequenceClassification, config)
        assert shape.critic_parameters == expected

    @pytest.mark.parametrize("size", QWEN25)
    def test_the_shapes_of_qwen25_are_those_of_their_models(self, size):
        shape = QWEN25[size]
        assert geometry_of(qwen25(shape)) == shape
        assert shape.parameters == count(AutoModelForCausalLM, qwen25(shape))
        billions = {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.62, "14B": 14.77, "32B": 32.76}
        assert shape.parameters / 1e9 == pytest.approx(billions[size], abs=0.006)

    @pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "mistral"])
    def test_lora_parameters_are_those_of_peft(self, name):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIGS[name])
        adapted = get_peft_model(model, LoraConfig(r=5, target_modules="all-linear"))
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert geometry_of(CONFIGS[name]).lora_parameters(5) == trained

    def test_a_mixture_of_experts_is_refused_by_name(self):
        with pytest.raises(ValueError, match=r"'mixtral'.*known are qwen2"):
            geometry_of(MixtralConfig(num_hidden_layers=1))

    def test_the_cache_of_a_7b_model_is_56_kib_per_token(self):
        assert QWEN25["7B"].cache_per_token(2) == 2 * 28 * 4 * 128 * 2 == 57344

    def test_nf4_takes_4_127_bits(self):
        shape = Geometry(128, 256, 2, 4, 4, 32, 100, tied=True)
        linear = 2 * (4 * 128 * 128 + 3 * 128 * 256)
        assert shape.linear_parameters == linear
        rest = 100 * 128 + 5 * 128
        assert shape.four_bit_weights(2) == round(linear * (4 + 0.126953125) / 8) + 2 * rest
        assert shape.four_bit_weights(4, double=False) == round(linear * 4.5 / 8) + 4 * rest


SHAPE = Geometry(64, 256, 3, 4, 2, 16, 1000, tied=True)
SETUP = Setup(
    geometry=SHAPE,
    weights=10_000_000,
    trainable=1000,
    critic_trainable=500,
    adapters=6000,
    rows=2,
    prompt=20,
    completion=100,
    slots=3,
)

# Where the tile does not hide what else there is.
NARROW = replace(
    SETUP, prompt=2000, geometry=replace(SHAPE, vocab=10), device="cpu", trainable_bytes=2
)


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

    def test_torch_folds_a_tile_with_seven_float_tables(self):
        setup = replace(SETUP, device="cpu", weight_bytes=4, compute_bytes=4)
        parts = estimate(setup).phases["update"]
        # Prompt positions too, and only the vocabulary that there is.
        assert parts["log-probabilities"] == 240 * 1000 * (4 + 29) + 240 * 64 * 8

    def test_the_peak_is_the_worst_phase_with_the_overhead(self):
        result = estimate(SETUP)
        sums = {name: sum(parts.values()) for name, parts in result.phases.items()}
        assert result.phase == max(sums, key=sums.get) == "update"
        assert result.peak == sums["update"] + result.overhead == sum(result.parts.values())
        assert result.overhead == round(0.7 * GIB)
        assert len(result.table()) == 4
        assert result.table()[0].startswith("rollout: 0.71 GiB (weights 0.01, ")


def test_the_rollouts_cache_takes_no_more_than_is_expected():
    """The real one, whose episodes grow token by token to their full length."""
    cache = SlotCache(keep_ids=False, device=torch.device("cpu"))
    states = torch.zeros(1, SHAPE.kv_heads, 1, SHAPE.head_dim, dtype=torch.bfloat16)
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


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ("adamw_torch_fused", 8000),
        ("adamw_8bit", 2000),
        ("paged_adamw_8bit", 2000),
        ("paged_adamw_32bit", 8000),
        ("lion_8bit", 1000),
        ("sgd", 0),
        ("some_new_name", 8000),
    ],
)
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
    full = make_setup(SHAPE, "full", reference_weights=5, completion=10)
    qlora = make_qlora(full, rank=4)
    adapter = SHAPE.lora_parameters(4)
    assert (qlora.weights, qlora.critic_weights) == (SHAPE.four_bit_weights(), 0)
    assert qlora.reference_weights == 0
    assert (qlora.trainable, qlora.critic_trainable) == (adapter, adapter + 65)
    assert qlora.adapters == 2 * (2 * adapter + 65)
    assert qlora.four_bit
    assert not qlora.full
    assert make_setup(SHAPE, "qlora", rank=4, completion=10) == qlora
    lora = make_setup(SHAPE, "lora", rank=4, completion=10)
    assert (lora.weights, lora.adapters) == (2 * SHAPE.parameters, 4 * (2 * adapter + 65))
    assert not lora.four_bit
    with pytest.raises(ValueError, match="'full', 'lora' and 'qlora'"):
        make_setup(SHAPE, "dora")


def test_paged_states_leave_the_card_while_others_need_it():
    phases = estimate(replace(SETUP, optim="paged_adamw_8bit")).phases
    assert phases["update"]["optimizer"] == 0
    assert phases["optimizer step"]["optimizer"] == 3000


MORE = {
    "geometry": replace(SHAPE, layers=6),
    "weights": 20_000_000,
    "trainable": 2000,
    "critic_trainable": 5000,
    "adapters": 12000,
    "critic_weights": 1000,
    "reference_weights": 1000,
    "critic_geometry": replace(SHAPE, layers=12, hidden=1024, intermediate=4096),
    "full": True,
    "weight_bytes": 4,
    "compute_bytes": 4,
    "trainable_bytes": 8,
    "rows": 3,
    "prompt": 200,
    "completion": 200,
    "checkpointing": False,
    "optim": "ademamix",
    "bias_buffers": 1,
    "slots": 300,
    "scoring_rows": 4000,
    "other": 1,
    "sampler": 1,
}


class TestMonotonic:
    def test_every_field_is_tried(self):
        rest = {"accumulates", "critic_full", "four_bit", "device", "tile_tokens"}  # below
        rest |= {"slots_settable", "sampler_sleeps"}
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

    def test_a_sampler_that_sleeps_is_there_in_the_rollout_alone(self):
        awake, asleep = (
            estimate(replace(SETUP, sampler=7, sampler_sleeps=sleeps)).phases
            for sleeps in (False, True)
        )
        assert {name: parts["others"] for name, parts in awake.items()} == dict.fromkeys(awake, 7)
        assert asleep["rollout"]["others"] == 7
        assert {asleep[name]["others"] for name in asleep if name != "rollout"} == {0}

    def test_smaller_tiles_take_less(self):
        assert estimate(replace(SETUP, tile_tokens=100)).peak < estimate(SETUP).peak

    def test_torchs_tile_takes_more_than_tritons(self):
        wide = replace(SETUP, geometry=replace(SHAPE, vocab=50_000))
        assert estimate(replace(wide, device="cpu")).peak > estimate(wide).peak
