"""What releases of transformers before 5.23 leave out, and this package therefore does itself."""

import torch
from peft import LoraConfig
from transformers import Trainer

from tests.kit.scripted import LEARNS, scripted_trainer, weights

LORA = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")


def test_the_policys_adapter_is_resumed_though_the_critics_lies_in_a_subfolder(tmp_path, monkeypatch):
    options = {**LEARNS, "peft_config": LORA, "save_strategy": "steps", "save_steps": 2}
    trainer, _ = scripted_trainer(tmp_path, **{**options, "max_steps": 2})
    trainer.train()
    saved = weights(trainer)

    def passed_over(self, resume_from_checkpoint, model=None):
        for folder in ("critic",):
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
