"""Trainings of the model of `make pretrained`: adapters, all weights, critics, packs, a resume, a tool."""

import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl.chat_template_utils import qwen2_5_chat_template

from tests.kit.script_kit import ROOT
from trl_stppo import Agent, STGRPOConfig, STGRPOTrainer, STPPOConfig, STPPOTrainer

sys.path.insert(0, str(ROOT / "scripts" / "pretrained"))
from number_game import HELD_OUT, TRAINED, NumberEnv, rows

FOLDER = ROOT / "runs" / "pretrained" / "smollm2-135m-instruct"
LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
UPDATES = 3
pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER} is made by `make pretrained`"),
]


def trainer_of(folder: Path, kind=STPPOTrainer, *, arguments=None, **options):
    settings = {
        "per_device_train_batch_size": 8, "num_iterations": 1, "max_steps": UPDATES,
        "learning_rate": 1e-3, "kl_coef": 0.0, "max_turns": 2, "max_turn_tokens": 3,
        "max_completion_length": 48, "bf16": False, "use_cpu": not torch.cuda.is_available(),
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "trace_episodes": 0,
        **({"critic_learning_rate": 1e-3} if kind is STPPOTrainer else {"num_generations": 8}),
        **options,
    }  # fmt: skip
    config = STPPOConfig if kind is STPPOTrainer else STGRPOConfig
    if kind is STGRPOTrainer:
        settings.pop("kl_coef")
    given = {"model": str(FOLDER), "environment_factory": NumberEnv, "reward_funcs": [length]}
    given |= {"train_dataset": Dataset.from_list(rows(TRAINED)), **(arguments or {})}
    return kind(args=config(str(folder), **settings), **given)


def length(completion_ids, **kwargs):
    """A reward that differs between any two episodes, so that each step has something to learn."""
    return [0.1 * (sum(ids) % 11) for ids in completion_ids]


def trained_weights(trainer):
    policy = trainer.accelerator.unwrap_model(trainer.model)
    return {n: p.detach().cpu().clone() for n, p in policy.named_parameters() if p.requires_grad}


def four_bit():
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


@pytest.mark.parametrize("kind", ["lora", "full", "qlora", "no critic"])
def test_three_updates(tmp_path, kind):
    """The critic is a second adapter with LoRA, and a second backbone without."""
    arguments = {} if kind == "full" else {"peft_config": LORA}
    if kind == "qlora":
        arguments["quantization_config"] = four_bit()
    trainer = trainer_of(
        tmp_path, STGRPOTrainer if kind == "no critic" else STPPOTrainer, arguments=arguments
    )
    before = trained_weights(trainer)
    trainer.train()
    after = trained_weights(trainer)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved
    assert all(bool(weight.isfinite().all()) for weight in after.values())
    lines = [line for line in trainer.state.log_history if "policy/approx_kl" in line]
    assert len(lines) == UPDATES
    assert [line["perf/packed_share"] for line in lines] == [1.0] * UPDATES
    if kind in ("lora", "qlora"):
        # The base is frozen, and a critic's head begins to move with the first step.
        assert all("lora" in name for name in moved)
        assert bool(trainer.critic.head.weight.count_nonzero())


