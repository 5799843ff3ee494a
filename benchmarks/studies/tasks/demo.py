"""The search agent of `make demo`, with the settings of its file."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from _task import Task

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "search"))
from search_env import StdlibSearchEnv
from search_env.retrieval import stdlib_search_dataset

AGENT = Path(__file__).parents[3] / "scripts" / "assets" / "search-agent"

TASKS = {
    "demo": Task(
        agent=lambda *_: AGENT,
        rows=lambda *_: list(stdlib_search_dataset("train")),
        player={"environment_factory": partial(StdlibSearchEnv, invalid_reward=-0.1)},
        args={
            "learning_rate": 5e-4,
            "lr_scheduler_type": "linear",
            "num_iterations": 2,
            "max_turns": 6,
            "max_turn_tokens": 24,
            "max_completion_length": 280,
        },
        critic={"critic_learning_rate": 1e-3},
        episodes=128,
        held_out=lambda *_: list(stdlib_search_dataset("test").shuffle(seed=0).select(range(200))),
    )
}
