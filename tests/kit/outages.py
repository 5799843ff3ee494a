"""Trainers whose environments ask a server that may be down; see `test_outages.py`."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.kit import builders
from tests.kit.builders import prompts
from tests.kit.fakes import CountEnv
from trl_stppo import STPPOTrainer

BATCH = 8
RUN = {**builders.LIMITS, "max_steps": 10}


class Asking(CountEnv):
    """Asks in every turn, pays for any words, and uses up random numbers where nobody answers."""

    def __init__(self, is_down: Callable[[int], bool]) -> None:
        super().__init__()
        self._is_down = is_down

    def reset(self, n: int, **row: Any) -> tuple[str, dict]:
        self._n = n
        return super().reset(**row)

    def step(self, action: str) -> tuple[Any, ...]:
        if self._is_down(self._n):
            torch.rand(3)
            np.random.rand(3)
            random.random()
            raise ConnectionError("no server")
        observation, _, *rest = super().step(action)
        return observation, sum(map(ord, action)) % 7 / 7, *rest


def build(
    folder: Any,
    down: Callable[[Any, int], bool] = lambda trainer, n: False,
    trainer_class: type = STPPOTrainer,
    *,
    rows: int = 2 * BATCH,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer whose server is down for the rows of which `down(trainer, n)` says so."""
    holder: list[Any] = []
    given = {
        "environment_factory": functools.partial(Asking, lambda n: down(holder[0], n)),
        "train_dataset": prompts(rows, n=list(range(rows))),
        **(arguments or {}),
    }
    torch.manual_seed(3)
    holder.append(builders.build(folder, trainer_class, arguments=given, **{**RUN, **options}))
    return holder[0]


def saved(folder: Any) -> list[str]:
    """Names of the checkpoints."""
    return sorted(path.name for path in folder.glob("checkpoint-*"))
