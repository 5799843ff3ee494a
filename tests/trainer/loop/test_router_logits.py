"""Mixtures of experts whose configuration asks for router logits: only the loss gets them."""

import pytest
import torch

from tests.kit.builders import LIMITS, TEXT, logs, train
from tests.kit.fakes import char_tokenizer
from trl_stppo import STGRPOTrainer, STPPOTrainer

TOKENIZER = char_tokenizer()
LAYERS = {"vocab_size": len(TOKENIZER), "hidden_size": 16, "intermediate_size": 24}
LAYERS |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
LAYERS |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
LAYERS |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "bos_token_id": None}
LAYERS |= {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id}
FAMILIES = ["Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "GptOss"]


def mixture(family: str):
    import transformers

    config = getattr(transformers, f"{family}Config")(**LAYERS, output_router_logits=True)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("family", "trainer_class"),
    [*((family, STPPOTrainer) for family in FAMILIES), (FAMILIES[0], STGRPOTrainer)],
)
def test_the_router_is_trained_and_turns_are_sampled(tmp_path, family, trainer_class) -> None:
    options = {"num_generations": 4} if trainer_class is STGRPOTrainer else {}
    arguments = {**TEXT, "model": mixture(family)}
    trainer = train(tmp_path, trainer_class, arguments=arguments, beta=0.1, **LIMITS, **options)
    assert trainer.state.global_step == 2
    assert not trainer.model.config.output_router_logits
    assert logs(trainer)["aux_loss"] > 0
    assert logs(trainer)["policy/ratio_max"] < 2
