"""The studies' third task: TextWorld games that an agent of 0.4M parameters has not seen before.

Worlds of three rooms, quests of four steps in six turns, in the words of TextWorld's "basic" theme. The first
message lists what to do, so the agent has to find out where it stands, to copy names, and not to try what
cannot be done yet. Its demonstrations do that too often; reinforcement is to leave it out.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "textworld"))

from _task import BATCH, Task, warm_start
from adventures import GameKind, demonstration, game_rows, make_games
from datasets import Dataset
from transformers import Qwen2ForCausalLM, set_seed

from trl_stppo.envs.adapters import TextWorldEnv
from trl_stppo.models.small import tiny_config, tiny_tokenizer

AGENT, GAMES = "textworld-agent", "textworld-games"
KIND = GameKind(rooms=3, objects=4, quest_length=4, step_points=True, theme="basic")
TURNS_PER_STEP = 1.5
TRAIN_SEEDS, TEST_SEEDS = range(400), range(400, 528)
# Before a step of the demonstrations comes, so often, another of the same quest, at the wrong time.
MISTAKES = 0.35
PLAYS = 3  # with mistakes, per game


def rows_of(folder: Path, seeds: range, kind: GameKind = KIND) -> list[dict[str, Any]]:
    """Rows of games that are in the folder, or are made now: half a second each."""
    games = make_games(folder / GAMES, kind, seeds)
    return game_rows(games, system=None, turns_per_step=TURNS_PER_STEP)


def with_mistakes(walkthrough: list[str], share: float, dice: random.Random) -> list[str]:
    """Commands of somebody who gets ahead of the quest, or falls behind; a step follows in the end."""
    commands = []
    for step in walkthrough:
        others = [command for command in walkthrough if command != step]
        while others and dice.random() < share:
            commands.append(dice.choice(others))
        commands.append(step)
    # A word has the same token at the beginning of a turn as within a sentence.
    return [f" {command}" for command in commands]


def build_textworld_agent(folder: Path, steps: int = 600) -> None:
    """Make the games and train the agent, each unless it is there; a quarter of an hour.

    Three steps in five are without mistakes: what a command has to do with the quest is found sooner so.
    """
    agent, rows = folder / AGENT, rows_of(folder, TRAIN_SEEDS)
    rows_of(folder, TEST_SEEDS)  # now, by one process
    if agent.is_dir():
        return
    set_seed(0)
    dice = random.Random(0)
    env = TextWorldEnv(max_steps=3 * KIND.quest_length)

    def plays(share: float) -> list[list[dict[str, str]]]:
        commands = (with_mistakes(row["walkthrough"], share, dice) for row in rows)
        return [demonstration(row, env, played) for row, played in zip(rows, commands, strict=True)]

    right = plays(0.0)
    mixed = [messages for _ in range(PLAYS) for messages in plays(MISTAKES)]
    env.close()
    texts = [message["content"] for messages in right for message in messages]
    tokenizer = tiny_tokenizer(texts, vocab_size=512)
    model = Qwen2ForCausalLM(tiny_config(tokenizer))
    count = 3 * steps * BATCH // 5
    lessons = [*dice.choices(right, k=count), *dice.choices(mixed, k=steps * BATCH - count)]
    warm_start(agent, model, tokenizer, lessons)


def textworld_task(folder: Path, reward: str = "sparse", kind: GameKind = KIND) -> Task:
    """Three turns for two steps; sparse: 1 for having won; dense: a share for each step that gets further."""
    settings = {
        "max_turns": int(TURNS_PER_STEP * kind.quest_length),
        "max_turn_tokens": 16,
        "max_completion_length": 80 * kind.quest_length,
        "critic_learning_rate": 1e-3,
        "per_device_eval_batch_size": 128,
    }
    return Task(
        folder / AGENT,
        Dataset.from_list(rows_of(folder, TRAIN_SEEDS, kind)),
        Dataset.from_list(rows_of(folder, TEST_SEEDS, kind)),
        partial(TextWorldEnv, reward=reward),
        settings,
        episodes=32,
        updates=20,
    )
