"""TextWorld games that an agent of 0.4M parameters has not seen before.

Worlds of three rooms, quests of four steps in six turns, in the words of TextWorld's "basic" theme. The first
message lists what to do, so the agent has to find out where it stands, to copy names, and not to try what
cannot be done yet. Its demonstrations do that too often; reinforcement is to leave it out.

textworld: reward 1 for winning.
textworld-dense: a share of the reward for each step that gets further.
textworld-hard: worlds of six rooms, sparse rewards; the agent has been taught on the easy ones.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

from _task import Messages, Row, Task, sft, taught
from filelock import FileLock
from transformers import Qwen2ForCausalLM, set_seed

from trl_stppo.models.small import tiny_config, tiny_tokenizer

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "textworld"))
from adventures import GameKind, demonstration, game_rows, make_games, write_rows
from textworld_env import TextWorldEnv

KIND = GameKind(rooms=3, objects=4, quest_length=4, step_points=True, theme="basic")
HARD = GameKind(rooms=6, objects=8, quest_length=4, step_points=True, theme="basic")
SPLITS = {"train": range(400), "test": range(400, 528)}
TURNS_PER_STEP = 1.5
# This often another step of the same quest, at the wrong time, comes before a step of the demonstrations.
MISTAKES = 0.35
PLAYS, BATCH = 3, 32


def rows(split: str, kind: GameKind, folder: Path, most: int | None) -> list[Row]:
    """Return rows of games, which are made unless they are there: half a second each.

    All rows of the easy kind are also written as `textworld-rows/SPLIT.jsonl`, for `trl-stppo train`.
    """
    with FileLock(folder / "textworld.lock"):
        games = make_games(folder / "textworld-games", kind, SPLITS[split][:most])
        found = game_rows(games, system=None, turns_per_step=TURNS_PER_STEP)
        if kind == KIND and most is None:
            write_rows(folder / "textworld-rows" / f"{split}.jsonl", found)
    return found


def with_mistakes(walkthrough: list[str], share: float, dice: random.Random) -> list[str]:
    """Return commands that get ahead of the quest, or fall behind; its step follows in the end."""
    commands = []
    for step in walkthrough:
        others = [command for command in walkthrough if command != step]
        while others and dice.random() < share:
            commands.append(dice.choice(others))
        commands.append(step)
    # A word has the same token at the beginning of a turn as within a sentence.
    return [f" {command}" for command in commands]


def teach(folder: Path, most: int | None, number: int, steps: int) -> tuple[Any, Any]:
    """Teach the agent; three lessons in five are without mistakes, from which it learns what a quest asks."""
    set_seed(number)
    dice, games = random.Random(number), rows("train", KIND, folder, most)
    env = TextWorldEnv(max_steps=3 * KIND.quest_length)

    def plays(share: float) -> list[Messages]:
        commands = (with_mistakes(row["walkthrough"], share, dice) for row in games)
        return [demonstration(row, env, played) for row, played in zip(games, commands, strict=True)]

    right = plays(0.0)
    mixed = [messages for _ in range(PLAYS) for messages in plays(MISTAKES)]
    env.close()
    texts = [message["content"] for messages in right for message in messages]
    tokenizer = tiny_tokenizer(texts, vocab_size=512)
    model = Qwen2ForCausalLM(tiny_config(tokenizer))
    count = 3 * steps * BATCH // 5
    lessons = [*dice.choices(right, k=count), *dice.choices(mixed, k=steps * BATCH - count)]
    sft(model, tokenizer, lessons, BATCH)
    return model, tokenizer


def agent(folder: Path, number: int, short: int | None) -> Path:
    """Return the folder of the agent, which all tasks of this module share."""
    most = None if short is None else 16
    return taught("textworld", partial(teach, folder, most), steps=600)(folder, number, short)


def task(reward: str = "sparse", kind: GameKind = KIND) -> Task:
    """Return a task of this kind, with three turns for two steps of a quest."""
    return Task(
        agent=agent,
        rows=partial(rows, "train", kind),
        player={"environment_factory": partial(TextWorldEnv, reward=reward)},
        args={
            "learning_rate": 3e-4,
            "num_iterations": 1,
            "max_turns": int(TURNS_PER_STEP * kind.quest_length),
            "max_turn_tokens": 16,
            # The larger worlds have more to show.
            "max_completion_length": 480 if kind == HARD else 320,
        },
        critic={"critic_learning_rate": 1e-3},
        held_out=partial(rows, "test", kind),
    )


TASKS = {
    "textworld": task(),
    "textworld-dense": task(reward="dense"),
    "textworld-hard": task(kind=HARD),
}
