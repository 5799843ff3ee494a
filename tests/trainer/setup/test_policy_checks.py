"""What is looked at in a policy when its trainer is made: context, sampling, what can be saved."""

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from tests.kit.builders import LIMITS, TEXT, build
from tests.kit.fakes import char_tokenizer, tiny_policy
from trl_stppo import Agent


def gemma(context):
    """A model for text and images, whose context is a setting of its text part."""
    tokenizer = char_tokenizer()
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = Gemma3TextConfig(
        **small, vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=8, sliding_window=32,
        max_position_embeddings=context, pad_token_id=0, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    vision = SiglipVisionConfig(**small, image_size=8, patch_size=4)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    return Gemma3ForConditionalGeneration(config)


def test_the_context_of_a_models_text_part_limits_its_episodes(tmp_path):
    trainer = build(
        tmp_path,
        arguments={**TEXT, "model": gemma(48), "value_model": None},
        **{**LIMITS, "max_turns": 9},
    )
    assert trainer._player.engine.limits.max_context_tokens == 48
    agent = Agent(gemma(48), char_tokenizer())
    episode = agent.run(None, {"prompt": [{"role": "user", "content": "x" * 60}]})
    assert "48" in episode.error


def test_a_generation_configuration_that_cannot_be_saved_is_refused(tmp_path):
    model = tiny_policy(char_tokenizer())
    model.generation_config.temperature = 0.9
    with pytest.raises(ValueError, match="temperature"):
        build(tmp_path / "a", arguments={"model": model})
