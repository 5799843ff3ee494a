"""TRL's own GRPOTrainer on the studies' tasks: its loss, its optimizer loop, its defaults; our engine plays.

A row's prompt is its number, because TRL hands `rollout_func` prompts alone. Epochs are `num_iterations`. TRL
trains each rollout on the policy that has just played it, so there is no staleness here.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from _stability_grid import LATER_PRESSURES, PRESSURES, SUCCESS, Cell
from _stability_run import GROUP
from _task import Task
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_stppo.generation.sampling import SamplingSettings
from trl_stppo.rollout.episode import Episode, Limits
from trl_stppo.trainer.play import Player, Speaker

SAMPLED = SamplingSettings(temperature=1.0)


class Rollouts:
    """Plays a task's rows for TRL, and keeps the success of each rollout."""

    def __init__(self, task: Task, model: Any, tokenizer: Any, seed: int) -> None:
        settings = task.settings
        limits = Limits(
            settings["max_completion_length"],
            max_turns=settings["max_turns"],
            max_turn_tokens=settings["max_turn_tokens"],
        )
        self._player = Player(Speaker(model, tokenizer), task.environment, limits)
        self._task, self._seed, self.success = task, seed, list[float]()

    def played(self, rows: list[dict[str, Any]], seed: int) -> list[Episode]:
        """An episode of each row."""
        names = [(number,) for number in range(len(rows))]
        return self._player.play(rows, SAMPLED, (self._seed, seed), names=names)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        rows = [self._task.train[int(prompt)] for prompt in prompts]
        episodes = self.played(rows, trainer.state.global_step)
        self.success.append(rate(episodes))
        return {
            "prompt_ids": [e.prompt_ids for e in episodes],
            "completion_ids": [e.ids for e in episodes],
            "logprobs": [[0.0] * len(e.ids) for e in episodes],
            "env_mask": [list(map(int, e.action_mask)) for e in episodes],
            "earned": [sum(e.turn_rewards) for e in episodes],
        }


def rate(episodes: list[Episode]) -> float:
    """Share of episodes that succeed."""
    return sum(bool(e.success) for e in episodes) / len(episodes)


def earned(completions: list[Any], earned: list[float], **_: Any) -> list[float]:
    """The reward that the environment has paid."""
    return earned


def run_grpo(cell: Cell, task: Task) -> list[dict[str, Any]]:
    """Train a cell; rows as `_stability_run.run` returns them."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    started = time.perf_counter()
    epochs, mini_batches, _ = (PRESSURES | LATER_PRESSURES)[cell.pressure]
    model = AutoModelForCausalLM.from_pretrained(task.agent, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task.agent)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            learning_rate=cell.learning_rate,
            lr_scheduler_type="constant",
            seed=cell.seed,
            num_generations=GROUP,
            num_iterations=epochs,
            steps_per_generation=mini_batches,
            per_device_train_batch_size=task.episodes // mini_batches,
            max_steps=task.updates * epochs * mini_batches,
            max_completion_length=task.settings["max_completion_length"],
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=epochs * mini_batches,
        )
        rollouts = Rollouts(task, model, tokenizer, cell.seed)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=earned,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(len(task.train))]),
            processing_class=tokenizer,
            rollout_func=rollouts,
        )
        tests = [task.test[n] for n in range(len(task.test))]
        rows = [{"phase": "test", "update": 0, SUCCESS: rate(rollouts.played(tests, -1))}]
        try:
            trainer.train()
        except Exception as error:  # a run that dies is a result, too
            rows.append({"phase": "failed", "update": task.updates, "error": repr(error)[:200]})
        for update, success in enumerate(rollouts.success, start=1):
            rows.append({"phase": "train", "update": update, SUCCESS: success})
        last = {"phase": "test", "update": task.updates, SUCCESS: rate(rollouts.played(tests, -2))}
        rows.append({**last, "seconds": time.perf_counter() - started})
    return rows
