"""Worker of `soak.py`: the demo task with environments that fail, one process of several.

After each optimizer step it writes down what the process holds: memory, threads, open files.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import yaml
from transformers import TrainerCallback

from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.recipes.search import StdlibSearchEnv
from trl_stppo.recipes.search.retrieval import stdlib_search_dataset

ROOT = Path(__file__).resolve().parents[1]
ENV_TIMEOUT_SECONDS = 1.0
HANG_SECONDS = 2.0
# In one episode of so many: the same mixture as the rollout tests inject.
FAULTS = {"error": 0.05, "hang": 0.02, "garbage": 0.02, "exit": 0.01}


class FailingSearch(StdlibSearchEnv):
    """The demo's environment, of which one episode in ten goes wrong in its reset or a step."""

    def __init__(self) -> None:
        super().__init__(invalid_reward=-0.1)
        self._dice = random.Random(time.monotonic_ns())
        self._fault: str | None = None

    def reset(self, **row: Any) -> Any:
        """The question, or a failure."""
        lot, self._fault = self._dice.random(), None
        for fault, share in FAULTS.items():
            if 0 <= lot < share:
                self._fault = fault
            lot -= share
        if self._dice.random() < 0.3:
            self._fail()
        return super().reset(**row)

    def step(self, action: str) -> Any:
        """The search result, or a failure."""
        if self._fail() == "garbage":
            return "x" * 1_000_000, float("nan"), False, False
        return super().step(action)

    def _fail(self) -> str | None:
        fault, self._fault = self._fault, None
        if fault == "error":
            raise OSError("broken on purpose")
        if fault == "exit":
            raise SystemExit(3)
        if fault == "hang":
            time.sleep(HANG_SECONDS)
        return fault


def holdings() -> dict[str, float]:
    """Return what this process holds, after freed memory has gone back to the system."""
    gc.collect()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory_mb": int(status["RssAnon"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "files": len(os.listdir("/proc/self/fd")),
    }


class Samples(TrainerCallback):
    """Writes a line per optimizer step, and ends the run when its time is up."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._file = open(path, "w", buffering=1)  # noqa: SIM115 (closed with the process)
        self._started, self._seconds = time.monotonic(), seconds
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sample; the processes stop at the same step."""
        elapsed = time.monotonic() - self._started
        line = {"step": state.global_step, "seconds": elapsed, **holdings()}
        self._file.write(json.dumps(line) + "\n")
        over = torch.tensor([float(elapsed > self._seconds)])
        control.should_training_stop = bool(self.trainer.accelerator.gather(over).any())


def main() -> None:
    """Train the demo's agent for the time given on the command line."""
    job = json.loads(sys.argv[1])
    folder, world = Path(job["folder"]), int(os.environ.get("WORLD_SIZE", "1"))
    demo = yaml.safe_load((ROOT / "scripts/configs/demo.yaml").read_text())
    known = set(STPPOConfig.__dataclass_fields__)
    settings = {name: value for name, value in demo.items() if name in known}
    for name in ("learning_rate", "critic_learning_rate"):
        settings[name] = float(settings[name])
    settings |= {
        "output_dir": str(folder / "run"),
        "gradient_accumulation_steps": settings["gradient_accumulation_steps"] // world,
        "total_episodes": 10**7,
        "learning_rate": 5e-5,  # it goes on for hours
        "env_timeout_seconds": ENV_TIMEOUT_SECONDS,
        "save_strategy": "steps",
        "save_steps": job["every"],
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": job["every"],
        "rollout_overlap": job["overlap"],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo" if world > 1 else None,
    }
    samples = Samples(folder / f"rank{os.environ.get('RANK', '0')}.jsonl", job["seconds"])
    trainer = STPPOTrainer(
        model=str(ROOT / demo["model_name_or_path"]),
        args=STPPOConfig(**settings),
        train_dataset=stdlib_search_dataset("train"),
        eval_dataset=stdlib_search_dataset("test").select(range(40)),
        environment_factory=FailingSearch,
        callbacks=[samples],
    )
    if trainer.accelerator.num_processes != world:
        raise RuntimeError(f"{trainer.accelerator.num_processes} processes instead of {world}")
    samples.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