def test_packed_passes_equal_padded_ones(tmp_path):
    trainer = trainer_of(tmp_path, arguments={"peft_config": LORA}, max_steps=1)
    torch.manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    seen, forward = [], trainer._forward
    policy = forward.policy

    def both(model, batch, *args, **kwargs):
        first = policy(model, batch, *args, **kwargs)
        if not seen and kwargs.get("entropy"):
            with torch.no_grad():
                forward.why_padded = "of the test"
                padded = policy(model, batch, *args, **kwargs)
                forward.why_padded = None
            mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
            seen.extend((a - b)[mask].abs().max() for a, b in zip(first[:2], padded[:2], strict=True))
        return first

    forward.policy = both
    trainer.train()
    # Nats; measured 1e-5.
    assert max(seen) < 1e-4


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    arguments = {"peft_config": LORA}
    saving = {"save_strategy": "steps", "save_steps": 2, "num_iterations": 2, "max_steps": 4}
    whole = trainer_of(tmp_path / "run", arguments=arguments, **saving)
    whole.train()
    resumed = trainer_of(tmp_path / "run", arguments=arguments, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    expected, found = trained_weights(whole), trained_weights(resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    trainer, game = resumed, rows(HELD_OUT)[0]
    trainer.save_model()
    agent = Agent.from_pretrained(str(tmp_path / "run"))
    once, again = (agent.run(NumberEnv, game) for _ in range(2))
    assert once.ids == again.ids
    loaded = {n: p.cpu() for n, p in agent.model.named_parameters() if "lora" in n}
    # A saved agent has no critic.
    saved = {name: weight for name, weight in found.items() if ".critic." not in name}
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())


class Calculator:
    """A tool environment: two numbers are multiplied by the tool, and the answer is the product."""

    def reset(self, *, a: int, b: int, **row) -> None:
        self._product, self.reward = str(a * b), 0.0

    def multiply(self, a: int, b: int) -> str:
        """Multiplies two numbers.

        Args:
            a: the first number
            b: the second number
        """
        self.reward = float(str(a * b) == self._product)
        return str(a * b)


def tool_rows(count: int) -> list[dict]:
    numbers = [(10 + i % 7, 3 + i % 5) for i in range(count)]
    ask = "What is {} times {}? Use the tool."
    return [{"prompt": [{"role": "user", "content": ask.format(a, b)}], "a": a, "b": b} for a, b in numbers]


def calculator_reward(environments, **kwargs):
    return [environment.reward for environment in environments]


@pytest.mark.parametrize(("dtype", "bf16"), [("float32", True), ("bfloat16", False)])
def test_passes_are_packed_in_bfloat16_too(tmp_path, dtype, bf16):
    trainer = trainer_of(
        tmp_path, arguments={"peft_config": LORA}, model_init_kwargs={"dtype": dtype}, bf16=bf16
    )
    assert trainer._forward.why_padded is None


def test_a_template_with_tools_lets_it_call_a_calculator(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tools = {"environment_factory": Calculator, "reward_funcs": [calculator_reward, length]}
    tools |= {"train_dataset": Dataset.from_list(tool_rows(16)), "peft_config": LORA}
    limits = {"max_turn_tokens": 40, "max_completion_length": 120, "per_device_train_batch_size": 2}
    with pytest.raises(ValueError, match="qwen2_5_chat_template"):
        trainer_of(tmp_path, arguments=tools, **limits)
    tokenizer.chat_template = qwen2_5_chat_template
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    teach_calls(model, tokenizer)
    trainer = trainer_of(
        tmp_path, arguments={**tools, "model": model, "processing_class": tokenizer}, **limits
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "tools/call_frequency" in line]
    assert len(lines) == UPDATES
    assert max(line["tools/call_frequency"] for line in lines) > 0


def teach_calls(model, tokenizer) -> None:
    """Imitates 200 calls, each after its question; what all prompts begin with is read without a gradient."""
    schema = {"name": "multiply", "description": "Multiplies two numbers.", "parameters": {
        "type": "object", "required": ["a", "b"], "properties": {
            "a": {"type": "integer", "description": "the first number"},
            "b": {"type": "integer", "description": "the second number"}}}}  # fmt: skip
    options = {"tools": [{"type": "function", "function": schema}], "return_dict": True}
    rows = []
    for row in tool_rows(200):
        call = {"name": "multiply", "arguments": {"a": row["a"], "b": row["b"]}}
        said = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template([*row["prompt"], said], **options)["input_ids"]
        rows.append((whole, len(prompt["input_ids"])))
    columns = enumerate(zip(*(ids for ids, _ in rows), strict=False))
    shared = next(n for n, column in columns if len(set(column)) > 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model.train()
    for start in range(0, 200, 8):
        part = rows[start : start + 8]
        ids = pad_sequence([torch.tensor(ids[shared:]) for ids, _ in part], True, 0)
        taught = pad_sequence([torch.tensor([-100] * (n - shared) + ids[n:]) for ids, n in part], True, -100)
        with torch.no_grad():
            cache = model(torch.tensor([part[0][0][:shared]]), use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(part))
        # Nothing attends to the padding, which stands at the end.
        model(ids, past_key_values=cache, labels=taught).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
