"""Runs with `rollout_overlap` and their twins with `rollout_staleness=1`: the same run, on two clocks."""

import random
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig

from tests.kit.builders import build
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy, tiny_value_model
from tests.kit.run_log import comparable
from tests.kit.scripted import weights
from trl_stppo import PPOTrainer, STGRPOTrainer, STPPOTrainer
from trl_stppo.trace.files import read_trace

OVERLAP, STALE = {"rollout_overlap": True}, {"rollout_staleness": 1}
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SETTINGS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_mini_batches": 1,
    "num_ppo_epochs": 2, "max_steps": 10, "learning_rate": 2e-2, "max_turns": 3,
    "max_turn_tokens": 6, "max_completion_length": 48, "trace_episodes": 8, "num_generations": 1,
}  # fmt: skip
_clock = random.Random()


class SleepyEnv(CountEnv):
    """Answers after a random time, of up to so many seconds."""

    most = 0.01

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        time.sleep(_clock.uniform(0.0, self.most))
        text, _, *rest = super().step(action)
        return text, sum(map(str.islower, action)) / max(1, len(action)), *rest


def rows(count: int = 24) -> Dataset:
    """An epoch of these is three rollouts of eight."""
    prompts = [[{"role": "user", "content": f"{i}"}] for i in range(count)]
    return Dataset.from_dict({"prompt": prompts, "letter": ["abc"[i % 3] for i in range(count)]})


def arguments(kind: str) -> dict[str, Any]:
    """Arguments of a trainer of this kind of policy and critic."""
    tokenizer = char_tokenizer()
    given: dict[str, Any] = {"model": tiny_policy(tokenizer), "environment_factory": SleepyEnv}
    given |= {"train_dataset": rows(), "processing_class": tokenizer}
    if kind == "lora":
        given["peft_config"] = LoraConfig(**LORA)
    elif kind == "separate":
        given["value_model"] = tiny_value_model(tokenizer)
    return given


def trainer_for(folder: Path, kind: str = "lora", **options: Any) -> PPOTrainer:
    """A trainer; `arguments` among the options are further ones of its constructor."""
    more = options.pop("arguments", {})
    groups = kind == "groups"
    default: type[PPOTrainer] = STGRPOTrainer if groups else STPPOTrainer
    trainer_class = options.pop("trainer_class", default)
    settings = {**SETTINGS, **({"num_generations": 4} if groups else {}), **options}
    given = {**arguments(kind), **more}
    return build(folder, trainer_class, arguments=given, **settings)


def end_of(trainer: PPOTrainer) -> dict[str, Any]:
    """All that two runs must have in common: weights, critic, moments, log."""
    moments = trainer.optimizer.state_dict()["state"]
    return {
        "weights": weights(trainer),
        "moments": [v for state in moments.values() for v in state.values()],
        "log": comparable(trainer.state.log_history),
        "trace": [
            [(e.row, e.seed, e.token_ids, e.score, e.policy_versions) for e in read_trace(folder)]
            for folder in [trainer.args.output_dir]
        ],
    }


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(one["weights"][n], other["weights"][n]) for n in other["weights"])
    pairs = zip(one["moments"], other["moments"], strict=True)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
    assert one["log"] == other["log"]
    assert one["trace"] == other["trace"]
