"""A run that says in which phase it is, so that `test_kills.py` can kill it there.

Started as `python -m tests.kit.kill_run <folder>` or through torch.distributed.run; it resumes from its
newest checkpoint if there is one, and ends by writing weights and log.
"""

import json
import mmap
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy, tiny_value_model
from tests.kit.scripted import weights
from trl_stppo import STPPOConfig, STPPOTrainer

PHASES = ("other", "rollout", "update", "optimizer", "saving", "evaluating", "finished")
STEPS = 160
SETTINGS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_mini_batches": 2,
    "num_ppo_epochs": 2, "max_steps": STEPS, "max_turns": 3, "max_turn_tokens": 6,
    "max_completion_length": 64, "learning_rate": 3e-3, "critic_learning_rate": 1e-2,
    "lr_scheduler_type": "linear", "disable_dropout": False, "stabilizers": ["share"], "bf16": False,
    "gradient_checkpointing": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    "logging_steps": 3, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2,
    "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
    "metric_for_best_model": "eval_episode/score", "greater_is_better": True,
    "per_device_eval_batch_size": 8,
}  # fmt: skip


class PhaseFile:
    """One byte, shared with the process that kills."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(b"\0")
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 1)

    def get(self) -> str:
        return PHASES[self._map[0]]

    def set(self, phase: str) -> str:
        before, self._map[0] = self.get(), PHASES.index(phase)
        return before


class MarksOptimizer(TrainerCallback):
    def __init__(self, file: PhaseFile) -> None:
        self._file = file

    def on_pre_optimizer_step(self, *args, **kwargs):
        self._file.set("optimizer")

    def on_optimizer_step(self, *args, **kwargs):
        self._file.set("other")


class MarkedTrainer(STPPOTrainer):
    """STPPOTrainer that keeps the phase file up to date."""

    phase: PhaseFile | None = None

    def _marked(self, phase, method, *args, **kwargs):
        if self.phase is None:
            return method(*args, **kwargs)
        before = self.phase.set(phase)
        try:
            return method(*args, **kwargs)
        finally:
            self.phase.set(before)

    def training_step(self, *args, **kwargs):
        return self._marked("update", super().training_step, *args, **kwargs)

    def _generate_and_score_completions(self, *args, **kwargs):
        inner = super()._generate_and_score_completions
        return (
            self._marked("rollout", inner, *args, **kwargs) if self.model.training else inner(*args, **kwargs)
        )

    def _save_checkpoint(self, *args, **kwargs):
        return self._marked("saving", super()._save_checkpoint, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        return self._marked("evaluating", super().evaluate, *args, **kwargs)


async def rewriting(client, row):
    """An agent that begins anew after its second turn."""
    messages, score = list(row["prompt"]), 0.0
    for turn in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        score += text.count(row["letter"])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
        if turn == 1:
            messages = [{"role": "user", "content": f"so far: {text}"}]
    return score


def build(folder: Path, kind: str) -> MarkedTrainer:
    tokenizer = char_tokenizer()
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "letter": "abc"[i % 3]} for i in range(48)]
    torch.manual_seed(5)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {**SETTINGS, "gradient_accumulation_steps": 4 // world}
    if world > 1:
        settings |= {"ddp_backend": "gloo", "num_mini_batches": 2}
    if kind in ("shared", "overlapped"):
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
        arguments = {"peft_config": lora}
    else:
        arguments = {"value_model": tiny_value_model(tokenizer)}
    if kind == "overlapped":
        settings["rollout_overlap"] = True
    arguments |= {"agent": rewriting} if kind == "agent" else {"environment_factory": CountEnv}
    trainer = MarkedTrainer(
        model=tiny_policy(tokenizer), args=STPPOConfig(output_dir=str(folder / "run"), **settings),
        train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:10]),
        processing_class=tokenizer, **arguments,
    )  # fmt: skip
    assert trainer.accelerator.num_processes == world
    return trainer


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    trainer = build(folder, kind)
    main_process = trainer.accelerator.is_main_process
    if main_process:
        trainer.phase = PhaseFile(folder / "phase")
        trainer.phase.set("other")
        trainer.add_callback(MarksOptimizer(trainer.phase))
        (folder / "started").write_text(str(os.getpid()))
    trainer.train(resume_from_checkpoint="auto")
    if main_process:
        torch.save(weights(trainer), folder / "weights.pt")
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))
        trainer.phase.set("finished")


if __name__ == "__main__":
    main()
