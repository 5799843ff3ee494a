"""What the stability study trains: the demo's search agent, and a longer task with a sparse reward.

The corridor has seven rooms of three doors each. The prompt names a colour; in every room the agent says
what it looks for and which door it takes, and only whoever took seven right doors is paid. One mistake is
enough to fail, and nothing says so before the end.
"""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from _solved_tasks import KINDS, build_solved_agent, solved_task
from _start_task import build_start_agent
from _task import BATCH, Task, warm_start
from _textworld_task import build_textworld_agent, textworld_task
from datasets import Dataset
from transformers import Qwen2ForCausalLM, set_seed

from trl_stppo.models.small import tiny_config, tiny_tokenizer
from trl_stppo.recipes.search.env import StdlibSearchEnv
from trl_stppo.recipes.search.stdlib_docs import stdlib_search_dataset

HERE = Path(__file__).resolve().parent
COLOURS = ("red", "blue", "green", "white", "black", "brown", "pink", "gold")
DOORS = ("left", "middle", "right")
ROOMS = 7
CORRIDOR_AGENT, SEARCH_AGENT = "corridor-agent", "search-agent"
# Of the demonstrations' doors so many are wrong: 0.8 ** 7 is a success of 0.21.
MISTAKES = 0.2
# Rows of different kinds start at different seeds, so that they share no rooms.
TRAIN_SEED, TEST_SEED, WARM_START_SEED = 0, 10**6, 2 * 10**6


class CorridorEnv:
    """Seven rooms; reward 1 at the end for seven right doors, else 0."""

    def reset(self, *, seed: int, colour: str, **row: Any) -> tuple[str, dict[str, Any]]:
        """The first room; the prompt has named the colour."""
        self._dice, self._colour = random.Random(seed), colour
        self._room, self._right = 0, True
        return " " + self._enter(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Through a door; an action that cannot be read is a wrong one."""
        words = action.split()
        valid = len(words) == 4 and words[:2] == ["i", "seek"] and words[3] in DOORS
        self._right = self._right and self.is_right(action)
        self._room += 1
        info: dict[str, Any] = {"valid_action": valid}
        if self._room == ROOMS:
            return "", float(self._right), True, False, {**info, "success": self._right}
        return self._enter(), 0.0, False, False, info

    def _enter(self) -> str:
        others = [colour for colour in COLOURS if colour != self._colour]
        self._doors = [self._colour, *self._dice.sample(others, len(DOORS) - 1)]
        self._dice.shuffle(self._doors)
        return "doors " + " ".join(f"{c} {d}" for c, d in zip(self._doors, DOORS, strict=True))

    def is_right(self, action: str) -> bool:
        """Whether it goes through the right door, for the right colour."""
        return action.split() == ["i", "seek", self._colour, self.right_door]

    @property
    def right_door(self) -> str:
        """Where the colour is, for demonstrations."""
        return DOORS[self._doors.index(self._colour)]


def corridor_rows(count: int, first_seed: int) -> list[dict[str, Any]]:
    """Rows of the corridor; each seed has rooms of its own."""
    rows = []
    for seed in range(first_seed, first_seed + count):
        colour = COLOURS[seed % len(COLOURS)]
        prompt = [{"role": "user", "content": f"find {colour}"}]
        rows.append({"prompt": prompt, "seed": seed, "colour": colour})
    return rows


def demonstration(row: dict[str, Any], mistakes: float) -> list[dict[str, str]]:
    """An episode of somebody who takes so large a share of wrong doors."""
    env, dice = CorridorEnv(), random.Random(row["seed"])
    observation, _ = env.reset(**row)
    messages = [{"role": "user", "content": row["prompt"][0]["content"] + observation}]
    over = False
    while not over:
        wrong = [door for door in DOORS if door != env.right_door]
        door = dice.choice(wrong) if dice.random() < mistakes else env.right_door
        action = f"i seek {row['colour']} {door}"
        observation, _, over, _, _ = env.step(action)
        messages.append({"role": "assistant", "content": action})
        messages.append({"role": "user", "content": observation})
    return messages[:-1]


def build_corridor_agent(folder: Path, steps: int = 1000) -> None:
    """Train the corridor's agent from demonstrations, unless it is there; two minutes.

    Right doors first: what a door has to do with the colour is found sooner without noise.
    """
    folder = folder / CORRIDOR_AGENT
    if folder.is_dir():
        return
    set_seed(0)
    rows = [
        demonstration(row, MISTAKES if i > 0.6 * steps * BATCH else 0.0)
        for i, row in enumerate(corridor_rows(steps * BATCH, WARM_START_SEED))
    ]
    texts = [message["content"] for messages in rows[:200] for message in messages]
    tokenizer = tiny_tokenizer(texts, vocab_size=320)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **sizes, num_key_value_heads=4))
    warm_start(folder, model, tokenizer, rows)


def build_search_agent(folder: Path, steps: int = 0) -> None:
    """Put the recorded weights beside the demo's tokenizer, unless they are there."""
    scripts = HERE.parents[1] / "scripts"
    if not (folder / SEARCH_AGENT).is_dir():
        for source in (scripts / "assets/search-agent", HERE / "assets/search-agent"):
            shutil.copytree(source, folder / SEARCH_AGENT, dirs_exist_ok=True)


def build_agent(task: str, folder: Path, steps: int | None = None) -> None:
    """Train the agent of a task, unless it is there or comes with the repository.

    Args:
        task: name.
        folder: of agents and games.
        steps: of the warm start; None for as many as the studies take.
    """
    if task.split("-")[0] in KINDS:
        build_solved_agent(task, folder)
        return
    if task.startswith("house"):
        build_start_agent(folder / f"{task}-agent", int(task[-1]), steps or 600)
        return
    builders = {"corridor": build_corridor_agent, "demo": build_search_agent}
    builder = builders.get(task, build_textworld_agent)
    builder(folder, **({} if steps is None else {"steps": steps}))


def load_task(name: str, folder: Path) -> Task:
    """The task of this name; `build_agent` has left its agent in the folder."""
    tasks = {"corridor": corridor_task, "demo": demo_task, "textworld": textworld_task}
    tasks["textworld-dense"] = partial(textworld_task, reward="dense")
    if name.split("-")[0] in KINDS:
        return solved_task(name, folder)
    return tasks[name](folder)


def corridor_task(folder: Path) -> Task:
    """Seven turns, sparse reward."""
    settings = {
        "max_turns": ROOMS,
        "max_turn_tokens": 10,
        "max_completion_length": 128,
        "critic_learning_rate": 1e-3,
        "per_device_eval_batch_size": 128,
    }
    return Task(
        folder / CORRIDOR_AGENT,
        Dataset.from_list(corridor_rows(4096, TRAIN_SEED)),
        Dataset.from_list(corridor_rows(256, TEST_SEED)),
        CorridorEnv,
        settings,
        episodes=32,
        updates=20,
    )


def demo_task(folder: Path) -> Task:
    """The demo as it was at version 0.1.0, agent and settings, so that figures stay comparable."""
    settings = {
        "max_turns": 6,
        "max_turn_tokens": 24,
        "max_completion_length": 280,
        "temperature": 1.0,
        "gamma": 1.0,
        "lam": 0.95,
        "critic_learning_rate": 1e-3,
        "per_device_eval_batch_size": 100,
    }
    return Task(
        folder / SEARCH_AGENT,
        stdlib_search_dataset("train"),
        stdlib_search_dataset("test").shuffle(seed=0).select(range(200)),
        partial(StdlibSearchEnv, invalid_reward=-0.1),
        settings,
        episodes=32,
        updates=12,
    )
