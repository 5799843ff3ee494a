"""QLoRA: policy, critic and reference on one backbone in 4 bits, here with bitsandbytes on the CPU."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, Qwen2ForCausalLM

from tests.builders import LIMITS, Kept, build, logs, prompts
from tests.fakes import CountEnv, char_tokenizer, tiny_config
from tests.scripted import norm, scripted_trainer
from trl_stppo import STPPOTrainer
from trl_stppo.trainer import rollout_engine

pytest.importorskip("bitsandbytes")
STEPS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model on disk, wide enough for blocks of 64 values."""
    torch.manual_seed(0)
    config = tiny_config(char_tokenizer(), hidden_size=64, intermediate_size=64)
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checkpointing"])
def finished(request, checkpoint, tmp_path_factory):
    """Trainer and recorder after a few steps, and the backbone's bytes before them."""
    trainer, recorder = scripted_trainer(
        tmp_path_factory.mktemp("run"),
        trainer_class=STPPOTrainer,
        model=checkpoint,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        variant="st-ppo",
        optim="adamw_torch",
        learning_rate=1e-2,
        critic_learning_rate=1e-2,
        num_ppo_epochs=2,
        max_steps=STEPS,
        gradient_checkpointing=request.param,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    before = frozen(trainer)
    trainer.train()
    return trainer, recorder, before


def frozen(trainer):
    named = trainer.model.named_parameters()
    return {n: p.detach().clone() for n, p in named if "lora_" not in n}


def test_the_backbone_is_in_four_bits(finished):
    trainer, _, _ = finished
    base = trainer.model.get_base_model()
    assert base.is_loaded_in_4bit
    packed = [p for n, p in trainer.model.named_parameters() if "base_layer" in n]
    assert any(p.dtype == torch.uint8 for p in packed)


def test_no_byte_of_the_backbone_changes(finished):
    trainer, _, before = finished
    after = frozen(trainer)
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name


def test_both_adapters_and_the_head_train(finished):
    trainer, recorder, _ = finished
    assert trainer.uses_shared_critic
    for name, weight in recorder.before.items():
        assert torch.isfinite(recorder.after[-1][name]).all(), name
        assert not torch.equal(recorder.after[-1][name], weight), name
    assert norm(recorder.moved("policy", STEPS - 1)) > 0
    assert norm(recorder.moved("critic", STEPS - 1)) > 0


def test_both_adapters_have_the_dtype_that_trl_gives_to_quantised_ones(finished):
    trainer, _, _ = finished
    dtypes = {
        name: {p.dtype for n, p in trainer.model.named_parameters() if f".{name}." in n}
        for name in ("default", "critic")
    }
    assert dtypes["critic"] == dtypes["default"] == {torch.bfloat16}
    assert {p.dtype for p in trainer.critic.head.parameters()} == {torch.float32}


def test_reference_logprobs_stay_those_of_the_backbone(finished):
    """The same episodes come back in the second rollout; the reference must not have moved."""
    _, recorder, _ = finished
    first, last = recorder.batches[0], recorder.batches[-1]
    order = [by_prompt(batch) for batch in (first, last)]
    for one, other in zip(*order, strict=True):
        torch.testing.assert_close(
            last["ref_per_token_logps"][other], first["ref_per_token_logps"][one], rtol=0, atol=1e-5
        )
    gap = last["old_per_token_logps"][order[1]] - first["old_per_token_logps"][order[0]]
    assert gap.abs().max() > 1e-3, "the policy should have moved"


def by_prompt(batch) -> list[int]:
    prompts = [row.tolist() for row in batch["completion_ids"]]
    return sorted(range(len(prompts)), key=lambda i: prompts[i])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_environment_is_played_on_the_quantised_weights(checkpoint, tmp_path, checkpointing):
    """By the backend that keeps its cache, which leaves modes and adapters as they were."""
    trainer = build(
        tmp_path,
        Kept,
        arguments={
            "model": checkpoint,
            "environment_factory": CountEnv,
            "eval_dataset": prompts(4),
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
            ),
            "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        },
        gradient_checkpointing=checkpointing,
        **LIMITS,
    )
    assert rollout_engine.why_not_cached(trainer) is None
    trainer.evaluate()  # in evaluation mode bitsandbytes would repack the weights for inference
    trainer.train()
    assert trainer.model.training
    assert trainer.model.is_gradient_checkpointing is checkpointing
    assert trainer.model.active_adapter == "default"
    figures = logs(trainer)
    assert figures["turns/mean"] > 1
    # Prefill and decoding in other shapes than training: nothing but rounding, in half precision.
    assert figures["sampling/sampling_logp_difference/mean"] < 0.02
