"""Trainings with images on as many processes as it is started with. Started by `vision/test_processes.py`."""

import os
from pathlib import Path
from typing import Any

from tests.kit.launch import save_cases
from tests.kit.vision_runs import Once, Pictures, Sometimes, trained, vision_trainer

CASES: dict[str, tuple[str, type]] = {
    "positions in three axes": ("Qwen2.5-VL", Pictures),
    "padded, through generate": ("Gemma 3", Pictures),
    "some rows without an image": ("LLaVA", Sometimes),
    "one row with an image": ("LLaVA", Once),
}


def run(case: str, folder: Path) -> dict[str, Any]:
    """How far four steps of eight episodes have moved the weights, and what was logged."""
    family, env = CASES[case]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    options = {"per_device_train_batch_size": 4 // processes, "gradient_accumulation_steps": 2}
    options |= {"ddp_backend": "gloo"} if processes > 1 else {}
    # In one of these steps the row with the image is not in its process's last micro-batch.
    options |= {"max_steps": 4, "log_completions": True}
    trainer = trained(vision_trainer(folder, family, env, **options))
    entry = trainer.state.log_history[0]
    figures = {name: entry[name] for name in ("loss", "episode/score", "value/loss")}
    moved = {**trainer.moved, "critic": trainer.critic_moved}
    return {"moved": moved, "figures": figures, "ids": trainer.data["completion_ids"]}


if __name__ == "__main__":
    save_cases(run)
