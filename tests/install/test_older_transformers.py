"""What releases of transformers before 5.23 leave out, and this package therefore does itself."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import Trainer

from tests.scripted import LEARNS, scripted_trainer, weights

ROOT = Path(__file__).resolve().parents[2]
# Fields of TrainingArguments that 5.13 lacks. TRL 1.16 has a `gradient_checkpointing` of its own.
NEWER = {
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("dataloader_in_order", "dataloader_multiprocessing_context"),
}
LORA = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")


def test_the_policys_adapter_is_resumed_though_the_critics_lies_in_a_subfolder(
    tmp_path, monkeypatch
):
    options = {**LEARNS, "peft_config": LORA, "save_strategy": "steps", "save_steps": 2}
    trainer, _ = scripted_trainer(tmp_path, **{**options, "max_steps": 2})
    trainer.train()
    saved = weights(trainer)

    def passed_over(self, resume_from_checkpoint, model=None):
        for folder in ("critic",):  # what 5.22 does where it finds an adapter in a subfolder
            path = f"{resume_from_checkpoint}/{folder}"
            self.model.load_adapter(path, folder, is_trainable=False)

    monkeypatch.setattr(Trainer, "_load_from_checkpoint", passed_over)
    again, recorder = scripted_trainer(tmp_path, **{**options, "max_steps": 4})
    fresh = weights(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    moved = [name for name in saved if not torch.equal(saved[name], fresh[name])]
    assert any(name.startswith("policy/") for name in moved)
    for name, value in saved.items():
        assert torch.equal(recorder.before[name], value), name
    assert again.model.active_adapter == "default"


def test_configurations_are_made_with_names_that_the_oldest_version_knows():
    found = []
    for folder in ("trl_stppo", "scripts", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            made = [
                call for call in calls if ast.unparse(call.func).endswith(("Config", "Arguments"))
            ]
            words = {word.arg for call in made for word in call.keywords}
            found += [(path.name, word) for word in words & NEWER]
    assert found == []
