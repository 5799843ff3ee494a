"""Models that nobody has refused by name are sampled right, or are found out before the first turn."""

import copy

import peft
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from tests.generation.driving import tiny_model
from trl_stppo.generation import slots
from trl_stppo.generation.probe import LONGEST, why_unlike

COMMON = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
COMMON |= {"initializer_range": 0.3, "hidden_size": 32}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, **COMMON}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN["original_max_position_embeddings"] = 64


def neo(window: int, layers: str = "local", **options):
    kinds = {"attention_types": [[["global", layers], 1]], "num_layers": 2, "num_heads": 4}
    return GPTNeoForCausalLM(GPTNeoConfig(window_size=window, **kinds, **COMMON, **options))


def llama(rope: dict | None = None, **options):
    return LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **LAYERS, **options))


def windowed(kind, **options):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, sliding_window=8, **LAYERS, **options))


WRONG = {
    "windows": lambda: neo(8),
    "wide windows": lambda: neo(100),
    "two sets of frequencies": lambda: llama(
        {**LONG, "original_max_position_embeddings": 64}, max_position_embeddings=512
    ),
    "positions from the padding": lambda: RobertaForCausalLM(RobertaConfig(is_decoder=True, **LAYERS)),
    "an encoder": lambda: BertLMHeadModel(BertConfig(**LAYERS)),
}
RIGHT = {
    "llama": llama,
    "a window": lambda: windowed("mistral", num_key_value_heads=2),
    "a window in some layers": lambda: windowed(
        "gemma3_text",
        head_dim=8,
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "short context": lambda: llama(max_position_embeddings=16),
    "eager": lambda: llama(attn_implementation="eager"),
    "yarn": lambda: llama(YARN, max_position_embeddings=256),
    "global layers": lambda: neo(8, "global"),
    **{kind: lambda kind=kind: tiny_model(kind) for kind in ("gpt2", "qwen2", "qwen3")},
    "a decoder": lambda: BertLMHeadModel(BertConfig(is_decoder=True, **LAYERS)),
    "LoRA": lambda: peft.get_peft_model(
        llama(), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    ),
}


def made(make, dtype):
    torch.manual_seed(0)
    return make().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_sampled_wrongly_is_found_out(kind, dtype, monkeypatch) -> None:
    monkeypatch.setattr(slots, "_attention_kind", lambda *model: None)
    assert "nats" in why_unlike(made(WRONG[kind], dtype), 0)


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_sampled_right_passes(kind) -> None:
    assert why_unlike(made(RIGHT[kind], torch.bfloat16), 0) is None
    assert why_unlike(made(RIGHT[kind], torch.float32), 0) is None


def test_weak_opinions_do_not_hide_a_difference(monkeypatch) -> None:
    monkeypatch.setattr(slots, "_attention_kind", lambda *model: None)
    model = made(lambda: neo(8), torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-4)
    assert "nats" in why_unlike(model, 0)


def test_a_window_too_wide_to_try_is_a_reason() -> None:
    model = made(lambda: neo(LONGEST, "global", max_position_embeddings=2 * LONGEST), torch.float32)
    assert f"window_size={LONGEST}" in why_unlike(model, 0)
    model.config.max_position_embeddings = LONGEST - 1
    assert why_unlike(model, 0) is None


@pytest.mark.parametrize("kind", ["windows", "two sets of frequencies"])
def test_known_ones_are_refused_by_name(kind) -> None:
    assert slots.supports(WRONG[kind]()) is not None


def test_nothing_is_left_behind() -> None:
    model = made(llama, torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert why_unlike(model, 0) is None
    assert all(module.training for module in model.modules())
    assert model.is_gradient_checkpointing
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
