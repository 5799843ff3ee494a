"""Adapters, gradient checkpointing, the model's mode, and models that are refused."""

import gc
import weakref

import peft
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config

from tests.generation.driving import GREEDY, backend_of, episodes, generated, play, tiny_model
from trl_stppo.generation.cached import CachedBackend, supports
from trl_stppo.generation.protocol import TurnRequest


def check_against_generate(model, backend) -> None:
    todo = episodes(4)
    with backend.running():
        play(backend, todo, 0)
    for episode in todo:
        for start, limit, turn in zip(episode.starts, episode.limits, episode.turns, strict=True):
            assert turn.ids == generated(model, episode.ids[:start], limit)


def adapted(kind: str, **options):
    model = tiny_model(kind)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).double().eval()


@pytest.mark.parametrize(("kind", "options"), [
    ("gpt2", {}),
    ("qwen2", {"target_modules": "all-linear"}),
    ("gpt2", {"modules_to_save": ["lm_head"]}),
    ("qwen2", {"target_modules": ["lm_head"]}),
])  # fmt: skip
def test_adapters_are_applied(kind: str, options: dict) -> None:
    model = adapted(kind, **options)
    if "modules_to_save" in options:
        with torch.no_grad():
            model.get_output_embeddings().modules_to_save["default"].weight.mul_(-1)
    assert supports(model) is None
    check_against_generate(model, backend_of(model))
    row = [5, 6, 7, 8]
    with model.disable_adapter():
        plain = generated(model, row, 20, [])
        backend = backend_of(model, ends=[])
        with backend.running():
            backend.add(TurnRequest(0, row, 20, (0,)))
            while backend.busy:
                turns = backend.step()
    assert turns[0].ids == plain != generated(model, row, 20, [])


def modes(model) -> list[tuple]:
    return [
        (m.training, getattr(m, "gradient_checkpointing", None), vars(m).get(CHECKPOINT))
        for m in model.modules()
    ]


CHECKPOINT = "_gradient_checkpointing_func"


@pytest.mark.parametrize(("kind", "in_running"), [("gpt2", True), ("qwen2", False)])
def test_gradient_checkpointing_pauses(kind: str, in_running: bool) -> None:
    model = tiny_model(kind)
    want = generated(model, [5, 6], 9)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    before = modes(model)
    backend = backend_of(model)
    if in_running:
        with backend.running():
            assert not model.is_gradient_checkpointing
            got = one_turn(backend, [5, 6], 9)
    else:
        got = one_turn(backend, [5, 6], 9)
    assert got == want
    assert modes(model) == before
    assert model.is_gradient_checkpointing
    model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()


def one_turn(backend, ids: list[int], limit: int) -> list[int]:
    backend.add(TurnRequest(0, ids, limit, (0,)))
    while True:
        turns = backend.step()
        if turns:
            return turns[0].ids


def test_modes_come_back_as_they_were_also_after_an_error() -> None:
    model = tiny_model()
    model.train()
    model.transformer.h[0].eval()
    before = modes(model)
    backend = backend_of(model)
    with backend.running():
        assert not any(module.training for module in model.modules())
    assert modes(model) == before
    with pytest.raises(ZeroDivisionError), backend.running():
        raise ZeroDivisionError
    assert modes(model) == before
    backend.add(TurnRequest(0, [10**6], 3, (0,)))
    with pytest.raises(IndexError):
        backend.step()
    assert modes(model) == before
    with backend.running(), pytest.raises(RuntimeError, match="already"), backend.running():
        pass
    assert modes(model) == before
    model.eval()
    with backend.running():
        pass
    assert not model.training


def test_buffers_are_freed_and_episodes_forgotten() -> None:
    backend = backend_of(tiny_model())
    for error in (None, ValueError):
        try:
            with backend.running():
                backend.add(TurnRequest(0, [3, 4], 50, (0,)))
                backend.step()
                kept = [weakref.ref(t.data) for t in backend._cache._tensors()]
                assert len(kept) == 4
                if error:
                    raise error
        except ValueError:
            pass
        gc.collect()
        assert not any(ref() is not None for ref in kept)
        assert not backend.busy
        assert one_turn(backend, [9, 9], 3)
        backend.release(0)


class _Blind(torch.nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.config = config

    def forward(self, input_ids, attention_mask=None):
        """Takes no cache."""


def changed(**fields):
    model = tiny_model("qwen2")
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(("model", "match"), [
    (lambda: changed(layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
    (lambda: changed(is_encoder_decoder=True), "encoder-decoder"),
    (lambda: changed(_attn_implementation="flash_attention_2"), "flash_attention_2"),
    (lambda: changed(is_causal=False), "not causal"),
    (lambda: changed(num_kv_shared_layers=1), "share"),
    (lambda: changed(alibi=True), "ALiBi"),
    (lambda: _Blind(Qwen2Config()), "a cache and position_ids"),
    (lambda: prompt_tuned(), "virtual tokens"),
    (lambda: spread(), "several devices"),
    (lambda: recurrent(), "recurrent"),
    (lambda: sliding(4, Own), "own code"),
])  # fmt: skip
def test_models_that_are_refused(model, match: str) -> None:
    model = model()
    assert match in supports(model)
    with pytest.raises(ValueError, match=match):
        CachedBackend(model, GREEDY, [1], pad_token_id=0)


def prompt_tuned():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(tiny_model("qwen2"), config)


def spread():
    model = tiny_model()
    model.hf_device_map = {"a": 0, "b": 1}
    return model


def recurrent():
    model = tiny_model()
    model._is_stateful = True
    return model


class Own(MistralForCausalLM):
    """A model whose code is not transformers'."""


def sliding(window: int | None, kind=MistralForCausalLM):
    config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    return kind(MistralConfig(**config, **heads, sliding_window=window))


def test_models_that_are_accepted() -> None:
    assert supports(sliding(None)) is None
    assert supports(sliding(4)) is None
    for kind in ("gpt2", "qwen2", "qwen3", "llama"):
        assert supports(tiny_model(kind)) is None
    # A window that is set but not used, as in the configurations of Qwen2.5.
    assert supports(changed(sliding_window=8, use_sliding_window=False)) is None
