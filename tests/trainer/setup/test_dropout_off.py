"""`disable_dropout` reaches dropout that is a number which a model hands to a function."""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, Qwen2ForCausalLM

from tests.kit.builders import logs, train
from tests.kit.fakes import char_tokenizer, tiny_config

TOKENIZER = char_tokenizer()


def opt():
    config = OPTConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, ffn_dim=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, word_embed_proj_dim=16, dropout=0.3,
        layerdrop=0.3, pad_token_id=TOKENIZER.pad_token_id, eos_token_id=TOKENIZER.eos_token_id,
        init_std=0.3,
    )  # fmt: skip
    return OPTForCausalLM(config)


MODELS = {
    "opt": opt,
    "qwen2": lambda: Qwen2ForCausalLM(tiny_config(TOKENIZER, attention_dropout=0.5)),
}


@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_an_unchanged_policy_has_the_ratio_one(tmp_path, kind, off) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    arguments = {"model": model, "ref_model": MODELS[kind]()}
    options = {"learning_rate": 0.0, "num_ppo_epochs": 2, "disable_dropout": off, "beta": 0.1}
    trainer = train(tmp_path, arguments=arguments, **options)
    models = (trainer.model, trainer.ref_model, trainer.critic.model)
    rates = [
        value
        for model in models
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name and isinstance(value, float)
    ]
    assert any(rates) is not off
    assert len(rates) >= 6
    assert (logs(trainer)["policy/ratio_max"] == pytest.approx(1, abs=1e-4)) is off
