"""Trains for a long time with environments that fail, and watches what the processes hold.

    python benchmarks/soak.py --minutes 60     # two processes
    python benchmarks/soak.py --quick          # under a minute, to see that it runs

The demo's agent trains. One episode in ten ends in an exception, a hang, garbage or SystemExit; checkpoints
and evaluations go on beside it. After each optimizer step a process writes down its memory, threads and open
files. Flat means: over the second half of the run they do not grow. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import yaml
from _launch import ONE_THREAD, launch, send
from _outcome import finish, show
from _probe import status, trim
from transformers import TrainerCallback

from trl_stppo import STPPOConfig, STPPOTrainer

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts" / "search"))
from search_env import StdlibSearchEnv
from search_env.retrieval import stdlib_search_dataset

ROOT = Path(__file__).resolve().parents[1]
ENV_TIMEOUT_SECONDS = 1.0
HANG_SECONDS = 2.0
# In one episode of so many: the same mixture as the rollout tests inject.
FAULTS = {"error": 0.05, "hang": 0.02, "garbage": 0.02, "exit": 0.01}
# Growth from the third to the fourth quarter of the run that counts as flat. It is that of the least value of
# each quarter: a rollout that is played while a sample is taken holds memory and threads of its own.
TOLERANCE = {"memory_mb": 0.03, "threads": 0.05, "files": 0.02}


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
    trim()
    files = len(os.listdir("/proc/self/fd"))
    return {"memory_mb": status("RssAnon") / 1024, "threads": status("Threads"), "files": files}


class Samples(TrainerCallback):
    """Writes a line per optimizer step, and ends the run when its time is up."""

    def __init__(self, path: Path, seconds: float) -> None:
        # The process closes it at its end.
        self._file = open(path, "w", buffering=1)  # noqa: SIM115
        self._started, self._seconds = time.monotonic(), seconds
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sample; the processes stop at the same step."""
        elapsed = time.monotonic() - self._started
        line = {"step": state.global_step, "seconds": elapsed, **holdings()}
        self._file.write(json.dumps(line) + "\n")
        over = torch.tensor([float(elapsed > self._seconds)])
        control.should_training_stop = bool(self.trainer.accelerator.gather(over).any())


def work(job: dict[str, Any]) -> None:
    """Train the demo's agent as one of several processes."""
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
        # A soak goes on for hours.
        "learning_rate": 5e-5,
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
    if trainer.accelerator.is_main_process:
        send({"steps": trainer.state.global_step})


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Least values of the quarters of a run, and whether the last two agree."""
    result: dict[str, Any] = {"steps": len(samples), "minutes": samples[-1]["seconds"] / 60}
    for name in TOLERANCE:
        values = [sample[name] for sample in samples]
        cuts = [len(values) * i // 4 for i in range(5)]
        quarters = [min(values[a:b] or values) for a, b in itertools.pairwise(cuts)]
        growth = quarters[3] / quarters[2] - 1
        result[name] = {
            "quarters": quarters,
            "max": max(values),
            "growth": growth,
            "flat": growth <= TOLERANCE[name],
        }
    return result


def main() -> None:
    """Run, print the table, then the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--overlap", action="store_true", help="with `rollout_overlap`")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return work(options.job)
    minutes, every = (0.25, 8) if options.quick else (options.minutes, 64)
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "seconds": 60 * minutes, "every": every}
        words = ("--job", json.dumps({**job, "overlap": options.overlap}))
        done = launch("soak.py", *words, processes=options.processes, **ONE_THREAD)
        if "error" in done:
            finish(done)
        files = [Path(folder) / f"rank{rank}.jsonl" for rank in range(options.processes)]
        ranks = [summarise([*map(json.loads, file.read_text().splitlines())]) for file in files]
    rows = [
        [
            str(rank),
            name,
            *(f"{least:.1f}" for least in result[name]["quarters"]),
            f"{result[name]['max']:.0f}",
            "yes" if result[name]["flat"] else "NO",
        ]
        for rank, result in enumerate(ranks)
        for name in TOLERANCE
    ]
    title = f"{options.processes} processes, {ranks[0]['minutes']:.1f} minutes"
    show(title, ("process", "held", "quarter 1", "2", "3", "4", "max", "flat"), rows)
    finish({"quick": options.quick, "overlap": options.overlap, "ranks": ranks})


if __name__ == "__main__":
    main()
