"""Whether an agent survives its first rollouts: clip range and advantages of turns of many tokens.

    python benchmarks/studies/start.py --stages house others     # goes on where it was
    python benchmarks/studies/start.py --quick                   # under a minute, to see that it runs

The rules are in `start.md`. Each finished run is a line of `start.jsonl.gz`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1]))  # for _outcome

import torch
import transformers
from _outcome import finish
from _rivals_stages import CLIP_RANGES, Record, Trial, levels
from _stability_grid import FIGURES, SUCCESS, Cell
from _stability_pool import run_all
from _stability_run import run
from _stability_tasks import load_task
from _start_task import CALLS, House, rows, visited
from datasets import Dataset
from solved import RATE, Records, Runs
from trl import GRPOConfig, GRPOTrainer

from trl_stppo import STGRPOConfig, STGRPOTrainer, STPPOConfig, STPPOTrainer

HERE = Path(__file__).parent
ROLLOUTS, EPISODES, LATE = 24, 64, 5
GRPO = ("grpo", "grpo-4")  # of TRL's trainer
EPOCHS = {"grpo": 1, "once": 1}  # else 4
CONFIGS = {"grpo": GRPOConfig, "grpo-4": GRPOConfig, "groups": STGRPOConfig}  # else STPPOConfig
TRAINERS = {GRPOConfig: GRPOTrainer, STGRPOConfig: STGRPOTrainer, STPPOConfig: STPPOTrainer}
ARMS: dict[str, dict[str, Any]] = {  # of STPPOTrainer
    "before": {"cliprange": 0.2, "lam": 0.95},
    "range": {"lam": 0.95},
    "lambda": {"lam": 1.0},
    "turn": {"advantage_level": "turn", "lam": 0.95},
    "spread": {},
    "winners": {"stabilizers": ["winners", "share"]},
    "root": {"cliprange": 0.0426},  # 0.2 by the root of 22 tokens
    "power": {"clip_bias_power": 2.0},
    "once": {},
    "groups": {},  # of STGRPOTrainer
}
SEEDS = {"house": range(800, 805), "rates": range(805, 807), "others": range(700, 710)}


def of_house(stage: str, arm: str, rate: float, seed: int) -> Trial:
    """A run in the house, with the agent that the seed chooses."""
    cell = Cell(stage, f"house-{seed % 3}", "turn-ppo", "start", rate, seed, power=4.0)
    return Trial(arm, "start", cell)


def of_game(stage: str, arm: str, task: str, seed: int) -> Trial:
    """A run of another study's task, at the settings at which `share` has run there with this seed."""
    if task in ("hanoi", "guess"):
        cell = Cell(stage, f"{task}-{seed % 3}", "turn-ppo", "tutorial", RATE, seed, power=4.0)
        return Trial(arm, "tutorial", cell)
    level = levels(Records(HERE / "rivals.jsonl.gz"), task)["threshold"]
    width = CLIP_RANGES[task]
    return Trial(
        arm, "threshold", Cell(stage, task, "turn-ppo", *level, seed, "share", 4.0, cliprange=width)
    )


def stages() -> dict[str, list[Trial]]:
    """All runs."""
    arms = ["grpo", "before", "turn", "spread"]
    house = itertools.product(SEEDS["house"], arms)
    rates = itertools.product(SEEDS["rates"], (3e-4, 3e-3), arms)
    speed = itertools.product(
        SEEDS["house"][:3], (3e-4, 3e-3, 1e-3), [*GRPO, "spread", "root", "power", "groups"]
    )
    parts = itertools.product(SEEDS["house"][:3], ["once", "range", "lambda", "winners"])
    games = itertools.product(SEEDS["others"], ("hanoi", "guess", "corridor", "demo"))
    return {
        "house": [of_house("house", arm, 1e-3, seed) for seed, arm in house],
        "rates": [of_house("rates", arm, rate, seed) for seed, rate, arm in rates],
        "speed": [of_house("speed", arm, rate, seed) for seed, rate, arm in speed],
        "parts": [of_house("parts", arm, 1e-3, seed) for seed, arm in parts],
        "others": [of_game("others", "spread", task, seed) for seed, task in games],
    }


