"""Trains one cell and returns its record. As a program it is the runner's worker."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
import trl
from _plan import HERE, Cell
from _records import Record
from _task import Task, load
from _trl import Rollouts
from datasets import Dataset
from trl import GRPOConfig

import trl_stppo
from trl_stppo import STGRPOConfig, STPPOConfig

# Curves of a record: metrics of our trainers' log, and their names in TRL's, if it has them.
CURVES = {
    "reward": "reward",
    "success": None,
    "policy/approx_kl": None,
    "policy/clip_fraction": "clip_ratio/region_mean",
    "policy/entropy": "entropy",
    "policy/ratio_max": None,
    "clip_bias/scale": None,
    "clip_bias/norm": None,
    "clip_bias/grad_norm": None,
    "value/explained_variance": None,
    "advantage/std": None,
    "turns/mean": None,
    "turns/valid_action_rate": None,
    "completions/mean_length": "completions/mean_length",
}
SUCCESS = "episode/success_rate"
EVALUATED = {"success": f"eval_{SUCCESS}", "reward": "eval_episode/score"}


def trainer_class(name: str, folder: Path) -> type:
    """Return the class that a `trainer` names: of TRL, of this package, or "module:Class" in a folder."""
    module, _, attribute = name.rpartition(":")
    if module:
        sys.path.append(str(folder))
        return getattr(importlib.import_module(module), attribute)
    return getattr(trl_stppo if name in trl_stppo.__all__ else trl, name)


def config_of(kind: type, task: Task, cell: Cell, folder: str) -> tuple[Any, list[str]]:
    """Return a cell's configuration, and the names of overrides that it lacks.

    It lacks options of ours if it is TRL's: a study's settings are those of all its arms.
    """
    own: type = getattr(kind, "config_class", GRPOConfig)
    given = {name: value for name, value in cell.overrides.items() if name != "trainer"}
    episodes, parts = (
        given.pop("episodes", task.episodes),
        given.pop("mini_batches", task.mini_batches),
    )
    settings: dict[str, Any] = {
        "output_dir": folder,
        "seed": cell.seed,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": episodes // parts,
        "steps_per_generation": parts,
        "per_device_eval_batch_size": 128,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        # A run that a signal ends early would pass for a whole one.
        "enable_jit_checkpoint": False,
        "trace_episodes": 0,
        **task.args,
    }
    if issubclass(own, STPPOConfig) and not issubclass(own, STGRPOConfig):
        settings |= {"kl_coef": 0.0, **task.critic}
    else:
        settings |= {"num_generations": task.group, "num_generations_eval": 1}
    settings |= given
    ours, known = ({spec.name for spec in fields(each)} for each in (STPPOConfig, own))
    lacks = sorted({*settings} & ours - known)
    settings = {name: value for name, value in settings.items() if name not in lacks}
    steps = own(**settings).num_iterations * parts
    rollouts = cell.rollouts or task.rollouts
    config = own(**settings, max_steps=rollouts * steps, logging_steps=steps)
    return config, [name for name in lacks if name in cell.overrides]


def run(
    cell: Cell, folder: Path, small: bool = False, curves: Iterable[str] = (), modules: Path = HERE
) -> Record:
    """Train a cell.

    Args:
        cell: what to train.
        folder: of taught agents and games.
        small: two short rollouts of an agent that has hardly been taught.
        curves: metrics that the record keeps besides the usual ones.
        modules: where `trainer` of an arm may be defined.

    Returns:
        The record. A training that dies is a result, too: the record then has an `error`.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    task = load(cell.task)
    if small:
        kept = {name: value for name, value in cell.overrides.items() if name != "episodes"}
        task, cell = task.small(), replace(cell, overrides=kept, rollouts=2)
    agent = str(task.agent(folder, cell.seed % task.agents, None))
    rows = task.rows(folder, None)
    held_out = task.held_out(folder, None) if task.held_out else []
    kind = trainer_class(cell.overrides.get("trainer", "STPPOTrainer"), modules)
    begun, used = time.perf_counter(), time.process_time()
    error, plays = None, None
    with tempfile.TemporaryDirectory() as scratch:
        config, left_out = config_of(kind, task, cell, scratch)
        if isinstance(config, STPPOConfig) or "reward_funcs" in task.player:
            arguments = {"model": agent, "train_dataset": Dataset.from_list(rows), **task.player}
        else:
            plays = Rollouts(task, rows, agent, cell.seed)
            arguments = plays.arguments
        if held_out and plays is None:
            arguments["eval_dataset"] = Dataset.from_list(held_out)
        trainer = kind(args=config, **arguments)

        def evaluate(seed: int) -> float | None:
            if not held_out:
                return None
            if plays is not None:
                return plays.evaluate(held_out, seed)
            return float(trainer.evaluate()[EVALUATED[task.measure]])

        before = evaluate(-1)
        try:
            trainer.train()
        except Exception as died:
            traceback.print_exc()
            error = repr(died)[:200]
        after = None if error else evaluate(-2)
    log = [line for line in trainer.state.log_history if "reward" in line]
    return {
        **asdict(cell),
        "trainer": kind.__name__,
        "measure": task.measure,
        "rollouts": cell.rollouts or task.rollouts,
        "left_out": left_out,
        "evaluation": {"before": before, "after": after} if held_out else None,
        "curves": curves_of(log, plays.success if plays else None, curves),
        "error": error,
        "seconds": round(time.perf_counter() - begun, 1),
        "cpu": round(time.process_time() - used, 1),
        **circumstances(),
    }


def curves_of(
    log: list[dict[str, Any]], success: list[float] | None, others: Iterable[str]
) -> dict[str, list[float | None]]:
    """Return the curves that the log of a trainer has, a value per rollout.

    Args:
        log: its lines, one per rollout.
        success: of the rollouts, if it is not in the log.
        others: metrics besides the usual ones.
    """
    found: dict[str, list[float | None]] = {}
    for name, upstream in {**CURVES, **dict.fromkeys(others)}.items():
        source = SUCCESS if name == "success" else name
        values = [line.get(source, line.get(upstream or source)) for line in log]
        if any(value is not None for value in values):
            found[name] = [None if v is None else float(f"{v:.4g}") for v in values]
    if success is not None:
        found["success"] = [float(f"{value:.4g}") for value in success]
    return found


def circumstances() -> Record:
    """Return what the figures of a record may depend on besides its settings."""
    words = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    packages = ("torch", "transformers", "trl", "trl-stppo")
    return {
        "commit": commit,
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in packages},
        "processor": processor(),
    }


def processor() -> str:
    """Return the name of the processor that has trained."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Read a job from standard input and write its record into a file; end when the input does."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    cell, folder = Cell(**job["cell"]), Path(job["folder"])
    if job["result"] is None:
        task = load(cell.task)
        task.agent(folder, cell.seed % task.agents, None)
        for rows in filter(None, (task.rows, task.held_out)):
            rows(folder, None)
        return
    record = run(cell, folder, job["small"], job["curves"], Path(job["modules"]))
    result = Path(job["result"])
    staging = result.with_suffix(".incomplete")
    staging.write_text(json.dumps(record))
    staging.replace(result)


if __name__ == "__main__":
    main()
