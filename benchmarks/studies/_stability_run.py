"""One run of the stability study: trains, and returns its figures update by update."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from _stability_grid import FIGURES, LATER_PRESSURES, METHODS, PRESSURES, SUCCESS, Cell
from _task import Task

from trl_stppo import STGRPOConfig, STGRPOTrainer, STPPOConfig, STPPOTrainer
from trl_stppo.watch import ProgressLines

GROUP = 4  # episodes per prompt where there is no critic


def with_estimator(kind: type[STPPOConfig], settings: dict[str, Any]) -> STPPOConfig:
    """A configuration; how the clipping bias is measured is no setting of it."""
    estimator = settings.pop("clip_bias_estimator", None)
    config = kind(**settings)
    config._clip_bias_estimator = estimator
    return config


def config_of(cell: Cell, task: Task, folder: str, **others: Any) -> STPPOConfig:
    """The trainer's configuration: the task's, the cell's, and then what `others` say."""
    level, _, critic = METHODS[cell.method]
    epochs, mini_batches, staleness = (PRESSURES | LATER_PRESSURES)[cell.pressure]
    settings: dict[str, Any] = {
        **task.settings,
        "output_dir": folder,
        "variant": None,
        "importance_sampling_level": level,
        "stabilizers": cell.mode,
        "clip_bias_power": cell.power,
        "clip_bias_estimator": cell.estimator,
        "optim": cell.optimizer,
        "learning_rate": cell.learning_rate,
        "cliprange": cell.cliprange,
        "seed": cell.seed,
        "num_ppo_epochs": epochs,
        "per_device_train_batch_size": task.episodes // mini_batches,
        "gradient_accumulation_steps": mini_batches,
        "num_mini_batches": mini_batches,
        "rollout_staleness": staleness,
        "total_episodes": task.episodes * task.updates,
        "logging_steps": epochs * mini_batches,  # one line per update
        "lr_scheduler_type": "constant",
        "kl_coef": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **others,
    }
    if not critic:
        for name in ("critic_learning_rate", "lam", "gamma"):
            settings.pop(name, None)
        defaults = {"num_generations": GROUP, "num_generations_eval": 1}
        return with_estimator(STGRPOConfig, defaults | settings)
    return with_estimator(STPPOConfig, settings)


def run(
    cell: Cell,
    task: Task,
    make: Callable[..., Any] | None = None,
    names: Iterable[str] = FIGURES,
    **others: Any,
) -> list[dict[str, Any]]:
    """Train one cell.

    Args:
        cell: what to train.
        task: on which task.
        make: of the trainer, in place of the package's class.
        names: figures of the log that go into the rows.
        others: settings that the cell does not know.

    Returns:
        One row per update, and one each for the held-out episodes before and after; a row of the
        phase "failed" where training could not go on.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(cell, task, folder, **others)
        kind = STPPOTrainer if METHODS[cell.method][2] else STGRPOTrainer
        trainer = (make or kind)(
            model=str(task.agent),
            args=config,
            train_dataset=task.train,
            eval_dataset=task.test,
            environment_factory=task.environment,
        )
        trainer.remove_callback(ProgressLines)
        rows = [held_out(trainer, 0)]
        try:
            trainer.train()
        except Exception as error:  # a run that dies is a result, too
            rows.append({"phase": "failed", "update": task.updates, "error": repr(error)[:200]})
        lines = [line for line in trainer.state.log_history if SUCCESS in line]
        for update, line in enumerate(lines, start=1):
            figures = {name: line.get(name) for name in names}
            rows.append({"phase": "train", "update": update, **figures})
        rows.append(held_out(trainer, task.updates) | {"seconds": time.perf_counter() - started})
    return rows


def held_out(trainer: Any, update: int) -> dict[str, Any]:
    """Success on the held-out episodes."""
    figures = trainer.evaluate()
    return {"phase": "test", "update": update, SUCCESS: figures[f"eval_{SUCCESS}"]}
