"""Which sampler a training uses, and that its tokens are those of the model's own forward pass."""

import copy
import logging

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.generation.test_probe import LONG
from tests.kit.builders import LIMITS, TEXT, Kept, build, prompts
from tests.kit.fakes import char_tokenizer
from trl_stppo import PPOTrainer
from trl_stppo.generation import slots
from trl_stppo.generation.batched import BatchedBackend
from trl_stppo.trainer.loop import sampler

TOKENIZER = char_tokenizer()
COMMON = {"vocab_size": len(TOKENIZER), "hidden_size": 16, "initializer_range": 0.4}
COMMON |= {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, **COMMON}
ROPE = {**LONG, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}


def neo():
    kinds = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2}
    return GPTNeoForCausalLM(GPTNeoConfig(window_size=8, bos_token_id=None, **kinds, **COMMON))


def rotary(**rope):
    config = LlamaConfig(rope_parameters={"rope_theta": 1e4, **rope}, **LAYERS)
    config.max_position_embeddings = 64 if rope["rope_type"] == "dynamic" else 512
    return LlamaForCausalLM(config)


MODELS = {
    "windows": neo,
    "longrope": lambda: rotary(**ROPE, original_max_position_embeddings=24),
    "dynamic": lambda: rotary(rope_type="dynamic", factor=4.0),
}


@pytest.mark.parametrize(("kind", "named"), [("windows", True), *((kind, False) for kind in MODELS)])
def test_each_episode_is_what_its_model_says_alone(
    tmp_path, monkeypatch, caplog, kind: str, named: bool
) -> None:
    if not named:
        monkeypatch.setattr(slots, "_attention_kind", lambda *model: None)
    torch.manual_seed(0)
    model = MODELS[kind]()
    alone = copy.deepcopy(model).eval()
    rows = prompts(16)
    rows = rows.map(lambda row, i: {"prompt": "say a thing or two "[: 5 + i] * 2}, with_indices=True)
    arguments = {"model": model, "train_dataset": rows}
    options = {"top_k": 1, "max_steps": 4, "max_completion_length": 40, "kl_coef": 0.0}
    options |= {"learning_rate": 0.0, "critic_learning_rate": 0.0}
    trainer = build(tmp_path, Kept, arguments=arguments, **options)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    told = [line for line in caplog.messages if "go through `generate`" in line]
    assert len(told) == (not named and kind != "dynamic")
    assert len(trainer.rollouts) == 2
    for episode in trainer.episodes:
        ids = [*episode.prompt_ids, *episode.ids]
        with torch.no_grad():
            likeliest = alone(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        said = likeliest[len(episode.prompt_ids) - 1 : -1]
        # Its frequencies change within a row and with the batch, in `generate` too.
        assert said == episode.ids or kind == "longrope"


def test_processes_choose_together(tmp_path, monkeypatch, caplog) -> None:
    trainer = build(tmp_path, PPOTrainer, arguments=dict(TEXT), **LIMITS)
    other = [(0, 0, 0), (1, 0, 0)]
    monkeypatch.setattr(sampler.TurnSampler, "exchange", lambda self, own: other)
    with caplog.at_level(logging.WARNING), trainer._player.sampler.backend() as backend:
        assert isinstance(backend, BatchedBackend)
    assert caplog.text.count("go through `generate`") == 1