def work(job: Trial, folder: str, updates: int | None) -> list[dict[str, Any]]:
    """One run, in a process that stays for others."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    started = time.process_time()
    if job.task.startswith("house"):
        lines = in_house(job, Path(folder) / f"{job.task}-agent", updates or ROLLOUTS)
    else:
        task = load_task(job.task, Path(folder))
        if updates is not None:
            task = replace(task, updates=updates, test=task.test.select(range(8)))
        schedule = "linear" if job.level == "tutorial" else "constant"
        changes = {"cliprange": None, "lam": None, "stabilizers": ["share"]}
        changes["lr_scheduler_type"] = schedule
        lines = run(job.cell, task, **{**changes, **ARMS[job.arm]})
    lines[-1]["cpu"] = time.process_time() - started
    return lines


def in_house(job: Trial, agent: Path, rollouts: int) -> list[dict[str, Any]]:
    """One run in the house; its success is the mean reward of a rollout."""
    started, cell = time.perf_counter(), job.cell
    grpo = job.arm in GRPO
    epochs = EPOCHS.get(job.arm, 4)
    own: dict[str, Any] = {"kl_coef": 0.0, **ARMS[job.arm]} if not grpo else {}
    with tempfile.TemporaryDirectory() as folder:
        config = CONFIGS.get(job.arm, STPPOConfig)(
            output_dir=folder,
            learning_rate=cell.learning_rate,
            lr_scheduler_type="constant",
            seed=cell.seed,
            per_device_train_batch_size=EPISODES,
            max_completion_length=160,
            max_tool_calling_iterations=CALLS,
            max_steps=rollouts * epochs,
            num_iterations=epochs,
            logging_steps=epochs,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **own,
        )
        trainer = TRAINERS[type(config)](
            model=str(agent),
            args=config,
            train_dataset=Dataset.from_list(rows(3000, seed=1)),
            reward_funcs=visited,
            environment_factory=House,
        )
        failure = []
        try:
            trainer.train()
        except Exception as error:  # a run that dies is a result, too
            failure = [{"phase": "failed", "update": rollouts, "error": repr(error)[:200]}]
    log = [line for line in trainer.state.log_history if "reward" in line]
    rewards = [line["reward"] for line in log] or [0.0]
    test = {"phase": "test", SUCCESS: statistics.fmean(rewards[-LATE:])}
    played = [
        {
            **{n: line.get(n) for n in FIGURES},
            "phase": "train",
            "update": i,
            SUCCESS: line["reward"],
        }
        for i, line in enumerate(log, 1)
    ]
    end = {**test, "update": rollouts, "seconds": time.perf_counter() - started}
    return [{**test, "update": 0, SUCCESS: rewards[0]}, *failure, *played, end]


def summary(records: Records) -> list[dict[str, Any]]:
    """A line per stage, task, arm and rate, with the difference to `share` of the study of solved tasks."""
    share = {
        (r["cell"]["task"], r["level"], r["cell"]["seed"]): r["test"][-1]
        for r in Records(HERE / "solved.jsonl.gz").rows
        if r["cell"]["stage"] == "test" and r["key"][2] == "share"
    }
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records.rows:
        cell = record["cell"]
        task = cell["task"].split("-")[0]
        key = (cell["stage"], task, record["key"][2], str(cell["learning_rate"]))
        groups.setdefault(key, []).append(record)
    lines = []
    for key, runs in sorted(groups.items()):
        line = dict(zip(("stage", "task", "arm", "rate"), key, strict=True)) | {"runs": len(runs)}
        line["first"] = round(statistics.fmean(run["test"][0] for run in runs), 3)
        line["final"] = round(statistics.fmean(run["test"][-1] for run in runs), 3)
        line["worst"] = round(min(run["test"][-1] for run in runs), 3)
        cells = [(run["cell"]["task"], run["level"], run["cell"]["seed"]) for run in runs]
        pairs = [
            run["test"][-1] - share[c] for run, c in zip(runs, cells, strict=True) if c in share
        ]
        if len(pairs) > 1:
            spread = statistics.stdev(pairs) / len(pairs) ** 0.5
            line["to_share"] = round(statistics.fmean(pairs), 3)
            line["lower"] = round(line["to_share"] - 1.83 * spread, 3)  # 95 %, one side, ten runs
        lines.append(line)
    return lines


def main() -> None:
    """Run the stages, then print the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=list(stages()), default=["house"])
    parser.add_argument(
        "--tasks", nargs="+", default=["house", "hanoi", "guess", "corridor", "demo"]
    )
    parser.add_argument("--arms", nargs="+", default=[*GRPO, *ARMS])
    parser.add_argument("--budget_hours", type=float, default=2.0, help="no run starts after it")
    parser.add_argument("--jobs", dest="workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=Path("runs/start"), help="of agents")
    parser.add_argument("--data", type=Path, default=HERE / "start.jsonl.gz")
    parser.add_argument("--quick", action="store_true", help="two runs of one rollout")
    args = parser.parse_args()
    args.updates = 1 if args.quick else None
    deadline = time.monotonic() + 3600 * args.budget_hours
    jobs = {name: stages()[name] for name in args.stages}
    if args.quick:
        args.output, jobs = args.output / "quick", {}
        args.data = Path(tempfile.mkdtemp()) / "start.jsonl.gz"
        jobs["quick"] = [of_house("quick", arm, 1e-3, 0) for arm in ("grpo", "spread")]
    args.output.mkdir(parents=True, exist_ok=True)
    records, left_out = Runs(args.data), dict[str, int]()
    for stage, wanted in jobs.items():
        chosen = [j for j in wanted if j.task.split("-")[0] in args.tasks and j.arm in args.arms]
        left_out[stage] = run_all(chosen, records, args, deadline, work)
    finish({"quick": args.quick, "left_out": left_out, "runs": summary(records)})


if __name__ == "__main__":
    main()
