"""QLoRA: policy, critic and reference on one backbone in 4 bits, here with bitsandbytes on the CPU."""

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2ForCausalLM

from tests.kit.builders import LIMITS, Kept, build, logs, prompts
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_config
from tests.kit.scripted import LEARNS, STEPS, scripted_trainer
from tests.kit.tiers import quick
from trl_stppo.trainer.setup.models import keep_trainable

pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model on disk, wide enough for blocks of 64 values."""
    torch.manual_seed(0)
    config = tiny_config(char_tokenizer(), hidden_size=64, intermediate_size=64)
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


def frozen(trainer):
    named = trainer.model.named_parameters()
    return {n: p.detach().clone() for n, p in named if "lora_" not in n}


@pytest.mark.long
def test_an_environment_is_played_on_the_quantised_weights(checkpoint, tmp_path):
    """By the backend that keeps its cache, which leaves modes and adapters as they were."""
    trainer = build(
        tmp_path,
        Kept,
        arguments={
            "model": checkpoint,
            "environment_factory": CountEnv,
            "eval_dataset": prompts(4),
            "quantization_config": in_4_bits(None, bnb_4bit_use_double_quant=True),
            "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        },
        gradient_checkpointing=True,
        **LIMITS,
    )
    assert trainer._player.sampler.why_not_cached() is None
    # In evaluation mode bitsandbytes would repack the weights for inference.
    trainer.evaluate()
    trainer.train()
    assert trainer.model.training
    assert trainer.model.is_gradient_checkpointing
    assert trainer.model.active_adapter == "default"
    figures = logs(trainer)
    assert figures["turns/mean"] > 1
    # Prefill and decoding in other shapes than training: nothing but rounding, in half precision.
    assert figures["sampling/sampling_logp_difference/mean"] < 0.02


LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
IDS = torch.arange(3, 19).unsqueeze(0)


def in_4_bits(compute=torch.float32, **options):
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute, **options
    )


def given(checkpoint, **prepare):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=in_4_bits())
    return prepare_model_for_kbit_training(model, **prepare) if prepare else model


def trained_before(checkpoint):
    torch.manual_seed(5)
    return get_peft_model(given(checkpoint), LoraConfig(**LORA, init_lora_weights=False))


def by_name(quantization, **settings):
    return lambda path: {
        "model": path,
        "quantization_config": quantization,
        "peft_config": LoraConfig(**LORA),
        **settings,
    }


WAYS = {
    "double, bfloat16": by_name(in_4_bits(torch.bfloat16, bnb_4bit_use_double_quant=True), bf16=True),
    "8 bits": by_name(BitsAndBytesConfig(load_in_8bit=True)),
    "given": lambda path: {"model": given(path), "peft_config": LoraConfig(**LORA, use_dora=True)},
    "prepared": lambda path: {
        "model": given(path, gradient_checkpointing_kwargs={"use_reentrant": True}),
        "peft_config": LoraConfig(**LORA),
        "gradient_checkpointing": True,
    },
    "trained before": lambda path: {"model": trained_before(path), "peft_config": None},
}


def quantised(folder, way, **options):
    settings = {**LEARNS, "save_strategy": "steps", "save_steps": 2}
    return scripted_trainer(folder, **{**settings, **way, **options})


NOW = ("double, bfloat16", "8 bits")


@pytest.fixture(scope="module", params=quick(WAYS, *NOW))
def run(request, checkpoint, tmp_path_factory):
    """Way, folder, trainer, recorder and the frozen bytes of a run of four steps."""
    way, folder = WAYS[request.param], tmp_path_factory.mktemp("way")
    trainer, recorder = quantised(folder, way(checkpoint), staleness=0.0)
    before = frozen(trainer)
    trainer.train()
    return way, folder, trainer, recorder, before


@pytest.mark.long
def test_every_way_trains_both_adapters_on_untouched_weights(run):
    _, _, trainer, recorder, before = run
    for name, weight in recorder.before.items():
        assert torch.isfinite(recorder.after[-1][name]).all(), name
        assert not torch.equal(recorder.after[-1][name], weight), name
    after = frozen(trainer)
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name
    named = dict(trainer.model.named_parameters())
    packed = {p.dtype for name, p in named.items() if "base_layer" in name}
    assert packed & {torch.uint8, torch.int8}
    policy, critic = (
        {p.dtype for name, p in named.items() if f".{adapter}." in name} for adapter in ("default", "critic")
    )
    assert policy == critic, "as TRL has it for adapters of quantised models"
    assert {p.dtype for p in trainer.critic.head.parameters()} == {torch.float32}


def test_every_way_has_its_initial_policy_as_the_reference(run):
    # DoRA's norms of the weights are rounded to the adapter's bfloat16.
    close = 2e-3 if run[2].model.peft_config["default"].use_dora else 1e-5
    batch = run[3].batches[0]
    gap = (batch["ref_per_token_logps"] - batch["old_per_token_logps"]) * batch["completion_mask"]
    assert gap.abs().max() < close
    late = run[3].batches[-1]
    assert (late["ref_per_token_logps"] - late["old_per_token_logps"]).abs().max() > 1e-2


@pytest.mark.long
def test_a_resumed_run_ends_where_the_uninterrupted_one_did(run, checkpoint):
    """In the same precision too: PEFT casts what it loads to float32, into new parameters."""
    way, folder, _, recorder, before = run
    resumed, again = quantised(folder, way(checkpoint), staleness=0.0)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert len(again.after) == STEPS - 2
    for name, weight in recorder.after[-1].items():
        assert again.after[-1][name].dtype == weight.dtype, name
        assert torch.equal(again.after[-1][name], weight), name
    for name, weight in before.items():
        assert torch.equal(frozen(resumed)[name], weight), name


def test_the_final_folder_loads_as_the_policy_alone(run, checkpoint):
    _, folder, trainer, _, _ = run
    trainer.save_model(str(folder / "final"))
    base = trainer.model.config.quantization_config
    loaded = AutoPeftModelForCausalLM.from_pretrained(
        folder / "final", quantization_config=base, dtype=trainer.model.dtype
    )
    keep_trainable(loaded)
    assert set(loaded.peft_config) == {"default"}
    own = dict(trainer.model.named_parameters())
    for name, weight in loaded.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(own[name].dtype)
            assert torch.equal(weight, own[name]), name
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=trainer.args.bf16):
        expected = trainer.model.eval()(IDS).logits.float()
        actual = loaded.eval()(IDS).logits.float()
    trainer.model.train()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_values_are_not_rounded_by_mixed_precision(checkpoint, tmp_path):
    """Rewards and returns take the dtype of the values; bfloat16 has three digits."""
    way = by_name(in_4_bits(torch.bfloat16), bf16=True)(checkpoint)
    trainer, recorder = quantised(tmp_path, way, max_steps=3, num_ppo_epochs=1)
    trainer.train()
    for name in ("values", "returns", "advantages"):
        figures = recorder.batches[-1][name]
        assert figures.dtype == torch.float32, name
        assert (figures != figures.bfloat16().float()).any(), name
