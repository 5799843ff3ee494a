"""Patterns of scripts that people have published for TRL, each written anew in a few lines, with our classes.

Another, PPO of TRL 0.12 by `config=`, `policy=`, `ref_policy=` and `tokenizer=`, is refused with the
names of today: tests/trainer/planning/test_refused_arguments.py.
"""

import re
from typing import Any

import pytest
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

from tests.kit.builders import logs, prompts, train
from trl_stppo import STPPOTrainer


class InOrder(Sampler):
    """Rows of a sampler's, by another order."""

    def __init__(self, order: list[int], **options: Any) -> None:
        self.order = order
        self.positions = RepeatSampler(order, shuffle=False, **options)

    def __iter__(self):
        return (self.order[i] for i in self.positions)

    def __len__(self) -> int:
        return len(self.positions)


class Curriculum(STPPOTrainer):
    """Easy rows first."""

    def _get_train_sampler(self, dataset=None):
        levels = self.train_dataset["level"]
        return InOrder(
            sorted(range(len(levels)), key=lambda row: levels[row]),
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
        )


def test_a_curriculum_by_a_sampler_of_ones_own(tmp_path):
    batches = []

    def maze(prompts, trainer, **kwargs):
        batches.append([int(re.search(r"\d+", prompt[-1]["content"])[0]) for prompt in prompts])
        tokenizer, how = trainer.processing_class, {"add_generation_prompt": True}
        ids = [tokenizer.apply_chat_template(p, return_dict=False, **how) for p in prompts]
        return {
            "prompt_ids": ids,
            "completion_ids": [[5, 6, 7, 8]] * len(ids),
            "logprobs": None,
            "env_mask": [[1, 0, 0, 1]] * len(ids),
            "env_reward": [0.25 * number for number in batches[-1]],
        }

    def from_environment(completions, env_reward, level, log_metric, **kwargs):
        log_metric("curriculum/level", sum(level) / len(level))
        return env_reward

    arguments = {
        "rollout_func": maze,
        "reward_funcs": from_environment,
        "train_dataset": prompts(8, level=[7 - i for i in range(8)]),
    }
    trainer = train(
        tmp_path, Curriculum, arguments=arguments, num_mini_batches=1, gradient_accumulation_steps=1
    )
    assert batches == [[7, 6, 5, 4], [3, 2, 1, 0]]
    levels = [e["curriculum/level"] for e in trainer.state.log_history if "curriculum/level" in e]
    assert levels == [1.5, 5.5]
    assert logs(trainer)["reward"] == pytest.approx(0.25 * 1.5)
    assert logs(trainer)["turns/mean"] == 2
