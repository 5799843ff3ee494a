"""One evaluation per case, on as many processes as it is started with; rank 0 saves the figures.

Started by `test_evaluation_figures.py` through torch.distributed.run.
"""

import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import torch
from datasets import IterableDataset
from torch.nn.parallel import DistributedDataParallel

from tests.kit.builders import LIMITS, build, prompts, share_of_a
from tests.kit.fakes import char_tokenizer, float64_policy
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.loop.log import PlayedEpisode

CASES = ("text", "answers", "stream")
ROWS = 5


class DiceEnv:
    """Everything about an episode follows from its seed and from what is said."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self, seed: int = 0, **row: Any) -> tuple[str, dict]:
        self.resets += 1
        self.random = Random(seed)
        self.left = self.random.randint(1, 3)
        return self.random.choice("abc"), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.left -= 1
        luck = self.random.random() + sum(map(ord, action)) % 7 / 7
        info = {"valid_action": len(action) % 2 == 0}
        if self.left == 0:
            info["success"] = luck > 1.0
        return self.random.choice("xy"), luck, self.left == 0, False, info


def late(turn: list[int], **columns: Any) -> list[float]:
    """A turn reward function: later turns earn more."""
    return [float(number) for number in turn]


class Watched(STPPOTrainer):
    """Keeps what it counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.facts: list[PlayedEpisode] = []
        count = self._evaluator._count

        def counted(run: Any, *rest: Any) -> None:
            before = len(run.episodes)
            count(run, *rest)
            self.facts = sorted([*self.facts, *run.episodes[before:]], key=lambda f: f.name)

        self._evaluator._count = counted


def figures_of(metrics: dict, prefix: str = "eval") -> dict:
    """The figures that are not about speed."""
    speed = ("runtime", "per_second", "preparation_time", "epoch")
    return {k: v for k, v in metrics.items() if k.startswith(prefix) and not k.endswith(speed)}


def evaluated(folder: Any, case: str, **options: Any) -> tuple[dict[str, float], Watched]:
    """What an untrained policy achieves."""
    trainer = made(folder, case, **options)
    return trainer.evaluate(), trainer


def made(folder: Any, case: str, **options: Any) -> Watched:
    """A trainer of a random float64 policy, so that rounding decides no token."""
    rows: Any = prompts(ROWS)
    arguments: dict[str, Any] = {"model": float64_policy(char_tokenizer())}
    if case == "text":
        arguments |= {"environment_factory": DiceEnv, "turn_reward_funcs": late}
        options = {**LIMITS, "max_turn_tokens": 5, "num_generations_eval": 2, **options}
    else:
        arguments["reward_funcs"] = share_of_a
    if case == "stream":
        rows = IterableDataset.from_generator(lambda: iter(prompts(ROWS)))
    return build(folder, Watched, arguments={**arguments, "eval_dataset": rows}, **options)


def main() -> None:
    folder = Path(sys.argv[1])
    world = int(os.environ["WORLD_SIZE"])
    results = {}
    for case in CASES:
        metrics, trainer = evaluated(
            folder, case, ddp_backend="gloo", per_device_eval_batch_size=2,
            per_device_train_batch_size=4 // world,
        )  # fmt: skip
        assert trainer.accelerator.num_processes == world
        results[case] = metrics, trainer.facts
    trainer = made(
        folder, "text", ddp_backend="gloo", per_device_eval_batch_size=2, eval_strategy="steps",
        eval_steps=1, per_device_train_batch_size=4 // world,
    )  # fmt: skip
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    results["while training"] = [
        figures_of(entry) for entry in trainer.state.log_history if "eval_episodes" in entry
    ]
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
