"""Reading trainers into the memory model, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2ForCausalLM,
)

from tests.builders import LIMITS, TEXT, build, prompts
from tests.fakes import char_tokenizer, tiny_config
from trl_stppo import STPPOTrainer
from trl_stppo.models.memory import GIB, OVERHEAD, Setup, estimate
from trl_stppo.models.shapes import critic_shape, geometry_of, policy_shape, qwen25
from trl_stppo.trainer.watching import memory

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def shape_config():
    return tiny_config(char_tokenizer(), hidden_size=64, intermediate_size=128)


def shape_of(config):
    return geometry_of(policy_shape(config, "float32"))


def parameters_of_critic(config) -> int:
    return sum(p.numel() for p in critic_shape(config, "float32").parameters())


def setup(tmp_path, arguments=None, **options) -> Setup:
    arguments = {"model": Qwen2ForCausalLM(shape_config()), **(arguments or {})}
    trainer = build(tmp_path, STPPOTrainer, arguments=arguments, **options)
    return memory.setup_of(trainer)


class TestSetup:
    def test_full_fine_tuning(self, tmp_path):
        found = setup(tmp_path, kl_coef=0.0)
        shape = shape_of(shape_config())
        critic = parameters_of_critic(shape_config())
        assert found.geometry == shape
        assert found.critic_geometry.linear == shape.linear
        assert (found.weights, found.critic_weights) == (4 * shape.parameters, 4 * critic)
        assert (found.trainable, found.critic_trainable) == (shape.parameters, critic)
        assert found.full
        assert found.critic_full
        assert found.adapters == found.reference_weights == 0

    def test_the_reference_is_counted(self, tmp_path):
        found = setup(tmp_path, kl_coef=0.1)
        assert found.reference_weights == found.weights

    def test_a_shared_critic_adds_an_adapter_and_a_head(self, tmp_path):
        found = setup(tmp_path, {"peft_config": LORA}, critic_lora_r=2)
        shape = shape_of(shape_config())
        assert found.weights == 4 * shape.parameters
        assert found.critic_weights == 0
        assert found.critic_geometry is None
        assert found.trainable == shape.lora_parameters(4)
        assert found.critic_trainable == shape.lora_parameters(2) + 64 + 1
        assert found.adapters == 4 * (found.trainable + found.critic_trainable)
        assert not found.full

    def test_a_separate_critic_with_adapters(self, tmp_path):
        config = shape_config()
        config.num_labels = 1
        value_model = get_peft_model(
            AutoModelForSequenceClassification.from_config(config),
            LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS"),
        )
        found = setup(tmp_path, {"peft_config": LORA, "value_model": value_model})
        shape = shape_of(config)
        # PEFT trains a copy of the head, which is an adapter too.
        assert found.critic_weights == 4 * parameters_of_critic(config)
        assert found.critic_trainable == shape.lora_parameters(2) + 64
        assert found.adapters == 4 * (found.trainable + found.critic_trainable)
        assert not found.critic_full

    @pytest.mark.parametrize("double", [True, False])
    def test_four_bit_weights_are_counted_to_the_byte(self, tmp_path, double):
        pytest.importorskip("bitsandbytes")
        config = tiny_config(char_tokenizer(), hidden_size=256, intermediate_size=1024)
        Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
        found = setup(
            tmp_path,
            {
                "model": str(tmp_path / "model"),
                "peft_config": LORA,
                "quantization_config": BitsAndBytesConfig(
                    load_in_4bit=True,
                    bnb_4bit_quant_type="nf4",
                    bnb_4bit_use_double_quant=double,
                ),
            },
        )
        shape = shape_of(config)
        layers, tables = 7 * shape.layers, 16 * 4
        # The constants of double quantisation have a table of 256 values and an offset per matrix.
        extra = layers * (tables + (256 * 4 + 4 if double else 0))
        expected = shape.four_bit_weights(4, double=double) + extra
        # Blocks of 256 constants are rounded up.
        assert found.weights == pytest.approx(expected, abs=4 * layers if double else 0)
        assert found.four_bit
        assert found.trainable_bytes == 2

    def test_settings(self, tmp_path):
        found = setup(
            tmp_path,
            {"train_dataset": prompts(16)},
            gradient_accumulation_steps=4,
            num_mini_batches=2,
            local_rollout_forward_batch_size=7,
            max_completion_length=33,
            optim="adamw_torch",
            gradient_checkpointing=True,
            variant="st-ppo",
        )
        assert (found.rows, found.completion, found.scoring_rows) == (4, 33, 7)
        assert found.accumulates
        assert found.checkpointing
        assert found.optim == "adamw_torch"
        assert found.bias_buffers == 1
        assert found.slots == 16  # four micro-batches of four
        assert found.device == "cpu"
        assert found.weight_bytes == found.compute_bytes == 4

    def test_the_extra_terms_wait_in_a_buffer_of_their_own(self, tmp_path):
        assert setup(tmp_path, variant="st-ppo", entropy_coef=0.1).bias_buffers == 2
        assert setup(tmp_path, stabilizers=["winners", "share"]).bias_buffers == 0
        assert setup(tmp_path, variant="ppo", entropy_coef=0.1).bias_buffers == 0

    def test_slots(self, tmp_path):
        found = setup(tmp_path, dict(TEXT), generation_slots=3, **LIMITS)
        assert found.slots == 3
        answers = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        played = {"rollout_func": lambda prompts, trainer: answers, "reward_funcs": None}
        assert setup(tmp_path, played).slots == 0

    def test_the_longest_prompt_is_that_of_the_dataset(self, tmp_path):
        trainer = build(tmp_path, STPPOTrainer, arguments={"train_dataset": prompts(12)})
        tokenizer = trainer.processing_class
        rows = [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            for row in trainer.train_dataset
        ]
        longest = max(len(tokenizer(r)["input_ids"]) for r in rows)
        assert memory.longest_prompt(trainer.train_dataset, tokenizer) == longest
        assert memory.setup_of(trainer).prompt == longest
        assert memory.longest_prompt(iter([]), tokenizer) == 0

    def test_vllm_beside_it_takes_its_share(self, tmp_path):
        trainer = build(tmp_path, STPPOTrainer)
        trainer.use_vllm, trainer.vllm_mode = True, "colocate"
        trainer.args.vllm_gpu_memory_utilization = 0.25
        trainer.args.vllm_enable_sleep_mode = True
        found = memory.setup_of(trainer, card=1000)
        assert (found.other, found.sampler, found.slots) == (0, 250, 0)
        assert found.sampler_sleeps


class TestEstimate:
    def test_other_families_are_read_too(self, tmp_path):
        tokenizer = char_tokenizer()
        config = GPT2Config(
            n_embd=16, n_layer=1, n_head=2, vocab_size=len(tokenizer), eos_token_id=1
        )
        model = GPT2LMHeadModel(config)
        parameters = sum(p.numel() for p in model.parameters())
        arguments = {"model": model, "processing_class": tokenizer}
        found = memory.setup_of(build(tmp_path, STPPOTrainer, arguments=arguments))
        assert found.trainable == found.geometry.parameters == parameters

    def test_nothing_is_said_where_a_shape_is_not_known(self, tmp_path, capsys, monkeypatch):
        trainer = build(tmp_path, STPPOTrainer)
        monkeypatch.delattr(type(trainer.model.config), "num_attention_heads", raising=False)
        del trainer.model.config.num_attention_heads
        with pytest.raises(ValueError, match="num_attention_heads"):
            memory.setup_of(trainer)
        memory.announce(trainer)
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("engine", ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"])
    def test_an_engine_shares_out(self, engine):
        one, four = FULL, memory.shared_out(FULL, engine, 4)
        n = FULL.trainable
        weights = {"DDP": 4 * n, "ZeRO-1": 3 * n, "ZeRO-2": 3 * n, "ZeRO-3": 1.5 * n, "FSDP2": n}
        c = FULL.critic_trainable
        others = {"DDP": 4 * n, "ZeRO-1": 2 * n + 2 * c}
        gathered = {"ZeRO-3": 2 * n, "FSDP2": 2 * n}
        assert four.weights == pytest.approx(weights[engine], rel=1e-6)
        assert four.other == pytest.approx(others.get(engine, 0), rel=1e-6)
        assert four.sampler == pytest.approx(gathered.get(engine, 0), rel=1e-6)
        assert four.sampler_sleeps == (engine in gathered), "it is held in rollouts alone"
        assert memory.shared_out(replace(FULL, slots=0), engine, 4).sampler == 0, "vLLM plays"
        assert four.trainable == (n if engine == "DDP" else n // 4)
        critic = {"DDP": 4 * c, "ZeRO-1": 3 * c, "ZeRO-2": 3 * c, "ZeRO-3": 1.5 * c, "FSDP2": c}
        assert four.critic_weights == pytest.approx(critic[engine], rel=1e-6)
        assert four.critic_trainable == one.critic_trainable // (1 if engine == "DDP" else 4)
        # Of adapters only the frozen weights are shared out, where an engine does that.
        four, pieces = memory.shared_out(QLORA, engine, 4), engine in ("ZeRO-3", "FSDP2")
        assert four.weights == QLORA.weights // (4 if pieces else 1)
        assert four.trainable == QLORA.trainable
        assert four.other == (2 * RANK if engine == "DDP" else 0)
        assert four.sampler == QLORA.weights * pieces
        own = replace(QLORA, critic_weights=400)
        assert memory.shared_out(own, engine, 4).critic_weights == (100 if pieces else 400)


SHAPE = shape_of(qwen25("7B"))
FULL = Setup(
    geometry=SHAPE,
    weights=4 * SHAPE.parameters,
    critic_weights=4 * parameters_of_critic(qwen25("7B")),
    trainable=SHAPE.parameters,
    critic_trainable=parameters_of_critic(qwen25("7B")),
    full=True,
    critic_full=True,
    weight_bytes=4,
    rows=4,
    completion=4096,
    checkpointing=False,
    slots=16,
)
RANK = SHAPE.lora_parameters(16)
QLORA = replace(
    FULL,
    weights=SHAPE.four_bit_weights(),
    critic_weights=0,
    trainable=RANK,
    critic_trainable=RANK,
    adapters=4 * RANK,
    full=False,
    critic_full=False,
    four_bit=True,
    weight_bytes=2,
    trainable_bytes=2,
    rows=1,
    completion=256,
    checkpointing=True,
    optim="paged_adamw_8bit",
    slots=1,
)


class TestReport:
    def test_one_line_where_it_fits(self):
        (line,) = memory.report(QLORA, 24 * GIB, "NVIDIA RTX 4090")
        peak = estimate(QLORA).peak
        assert line.startswith(f"memory: about {peak / GIB:.1f} GiB at the peak of the update (")
        assert "weights 5.2" in line
        assert line.endswith(") of 24.0 GiB on NVIDIA RTX 4090")

    def test_a_warning_with_hints_where_it_does_not(self):
        _, warning = memory.report(FULL, 80 * GIB, "a card")
        assert "WARNING: this will probably not fit" in warning
        told = [
            "per_device_train_batch_size=1 with gradient_accumulation_steps times 4",
            "gradient_checkpointing=True",
            "QLoRA: load_in_4bit with LoRA",
            "max_completion_length=2048",
            "optim=paged_adamw_8bit",
        ]
        assert all(text in warning for text in told)
        assert warning.index("QLoRA") < warning.index("gradient_checkpointing=True")

    def test_hints_say_what_they_save(self):
        found = dict(memory.hints(FULL))
        now = estimate(FULL).peak
        assert found["gradient_checkpointing=True"] == (
            now - estimate(replace(FULL, checkpointing=True)).peak
        )
        assert list(found.values()) == sorted(found.values(), reverse=True)
        line = memory.report(FULL, GIB, "")[1]
        saved = found["gradient_checkpointing=True"] / GIB
        assert f"gradient_checkpointing=True (saves {saved:.1f} GiB)" in line

    def test_what_is_in_use_already_is_not_proposed(self):
        assert memory.hints(QLORA) == []
        assert "A smaller model is needed" in memory.report(QLORA, GIB, "")[1]

    def test_slots_are_proposed_where_the_cache_is_the_peak(self):
        setup = replace(QLORA, slots=64, completion=4096)
        assert estimate(setup).phase == "rollout"
        assert memory.hints(setup)[0][0] in ("generation_slots=32", "max_completion_length=2048")

    def test_options_that_would_be_refused_are_not_proposed(self, tmp_path):
        """Slots of a single answer per prompt; 8-bit states on the CPU."""
        setup = replace(QLORA, slots=64, completion=4096, slots_settable=False)
        assert not any("slots" in text for text, _ in memory.hints(setup))
        assert not any("paged" in text for text, _ in memory.hints(replace(FULL, device="cpu")))
        assert not memory.setup_of(build(tmp_path, STPPOTrainer)).slots_settable
        played = build(tmp_path, STPPOTrainer, arguments=dict(TEXT), **LIMITS)
        assert memory.setup_of(played).slots_settable

    def test_qlora_is_said_to_move_a_separate_critic(self):
        assert "QLoRA: load_in_4bit with LoRA, critic on the same backbone" in dict(
            memory.hints(FULL)
        )
        assert "QLoRA: load_in_4bit with LoRA" in dict(
            memory.hints(replace(FULL, critic_weights=0, critic_full=False))
        )

    def test_the_limit_is_092_of_the_card(self):
        peak = estimate(QLORA).peak
        assert len(memory.report(QLORA, round(peak / 0.92) + 1000, "")) == 1
        assert len(memory.report(QLORA, round(peak / 0.92) - 1000, "")) == 2


class TestAnnounce:
    def test_it_compares_with_the_ram_on_a_cpu(self, tmp_path, capsys):
        memory.announce(build(tmp_path, STPPOTrainer))
        said = capsys.readouterr().out
        assert said.startswith("memory: about ")
        assert said.endswith("GiB on this machine's RAM\n")
        assert said.count("\n") == 1

    def test_it_warns_on_a_small_card(self, tmp_path, capsys, monkeypatch):
        trainer = build(tmp_path, STPPOTrainer)
        monkeypatch.setattr(memory, "capacity", lambda device: (GIB // 2, "a small card"))
        memory.announce(trainer)
        said = capsys.readouterr().out
        assert "of 0.5 GiB on a small card\nmemory: WARNING" in said

    def test_it_says_nothing_where_the_memory_is_not_known(self, tmp_path, capsys, monkeypatch):
        trainer = build(tmp_path, STPPOTrainer)
        monkeypatch.setattr(memory, "capacity", lambda device: None)
        memory.announce(trainer)
        assert capsys.readouterr().out == ""

    def test_other_processes_say_nothing(self, tmp_path, capsys, monkeypatch):
        trainer = build(tmp_path, STPPOTrainer)
        monkeypatch.setattr(type(trainer.accelerator), "is_main_process", False)
        memory.announce(trainer)
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("name", ["capacity", "setup_of", "report"])
    def test_it_never_raises(self, tmp_path, capsys, monkeypatch, name):
        def fail(*args, **kwargs):
            raise RuntimeError("broken")

        trainer = build(tmp_path, STPPOTrainer)
        monkeypatch.setattr(memory, name, fail)
        memory.announce(trainer)
        memory.announce(None)
        assert capsys.readouterr().out == ""


def test_ram_includes_what_the_process_holds():
    size, name = memory.capacity(torch.device("cpu"))
    assert size > GIB // 10
    assert name == "this machine's RAM"
    assert memory.capacity(torch.device("meta")) is None


def test_the_overhead_of_a_cpu_is_that_of_the_libraries():
    assert 0 < OVERHEAD["cpu"] < OVERHEAD["cuda"] < GIB
