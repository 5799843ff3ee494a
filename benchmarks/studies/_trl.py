"""TRL's own trainers on the studies' text environments: our engine plays, all else is TRL's.

A row's prompt is its number, because TRL hands `rollout_func` prompts alone. TRL trains the policy that
has just played, so there is no staleness.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from _task import Row, Task
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_stppo.generation.sampling import SamplingSettings
from trl_stppo.rollout.episode import Episode, Limits
from trl_stppo.trainer.play import Player, Speaker


class Rollouts:
    """Plays a task's rows for TRL, and keeps the success of each rollout.

    Args:
        task: with an environment of ours.
        rows: of training.
        agent: folder or name of the policy.
        seed: of sampling.
    """

    def __init__(self, task: Task, rows: list[Row], agent: str, seed: int) -> None:
        if "environment_factory" not in task.player:
            raise ValueError("TRL's trainer plays environments and tools; this task has neither.")
        self.model = AutoModelForCausalLM.from_pretrained(agent, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(agent)
        limits = Limits(
            task.args["max_completion_length"],
            max_turns=task.args["max_turns"],
            max_turn_tokens=task.args["max_turn_tokens"],
        )
        speaker = Speaker(self.model, self.tokenizer)
        self._player = Player(speaker, task.player["environment_factory"], limits)
        self._rows, self._seed, self.success = rows, seed, list[float]()
        self._adapter = task.player.get("peft_config")
        self._by_score = task.measure == "reward"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of TRL's trainer."""
        prompts = [{"prompt": str(number)} for number in range(len(self._rows))]
        return {
            "model": self.model,
            "processing_class": self.tokenizer,
            "train_dataset": Dataset.from_list(prompts),
            "reward_funcs": scores,
            "rollout_func": self,
            # TRL puts an adapter into this very model, so that episodes are played with it.
            "peft_config": self._adapter,
        }

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        rows = [self._rows[int(prompt)] for prompt in prompts]
        episodes = self._played(rows, trainer.state.global_step)
        self.success.append(rate(episodes))
        return {
            "prompt_ids": [e.prompt_ids for e in episodes],
            "completion_ids": [e.ids for e in episodes],
            "logprobs": [[0.0] * len(e.ids) for e in episodes],
            "env_mask": [list(map(int, e.action_mask)) for e in episodes],
            "score": [sum(e.turn_rewards) for e in episodes],
        }

    def evaluate(self, rows: list[Row], seed: int) -> float:
        """Return the success of held-out rows, or their score if runs are judged by it."""
        episodes = self._played(rows, seed)
        if self._by_score:
            return statistics.fmean(sum(episode.turn_rewards) for episode in episodes)
        return rate(episodes)

    def _played(self, rows: list[Row], seed: int) -> list[Episode]:
        names = [(number,) for number in range(len(rows))]
        sampled = SamplingSettings(temperature=1.0)
        return self._player.play(rows, sampled, (self._seed, seed), names=names).episodes


def rate(episodes: list[Episode]) -> float:
    """Return the share of episodes that succeed."""
    return sum(bool(e.success) for e in episodes) / len(episodes)


def scores(completions: list[Any], score: list[float], **_: Any) -> list[float]:
    """Return the rewards of the environment."""
    return score
